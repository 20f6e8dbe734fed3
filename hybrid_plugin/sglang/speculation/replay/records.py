# SPDX-License-Identifier: Apache-2.0
"""Records of the drafts that the last step verified, in all state layers."""

from __future__ import annotations

from typing import Any

import torch
from hybrid_kernels import replay
from sglang.srt.utils.common import (
    get_cuda_graph_max_batch_size,
    get_eager_max_batch_size,
)

from hybrid_plugin.mixers.verifications import Record

_FLOAT = torch.float32


def row_bytes(params: Any, drafts: int) -> int:
    """Bytes that the drafts of one sequence take, over all state layers.

    Args:
        params: SGLang's `BaseLinearStateParams`.
        drafts: tokens that it verifies, the known one counted.
    """
    shape, type_ = params.shape, params.dtype.conv
    channels = shape.conv[0][1 if params.is_kda else 0]
    pool = torch.empty((1, *shape.temporal), device="meta")
    numbers = replay.record_size(
        pool, _key_heads(pool, channels), wide_decay=params.is_kda
    )
    token = numbers * _FLOAT.itemsize + channels * type_.itemsize
    return int(token * drafts * len(params.layers))


def rows_of(requests: int) -> int:
    """Rows for so many running requests: SGLang may pad a batch beyond them."""
    return max(
        get_eager_max_batch_size(requests), get_cuda_graph_max_batch_size(requests)
    )


class Records:
    """A record of each draft, layer and row of the batch; one commit folds them all."""

    def __init__(self, states: Any, rows: int, drafts: int, *, is_kda: bool) -> None:
        """Take memory for them.

        Args:
            states: SGLang's `State` of a pool: `temporal` ``[layers, S, HV, V, K]``,
                and of `conv` one, ``[layers, S, D, W - 1]``; of Kimi delta attention
                ``[layers, S, W - 1, D]``.
            rows: sequences that verify at once, padding counted.
            drafts: tokens of each, the known one counted.
            is_kda: whether the layers are Kimi delta attention.
        """
        temporal, (windows,) = states.temporal, states.conv
        windows = windows.transpose(-1, -2) if is_kda else windows
        channels = windows.shape[2]
        heads = _key_heads(temporal[0], channels)
        size = replay.record_size(temporal[0], heads, wide_decay=is_kda)
        lead, device = (len(temporal), rows, drafts), temporal.device
        recorded = torch.zeros((*lead, size), dtype=_FLOAT, device=device)
        inputs = torch.zeros((*lead, channels), dtype=windows.dtype, device=device)
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

    def warm_up(self, *, trees: bool) -> None:
        """Compile the kernel that folds, before there is anything to fold.

        Args:
            trees: whether drafts are trees.
        """
        recorded = self._of_layer[0].states
        nobody = torch.full(
            (len(recorded),), -1, dtype=torch.int32, device=recorded.device
        )
        links = nobody[:, None].repeat(1, recorded.shape[1]) if trees else None
        replay.commit(self.layers, nobody, torch.zeros_like(nobody), parents=links)

    def of(self, layer: int) -> Record:
        """Those of a state layer, by its place among them."""
        return self._of_layer[layer]


def _key_heads(pool: torch.Tensor, channels: int) -> int:
    """Key heads, or groups, of a layer: what the values leave of its convolution."""
    _, heads, width, depth = pool.shape
    return (channels - heads * width) // (2 * depth)
