# SPDX-License-Identifier: Apache-2.0
"""SGLang's Mamba-2 mixers on our kernels: the hook of `Mamba2AttnBackend`.

Projections and the gated norm stay SGLang's.  `T` tokens, padding included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

from hybrid_plugin.engine.kernel_choice import Mixer, Phase
from hybrid_plugin.mixers import mamba2
from hybrid_plugin.mixers.mamba2 import Weights
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.sglang.kernels import passes
from hybrid_plugin.sglang.kernels.state_layers import StateLayers


def forward(
    layers: StateLayers,
    original: Callable[..., Any],
    backend: Any,
    mixer: Any,
    hidden_states: torch.Tensor,
    output: torch.Tensor | None,
    layer_id: int,
    forward_batch: Any,
    mup_vector: torch.Tensor | None = None,
    use_triton_causal_conv: bool = False,
) -> torch.Tensor:
    """Hook of `forward`; where no prompt is computed, a CUDA graph may capture it.

    Args:
        layers: who runs them.
        original: SGLang's method.
        backend: whose method it is.
        mixer: SGLang's `MambaMixer2`.
        hidden_states: ``[T, hidden]``.
        output: like these, written if given.
        layer_id: of the model.
        forward_batch: the pass.
        mup_vector: factors of the projected channels, if given.
        use_triton_causal_conv: of SGLang's kernels.

    Returns:
        ``[T, hidden]``.
    """
    if not _is_ours(layers, backend, mixer, forward_batch):
        return original(
            backend,
            mixer,
            hidden_states,
            output,
            layer_id,
            forward_batch,
            mup_vector,
            use_triton_causal_conv,
        )
    projected, _ = mixer.in_proj(hidden_states)
    if mup_vector is not None:
        projected = projected * mup_vector
    inner = mixer.intermediate_size // mixer.tp_size
    sizes = [inner, mixer.conv_dim // mixer.tp_size, mixer.num_heads // mixer.tp_size]
    gate, mixed, dt = torch.split(projected, sizes, dim=-1)
    out = hidden_states.new_empty(len(hidden_states), inner)
    _mix(layers, backend, mixer, layer_id, forward_batch, mixed, dt, out)
    result, _ = mixer.out_proj(mixer.norm(out, gate))
    if output is not None:
        output[: len(hidden_states)].copy_(result)
    return result


def _mix(
    layers: StateLayers,
    backend: Any,
    mixer: Any,
    layer_id: int,
    batch: Any,
    mixed: torch.Tensor,
    dt: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Convolve and run the state space: prompts first, then single tokens."""
    metadata = backend.forward_metadata
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer_id)
    conv_states, states = cache.conv[0], cache.temporal
    weights = _weights(mixer)
    end = metadata.num_prefill_tokens
    last = end + metadata.num_decodes
    heads = out.view(len(out), *states.shape[1:3])

    def run(prefills: Prefills) -> None:
        mamba2.prefill(
            weights,
            prefills,
            mixed[:end],
            dt[:end],
            conv_states,
            states,
            heads[:end],
        )

    if metadata.num_prefills:
        run(layers.prefills(metadata, batch, run))
    if metadata.num_decodes:
        mamba2.decode(
            weights,
            metadata.mamba_cache_indices[metadata.num_prefills :][: last - end],
            mixed[end:last],
            dt[end:last],
            conv_states,
            states,
            heads[end:last],
        )
    if last < len(out):
        # The norm and what follows take padding too, which must be finite.
        out[last:].zero_()


def _is_ours(layers: StateLayers, backend: Any, mixer: Any, batch: Any) -> bool:
    metadata = backend.forward_metadata
    if type(mixer) is not MambaMixer2 or metadata.is_target_verify:
        return False
    prefills = not metadata.num_prefills or (
        layers.runs(Mixer.MAMBA2, Phase.PREFILL)
        and passes.is_plain_prefill(batch, metadata)
    )
    decodes = not metadata.num_decodes or (
        layers.runs(Mixer.MAMBA2, Phase.DECODE)
        and passes.is_plain_decode(batch, metadata)
    )
    return prefills and decodes


def _weights(mixer: Any) -> Weights:
    return Weights(
        convolution=mixer.conv1d.weight.flatten(1),
        bias=mixer.conv1d.bias,
        activation=mixer.activation,
        A=mixer.A,
        skip=mixer.D,
        dt_bias=mixer.dt_bias,
    )
