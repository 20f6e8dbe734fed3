# SPDX-License-Identifier: Apache-2.0
"""What SGLang's passes through all kinds of delta rule have in common.

The operations of `hybrid_kernels` differ in their gates alone: `gated_delta_rule` makes
them of a layer's projections, `kda` takes each key channel's decay, and the strength of
each write.  `H` key heads, `HV` value heads, `T` packed tokens, `N` sequences, `S`
slots.
"""

from __future__ import annotations

from types import ModuleType

import torch

from hybrid_plugin.sglang_cpu.chunk_states import ChunkStates
from hybrid_plugin.sglang_cpu.draft_states import DraftStates, parents_below_roots


def prefill(
    operation: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    initial_state: torch.Tensor | None,
    slots: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    *,
    scale: float | None,
    use_qk_l2norm: bool,
    in_place: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run packed sequences, and keep the state in front of every chunk of 64.

    Args:
        operation: of `hybrid_kernels`.
        q: ``[1, T, H, K]``.
        k: ``[1, T, H, K]``.
        v: ``[1, T, HV, V]``.
        decay: ``[T, HV]`` or ``[T, HV, K]``, its logarithm.
        strength: ``[T, HV]``.
        initial_state: ``[S, HV, V, K]``, updated.
        slots: ``[N]``; None means 0, 1, 2, ...
        cu_seqlens: ``[N + 1]``.
        scale: ``K ** -0.5`` if None.
        use_qk_l2norm: normalise queries and keys.
        in_place: whether final states go to their slots.

    Returns:
        ``[1, T, HV, V]``, and chunk states ``[1, C, HV, V, K]`` in float32: for each
        sequence in turn, the state before its tokens 0, 64, 128, ...

    Raises:
        ValueError: without a pool or `cu_seqlens`, or if shapes do not fit.
    """
    if initial_state is None or cu_seqlens is None:
        raise ValueError("prefill needs initial_state and cu_seqlens")
    states = ChunkStates.start(initial_state, slots, cu_seqlens)
    out: torch.Tensor = operation.prefill(
        q[0],
        k[0],
        v[0],
        decay,
        strength,
        cu_seqlens,
        states.pool,
        states.running,
        boundary_slots=states.boundary_slots,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
    )
    if in_place:
        states.write_final(initial_state)
    return out[None], states.chunks()[None]


def step(
    operation: ModuleType,
    mixed_qkv: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    use_qk_l2norm: bool,
    **more: torch.Tensor,
) -> None:
    """Run one new token per sequence and advance its slot in place.

    Args:
        operation: of `hybrid_kernels`.
        mixed_qkv: ``[N, 2 * H * K + HV * V]``: queries, keys, values.
        gates: that the operation takes.
        state: ``[S, HV, V, K]``, updated.
        slots: ``[N]``.
        out: ``[N, 1, HV, V]``, written.
        scale: of the queries.
        use_qk_l2norm: normalise queries and keys.
        more: what else the operation makes its gates of.

    Raises:
        ValueError: if shapes do not fit.
    """
    rows = mixed_qkv.shape[0]
    values, width, depth = state.shape[1:]
    keys = (mixed_qkv.shape[1] - values * width) // 2
    q, k, v = torch.split(mixed_qkv, [keys, keys, values * width], dim=-1)
    operation.update(
        q.view(rows, -1, depth),
        k.view(rows, -1, depth),
        v.view(rows, values, width),
        *gates,
        state,
        slots,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        out=out[:, 0],
        **more,
    )


def verify(
    operation: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    states: DraftStates,
    parents: torch.Tensor | None,
    *,
    scale: float | None,
    use_qk_l2norm: bool,
    **more: torch.Tensor,
) -> torch.Tensor:
    """Run `L` drafts of each sequence, and keep the state after each of them.

    Args:
        operation: of `hybrid_kernels`.
        q: ``[N, L, H, K]``.
        k: ``[N, L, H, K]``.
        v: ``[N, L, HV, V]``.
        gates: that the operation takes, their first dimensions ``[N * L]``.
        states: where the drafts' states go.
        parents: ``[N, L]``, the draft that each one follows; None for chains.
        scale: ``K ** -0.5`` if None.
        use_qk_l2norm: normalise queries and keys.
        more: what else the operation makes its gates of.

    Returns:
        ``[N, L, HV, V]``.

    Raises:
        ValueError: if shapes do not fit.
    """
    rows, drafts = q.shape[:2]
    first, second = (x.reshape(rows, drafts, *x.shape[1:]) for x in gates)
    out: torch.Tensor = operation.verify(
        q,
        k,
        v,
        first,
        second,
        states.pool,
        states.slots,
        states.draft_slots,
        parents=parents_below_roots(parents),
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        **more,
    )
    return out
