# SPDX-License-Identifier: Apache-2.0
"""SGLang's kernels of Kimi delta attention, on `hybrid_kernels.kda`.

`H` key heads, `HV` value heads, `T` packed tokens, `N` sequences, `S` slots.  A gate
with a lower bound is no gate of `hybrid_kernels`: decays are computed here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hybrid_kernels import kda
from torch.nn import functional

from hybrid_plugin.sglang_cpu import delta_passes
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


def strengths(beta: torch.Tensor) -> torch.Tensor:
    """Strength of each write, in float32, of a layer's projection."""
    return beta.float().sigmoid()


def gates(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    shape: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and write strength of tokens, of a layer's projections.

    Args:
        a: `T` times `HV` times `K` numbers, as the gate of `decays`.
        b: `T` times `HV` numbers, before the logistic function.
        A_log: as for `decays`, as are `dt_bias` and `lower_bound`.
        shape: `HV` and `K`.

    Returns:
        ``[T, HV, K]`` and ``[T, HV]``, float32.
    """
    values, depth = shape
    decay = decays(a.reshape(-1, values, depth), A_log, dt_bias, lower_bound)
    return decay, strengths(b.reshape(-1, values))


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
    decay = g[0] if A_log is None else decays(g[0], A_log, dt_bias, lower_bound)
    out, chunks = delta_passes.prefill(
        kda,
        q,
        k,
        v,
        decay.contiguous(),
        strengths(beta[0]) if beta_is_raw else beta[0].float(),
        initial_state,
        initial_state_indices,
        cu_seqlens,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )
    return (out, chunks) if output_intermediate_states else out


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
    decay, strength = gates(
        a, b, A_log, dt_bias, lower_bound, initial_state.shape[1::2]
    )
    delta_passes.step(
        kda,
        mixed_qkv,
        (decay, strength),
        initial_state,
        ssm_state_indices,
        out,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
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
    return kda.update(
        q[0],
        k[0],
        v[0],
        *gates(a, b, A_log, dt_bias, lower_bound, pool.shape[1::2]),
        pool,
        slots,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
    )[None]
