# SPDX-License-Identifier: Apache-2.0
"""The gated norm behind a gated delta net, where vLLM runs it with the layer."""

from __future__ import annotations

from typing import Any

import torch
from hybrid_kernels import gated_norm


def run(norm: Any, x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> bool:
    """Norm and gate what a layer gave, if our kernel computes that norm.

    Args:
        norm: vLLM's, of the layer.
        x: ``[T, HV, V]``, with any strides of tokens and heads, as all of them.
        gate: ``[T, HV, V]``, before the activation.
        out: ``[T, HV, V]``, written; may be `x`.

    Returns:
        Whether it does; if not, nothing was written.
    """
    if not _is_ours(norm, x.shape[-1]):
        return False
    given = {"activation": norm.activation, "out": out}
    gated_norm.rms_norm(x, gate, norm.weight.detach(), norm.eps, **given)
    return True


def warm_up(norm: Any, out: torch.Tensor, columns: int) -> None:
    """Compile the kernel for what vLLM gives it.

    Args:
        norm: vLLM's, of the layer.
        out: ``[T, HV, V]``, overwritten.
        columns: of queries, keys and values, before the gates in a token's row.
    """
    tokens, heads, width = out.shape
    rows = out.new_zeros((tokens, columns + heads * width))
    run(norm, out, rows[:, columns:].view(tokens, heads, width), out)


def _is_ours(norm: Any, width: int) -> bool:
    return (
        bool(norm.norm_before_gate)
        and norm.group_size in (None, width)
        and norm.bias is None
        and norm.activation in gated_norm.ACTIVATIONS
    )
