# SPDX-License-Identifier: Apache-2.0
"""Elementwise steps that SGLang fuses and has no PyTorch form of."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from hybrid_plugin.sglang_cpu.unsupported import refuse


class GatedNorm(Protocol):
    """What `gated_norm` reads of SGLang's module."""

    hidden_size: int
    eps: float
    activation: str
    weight: torch.Tensor | None


def gated_norm(
    self: GatedNorm,
    x: torch.Tensor,
    g: torch.Tensor,
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> torch.Tensor:
    """Normalise by the root mean square, then gate.

    Args:
        self: SGLang's `FusedRMSNormGated`.
        x: ``[..., D]``.
        g: as many elements; passed through `self.activation`.
        residual: refused, as are `prenorm` and `residual_in_fp32`.

    Returns:
        As `x`, computed in float32.

    Raises:
        NotImplementedError: for a residual.
    """
    refuse(
        "a residual in the gated norm",
        residual=residual,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
    )
    weight = None if self.weight is None else self.weight.float()
    normal = functional.rms_norm(x.float(), (self.hidden_size,), weight, self.eps)
    gate = g.reshape(x.shape).float()
    opened = gate.sigmoid() if self.activation == "sigmoid" else functional.silu(gate)
    return (normal * opened).to(x.dtype)


def norm_then_gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """The same of another module of SGLang's (Qwen3.5, Qwen4-Exp).

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        bias: refused, as are groups, another order, and means that are taken off.
        z: as many elements as `x`; passed through `activation`.
        eps: beside the mean square.
        group_size: refused.
        norm_before_gate: must be true.
        is_rms_norm: must be true.
        activation: "sigmoid", or "swish" by one of its names.

    Returns:
        As `x`, computed in float32.

    Raises:
        NotImplementedError: for what is refused.
    """
    refuse(
        "this form of the gated norm",
        bias=bias,
        group_size=group_size,
        gate_before_norm=not norm_before_gate,
        mean=not is_rms_norm,
    )
    normal = functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    if z is not None:
        gate = z.reshape(x.shape).float()
        opened = gate.sigmoid() if activation == "sigmoid" else functional.silu(gate)
        normal = normal * opened
    return normal.to(x.dtype)


def gate_output(
    attn_output: torch.Tensor,
    gate: torch.Tensor,
    inplace: bool = False,
    quant: bool = False,
) -> torch.Tensor:
    """Multiply what attention gives by the logistic function of its gates (Qwen3.5).

    Args:
        attn_output: ``[T, H * D]``.
        gate: ``[T, H, D]``, with any strides, or as `attn_output`.
        inplace: whether to change `attn_output`.
        quant: refused.

    Returns:
        As `attn_output`, computed in float32.

    Raises:
        NotImplementedError: for an output of 8 bits.
    """
    refuse("8-bit outputs of gated attention", quant=quant)
    gated = attn_output.float() * gate.reshape(attn_output.shape).float().sigmoid()
    return attn_output.copy_(gated) if inplace else gated.to(attn_output.dtype)


def add_shared_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add a shared expert's output, times its gate, to that of the routed ones.

    Args:
        hidden_states: ``[T, D]``.
        gate_weight: ``[D]``; the gate is the logistic function of its product with
            the hidden states.
        shared_output: ``[T, D]``.
        final_hidden_states: ``[T, D]``, added to in place.
    """
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
    total = final_hidden_states.float() + gate * shared_output.float()
    final_hidden_states.copy_(total)


def soft_cap(full_logits: torch.Tensor, final_logit_softcapping: float) -> torch.Tensor:
    """Bound logits, in place.

    Args:
        full_logits: ``[T, vocabulary]``, changed.
        final_logit_softcapping: the bound ``c`` of ``c * tanh(logits / c)``.

    Returns:
        `full_logits`.
    """
    bounded = (full_logits.float() / final_logit_softcapping).tanh()
    return full_logits.copy_(bounded * final_logit_softcapping)


def gate_within(input: torch.Tensor, output: torch.Tensor, swiglu_limit: float) -> None:
    """Multiply by the SiLU of the gates, both bounded.

    Args:
        input: ``[T, 2 * D]``: gates, then what they are multiplied with.
        output: ``[T, D]``, written.
        swiglu_limit: bound of the gates from above, and of the others on both sides.
    """
    gate, other = input.float().chunk(2, -1)
    opened = functional.silu(gate.clamp(max=swiglu_limit))
    output.copy_(opened * other.clamp(-swiglu_limit, swiglu_limit))
