# SPDX-License-Identifier: Apache-2.0
"""Triton lightning attention, on the kernels of the shared recurrence."""

from __future__ import annotations

import torch

from hybrid_kernels._common import linear_chunk as chunk
from hybrid_kernels._common import linear_step


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    boundary_slots: torch.Tensor | None,
    round_boundaries: bool,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Pass states, compute outputs."""
    if slots.numel() == 0:
        return
    batch = chunk.Batch(
        cu_seqlens, pool, slots, has_initial, boundary_slots, round_boundaries
    )
    # A view with stride 0 over tokens: nothing is written out.
    g = decay.expand(v.shape[:-1])
    offsets = chunk.chunk_offsets(cu_seqlens)
    states = chunk.pass_states(k, v, g, None, None, batch, offsets)
    chunk.outputs(q, k, v, g, None, states, batch, offsets, out, scale=scale)


def steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each from its parent's state."""
    linear_step.launch(
        q,
        k,
        v,
        decay.expand(v.shape[:-1]),
        None,
        pool,
        slots,
        draft_slots,
        parents,
        out,
        scale=scale,
        normalise=False,
        extras=linear_step.Extras(),
    )
