# SPDX-License-Identifier: Apache-2.0
"""Short causal depthwise convolution with a state of the last ``W - 1`` inputs.

``y[t, d] = act(bias[d] + sum_w weight[d, w] * x[t - (W - 1) + w, d])``, where
inputs before the sequence come from its state slot. Used in front of the state
update by Mamba (Gu and Dao 2023, arXiv:2312.00752), Mamba-2, Gated DeltaNet and
KDA, and alone as a short-convolution layer.

Shapes: `D` channels, `W` taps (2 to 5), `N` sequences, `T` packed tokens, `S`
slots. The pool is ``[S, D, W - 1]``, oldest input first, with any strides: pass a
transposed view of an ``[S, W - 1, D]`` buffer as it is. `x` may have any strides,
channels contiguous being the fast case. `hybrid_kernels` describes the arguments
that all operations share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common import operation
from hybrid_kernels._common.checks import require
from hybrid_kernels._common.tables import CHUNK, Drafts, Sequences
from hybrid_kernels.causal_conv1d.reference import Activation, Operands

if TYPE_CHECKING:
    import torch

__all__ = ["Activation", "prefill", "update", "verify"]


def prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    has_initial: torch.Tensor | None = None,
    activation: Activation = None,
    boundary_slots: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    boundary_every: int = CHUNK,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve packed sequences and leave each one's state in its slot.

    Args:
        x: ``[T, D]``. Rows after the last sequence are padding; their output is 0.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        cu_seqlens, pool, slots, has_initial, boundary_slots, offsets: as for every
            `prefill`, see `hybrid_kernels`; with `boundary_every` for 64.
        activation: applied to the output; "silu" or None.
        boundary_every: tokens between boundaries, at least ``W - 1``.
        out: ``[T, D]``, written if given; may not overlap `x`.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    inputs = weight.shape[-1] - 1
    require(
        boundary_every >= inputs,
        f"boundary_every is {boundary_every}, less than the state's {inputs} inputs",
    )
    return operation.prefill(
        __name__,
        Operands(x, weight, bias, activation),
        Sequences(
            cu_seqlens,
            pool,
            slots,
            has_initial,
            boundary_slots,
            every=boundary_every,
            offsets=offsets,
        ),
        out,
    )


def update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    activation: Activation = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve one new token per sequence and advance its state in place.

    Args:
        x: ``[N, D]``.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        pool: ``[S, D, W - 1]``.
        slots: ``[N]``, no repeats among the non-negative.
        activation: "silu" or None.
        out: ``[N, D]``, written if given; may be `x` itself.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    tokens = Operands(x, weight, bias, activation)
    return operation.update(__name__, tokens, pool, slots, out)


def verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor | None = None,
    *,
    parents: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
    activation: Activation = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve `L` draft tokens per sequence; keep states, or a record to replay.

    Args:
        x: ``[N, L, D]``.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        pool: ``[S, D, W - 1]``.
        slots, draft_slots, parents, cu_seqlens, record: as for every `verify`, see
        `hybrid_kernels`; packed drafts are ``[T, ...]`` instead of ``[N, L, ...]``.
        activation: "silu" or None.
        out: ``[N, L, D]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    tokens = Operands(x, weight, bias, activation)
    drafts = Drafts(pool, slots, draft_slots, parents, cu_seqlens, record)
    return operation.verify(__name__, tokens, drafts, out)
