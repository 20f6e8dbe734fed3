# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch gated delta rule; the CPU path.

The recurrence is `hybrid_kernels._common.linear`'s, with one decay per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from hybrid_kernels._common.linear import EPSILON, Operands, prefill, steps

__all__ = ["Factors", "factors", "gates", "operands", "prefill", "steps"]


@dataclass(frozen=True)
class Factors:
    """Tokens whose gates and norms are computed; contiguous."""

    q: torch.Tensor
    """``[R, H, K]``, of the queries' type."""
    k: torch.Tensor
    """``[R, H, K]``, of the keys' type."""
    v: torch.Tensor
    """``[R, HV, V]``, of the values' type."""
    decay: torch.Tensor
    """``[R, HV]``, float32: ``exp`` of the log decay, 0 to 1."""
    beta: torch.Tensor
    """``[R, HV]``, float32."""


def operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    scale: float | None,
    use_qk_l2norm: bool,
) -> Operands:
    """The layer as an instance of the shared recurrence."""
    return Operands(
        q,
        k,
        v,
        g,
        beta,
        A=A,
        dt_bias=dt_bias,
        scale=k.shape[-1] ** -0.5 if scale is None else scale,
        use_qk_l2norm=use_qk_l2norm,
    )


def gates(
    a: torch.Tensor, b: torch.Tensor, A: torch.Tensor, dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and beta from a layer's projections."""
    shifted = a.float() if dt_bias is None else a.float() + dt_bias.float()
    return A.float() * functional.softplus(shifted), b.float().sigmoid()


def factors(operands: Operands, rows: torch.Tensor) -> Factors:
    """See `hybrid_kernels.gated_delta_rule.factors`."""
    assert operands.beta is not None

    at = rows.long()
    g, beta = operands.g[at].float(), operands.beta[at].float()
    if operands.A is not None:
        g, beta = gates(g, beta, operands.A, operands.dt_bias)
    q, k = operands.q[at], operands.k[at]
    if operands.use_qk_l2norm:
        q, k = _unit(q), _unit(k)
    return Factors(q, k, operands.v[at], g.exp(), beta)


def _unit(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    norm = wide.square().sum(-1, keepdim=True) + EPSILON
    return (wide * norm.rsqrt()).to(x.dtype)
