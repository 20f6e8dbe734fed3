# SPDX-License-Identifier: Apache-2.0
"""What the gated delta net and Kimi delta attention are alike: a short convolution of
queries, keys and values together, then a delta rule with a decay.

`H` key heads of `K` channels, `HV` value heads of `V`, `D = 2 * H * K + HV * V`
channels of the convolution, `W` its width, `S` slots, `T` packed tokens.  What the
decay is made of has one number per value head, or one per key channel of it: `...`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hybrid_kernels.causal_conv1d import Activation
from torch.nn import functional

from hybrid_plugin.mixers import convolution
from hybrid_plugin.mixers.long_prefill import run_body, takes
from hybrid_plugin.mixers.prefills import LongPass, Prefills
from hybrid_plugin.mixers.verifications import Record, Verifications


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, as far as the mixer needs them."""

    convolution: torch.Tensor
    """``[D, W]``."""
    bias: torch.Tensor | None
    """``[D]``."""
    activation: Activation
    A: torch.Tensor
    """``[HV]``, float32: ``-exp(A_log)``."""
    dt_bias: torch.Tensor
    """``[HV, ...]``."""
    key_heads: int
    write_scale: float = 1.0
    """Multiplies the write strength: with 2 a write may reverse what it replaces."""


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The mixer, by its rule."""

    rule: Any
    """`hybrid_kernels.gated_delta_rule`, or a module with the same functions."""

    def prefill(
        self,
        weights: Weights,
        prefills: Prefills,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        conv_states: torch.Tensor,
        states: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run packed sequences; leave their states in their slots.

        Args:
            weights: of the layer.
            prefills: the sequences.
            mixed_qkv: ``[T, D]``: queries, keys, values, before the convolution.
            a: ``[T, HV, ...]``, what the decay is made of, contiguous at its end.
            b: ``[T, HV]``, the write strength before the logistic function.
            conv_states: ``[S, D, W - 1]``, with any strides.
            states: ``[S, HV, V, K]``, with any strides.
            out: ``[T, HV, V]``, written if given.

        Returns:
            `out`, or a new tensor of `mixed_qkv`'s type.

        Raises:
            ValueError: if shapes do not fit.
        """
        convolved = convolution.prefill(weights, prefills, mixed_qkv, conv_states)
        return self.recur(weights, prefills, convolved, a, b, states, out)

    def recur(
        self,
        weights: Weights,
        prefills: Prefills,
        convolved: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        states: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What `prefill` does behind the convolution, which gives ``[T, D]``."""
        long = prefills.long
        if long is not None and takes(long, convolved, states):
            return self._divided(weights, long, convolved, a, b, states, out)
        gates = _gates(weights, a, b)
        result: torch.Tensor = self.rule.prefill(
            *_heads(weights, convolved, states),
            *gates.tensors,
            prefills.cu_seqlens,
            states,
            prefills.slots,
            A=gates.A,
            dt_bias=gates.dt_bias,
            has_initial=prefills.has_initial,
            boundary_slots=prefills.boundary_slots,
            offsets=prefills.offsets,
            round_boundaries=prefills.round_states,
            use_qk_l2norm=True,
            out=out,
        )
        return result

    def _divided(
        self,
        weights: Weights,
        long: LongPass,
        convolved: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        states: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same, most of it on another kernel; of a rule that has `factors`."""
        if out is None:
            out = convolved.new_empty(len(convolved), *states.shape[1:3])
        if long.head is not None:
            first, head = long.head.tokens, long.head.prefills
            some = (convolved[first], a[first], b[first])
            out[first] = self.recur(weights, head, *some, states).to(out.dtype)
        gates = _gates(weights, a, b)
        factors = self.rule.factors(
            *_heads(weights, convolved, states),
            *gates.tensors,
            long.body.tokens,
            A=gates.A,
            dt_bias=gates.dt_bias,
            use_qk_l2norm=True,
        )
        at = long.body.neighbours
        if at is not None and out.is_contiguous() and out.dtype == factors.v.dtype:
            run_body(long, factors, states, out[at])
        else:
            packed = torch.empty_like(factors.v)
            run_body(long, factors, states, packed)
            out[long.body.tokens] = packed.to(out.dtype)
        return out

    def decode(
        self,
        weights: Weights,
        slots: torch.Tensor,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        conv_states: torch.Tensor,
        states: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one token per sequence and advance the states; shapes as for `prefill`.

        Allocates what the convolution gives, and the output unless `out` is given; a
        CUDA graph may capture it.

        Args:
            slots: ``[T]``, int32 or int64; negative for padding.

        Returns:
            `out`, or a new tensor of `mixed_qkv`'s type.

        Raises:
            ValueError: if shapes do not fit.
        """
        convolved = convolution.decode(weights, slots, mixed_qkv, conv_states)
        gates = _gates(weights, a, b)
        result: torch.Tensor = self.rule.update(
            *_heads(weights, convolved, states),
            *gates.tensors,
            states,
            slots,
            A=gates.A,
            dt_bias=gates.dt_bias,
            use_qk_l2norm=True,
            out=out,
        )
        return result

    def verify(
        self,
        weights: Weights,
        verifications: Verifications,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        conv_states: torch.Tensor,
        states: torch.Tensor,
        out: torch.Tensor | None = None,
        record: Record | None = None,
    ) -> torch.Tensor:
        """Run sequences that verify drafts; leave a state in each of their columns.

        Shapes are as for `prefill`; what is allocated, as for `decode`.

        Args:
            verifications: the sequences.
            record: written instead of columns, if given.

        Returns:
            `out`, or a new tensor of `mixed_qkv`'s type.

        Raises:
            ValueError: if shapes do not fit.
        """
        convolved = convolution.verify(
            weights, verifications, mixed_qkv, conv_states, record
        )
        gates = _gates(weights, a, b)
        result: torch.Tensor = self.rule.verify(
            *_heads(weights, convolved, states),
            *gates.tensors,
            states,
            verifications.slots,
            verifications.columns,
            parents=verifications.parents,
            cu_seqlens=verifications.cu_seqlens,
            record=None if record is None else record.states,
            A=gates.A,
            dt_bias=gates.dt_bias,
            use_qk_l2norm=True,
            out=out,
        )
        return result


@dataclass(frozen=True, slots=True)
class _Gates:
    """Decay and write strength, as the rule takes them."""

    tensors: tuple[torch.Tensor, torch.Tensor]
    A: torch.Tensor | None
    dt_bias: torch.Tensor | None


def _gates(weights: Weights, a: torch.Tensor, b: torch.Tensor) -> _Gates:
    """Left to the rule, which fuses them, unless it does not know how to."""
    if weights.write_scale == 1.0:
        return _Gates((a, b), weights.A, weights.dt_bias)
    steps = functional.softplus(a.float() + weights.dt_bias.float())
    strength = weights.write_scale * b.float().sigmoid()
    return _Gates((weights.A * steps, strength), None, None)


def _heads(
    weights: Weights, convolved: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys ``[T, H, K]`` and values ``[T, HV, V]``, as views."""
    value_heads, width, depth = states.shape[1:]
    keys = weights.key_heads * depth
    q, k, v = torch.split(convolved, [keys, keys, value_heads * width], dim=-1)
    return (
        q.view(-1, weights.key_heads, depth),
        k.view(-1, weights.key_heads, depth),
        v.view(-1, value_heads, width),
    )
