# SPDX-License-Identifier: Apache-2.0
"""Records of the drafts that the last step verified, in all state layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hybrid_kernels import replay
from sglang.srt.utils.common import (
    get_cuda_graph_max_batch_size,
    get_eager_max_batch_size,
)

from hybrid_plugin.device.row_pool import RowTensor
from hybrid_plugin.mixers.verifications import Record

_FLOAT = torch.float32


def row_tensors(params: Any, drafts: int) -> list[RowTensor]:
    """What records have of a sequence: of the recurrences, then of the convolutions.

    Args:
        params: SGLang's `BaseLinearStateParams`.
        drafts: tokens that it verifies, the known one counted.
    """
    shape, layers = params.shape, len(params.layers)
    channels = shape.conv[0][1 if params.is_kda else 0]
    pool = torch.empty((1, *shape.temporal), device="meta")
    size = replay.record_size(
        pool, _key_heads(pool, channels), wide_decay=params.is_kda
    )
    return [
        RowTensor(layers, (drafts, size), _FLOAT),
        RowTensor(layers, (drafts, channels), params.dtype.conv),
    ]


def row_bytes(params: Any, drafts: int) -> int:
    """Bytes of these, behind each other."""
    return sum(
        one.layers * torch.Size(one.shape).numel() * one.dtype.itemsize
        for one in row_tensors(params, drafts)
    )


def rows_of(requests: int) -> int:
    """Rows for so many running requests: SGLang may pad a batch beyond them."""
    return max(
        get_eager_max_batch_size(requests), get_cuda_graph_max_batch_size(requests)
    )


class Records:
    """A record of each draft, layer and row of the batch; one commit folds them all."""

    def __init__(
        self, states: Any, tensors: Sequence[torch.Tensor], *, is_kda: bool
    ) -> None:
        """Describe them.

        Args:
            states: SGLang's `State` of a pool: `temporal` ``[layers, S, HV, V, K]``,
                and of `conv` one, ``[layers, S, D, W - 1]``; of Kimi delta attention
                ``[layers, S, W - 1, D]``.
            tensors: those of `row_tensors`, ``[layers, R, L, ...]``.
            is_kda: whether the layers are Kimi delta attention.
        """
        temporal, (windows,) = states.temporal, states.conv
        windows = windows.transpose(-1, -2) if is_kda else windows
        heads = _key_heads(temporal[0], windows.shape[2])
        recorded, inputs = tensors
        self._of_layer = [Record(*pair) for pair in zip(recorded, inputs, strict=True)]
        self.layers = replay.Layers(
            [
                replay.States(pool, record.states, heads, is_kda)
                for pool, record in zip(temporal, self._of_layer, strict=True)
            ],
            [
                replay.Windows(pool, record.inputs)
                for pool, record in zip(windows, self._of_layer, strict=True)
            ],
        )

    @classmethod
    def allocated(cls, states: Any, rows: int, drafts: int, *, is_kda: bool) -> Records:
        """Take memory for them.

        Args:
            states: as above.
            rows: sequences that verify at once, padding counted.
            drafts: tokens of each, the known one counted.
            is_kda: as above.
        """
        temporal, (windows,) = states.temporal, states.conv
        channels = windows.shape[3 if is_kda else 2]
        size = replay.record_size(
            temporal[0], _key_heads(temporal[0], channels), wide_decay=is_kda
        )
        lead, device = (len(temporal), rows, drafts), temporal.device
        tensors = (
            torch.zeros((*lead, size), dtype=_FLOAT, device=device),
            torch.zeros((*lead, channels), dtype=windows.dtype, device=device),
        )
        return cls(states, tensors, is_kda=is_kda)

    def warm_up(self, *, trees: bool) -> None:
        """Compile the kernel that folds, before there is anything to fold.

        Args:
            trees: whether drafts are trees.
        """
        recorded = self._of_layer[0].states
        nobody = torch.full((1,), -1, dtype=torch.int32, device=recorded.device)
        links = nobody[:, None].repeat(1, recorded.shape[1]) if trees else None
        replay.commit(self.layers, nobody, torch.zeros_like(nobody), parents=links)

    def of(self, layer: int) -> Record:
        """Those of a state layer, by its place among them."""
        return self._of_layer[layer]


def _key_heads(pool: torch.Tensor, channels: int) -> int:
    """Key heads, or groups, of a layer: what the values leave of its convolution."""
    _, heads, width, depth = pool.shape
    return (channels - heads * width) // (2 * depth)
