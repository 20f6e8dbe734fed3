# SPDX-License-Identifier: Apache-2.0
"""SGLang's lightning attention on our kernels: hooks of `LightningAttentionBackend`.

`H` heads of `D` channels, `T` tokens.  SGLang rounds queries to the type of the KV
cache, where one was given; that has no use here and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.layers.attention.linear.lightning_backend import (
    LightningAttentionBackend,
)

from hybrid_plugin.engine.kernel_choice import Mixer, Phase
from hybrid_plugin.mixers import lightning
from hybrid_plugin.mixers.lightning import Weights
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.sglang.kernels import passes
from hybrid_plugin.sglang.kernels.state_layers import StateLayers

_DECAYS: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()
"""Of every layer, by backend: they are constants of the model."""


def extend(
    layers: StateLayers,
    original: Callable[..., Any],
    backend: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Hook of `forward_extend`, which SGLang calls with names.

    Returns:
        ``[T, H * D]``.
    """
    batch, metadata = kwargs["forward_batch"], backend.forward_metadata
    if not (
        type(backend) is LightningAttentionBackend
        and layers.run_prefill(Mixer.LIGHTNING, batch, metadata)
    ):
        return original(backend, *args, **kwargs)
    weights, q, k, v, states = _operands(backend, kwargs)
    out = torch.empty_like(v)
    tokens = sum(batch.extend_seq_lens_cpu)
    if tokens < len(out):
        # Norms and experts that follow take padding too.
        out[tokens:].zero_()

    def run(prefills: Prefills) -> None:
        lightning.prefill(weights, prefills, q, k, v, states, out)

    run(layers.prefills(metadata, batch, run))
    return out.flatten(1)


def decode(
    layers: StateLayers,
    original: Callable[..., Any],
    backend: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Hook of `forward_decode`; a CUDA graph may capture it.

    Returns:
        ``[T, H * D]``.
    """
    metadata = backend.forward_metadata
    if not (
        layers.runs(Mixer.LIGHTNING, Phase.DECODE)
        and type(backend) is LightningAttentionBackend
        and passes.is_plain_decode(kwargs["forward_batch"], metadata)
    ):
        return original(backend, *args, **kwargs)
    weights, q, k, v, states = _operands(backend, kwargs)
    slots = metadata.mamba_cache_indices
    return lightning.decode(weights, slots, q, k, v, states).flatten(1)


def _operands(
    backend: Any, call: dict[str, Any]
) -> tuple[Weights, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a layer: its weights, queries, keys, values ``[T, H, D]``, and all states."""
    layer = call["layer"]
    shape = (-1, layer.tp_q_head_num, layer.head_dim)
    q, k, v = (call[name].reshape(shape) for name in ("q", "k", "v"))
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    # SGLang keeps keys along the rows of a state, we keep values.
    states = cache.temporal.transpose(-1, -2)
    decay = _decays(backend)[layer.layer_id]
    return Weights(decay, layer.scaling), q, k, v, states


def _decays(backend: Any) -> list[torch.Tensor]:
    found = _DECAYS.get(backend)
    if found is None:
        # A tensor of inference mode is of no use outside it.
        with torch.inference_mode(False):
            found = [-slopes.reshape(-1).float() for slopes in backend.tp_slope]
        _DECAYS[backend] = found
    return found
