# SPDX-License-Identifier: Apache-2.0
"""SGLang's Kimi delta attention on our kernels: hooks of `KDAAttnBackend`.

Projections and the gated norm stay SGLang's.  `K` key channels of a head, `HV` value
heads of `V`, `T` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend

from hybrid_plugin.engine.kernel_choice import Mixer, Phase
from hybrid_plugin.mixers import kda
from hybrid_plugin.mixers.kda import Weights
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.sglang.kernels import passes, prefill_graphs
from hybrid_plugin.sglang.kernels.decays import Decays
from hybrid_plugin.sglang.kernels.linear_layer import output_for, pools
from hybrid_plugin.sglang.kernels.state_layers import StateLayers
from hybrid_plugin.sglang.speculation.replay.passes import Replay

DECAYS = Decays()


def extend(
    layers: StateLayers,
    original: Callable[..., Any],
    backend: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Hook of `forward_extend`, which SGLang calls with names.

    Returns:
        ``[1, T, HV, V]``.
    """
    batch, metadata = kwargs["forward_batch"], backend.forward_metadata
    if not (
        _is_ours(backend, kwargs["layer"])
        and layers.run_prefill(Mixer.KDA, batch, metadata)
    ):
        return original(backend, *args, **kwargs)
    mixed_qkv, layer = kwargs["mixed_qkv"], kwargs["layer"]
    a, b = _gates(layer, len(mixed_qkv), kwargs)
    weights = _weights(layer)
    conv_states, states = pools(backend, layer)
    out = output_for(kwargs, metadata)

    def run(prefills: Prefills) -> None:
        kda.prefill(
            weights,
            prefills,
            mixed_qkv,
            a,
            b,
            conv_states.transpose(-1, -2),
            states,
            out[0],
        )

    run(layers.prefills(metadata, batch, run))
    prefill_graphs.clear_padding(out, metadata)
    return out


def decode(
    layers: StateLayers,
    original: Callable[..., Any],
    backend: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Hook of `forward_decode`; a CUDA graph may capture it.

    Returns:
        ``[1, T, HV, V]``.
    """
    metadata = backend.forward_metadata
    if not (
        layers.runs(Mixer.KDA, Phase.DECODE)
        and _is_ours(backend, kwargs["layer"])
        and passes.is_plain_decode(kwargs["forward_batch"], metadata)
    ):
        return original(backend, *args, **kwargs)
    mixed_qkv, layer = kwargs["mixed_qkv"], kwargs["layer"]
    a, b = _gates(layer, len(mixed_qkv), kwargs)
    conv_states, states = pools(backend, layer)
    return kda.decode(
        _weights(layer),
        metadata.mamba_cache_indices,
        mixed_qkv,
        a,
        b,
        conv_states.transpose(-1, -2),
        states,
    )[None]


def verify(
    replay: Replay,
    original: Callable[..., Any],
    backend: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Hook of `forward_extend` for passes that verify; a CUDA graph may capture it.

    Returns:
        ``[1, T, HV, V]``.
    """
    layer = kwargs["layer"]
    if not (
        _is_ours(backend, layer) and replay.records(backend, kwargs["forward_batch"])
    ):
        return original(backend, *args, **kwargs)
    mixed_qkv = kwargs["mixed_qkv"]
    a, b = _gates(layer, len(mixed_qkv), kwargs)
    verifications, record = replay.of_layer(backend, layer.layer_id)
    conv_states, states = pools(backend, layer)
    out = output_for(kwargs, backend.forward_metadata)
    kda.verify(
        _weights(layer),
        verifications,
        mixed_qkv,
        a,
        b,
        conv_states.transpose(-1, -2),
        states,
        out[0],
        record,
    )
    return out


def _is_ours(backend: Any, layer: Any) -> bool:
    """Whether the layer computes what our kernels do, and the backend nothing else."""
    return (
        type(backend) is KDAAttnBackend
        and backend.accept_lens_pool is None
        and layer.lower_bound is None
    )


def _gates(layer: Any, tokens: int, call: dict[str, Any]) -> tuple[Any, Any]:
    """``[T, HV, K]`` and ``[T, HV]``: SGLang's have other dimensions in each phase."""
    heads = layer.num_v_heads
    a = call["a"].reshape(tokens, heads, layer.head_k_dim)
    return a, call["b"].reshape(tokens, heads)


def _weights(layer: Any) -> Weights:
    return Weights(
        convolution=layer.conv_weights,
        bias=layer.bias,
        activation="silu",
        A=DECAYS.of(layer),
        dt_bias=layer.dt_bias.view(layer.num_v_heads, layer.head_k_dim),
        key_heads=layer.num_k_heads,
    )
