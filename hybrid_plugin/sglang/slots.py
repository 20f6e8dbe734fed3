# SPDX-License-Identifier: Apache-2.0
"""SGLang's state pool with all states of a slot side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MambaPool

from hybrid_plugin.sglang.speculation import scratch_layout

_ALIGNMENT = 128
"""Each state starts at a multiple of this many bytes, for loads in full vectors."""


def slot_bytes(params: Any) -> int:
    """Bytes of one slot over all state layers, each state aligned.

    Args:
        params: SGLang's `BaseLinearStateParams`.
    """
    return sum(size * len(params.layers) for _, _, size in _states(params))


def state_views(
    rows: torch.Tensor, params: Any, layers: int | None = None
) -> list[torch.Tensor]:
    """Views `[layers, slots, *state]` of each kind of state; the temporal one last.

    Args:
        rows: `[slots, bytes]` int8 with contiguous rows of at least `slot_bytes`.
        params: SGLang's `BaseLinearStateParams`.
        layers: with states on this stage of a pipeline; None for all of the model.
    """
    slots, views, start = len(rows), [], 0
    layers = len(params.layers) if layers is None else layers
    for shape, dtype, size in _states(params):
        part = rows[:, start : start + layers * size].view(dtype)
        padded = part.view(slots, layers, size // dtype.itemsize)
        state = padded[:, :, : torch.Size(shape).numel()].view(slots, layers, *shape)
        views.append(state.transpose(0, 1))
        start += layers * size
    return views


def _states(params: Any) -> Iterator[tuple[tuple[int, ...], torch.dtype, int]]:
    """Shape, type and aligned bytes of each kind of state of a layer."""
    kinds = [(tuple(shape), params.dtype.conv) for shape in params.shape.conv]
    kinds.append((tuple(params.shape.temporal), params.dtype.temporal))
    for shape, dtype in kinds:
        size = torch.Size(shape).numel() * dtype.itemsize
        yield shape, dtype, -(-size // _ALIGNMENT) * _ALIGNMENT


class SlotMajorPool(MambaPool):
    """A `MambaPool` on memory that comes and goes."""

    _conv_fuse_ok = False
    """SGLang's fused copies need each layer's states side by side."""
    _size: Callable[[], int]

    def __init__(
        self,
        rows: torch.Tensor,
        scratch: Sequence[torch.Tensor] = (),
        *,
        size: int,
        **kwargs: Any,
    ) -> None:
        """Build the pool small, and put it on its memory.

        Args:
            rows: `[slots, bytes]` int8, the slot for padding counted in.
            scratch: with drafts, the tensors of `speculation.scratch_layout`.
            size: slots, that one not counted.
            kwargs: as for `MambaPool`.

        Raises:
            ValueError: if SGLang's scratch has other tensors.
        """
        super().__init__(size=1, **{**kwargs, "spec_state_size": 0})
        layers = len(kwargs["mamba_layer_ids"])
        *conv, temporal = state_views(rows, kwargs["cache_params"], layers)
        if scratch:
            self._place_scratch(conv, temporal, scratch)
        else:
            self.mamba_cache = self.State(conv=conv, temporal=temporal)
        self.size = size

    def _place_scratch(
        self,
        conv: Sequence[torch.Tensor],
        temporal: torch.Tensor,
        scratch: Sequence[torch.Tensor],
    ) -> None:
        built: Any = self
        windows, states = scratch_layout.moved(
            built.mamba_cache, built._intermediate_conv_window_phys, scratch
        )
        built._intermediate_conv_window_phys = windows
        built.mamba_cache = self.SpeculativeState(
            conv=conv,
            temporal=temporal,
            intermediate_ssm=states,
            intermediate_conv_window=windows,
        )

    @property
    def size(self) -> int:
        """Slots that could be had at once, for SGLang's check for leaks."""
        return self._size()

    @size.setter
    def size(self, count: int) -> None:
        self._size = lambda: count

    def count_with(self, size: Callable[[], int]) -> None:
        """Have `size` say how many slots there are."""
        self._size = size
