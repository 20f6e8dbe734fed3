# SPDX-License-Identifier: Apache-2.0
"""What verified tokens do to states, recorded by a pass and folded in before the next.

How many tokens of each sequence are folded is what was accepted of it, which only the
device knows; of sequences that ended meanwhile the cache says it (`Fold`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hybrid_kernels import replay

from hybrid_plugin.core.commands import Fold
from hybrid_plugin.device.arena import to_device


class DraftRecords:
    """The record of the last forward pass, over all layers."""

    def __init__(self, rows: int, device: torch.device) -> None:
        """Begin without a pass.

        Args:
            rows: sequences of a pass that verify, at most.
            device: of the states.
        """
        self._layers: replay.Layers | None = None
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        """What was accepted of each sequence of the last pass, the known token counted;
        ``[rows]``, on the device."""
        self._slots: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None

    def fold_into(self, layers: replay.Layers) -> None:
        """Fold into the states of these layers from now on.

        Args:
            layers: with as many rows as there may be.
        """
        self._layers = layers

    def recorded(
        self, slots: torch.Tensor | None, rows: torch.Tensor | None = None
    ) -> None:
        """Note the sequences that a pass verifies, in the order of their records.

        Args:
            slots: ``[N]``, int32, on the device, left alone until `fold`: where the
                state of each lies, negative for padding.  None if it verifies none.
            rows: ``[N]``, int64: their places among the pass's sequences; None if they
                are the first.
        """
        self._slots, self._rows = slots, rows
        self.tokens.fill_(1)  # the known token, whatever becomes of its drafts

    def accepted(self, tokens: torch.Tensor) -> None:
        """Note what was accepted, on the device.

        Args:
            tokens: ``[B]``, of each of the pass's sequences, the known token counted; a
                sequence that accepts nothing has 1.
        """
        if self._slots is None:
            return
        chosen = tokens if self._rows is None else tokens[self._rows]
        count = min(len(chosen), len(self._slots))
        self.tokens[:count].copy_(chosen[:count])

    def fold(self, ended: Sequence[Fold] = ()) -> None:
        """Fold what was accepted into the slots, once; returns before it is done.

        Args:
            ended: of sequences that ended, the tokens that are folded instead.

        Raises:
            RuntimeError: if there are such, and no pass recorded anything.
        """
        slots, self._slots, self._rows = self._slots, None, None
        if slots is None or self._layers is None:
            if ended:
                raise RuntimeError("the last pass recorded none of its tokens")
            return
        tokens = self.tokens[: len(slots)]
        if ended:
            known = torch.tensor([[one.slot, one.tokens] for one in ended])
            names, counts = to_device(known.t().contiguous(), slots.device)
            same = slots[:, None] == names
            chosen = (same * counts).sum(1, dtype=torch.int32)
            tokens = torch.where(same.any(1), chosen, tokens)
        replay.commit(self._layers, slots, tokens)
