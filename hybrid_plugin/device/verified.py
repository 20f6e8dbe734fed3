# SPDX-License-Identifier: Apache-2.0
"""States that verifying steps leave: where an accepted one is taken from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hybrid_plugin.core.commands import MoveWindow, Take
from hybrid_plugin.device.arena import to_device


class RollingWindows:
    """Convolution inputs of all layers, where one window in column 0 serves all drafts.

    Row `s` of each tensor belongs to slot `s`.  A step that verifies `d` drafts leaves
    the inputs after `c` of them in tokens `c` to `c + width - 1` of its own row.
    """

    def __init__(self, windows: Iterable[torch.Tensor], width: int) -> None:
        """Work on the engine's tensors.

        Args:
            windows: a layer each, ``[slots, tokens, ...]``, of any strides; as many
                tokens as inputs and drafts together, at least.
            width: inputs of an ordinary state, one less than the kernel is wide.

        Raises:
            ValueError: if a window has no room for the inputs.
        """
        self._windows = tuple(windows)
        self._width = width
        if any(window.shape[1] < width for window in self._windows):
            raise ValueError(f"a window holds fewer than {width} inputs")

    def move(self, commands: Sequence[MoveWindow]) -> None:
        """Move windows on the current stream; none reads what another one writes.

        Raises:
            ValueError: if the inputs are not all there.
        """
        furthest = max(command.offset for command in commands) + self._width
        for window in self._windows:
            if window.shape[1] < furthest:
                raise ValueError(
                    f"a window of {window.shape[1]} tokens was read up to {furthest}"
                )
        if not self._windows:
            return
        rows = torch.tensor(
            [(one.source, one.offset, one.destination) for one in commands]
        )
        device = self._windows[0].device
        source, offset, destination = to_device(rows.t().contiguous(), device)
        tokens = torch.arange(self._width, device=device)
        for window in self._windows:
            inputs = window[source[:, None], offset[:, None] + tokens]
            window[destination[:, None], tokens] = inputs


class VerificationScratch:
    """States that a step leaves beside the slots, a row for each sequence."""

    def __init__(
        self,
        states: Iterable[tuple[torch.Tensor, torch.Tensor]],
        windows: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        """Work on the engine's tensors.

        Args:
            states: of each layer, the scratch, ``[rows, steps, ...]``, and the slots,
                ``[slots, ...]``.
            windows: the same of convolution inputs that all steps of a chain share:
                ``[rows, tokens, ...]`` and ``[slots, width, ...]``.  Step `s` has
                tokens `s` to `s + width - 1`.

        Raises:
            ValueError: if a state of the scratch does not fit into a slot.
        """
        self._states = tuple(states)
        self._windows = tuple(windows)
        for scratch, slots in self._states:
            if scratch.shape[2:] != slots.shape[1:]:
                raise ValueError("a state of the scratch is no state of a slot")
        for scratch, slots in self._windows:
            fits = scratch.shape[2:] == slots.shape[2:]
            if not fits or scratch.shape[1] < slots.shape[1]:
                raise ValueError("a window of the scratch is none of a slot")

    def take(self, commands: Sequence[Take]) -> None:
        """Copy states to slots on the current stream."""
        pairs = (*self._states, *self._windows)
        if not pairs:
            return
        rows = torch.tensor([(one.row, one.step, one.destination) for one in commands])
        device = pairs[0][0].device
        row, step, destination = to_device(rows.t().contiguous(), device)
        for scratch, slots in self._states:
            slots[destination] = scratch[row, step]
        for scratch, slots in self._windows:
            tokens = torch.arange(slots.shape[1], device=device)
            slots[destination] = scratch[row[:, None], step[:, None] + tokens]
