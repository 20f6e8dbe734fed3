# SPDX-License-Identifier: Apache-2.0
"""Which kind of state layers a model has, as SGLang tells them apart."""

from __future__ import annotations

from typing import Any

from sglang.srt import configs
from sglang.srt.configs import hybrid_arch
from sglang.srt.layers.attention.linear.kernels.gdn_flashinfer import (
    is_flashinfer_gdn_prefill_available,
)
from sglang.srt.runtime_context import get_exec

from hybrid_plugin.engine.kernel_choice import TRITON, Mixer, Phase
from hybrid_plugin.sglang.kernels import model_class
from hybrid_plugin.sglang.side_states import has_side_states

_GATED_OTHERWISE = (configs.JetNemotronConfig, configs.JetVLMConfig)
"""Their convolution's weights are made from the tokens, by the model itself."""
_GATED = "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend"
_FLASHINFER = "flashinfer"
_SEGMENTS = "seg_la"
"""The kernel that SGLang has for lightning attention, unless a model names another."""
_SHORT_CONV = (configs.Lfm2Config, configs.Lfm2MoeConfig, configs.Lfm2VlConfig)
_NO_MAMBA2 = (
    configs.ZayaConfig,
    configs.MambaConfig,
    configs.FalconMambaConfig,
    configs.InklingModelConfig,
    configs.InklingMMConfig,
)
"""Counted among Mamba-2 by SGLang, with other state layers."""


def mixer_of(model: Any) -> Mixer | None:
    """The kind of a model's state layers; None for one that we have no kernels for.

    Args:
        model: SGLang's `ModelConfig`.
    """
    if model_class.is_own(model.hf_config):
        return Mixer.MODEL_CLASS
    gated = hybrid_arch.hybrid_gdn_config(model)
    if gated is not None:
        # A pass keeps states in the middle of a prompt, and no more than states.
        known = not isinstance(gated, _GATED_OTHERWISE) and not has_side_states(gated)
        return Mixer.GATED_DELTA_NET if known else None
    config = hybrid_arch.mamba2_config(model)
    if config is not None:
        return _among_mamba2(config)
    config = hybrid_arch.hybrid_kda_config(model)
    if config is not None:
        return None if _clamps_decay(config) else Mixer.KDA
    config = hybrid_arch.hybrid_lightning_config(model)
    if config is not None:
        stock = getattr(config, "linear_backend", _SEGMENTS) == _SEGMENTS
        return Mixer.LIGHTNING if stock else None
    spec = hybrid_arch.linear_attn_model_spec(model)
    registered = spec is not None and spec.backend_class_name == _GATED
    return Mixer.GATED_DELTA_NET if registered else None


def library_of(mixer: Mixer, phase: Phase) -> str:
    """The library of kernels that SGLang has for a kind of state layers.

    Args:
        mixer: the kind.
        phase: prefill or decode.
    """
    asked = get_exec().mamba
    if phase is Phase.DECODE:
        return str(asked.linear_attn_decode_backend or asked.linear_attn_backend)
    named = asked.linear_attn_prefill_backend
    if named is not None or asked.linear_attn_backend != TRITON:
        return str(named or asked.linear_attn_backend)
    # It takes FlashInfer's by itself, for sizes and dtypes that it knows once its pools
    # are built: where that can be had, we go by it.
    gated = mixer is Mixer.GATED_DELTA_NET
    return _FLASHINFER if gated and is_flashinfer_gdn_prefill_available() else TRITON


def is_captured_as_it_is(model: Any) -> bool:
    """Whether SGLang's graphs of prefills do not break at the model's state layers.

    It captures a model whose every layer has attention, and breaks the graph there; the
    state layers beside it are captured with the tensors of one pass.

    Args:
        model: SGLang's `ModelConfig`.
    """
    return isinstance(hybrid_arch.mamba2_config(model), configs.FalconH1Config)


def _among_mamba2(config: Any) -> Mixer | None:
    if isinstance(config, _SHORT_CONV):
        return Mixer.SHORT_CONV
    return None if isinstance(config, _NO_MAMBA2) else Mixer.MAMBA2


def _clamps_decay(config: Any) -> bool:
    """Whether Kimi delta attention has a lower bound for its decay: ours has none."""
    linear = getattr(config, "linear_attn_config", None) or {}
    bounds = (
        linear.get("gate_lower_bound"),
        getattr(config, "gate_lower_bound", None),
        getattr(config, "kda_lower_bound", None),
    )
    return any(bound is not None for bound in bounds)
