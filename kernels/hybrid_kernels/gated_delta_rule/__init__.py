# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule (Gated DeltaNet; Qwen3-Next, Qwen3.5, OLMo hybrid).

Per value head, with state ``S`` of shape ``[V, K]``:

    S = S * exp(g)
    S = S + beta * (v - S k) k^T
    o = scale * S q

Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", arXiv:2412.06464;
the chunked form follows its section 3.3.

Shapes: `H` key heads, `HV` value heads (a multiple of `H`; key head `h` serves
value heads ``h * HV / H`` and following), `K` up to 256, `V`, `N` sequences, `T`
packed tokens, `S` slots. The pool is ``[S, HV, V, K]`` with any strides. Queries,
keys and values are contiguous along their last dimension, free elsewhere.
`hybrid_kernels` describes the arguments that all operations share.

Matrix products of `prefill` take their operands in `k`'s type, with float32 sums:
bfloat16 inputs give bfloat16 accuracy, float32 inputs float32 accuracy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from hybrid_kernels._common import operation
from hybrid_kernels._common.checks import check_index
from hybrid_kernels._common.tables import Drafts, Sequences
from hybrid_kernels.gated_delta_rule.reference import Factors, operands

if TYPE_CHECKING:
    import torch

__all__ = ["Factors", "factors", "prefill", "update", "verify"]


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    A: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    has_initial: torch.Tensor | None = None,
    boundary_slots: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    round_boundaries: bool = False,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences and leave each one's state in its slot.

    Args:
        q: ``[T, H, K]``.
        k: ``[T, H, K]``.
        v: ``[T, HV, V]``.
        g: ``[T, HV]``, log decay, at most 0; with `A`, the projection it is
            made of.
        beta: ``[T, HV]``, between 0 and 1; with `A`, before the logistic
            function.
        A: ``[HV]``; fuses the layer's gates: the log decay is
            ``A * softplus(g + dt_bias)``, that is ``A = -exp(A_log)``, and beta
            is passed through the logistic function.
        dt_bias: ``[HV]`` or None, used with `A` only.
        scale: ``K ** -0.5`` if None.
        use_qk_l2norm: divide queries and keys by their 2-norm first.
        cu_seqlens, pool, slots, has_initial, boundary_slots, offsets,
        round_boundaries: as for every `prefill`, see `hybrid_kernels`.
        out: ``[T, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    return operation.prefill(
        __name__,
        operands(q, k, v, g, beta, A, dt_bias, scale, use_qk_l2norm),
        Sequences(
            cu_seqlens,
            pool,
            slots,
            has_initial,
            boundary_slots,
            round_boundaries,
            offsets=offsets,
        ),
        out,
    )


def update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    A: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one new token per sequence and advance its state in place.

    Args:
        q: ``[N, H, K]``.
        k: ``[N, H, K]``.
        v: ``[N, HV, V]``.
        g: ``[N, HV]``, as for `prefill`.
        beta: ``[N, HV]``, as for `prefill`.
        pool: ``[S, HV, V, K]``.
        slots: ``[N]``, no repeats among the non-negative.
        A, dt_bias, scale, use_qk_l2norm: as for `prefill`.
        out: ``[N, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = operands(q, k, v, g, beta, A, dt_bias, scale, use_qk_l2norm)
    return operation.update(__name__, tokens, pool, slots, out)


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor | None = None,
    *,
    parents: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
    A: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `L` draft tokens per sequence; keep states, or a record to replay.

    Args:
        q: ``[N, L, H, K]``.
        k: ``[N, L, H, K]``.
        v: ``[N, L, HV, V]``.
        g: ``[N, L, HV]``, as for `prefill`.
        beta: ``[N, L, HV]``, as for `prefill`.
        pool: ``[S, HV, V, K]``.
        slots, draft_slots, parents, cu_seqlens, record: as for every `verify`, see
        `hybrid_kernels`; packed drafts are ``[T, ...]`` instead of ``[N, L, ...]``.
        A, dt_bias, scale, use_qk_l2norm: as for `prefill`.
        out: ``[N, L, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = operands(q, k, v, g, beta, A, dt_bias, scale, use_qk_l2norm)
    drafts = Drafts(pool, slots, draft_slots, parents, cu_seqlens, record)
    return operation.verify(__name__, tokens, drafts, out)


def factors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    rows: torch.Tensor,
    *,
    A: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_qk_l2norm: bool = False,
) -> Factors:
    """What the recurrence multiplies, for kernels that know no gates and no strides.

    Args:
        q: ``[T, H, K]``.
        k: ``[T, H, K]``.
        v: ``[T, HV, V]``.
        g: ``[T, HV]``, as for `prefill`.
        beta: ``[T, HV]``, as for `prefill`.
        rows: ``[R]``, int32 or int64: tokens to take, in this order.
        A, dt_bias, use_qk_l2norm: as for `prefill`.

    Returns:
        New contiguous tensors.

    Raises:
        ValueError: if `rows` is not a list of indices.
    """
    check_index("rows", rows, (rows.numel(),))
    tokens = operands(q, k, v, g, beta, A, dt_bias, None, use_qk_l2norm)
    made: Factors = cast(Any, operation.backend(__name__, v)).factors(tokens, rows)
    return made
