# SPDX-License-Identifier: Apache-2.0
"""Triton gated delta rule, on the kernels of the shared recurrence."""

from __future__ import annotations

import torch

from hybrid_kernels._common import linear_chunk as chunk
from hybrid_kernels._common import linear_step


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    boundary_slots: torch.Tensor | None,
    round_boundaries: bool,
    scale: float,
    normalise: bool,
    out: torch.Tensor,
) -> None:
    """Correct values, pass states, compute outputs."""
    if slots.numel() == 0:
        return
    batch = chunk.Batch(
        cu_seqlens, pool, slots, has_initial, boundary_slots, round_boundaries
    )
    offsets = chunk.chunk_offsets(cu_seqlens)
    unit_k, w, u = chunk.correct(k, v, g, beta, batch, offsets, normalise=normalise)
    states = chunk.pass_states(unit_k, u, g, None, w, batch, offsets)
    chunk.outputs(
        q,
        unit_k,
        u,
        g,
        None,
        states,
        batch,
        offsets,
        out,
        scale=scale,
        normalise=normalise,
    )


def steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    rate: torch.Tensor | None,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    scale: float,
    normalise: bool,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each from its parent's state."""
    extras = linear_step.Extras(rate=rate, bias=bias, sigmoid_beta=rate is not None)
    linear_step.launch(
        q,
        k,
        v,
        g,
        beta,
        pool,
        slots,
        draft_slots,
        parents,
        out,
        scale=scale,
        normalise=normalise,
        extras=extras,
    )
