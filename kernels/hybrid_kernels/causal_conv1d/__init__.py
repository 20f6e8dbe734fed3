# SPDX-License-Identifier: Apache-2.0
"""Short causal depthwise convolution with a state of the last ``W - 1`` inputs.

``y[t, d] = act(bias[d] + sum_w weight[d, w] * x[t - (W - 1) + w, d])``, where
inputs before the sequence come from its state slot. Used in front of the state
update by Mamba (Gu and Dao 2023, arXiv:2312.00752), Mamba-2, Gated DeltaNet and
KDA, and alone as a short-convolution layer.

Shapes: `D` channels, `W` taps (2 to 5), `N` sequences, `T` packed tokens, `S`
slots. The pool is ``[S, D, W - 1]``, oldest input first, with any strides: pass a
transposed view of an ``[S, W - 1, D]`` buffer as it is. `x` may have any strides,
channels contiguous being the fast case. See `hybrid_kernels` for slots, padding
rows and rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hybrid_kernels._common.checks import (
    check_flags,
    check_index,
    check_last_contiguous,
    check_shape,
    on_gpu,
    require,
)
from hybrid_kernels._common.varlen import CHUNK
from hybrid_kernels.causal_conv1d import reference

if TYPE_CHECKING:
    import torch

__all__ = ["Activation", "prefill", "update", "verify"]

Activation = Literal["silu"] | None


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
    boundary_every: int = CHUNK,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve packed sequences and leave each one's state in its slot.

    Args:
        x: ``[T, D]``.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        cu_seqlens: ``[N + 1]``, int32 or int64, on `x`'s device, starting at 0.
            Rows of `x` after the last sequence are padding; their output is 0.
        pool: ``[S, D, W - 1]``.
        slots: ``[N]``.
        has_initial: ``[N]`` bool; False starts from zeros whatever the slot
            holds. None means True for all.
        activation: applied to the output; "silu" or None.
        boundary_slots: ``[N, C]``; the state after ``(c + 1) * boundary_every``
            tokens of sequence `n` is also written to ``boundary_slots[n, c]``.
            Negative entries, and entries beyond the sequence, are skipped.
        boundary_every: tokens between boundaries, at least ``W - 1``.
        out: ``[T, D]``, written if given; may not overlap `x`.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    _check_weights(x, weight, bias, pool, activation)
    require(x.ndim == 2, f"x has {x.ndim} dimensions, expected 2")
    count = cu_seqlens.numel() - 1
    check_index("cu_seqlens", cu_seqlens, (count + 1,))
    check_index("slots", slots, (count,))
    if has_initial is not None:
        check_flags("has_initial", has_initial, (count,))
    if boundary_slots is not None:
        check_index("boundary_slots", boundary_slots, (count, boundary_slots.shape[1]))
        check_last_contiguous("boundary_slots", boundary_slots)
        require(
            boundary_every >= weight.shape[1] - 1,
            f"boundary_every is {boundary_every}, less than the state's "
            f"{weight.shape[1] - 1} inputs",
        )
    result = x.new_empty(x.shape) if out is None else out
    check_shape("out", result, tuple(x.shape))
    arguments = (x, weight, bias, cu_seqlens, pool, slots, has_initial)
    tail = (activation, boundary_slots, boundary_every, result)
    if on_gpu(x):
        from hybrid_kernels.causal_conv1d import triton

        triton.prefill(*arguments, *tail)
    else:
        reference.prefill(*arguments, *tail)
    return result


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

    With `out` given nothing is allocated; the call can be captured.

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
    require(x.ndim == 2, f"x has {x.ndim} dimensions, expected 2")
    check_index("slots", slots, (x.shape[0],))
    result = x.new_empty(x.shape) if out is None else out
    check_shape("out", result, tuple(x.shape))
    _step(
        x[:, None],
        weight,
        bias,
        pool,
        slots,
        slots[:, None],
        None,
        activation,
        result[:, None],
    )
    return result


def verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    *,
    parents: torch.Tensor | None = None,
    activation: Activation = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve `L` draft tokens per sequence; the state after each gets a slot.

    Bit for bit what `update` gives when the path to a draft is replayed token by
    token. With `out` given nothing is allocated; the call can be captured.

    Args:
        x: ``[N, L, D]``.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        pool: ``[S, D, W - 1]``.
        slots: ``[N]``, the main state of each sequence; read only.
        draft_slots: ``[N, L]``; a negative entry keeps no state. For a chain
            ``slots[i]`` may be among row `i`; otherwise all slots differ.
        parents: ``[N, L]``, the draft each draft follows, -1 for the main state;
            parents come before children and keep their state in a slot. None
            means a chain.
        activation: "silu" or None.
        out: ``[N, L, D]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    require(x.ndim == 3, f"x has {x.ndim} dimensions, expected 3")
    rows, drafts = x.shape[:2]
    check_index("slots", slots, (rows,))
    check_index("draft_slots", draft_slots, (rows, drafts))
    if parents is not None:
        check_index("parents", parents, (rows, drafts))
    result = x.new_empty(x.shape) if out is None else out
    check_shape("out", result, tuple(x.shape))
    _step(x, weight, bias, pool, slots, draft_slots, parents, activation, result)
    return result


def _step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    activation: Activation,
    out: torch.Tensor,
) -> None:
    _check_weights(x, weight, bias, pool, activation)
    arguments = (x, weight, bias, pool, slots, draft_slots, parents, activation, out)
    if on_gpu(x):
        from hybrid_kernels.causal_conv1d import triton

        triton.step(*arguments)
    else:
        reference.step(*arguments)


def _check_weights(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    activation: str | None,
) -> None:
    channels, width = x.shape[-1], weight.shape[-1]
    check_shape("weight", weight, (channels, width))
    require(2 <= width <= 5, f"weight has {width} taps, expected 2 to 5")
    check_shape("pool", pool, (pool.shape[0], channels, width - 1))
    if bias is not None:
        check_shape("bias", bias, (channels,))
    require(activation in (None, "silu"), f"unknown activation {activation!r}")
