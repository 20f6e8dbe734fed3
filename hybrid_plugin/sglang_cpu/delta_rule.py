# SPDX-License-Identifier: Apache-2.0
"""SGLang's gated delta net kernels, on `hybrid_kernels.gated_delta_rule`.

`H` key heads, `HV` value heads, `T` packed tokens, `N` sequences, `S` slots.
"""

from __future__ import annotations

import torch
from hybrid_kernels import gated_delta_rule, kda
from torch.nn import functional

from hybrid_plugin.sglang_cpu import delta_passes, kimi_delta
from hybrid_plugin.sglang_cpu.draft_states import DraftStates
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
    out, chunks = delta_passes.prefill(
        gated_delta_rule,
        q,
        k,
        v,
        g[0],
        beta[0],
        initial_state,
        initial_state_indices,
        cu_seqlens,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        in_place=inplace_update,
    )
    return out, None, chunks


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
    delta_passes.step(
        gated_delta_rule,
        mixed_qkv,
        (a, b),
        initial_state,
        ssm_state_indices,
        out,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        A=-A_log.float().exp(),
        dt_bias=dt_bias,
    )
    return out, initial_state


def verify(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: torch.Tensor | None = None,
    replayssm_rawk: torch.Tensor | None = None,
    replayssm_g: torch.Tensor | None = None,
    replayssm_beta: torch.Tensor | None = None,
    match_cutedsl_decode: bool = False,
) -> torch.Tensor:
    """Run `L` drafts of each sequence, and keep the state after each of them.

    Args:
        A_log: ``[HV]``.
        a: ``[N * L, HV]``, as for `gates`; with `is_kda` `K` times as many.
        dt_bias: ``[HV]``; with `is_kda` `K` times as many.
        softplus_beta: 1.
        softplus_threshold: not used; softplus is exact for every input.
        q: ``[1, N * L, H, K]``.
        k: ``[1, N * L, H, K]``.
        v: ``[1, N * L, HV, V]``.
        b: ``[N * L, HV]``, as for `gates`.
        initial_state_source: ``[S, HV, V, K]``, read only.
        initial_state_indices: ``[N]`` slots.
        scale: ``K ** -0.5`` if None.
        use_qk_l2norm_in_kernel: normalise queries and keys.
        cu_seqlens: ``[N + 1]``, in equal steps of `L`.
        disable_state_update: True; without it, `L` is one and slots are updated, for
            Kimi delta attention only.
        intermediate_states_buffer: ``[R, D, HV, V, K]``, written.
        intermediate_state_indices: ``[N]`` rows of it.
        cache_steps: not used; `D` says it.
        retrieve_parent_token: ``[N, L]``, the draft that each one follows; None for
            chains.
        is_kda: whether decays are those of Kimi delta attention, with one of each key
            channel and perhaps a `lower_bound`.
        cache_ring: refused, as are ReplaySSM's other arguments.

    Returns:
        ``[1, N * L, HV, V]``.

    Raises:
        ValueError: if shapes do not fit, or without `cu_seqlens` or the buffer.
        NotImplementedError: for anything else than a verification.
    """
    refuse(
        "ReplaySSM",
        cache_ring=cache_ring,
        replayssm_rawv=replayssm_rawv,
        replayssm_rawk=replayssm_rawk,
        replayssm_g=replayssm_g,
        replayssm_beta=replayssm_beta,
        match_cutedsl_decode=match_cutedsl_decode,
    )
    if softplus_beta != 1.0:
        raise NotImplementedError(f"softplus with beta {softplus_beta}")
    if is_kda and not disable_state_update:
        return kimi_delta.run(
            q,
            k,
            v,
            a,
            b,
            A_log,
            dt_bias,
            lower_bound,
            initial_state_source,
            initial_state_indices,
            scale,
            use_qk_l2norm_in_kernel,
        )
    refuse("steps that update states", update=not disable_state_update)
    if cu_seqlens is None or intermediate_states_buffer is None:
        raise ValueError("verify needs cu_seqlens and intermediate_states_buffer")
    rows = cu_seqlens.numel() - 1
    drafts = q.shape[1] // max(rows, 1)
    if rows * drafts != q.shape[1]:
        raise ValueError(f"{q.shape[1]} drafts are not equally many for {rows} rows")
    states = DraftStates.start(
        initial_state_source, initial_state_indices, rows, drafts
    )
    q, k, v = (x[0].reshape(rows, drafts, *x.shape[2:]) for x in (q, k, v))
    projected = {"A": -A_log.float().exp(), "dt_bias": dt_bias}
    gates_of_drafts = a.flatten(0, -2), b.flatten(0, -2)
    if is_kda:
        shape = initial_state_source.shape[1::2]
        gates_of_drafts = kimi_delta.gates(a, b, A_log, dt_bias, lower_bound, shape)
        projected = {}
    out = delta_passes.verify(
        kda if is_kda else gated_delta_rule,
        q,
        k,
        v,
        gates_of_drafts,
        states,
        retrieve_parent_token,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        **projected,
    )
    states.keep(intermediate_states_buffer, intermediate_state_indices)
    return out.flatten(0, 1)[None]
