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
from hybrid_plugin.sglang.speculation.replay.passes import Replay


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
    metadata = backend.forward_metadata
    conv_states, states = _pools(backend, layer_id)
    weights = _weights(mixer)

    def mix(mixed: torch.Tensor, dt: torch.Tensor, out: torch.Tensor) -> None:
        end = metadata.num_prefill_tokens
        last = end + metadata.num_decodes

        def run(prefills: Prefills) -> None:
            mamba2.prefill(
                weights,
                prefills,
                mixed[:end],
                dt[:end],
                conv_states,
                states,
                out[:end],
            )

        if metadata.num_prefills:
            run(layers.prefills(metadata, forward_batch, run))
        if metadata.num_decodes:
            mamba2.decode(
                weights,
                metadata.mamba_cache_indices[metadata.num_prefills :][: last - end],
                mixed[end:last],
                dt[end:last],
                conv_states,
                states,
                out[end:last],
            )
        if last < len(out):
            # The norm and what follows take padding too, which must be finite.
            out[last:].zero_()

    return _between_projections(mixer, hidden_states, output, mup_vector, states, mix)


def verify(
    replay: Replay,
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
    """Hook of `forward` for passes that verify; a CUDA graph may capture it.

    Args:
        replay: of this process.
        original: SGLang's method, or the hook above.
        backend, mixer, hidden_states, output, layer_id, forward_batch, mup_vector,
        use_triton_causal_conv: as for that one.

    Returns:
        ``[T, hidden]``.
    """
    if type(mixer) is not MambaMixer2 or not replay.records(backend, forward_batch):
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
    conv_states, states = _pools(backend, layer_id)
    verifications, record = replay.of_layer(backend, layer_id)

    def mix(mixed: torch.Tensor, dt: torch.Tensor, out: torch.Tensor) -> None:
        mamba2.verify(
            _weights(mixer),
            verifications,
            mixed,
            dt,
            conv_states,
            states,
            out,
            record,
        )

    return _between_projections(mixer, hidden_states, output, mup_vector, states, mix)


def _between_projections(
    mixer: Any,
    hidden_states: torch.Tensor,
    output: torch.Tensor | None,
    mup_vector: torch.Tensor | None,
    states: torch.Tensor,
    mix: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
) -> torch.Tensor:
    """Project, have `mix` convolve and run the state space, norm and project again.

    Args:
        mixer: SGLang's `MambaMixer2`.
        hidden_states: ``[T, hidden]``.
        output: like these, written if given.
        mup_vector: factors of the projected channels, if given.
        states: ``[S, H, P, K]``.
        mix: takes inputs with B and C, ``[T, D]``, time steps, ``[T, H]``, and writes
            ``[T, H, P]``.
    """
    projected, _ = mixer.in_proj(hidden_states)
    if mup_vector is not None:
        projected = projected * mup_vector
    inner = mixer.intermediate_size // mixer.tp_size
    sizes = [inner, mixer.conv_dim // mixer.tp_size, mixer.num_heads // mixer.tp_size]
    gate, mixed, dt = torch.split(projected, sizes, dim=-1)
    out = hidden_states.new_empty(len(hidden_states), inner)
    mix(mixed, dt, out.view(len(out), *states.shape[1:3]))
    result, _ = mixer.out_proj(mixer.norm(out, gate))
    if output is not None:
        output[: len(hidden_states)].copy_(result)
    return result


def _pools(backend: Any, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States of the convolution and of the state space, in all slots."""
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer_id)
    return cache.conv[0], cache.temporal


def _is_ours(layers: StateLayers, backend: Any, mixer: Any, batch: Any) -> bool:
    metadata = backend.forward_metadata
    if type(mixer) is not MambaMixer2 or metadata.is_target_verify:
        return False
    prefills = not metadata.num_prefills or layers.run_prefill(
        Mixer.MAMBA2, batch, metadata
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
