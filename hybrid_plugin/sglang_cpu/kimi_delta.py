# SPDX-License-Identifier: Apache-2.0
"""SGLang's kernels of Kimi delta attention, on `hybrid_kernels.kda`.

`H` key heads, `HV` value heads, `T` packed tokens, `N` sequences, `S` slots.  A gate
with a lower bound is no gate of `hybrid_kernels`: decays are computed here.
"""

from __future__ import annotations

import torch
from hybrid_kernels import kda
from torch.nn import functional

from hybrid_plugin.sglang_cpu.chunk_states import ChunkStates
from hybrid_plugin.sglang_cpu.draft_states import DraftStates, parents_below_roots
from hybrid_plugin.sglang_cpu.unsupported import refuse


def decays(
    gate: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> torch.Tensor:
    """Log decay of each key channel.

    Args:
        gate: ``[T, HV, K]``, a layer's projection.
        A_log: `HV` numbers.
        dt_bias: `HV` times `K` numbers.
        lower_bound: of the log decay, negative; None for none.

    Returns:
        ``[T, HV, K]``, float32.
    """
    rate, x = A_log.float().view(-1, 1).exp(), gate.float()
    if dt_bias is not None:
        x = x + dt_bias.float().view(x.shape[1:])
    if lower_bound is None:
        return -rate * functional.softplus(x)
    return lower_bound * (rate * x).sigmoid()


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    track_state: torch.Tensor | None = None,
    track_chunk_idx: torch.Tensor | None = None,
    beta_is_raw: bool = False,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    **kwargs: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run packed sequences.

    Args:
        q: ``[1, T, H, K]``.
        k: ``[1, T, H, K]``.
        v: ``[1, T, HV, V]``.
        g: ``[1, T, HV, K]``, log decay; with `A_log`, what it is made of.
        beta: ``[1, T, HV]``; before the logistic function if `beta_is_raw`.
        scale: ``K ** -0.5`` if None.
        initial_state: ``[S, HV, V, K]``, updated.
        initial_state_indices: ``[N]`` slots.
        use_qk_l2norm_in_kernel: normalise queries and keys.
        cu_seqlens: ``[N + 1]``.
        A_log: as for `decays`, as are `dt_bias` and `lower_bound`.
        output_intermediate_states: hand out the states of chunks too.
        track_state: refused, as is `track_chunk_idx`.
        chunk_indices: not used, as are `chunk_offsets` and other arguments.

    Returns:
        ``[1, T, HV, V]``, and with `output_intermediate_states` ``[1, C, HV, V, K]``
        in float32: the state before tokens 0, 64, 128, ... of each sequence.

    Raises:
        ValueError: without a pool or `cu_seqlens`, or if shapes do not fit.
        NotImplementedError: for tracked states.
    """
    refuse("tracked states", track_state=track_state, track_chunk_idx=track_chunk_idx)
    if initial_state is None or cu_seqlens is None:
        raise ValueError("prefill needs initial_state and cu_seqlens")
    decay = g[0] if A_log is None else decays(g[0], A_log, dt_bias, lower_bound)
    states = ChunkStates.start(initial_state, initial_state_indices, cu_seqlens)
    out = kda.prefill(
        q[0],
        k[0],
        v[0],
        decay.contiguous(),
        _strength(beta[0], beta_is_raw),
        cu_seqlens,
        states.pool,
        states.running,
        boundary_slots=states.boundary_slots,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )
    states.write_final(initial_state)
    if output_intermediate_states:
        return out[None], states.chunks()[None]
    return out[None]


def step(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one new token per sequence and advance its slot in place.

    Args:
        mixed_qkv: ``[N, 2 * H * K + HV * V]``: queries, keys, values.
        a: ``[N, HV * K]``, as the gate of `decays`.
        b: ``[N, HV]``, before the logistic function.
        A_log: as for `decays`, as are `dt_bias` and `lower_bound`.
        scale: of the queries.
        initial_state: ``[S, HV, V, K]``, updated.
        out: ``[N, 1, HV, V]``, written.
        ssm_state_indices: ``[N]`` slots.
        use_qk_l2norm_in_kernel: normalise queries and keys.

    Returns:
        `out` and `initial_state`.

    Raises:
        ValueError: if shapes do not fit.
    """
    rows = mixed_qkv.shape[0]
    values, width, depth = initial_state.shape[1:]
    keys = (mixed_qkv.shape[1] - values * width) // 2
    q, k, v = torch.split(mixed_qkv, [keys, keys, values * width], dim=-1)
    kda.update(
        q.view(rows, -1, depth),
        k.view(rows, -1, depth),
        v.view(rows, values, width),
        decays(a.view(rows, values, depth), A_log, dt_bias, lower_bound),
        _strength(b, is_raw=True),
        initial_state,
        ssm_state_indices,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        out=out[:, 0],
    )
    return out, initial_state


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    scale: float | None,
    use_qk_l2norm: bool,
) -> torch.Tensor:
    """Run one new token per sequence, from queries, keys and values apart.

    Args:
        q: ``[1, N, H, K]``.
        k: ``[1, N, H, K]``.
        v: ``[1, N, HV, V]``.
        a: `N` times `HV` times `K` numbers, as the gate of `decays`.
        b: `N` times `HV` numbers, before the logistic function.
        A_log: as for `decays`, as are `dt_bias` and `lower_bound`.
        pool: ``[S, HV, V, K]``, updated.
        slots: ``[N]``.
        scale: ``K ** -0.5`` if None.
        use_qk_l2norm: normalise queries and keys.

    Returns:
        ``[1, N, HV, V]``.

    Raises:
        ValueError: if shapes do not fit.
    """
    shape = (q.shape[1], v.shape[2], k.shape[3])
    return kda.update(
        q[0],
        k[0],
        v[0],
        decays(a.reshape(shape), A_log, dt_bias, lower_bound),
        _strength(b.reshape(shape[:2]), is_raw=True),
        pool,
        slots,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
    )[None]


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    states: DraftStates,
    retrieve_parent_token: torch.Tensor | None,
    scale: float | None,
    use_qk_l2norm: bool,
) -> torch.Tensor:
    """Run `L` drafts of each sequence, and keep the state after each of them.

    Args:
        q: ``[N, L, H, K]``.
        k: ``[N, L, H, K]``.
        v: ``[N, L, HV, V]``.
        a: `N` times `L` times `HV` times `K` numbers, as the gate of `decays`.
        b: `N` times `L` times `HV` numbers, before the logistic function.
        A_log: as for `decays`, as are `dt_bias` and `lower_bound`.
        states: where the drafts' states go.
        retrieve_parent_token: ``[N, L]``, the draft that each one follows; None for
            chains.
        scale: ``K ** -0.5`` if None.
        use_qk_l2norm: normalise queries and keys.

    Returns:
        ``[N, L, HV, V]``.

    Raises:
        ValueError: if shapes do not fit.
    """
    rows, drafts = q.shape[:2]
    shape = (rows * drafts, v.shape[2], k.shape[3])
    decay = decays(a.reshape(shape), A_log, dt_bias, lower_bound)
    return kda.verify(
        q,
        k,
        v,
        decay.view(rows, drafts, *shape[1:]),
        _strength(b.reshape(rows, drafts, -1), is_raw=True),
        states.pool,
        states.slots,
        states.draft_slots,
        parents=parents_below_roots(retrieve_parent_token),
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
    )


def _strength(beta: torch.Tensor, is_raw: bool) -> torch.Tensor:
    return beta.float().sigmoid() if is_raw else beta.float()
