# SPDX-License-Identifier: Apache-2.0
"""SGLang's gated delta nets on our kernels: hooks of `GDNAttnBackend`.

Projections and the gated norm stay SGLang's.  `H` key heads of `K` channels, `HV` value
heads of `V`, `D = 2 * H * K + HV * V`, `T` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.linear import gdn_backend

from hybrid_plugin.engine.kernel_choice import Mixer, Phase
from hybrid_plugin.mixers import gated_delta_net
from hybrid_plugin.mixers.gated_delta_net import Weights
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.sglang.kernels import passes, prefill_graphs
from hybrid_plugin.sglang.kernels.decays import Decays
from hybrid_plugin.sglang.kernels.linear_layer import output_for, pools
from hybrid_plugin.sglang.kernels.state_layers import StateLayers
from hybrid_plugin.sglang.speculation.replay.passes import Replay

_MIXER = Mixer.GATED_DELTA_NET


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
    if not _extends(layers, backend, kwargs["forward_batch"]):
        return original(backend, *args, **kwargs)
    mixed_qkv, layer = kwargs["mixed_qkv"], kwargs["layer"]
    gates = (len(mixed_qkv), layer.num_v_heads)
    a, b = kwargs["a"].reshape(gates), kwargs["b"].reshape(gates)
    weights = _weights(layer)
    conv_states, states = pools(backend, layer)
    out = output_for(kwargs, backend.forward_metadata)

    def run(prefills: Prefills) -> None:
        gated_delta_net.prefill(
            weights, prefills, mixed_qkv, a, b, conv_states, states, out[0]
        )

    run(layers.prefills(backend.forward_metadata, kwargs["forward_batch"], run))
    prefill_graphs.clear_padding(out, backend.forward_metadata)
    return out


def decode(
    layers: StateLayers,
    original: Callable[..., Any],
    backend: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Hook of `forward_decode`; a CUDA graph may capture it.

    Padded rows have slot -1 in a graph, and all slot 0 without one: nothing reads
    what they leave there.

    Returns:
        ``[1, T, HV, V]``; where SGLang passes projections as they are, as a pair, that
        and the gate ``[T, HV, V]``.
    """
    batch, metadata = kwargs["forward_batch"], backend.forward_metadata
    if not _decodes(layers, backend, batch):
        return original(backend, *args, **kwargs)
    mixed_qkv, layer = kwargs["mixed_qkv"], kwargs["layer"]
    a, b, z = kwargs["a"], kwargs["b"], None
    if isinstance(mixed_qkv, tuple):
        mixed_qkv, z, b, a = gdn_backend.fused_qkvzba_split_reshape_cat_contiguous(
            *mixed_qkv,
            layer.num_q_heads,
            layer.num_v_heads,
            layer.head_q_dim,
            layer.head_v_dim,
        )
    gates = (len(mixed_qkv), layer.num_v_heads)
    out = gated_delta_net.decode(
        _weights(layer),
        metadata.mamba_cache_indices,
        mixed_qkv,
        a.reshape(gates),
        b.reshape(gates),
        *pools(backend, layer),
    )[None]
    return out if z is None else (out, z)


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
    if not (_is_stock(backend) and replay.records(backend, kwargs["forward_batch"])):
        return original(backend, *args, **kwargs)
    mixed_qkv, layer = kwargs["mixed_qkv"], kwargs["layer"]
    gates = (len(mixed_qkv), layer.num_v_heads)
    verifications, record = replay.of_layer(backend, layer.layer_id)
    out = output_for(kwargs, backend.forward_metadata)
    gated_delta_net.verify(
        _weights(layer),
        verifications,
        mixed_qkv,
        kwargs["a"].reshape(gates),
        kwargs["b"].reshape(gates),
        *pools(backend, layer),
        out[0],
        record,
    )
    return out


def _extends(layers: StateLayers, backend: Any, batch: Any) -> bool:
    return (
        _is_stock(backend)
        and backend.mis_metadata is None
        and layers.run_prefill(_MIXER, batch, backend.forward_metadata)
    )


def _decodes(layers: StateLayers, backend: Any, batch: Any) -> bool:
    return (
        layers.runs(_MIXER, Phase.DECODE)
        and _is_stock(backend)
        and passes.is_plain_decode(batch, backend.forward_metadata)
    )


def _is_stock(backend: Any) -> bool:
    """Whether it is no subclass, which may compute something else."""
    return type(backend) is gdn_backend.GDNAttnBackend


def _weights(layer: Any) -> Weights:
    return Weights(
        convolution=layer.conv_weights,
        bias=layer.bias,
        activation=layer.activation,
        A=DECAYS.of(layer),
        dt_bias=layer.dt_bias,
        key_heads=layer.num_k_heads,
    )
