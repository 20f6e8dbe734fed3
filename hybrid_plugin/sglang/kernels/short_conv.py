# SPDX-License-Identifier: Apache-2.0
"""LFM2's short convolutions in SGLang on our kernels: hooks of the model's layers.

SGLang's backend keeps their states and says where; the layers convolve by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend

from hybrid_plugin.engine.kernel_choice import Mixer, Phase
from hybrid_plugin.mixers import short_conv
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.short_conv import Weights
from hybrid_plugin.sglang.kernels import passes
from hybrid_plugin.sglang.kernels.state_layers import StateLayers


def forward(
    layers: StateLayers,
    original: Callable[..., torch.Tensor],
    layer: Any,
    hidden_states: torch.Tensor,
    forward_batch: Any,
) -> torch.Tensor:
    """Hook of `Lfm2ShortConv.forward` and `Lfm2MoeShortConv.forward`.

    Where no prompt is computed, a CUDA graph may capture it.

    Args:
        layers: who runs them.
        original: SGLang's method.
        layer: whose method it is.
        hidden_states: ``[T, hidden]``.
        forward_batch: the pass.

    Returns:
        ``[T, hidden]``.
    """
    phase = _phase(forward_batch)
    if phase is None or not layers.runs(Mixer.SHORT_CONV, phase):
        return original(layer, hidden_states, forward_batch)
    backend = get_attn_backend()
    metadata = backend.short_conv_backend.forward_metadata
    plain = (
        passes.is_plain_prefill if phase is Phase.PREFILL else passes.is_plain_decode
    )
    if not plain(forward_batch, metadata):
        return original(layer, hidden_states, forward_batch)
    handle = backend.conv_state_metadata(layer.layer_idx, forward_batch)
    states = handle.layer_cache.conv[0]
    projected, _ = layer.in_proj(hidden_states)
    before, behind, x = projected.chunk(3, dim=-1)
    gated = before * x
    weights = Weights(layer.conv_weight, layer.conv_bias)
    if phase is Phase.DECODE:
        short_conv.decode(weights, handle.cache_indices, gated, states, gated)
        convolved = gated
    else:
        convolved = torch.empty_like(gated)

        def run(prefills: Prefills) -> None:
            short_conv.prefill(weights, prefills, gated, states, convolved)

        run(layers.prefills(metadata, forward_batch, run))
    result: torch.Tensor
    result, _ = layer.out_proj(behind * convolved)
    return result


def _phase(batch: Any) -> Phase | None:
    """What the layers do in this pass; None where they do something else."""
    if batch.forward_mode.is_idle():
        return None
    if batch.forward_mode.is_decode():
        return Phase.DECODE
    return Phase.PREFILL if batch.forward_mode.is_extend() else None
