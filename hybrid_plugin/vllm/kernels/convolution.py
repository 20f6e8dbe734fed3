# SPDX-License-Identifier: Apache-2.0
"""The short convolution in front of a state layer, as vLLM keeps it."""

from __future__ import annotations

from typing import Any, cast

import torch
from hybrid_kernels.causal_conv1d import Activation
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from hybrid_plugin.config import ConfigError


def weight_of(convolution: Any) -> torch.Tensor:
    """The weight of a `conv1d` of vLLM's, ``[D, W]``.

    On some CPUs vLLM repacks it for its own kernel, and keeps the plain one beside it.
    """
    plain = getattr(convolution, "_cpu_unpacked_conv_weight", None)
    weight = cast(torch.Tensor, convolution.weight if plain is None else plain)
    return weight.detach().view(weight.shape[0], weight.shape[-1])


def bias_of(convolution: Any) -> torch.Tensor | None:
    """Its bias, ``[D]``; None if it has none."""
    bias: torch.Tensor | None = convolution.bias
    return None if bias is None else bias.detach()


def activation_of(layer: Any) -> Activation:
    """What follows a layer's convolution.

    Raises:
        ConfigError: for one that our kernels do not know.
    """
    if layer.activation in ("silu", "swish"):  # two names of one function
        return "silu"
    raise ConfigError(
        f"hybrid-plugin's kernels know no convolution with {layer.activation!r} behind "
        'it. Set the option "kernels" to "engine".'
    )


def states_of(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """The convolution's states of a layer, ``[S, D, W - 1]``.

    Where drafts are verified vLLM has room for one input more of each, which its own
    kernels need: ours keep an ordinary state in every column.

    Args:
        layer: vLLM's.
        weight: of the convolution, ``[D, W]``.
    """
    states: torch.Tensor = layer.kv_cache[0]
    if not is_conv_state_dim_first():
        states = states.transpose(-1, -2)
    return states[..., : weight.shape[-1] - 1]
