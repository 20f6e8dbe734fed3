# SPDX-License-Identifier: Apache-2.0
"""Every architecture with state layers that SGLang knows, by a small configuration.

SGLang reads what a model keeps off its configuration, and so does the plugin: it is
asked about each of these as about a server's model.  SGLang's own list of names has
more, variants of these.  Nothing else goes by either, and a test compares the examples
with SGLang's classes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hybrid_plugin.engine.architectures import Provider, Standing
from hybrid_plugin.engine.outlook import Prospect


@dataclass(frozen=True, slots=True)
class Example:
    """A configuration of an architecture, as small as may be."""

    architecture: str
    config: str
    """``module:class``, of SGLang."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    is_uncached: bool = False
    """Whether SGLang switches prefix caches off for it, when a server starts."""


UNCACHED = "SGLang switches prefix caches off for it"
_CONFIGS = "sglang.srt.configs"
_ALTERNATING = {"num_hidden_layers": 4, "full_attention_interval": 2}
_GROUPED = {"num_hidden_layers": 4, "layer_group_size": 2}
_KIMI = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "short_conv_kernel_size": 4}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
_NGRAMS = {"ple_layer_ids": [1]}

EXAMPLES = (
    Example("BailingMoeV2_5ForCausalLM", f"{_CONFIGS}:BailingHybridConfig", _GROUPED),
    Example(
        "BailingMoeV3ForCausalLM",
        f"{_CONFIGS}:BailingHybridConfig",
        _GROUPED | {"short_conv_kernel_size": 4},
    ),
    Example(
        "FalconH1ForCausalLM", f"{_CONFIGS}:FalconH1Config", {"num_hidden_layers": 2}
    ),
    Example(
        "FalconMambaForCausalLM",
        f"{_CONFIGS}:FalconMambaConfig",
        {"num_hidden_layers": 2},
    ),
    Example(
        "GigaChat35ForCausalLM",
        f"{_CONFIGS}.gigachat35:GigaChat35Config",
        {"full_attention_layers": [1]},
    ),
    Example(
        "Glm5NextForConditionalGeneration",
        f"{_CONFIGS}.glm5_next:Glm5NextConfig",
        {"index_topk": 2048},
    ),
    Example(
        "GraniteMoeHybridForCausalLM",
        f"{_CONFIGS}:GraniteMoeHybridConfig",
        {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    ),
    Example(
        "InternS2PreviewForConditionalGeneration",
        f"{_CONFIGS}:InternS2PreviewConfig",
        {"text_config": _ALTERNATING},
    ),
    Example(
        "JetNemotronForCausalLM",
        f"{_CONFIGS}:JetNemotronConfig",
        {"layer_types": ["jet", "attn"]},
    ),
    Example(
        "JetVLMForConditionalGeneration",
        f"{_CONFIGS}:JetVLMConfig",
        {"text_config": {"layer_types": ["jet", "attn"]}},
    ),
    Example(
        "KimiK3ForConditionalGeneration",
        f"{_CONFIGS}.kimi_k3:KimiK3Config",
        {"text_config": {"num_hidden_layers": 4, "linear_attn_config": _KIMI}},
    ),
    Example(
        "KimiLinearForCausalLM",
        f"{_CONFIGS}:KimiLinearConfig",
        {"num_hidden_layers": 4, "linear_attn_config": _KIMI},
    ),
    Example(
        "Lfm2ForCausalLM",
        f"{_CONFIGS}:Lfm2Config",
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    ),
    Example(
        "Lfm2MoeForCausalLM",
        f"{_CONFIGS}:Lfm2MoeConfig",
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    ),
    Example("Lfm2VlForConditionalGeneration", f"{_CONFIGS}:Lfm2VlConfig"),
    Example("Mamba2ForCausalLM", f"{_CONFIGS}:Mamba2Config"),
    Example("MambaForCausalLM", f"{_CONFIGS}:MambaConfig"),
    Example(
        "MiniCPMSALAForCausalLM",
        f"{_CONFIGS}:MiniCPMHybridConfig",
        {
            "num_hidden_layers": 2,
            "mixer_types": ["minicpm4", "lightning-attn"],
            "lightning_nkv": 32,
        },
        is_uncached=True,
    ),
    Example(
        "NemotronHForCausalLM",
        f"{_CONFIGS}:NemotronHConfig",
        {"num_hidden_layers": 3, "hybrid_override_pattern": "M*-"},
    ),
    Example(
        "NemotronH_Nano_Omni_Reasoning_V3",
        f"{_CONFIGS}:NemotronH_Nano_Omni_Reasoning_V3_Config",
    ),
    Example("NemotronH_Nano_VL_V2", f"{_CONFIGS}:NemotronH_Nano_VL_V2_Config"),
    Example("Qwen3NextForCausalLM", f"{_CONFIGS}:Qwen3NextConfig", _ALTERNATING),
    Example(
        "Qwen3_5ForConditionalGeneration",
        f"{_CONFIGS}:Qwen3_5Config",
        {"text_config": _ALTERNATING},
    ),
    Example(
        "Qwen3_5MoeForConditionalGeneration",
        f"{_CONFIGS}:Qwen3_5MoeConfig",
        {"text_config": _ALTERNATING},
    ),
    Example(
        "Qwen4ExpForConditionalGeneration",
        f"{_CONFIGS}.qwen4_exp:Qwen4ExpConfig",
        {"text_config": _ALTERNATING | _INDEXER | _NGRAMS},
    ),
    Example("ZayaForCausalLM", f"{_CONFIGS}:ZayaConfig"),
)


_NAMES = frozenset(example.architecture for example in EXAMPLES)


def standings(ours: Iterable[str]) -> list[Standing]:
    """Of all, by name.

    Args:
        ours: architectures that the plugin has classes of, where SGLang has none.
    """
    from sglang.srt.arg_groups import overrides

    found = {name: Standing(name, Provider.OURS, Prospect.SERVED) for name in ours}
    for name in overrides._MAMBA_RADIX_CACHE_ARCHS - _NAMES:
        found.setdefault(name, Standing(name, Provider.ENGINE, Prospect.SERVED))
    for example in filter(_is_known, EXAMPLES):
        found.setdefault(example.architecture, _of_sglangs(example))
    return sorted(found.values(), key=lambda standing: standing.architecture)


def model_of(example: Example) -> Any:
    """As much of SGLang's `ModelConfig` as says what a model keeps of a request."""
    from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_config
    from sglang.srt.configs.model_config import (
        get_hybrid_layer_ids,
        is_generation_model,
        is_hybrid_swa_model,
    )
    from sglang.srt.utils.hf_transformers.common import get_hf_text_config

    hf_config = _load(example.config)(**example.fields)
    names = hf_config.architectures = [example.architecture]
    text = get_hf_text_config(hf_config)
    is_windowed = bool(is_hybrid_swa_model(names, text))
    windows, full = None, None
    if is_windowed and not example.architecture.startswith("DeepseekV4"):
        windows, full = get_hybrid_layer_ids(names, text)
    return SimpleNamespace(
        hf_config=hf_config,
        is_draft_model=False,
        linear_attn_registry_result=get_linear_attn_config(hf_config),
        is_hybrid_swa=is_windowed,
        swa_attention_layer_ids=windows,
        full_attention_layer_ids=full,
        is_generation=is_generation_model(names),
    )


def _is_known(example: Example) -> bool:
    """Whether this SGLang has the configuration."""
    try:
        _load(example.config)
    except (ImportError, AttributeError):
        return False
    return True


def _load(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _of_sglangs(example: Example) -> Standing:
    from hybrid_plugin.sglang import known_pools

    name, engine = example.architecture, Provider.ENGINE
    model = model_of(example)
    if example.is_uncached:
        return Standing(name, engine, Prospect.LEFT_ALONE, UNCACHED)
    kept = known_pools.kept_beside(model)
    if kept is None:
        return Standing(name, engine, Prospect.SERVED)
    reason = f"SGLang keeps more than the plugin saves ({kept})"
    return Standing(name, engine, Prospect.REFUSED, reason)
