# SPDX-License-Identifier: Apache-2.0
"""SGLang's gated delta net kernels, on `hybrid_kernels.gated_delta_rule`.

`H` key heads, `HV` value heads, `T` packed tokens, `N` sequences, `S` slots.
"""

from __future__ import annotations

import torch
from hybrid_kernels import gated_delta_rule
from torch.nn import functional

from hybrid_plugin.sglang_cpu.chunk_states import ChunkStates
from hybrid_plugin.sglang_cpu.unsupported import refuse


def gates(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and write strength from a layer's projections.

    Args:
        A_log: ``[HV]``.
        a: ``[T, HV]``.
        b: ``[T, HV]``.
        dt_bias: ``[HV]``.
        beta: of softplus; 1.
        threshold: not used; softplus is exact for every input.

    Returns:
        Two tensors ``[1, T, HV]``, float32.

    Raises:
        NotImplementedError: for another `beta`.
    """
    if beta != 1.0:
        raise NotImplementedError(f"softplus with beta {beta} is not supported")
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Run packed sequences, and keep the state in front of every chunk of 64.

    Args:
        q: ``[1, T, H, K]``.
        k: ``[1, T, H, K]``.
        v: ``[1, T, HV, V]``.
        g: ``[1, T, HV]``, log decay.
        beta: ``[1, T, HV]``.
        scale: ``K ** -0.5`` if None.
        initial_state: ``[S, HV, V, K]``, updated unless `inplace_update` is False.
        initial_state_indices: ``[N]`` slots; None means 0, 1, 2, ...
        cu_seqlens: ``[N + 1]``.
        head_first: refused.
        use_qk_l2norm_in_kernel: normalise queries and keys.
        inplace_update: whether final states go to their slots.

    Returns:
        Outputs ``[1, T, HV, V]``, None, and chunk states ``[1, C, HV, V, K]`` in
        float32: for each sequence in turn, the state before its tokens 0, 64,
        128, ...

    Raises:
        ValueError: if shapes do not fit, or there is no pool or no `cu_seqlens`.
        NotImplementedError: for `head_first`.
    """
    refuse("heads before tokens", head_first=head_first)
    if initial_state is None or cu_seqlens is None:
        raise ValueError("prefill needs initial_state and cu_seqlens")
    states = ChunkStates.start(initial_state, initial_state_indices, cu_seqlens)
    out = gated_delta_rule.prefill(
        q[0],
        k[0],
        v[0],
        g[0],
        beta[0],
        cu_seqlens,
        states.pool,
        states.running,
        boundary_slots=states.boundary_slots,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )
    if inplace_update:
        states.write_final(initial_state)
    return out[None], None, states.chunks()[None]


def update(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one new token per sequence and advance its slot in place.

    Args:
        mixed_qkv: ``[N, 2 * H * K + HV * V]``: queries, keys, values.
        a: ``[N, HV]``, as for `gates`.
        b: ``[N, HV]``, as for `gates`.
        A_log: ``[HV]``.
        dt_bias: ``[HV]``.
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
    gated_delta_rule.update(
        q.view(rows, -1, depth),
        k.view(rows, -1, depth),
        v.view(rows, values, width),
        a,
        b,
        initial_state,
        ssm_state_indices,
        A=-A_log.float().exp(),
        dt_bias=dt_bias,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        out=out[:, 0],
    )
    return out, initial_state
