# SPDX-License-Identifier: Apache-2.0
"""How the scratch of verifications lies in elastic pools, from SGLang's arguments.

SGLang's kernels take the states after drafts without strides, and the windows of
convolutions with them; so the former lie a layer behind the other, the latter side by
side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.runtime_context import get_exec, get_spec

from hybrid_plugin.core.memory.scratch import ScratchLayout
from hybrid_plugin.device.row_pool import RowTensor, apart_bytes, together_bytes
from hybrid_plugin.sglang.speculation.scratch import drafts_per_step


def scratch_layout(
    params: Any, device_type: str, sequences: int
) -> ScratchLayout | None:
    """How the rows lie; None without drafts, or rows.

    Args:
        params: SGLang's `BaseLinearStateParams`.
        device_type: "cpu" or "cuda", as torch calls it.
        sequences: that run at once, at most.
    """
    drafts = drafts_per_step()
    if not drafts or not sequences:
        return None
    topk = get_spec().speculative_eagle_topk
    tensors = row_tensors(params, drafts, topk)
    on_gpu = device_type != "cpu"
    return ScratchLayout(
        rows=sequences,
        apart=apart_bytes(tensors),
        together=together_bytes(tensors),
        batches=tuple(sorted(get_exec().graph.cuda_graph_config.decode.bs or ()))
        if on_gpu
        else (),
        # Graphs are captured, and kernels tuned, with batches of any size.
        warm_up_rows=sequences if on_gpu else 1,
    )


def row_tensors(params: Any, drafts: int, topk: int | None) -> list[RowTensor]:
    """What SGLang's `SpeculativeState` has of a row: windows, then temporal states.

    Args:
        params: SGLang's `BaseLinearStateParams`.
        drafts: tokens that a sequence verifies, the known one counted.
        topk: children of a draft; windows of a chain overlap.
    """
    overlap = (
        not params.shape.disable_conv_window_dedup
        and memory_pool.conv_window_dedup_enabled(
            memory_pool._is_npu, memory_pool._is_cpu, topk, params.is_kda
        )
    )
    layers, found = len(params.layers), []
    for shape in params.shape.conv:
        whole = (drafts, *shape)
        if overlap:
            whole = _overlapping(tuple(shape), params.shape.conv_kernel - 1, drafts)
        found.append(RowTensor(layers, whole, params.dtype.conv))
    temporal = (drafts, *params.shape.temporal)
    found.append(RowTensor(layers, temporal, params.dtype.temporal, apart=True))
    return found


def _overlapping(shape: tuple[int, ...], width: int, drafts: int) -> tuple[int, ...]:
    """Shape of the inputs of all windows of a chain; the last axis wins a tie."""
    axis = len(shape) - 1 if shape[-1] == width else 0
    return (*shape[:axis], width + drafts - 1, *shape[axis + 1 :])


def moved(
    states: Any, windows: Sequence[torch.Tensor], placed: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """SGLang's scratch of one row as a scratch of all rows.

    Args:
        states: `SpeculativeState` that SGLang built for no sequence but padding.
        windows: the memory of its windows, ``[layers, 1, ...]``.
        placed: tensors ``[layers, rows, ...]`` for each of them, and one for the
            temporal states.

    Returns:
        Its windows, which overlap where SGLang's do, and its temporal states.

    Raises:
        ValueError: if SGLang's tensors are others.
    """
    *homes, temporal = placed
    small = states.intermediate_ssm
    pairs = [*zip(windows, homes, strict=True), (small, temporal)]
    for own, home in pairs:
        shapes = own.shape[0], own.shape[2:]
        if shapes != (home.shape[0], home.shape[2:]) or own.dtype != home.dtype:
            raise ValueError(
                f"rows of {tuple(own.shape[2:])} were planned as "
                f"{tuple(home.shape[2:])}"
            )
    views = []
    for view, home in zip(states.intermediate_conv_window, homes, strict=True):
        size = (home.shape[0], home.shape[1], *view.shape[2:])
        views.append(home.as_strided(size, (*home.stride()[:2], *view.stride()[2:])))
    return views, temporal
