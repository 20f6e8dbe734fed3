# SPDX-License-Identifier: Apache-2.0
"""Every hybrid architecture of SGLang: served, left alone, or refused in a sentence.

Configurations are SGLang's own classes, shrunken; nothing is loaded or started.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import sglang.srt.configs as configs
from sglang.srt.configs import hybrid_arch
from sglang.srt.configs.gigachat35 import GigaChat35Config
from sglang.srt.configs.glm5_next import Glm5NextConfig
from sglang.srt.configs.linear_attn_model_registry import (
    _LINEAR_ATTN_MODEL_REGISTRY,
    get_linear_attn_config,
)
from sglang.srt.configs.model_config import (
    get_hybrid_layer_ids,
    is_generation_model,
    is_hybrid_swa_model,
)
from sglang.srt.configs.qwen4_exp import Qwen4ExpConfig
from sglang.srt.utils.hf_transformers.common import get_hf_text_config
from transformers import (
    AfmoeConfig,
    Cohere2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LagunaConfig,
    Llama4Config,
    MellumConfig,
    MistralConfig,
    PretrainedConfig,
)

from hybrid_plugin.sglang import arguments

SERVED = "served"
LEFT_ALONE = "left alone"

EVERY_SECOND = {"num_hidden_layers": 4, "full_attention_interval": 2}
KIMI = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "short_conv_kernel_size": 4}
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
SPEECH = "it cannot serve this: SGLang keeps more of a request of this model than"

Case = tuple[type, str, dict[str, Any], str]
CASES: tuple[Case, ...] = (
    (
        configs.BailingHybridConfig,
        "BailingMoeV2_5ForCausalLM",
        {"num_hidden_layers": 4, "layer_group_size": 2},
        SERVED,
    ),
    (
        configs.BailingHybridConfig,
        "BailingMoeV3ForCausalLM",
        {"num_hidden_layers": 4, "layer_group_size": 2, "short_conv_kernel_size": 4},
        SERVED,
    ),
    (configs.FalconH1Config, "FalconH1ForCausalLM", {"num_hidden_layers": 2}, SERVED),
    (
        configs.FalconMambaConfig,
        "FalconMambaForCausalLM",
        {"num_hidden_layers": 2},
        LEFT_ALONE,
    ),
    (GigaChat35Config, "GigaChat35ForCausalLM", {"full_attention_layers": [1]}, SERVED),
    (
        Glm5NextConfig,
        "Glm5NextForConditionalGeneration",
        {"index_topk": 2048},
        "(index keys)",
    ),
    (
        configs.GraniteMoeHybridConfig,
        "GraniteMoeHybridForCausalLM",
        {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
        SERVED,
    ),
    (
        configs.GraniteMoeHybridConfig,
        "GraniteMoeHybridForCausalLM",
        {"num_hidden_layers": 2, "layer_types": ["attention", "attention"]},
        LEFT_ALONE,
    ),
    (
        configs.InternS2PreviewConfig,
        "InternS2PreviewForConditionalGeneration",
        {"text_config": EVERY_SECOND},
        SERVED,
    ),
    (
        configs.JetNemotronConfig,
        "JetNemotronForCausalLM",
        {"layer_types": ["jet", "attn"]},
        SERVED,
    ),
    (
        configs.JetVLMConfig,
        "JetVLMForConditionalGeneration",
        {"text_config": {"layer_types": ["jet", "attn"]}},
        SERVED,
    ),
    (
        configs.KimiLinearConfig,
        "KimiLinearForCausalLM",
        {"num_hidden_layers": 4, "linear_attn_config": KIMI},
        SERVED,
    ),
    (
        configs.Lfm2Config,
        "Lfm2ForCausalLM",
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        SERVED,
    ),
    (
        configs.Lfm2MoeConfig,
        "Lfm2MoeForCausalLM",
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        SERVED,
    ),
    (configs.Lfm2VlConfig, "Lfm2VlForConditionalGeneration", {}, SERVED),
    (configs.Mamba2Config, "Mamba2ForCausalLM", {}, LEFT_ALONE),
    (configs.MambaConfig, "MambaForCausalLM", {}, LEFT_ALONE),
    (
        configs.MiniCPMHybridConfig,
        "MiniCPMForCausalLM",
        {"num_hidden_layers": 2, "mixer_types": ["minicpm4", "minicpm4"]},
        LEFT_ALONE,
    ),
    (
        configs.NemotronHConfig,
        "NemotronHForCausalLM",
        {"num_hidden_layers": 3, "hybrid_override_pattern": "M*-"},
        SERVED,
    ),
    (
        configs.NemotronH_Nano_VL_V2_Config,
        "NemotronH_Nano_VL_V2",
        {},
        SERVED,
    ),
    (configs.Qwen3NextConfig, "Qwen3NextForCausalLM", EVERY_SECOND, SERVED),
    (
        configs.Qwen3_5Config,
        "Qwen3_5ForConditionalGeneration",
        {"text_config": EVERY_SECOND},
        SERVED,
    ),
    (
        configs.Qwen3_5MoeConfig,
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": EVERY_SECOND},
        SERVED,
    ),
    (
        Qwen4ExpConfig,
        "Qwen4ExpForConditionalGeneration",
        {"text_config": EVERY_SECOND | INDEXER},
        "(compressed keys)",
    ),
    (configs.ZayaConfig, "ZayaForCausalLM", {}, SERVED),
)

LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWED: tuple[Case, ...] = (
    (AfmoeConfig, "AfmoeForCausalLM", {"num_hidden_layers": 2}, LEFT_ALONE),
    (Cohere2Config, "Cohere2ForCausalLM", {"num_hidden_layers": 2}, LEFT_ALONE),
    (PretrainedConfig, "DeepseekV4ForCausalLM", {}, LEFT_ALONE),
    (Gemma4TextConfig, "EmbeddingGemma2Model", {"num_hidden_layers": 6}, LEFT_ALONE),
    (Gemma3TextConfig, "Gemma3ForCausalLM", {"num_hidden_layers": 6}, LEFT_ALONE),
    (Gemma4TextConfig, "Gemma4ForCausalLM", {"num_hidden_layers": 6}, SERVED),
    (GptOssConfig, "GptOssForCausalLM", {"num_hidden_layers": 2}, SERVED),
    (LagunaConfig, "LagunaForCausalLM", {"num_hidden_layers": 2} | LAYERS, SERVED),
    (Llama4Config, "Llama4ForConditionalGeneration", {}, SERVED),
    (MellumConfig, "MellumForCausalLM", {"num_hidden_layers": 2} | LAYERS, SERVED),
    (
        PretrainedConfig,
        "MiMoV2FlashForCausalLM",
        {"num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1]},
        SERVED,
    ),
    (MistralConfig, "MistralForCausalLM", {"sliding_window": 4096}, LEFT_ALONE),
)
"""Models with windows and no states."""


NEEDS_A_SERVER = {configs.InklingMMConfig, configs.InklingModelConfig}
"""Their layers are known only once SGLang has published a server's arguments."""


def model_of(kind: type, architecture: str, fields: dict[str, Any]) -> Any:
    """As much of SGLang's `ModelConfig` as says what a model keeps of a request."""
    hf_config = kind(**fields)
    hf_config.architectures = [architecture]
    text = get_hf_text_config(hf_config)
    is_windowed = bool(is_hybrid_swa_model(hf_config.architectures, text))
    windows, full = None, None
    if is_windowed and not architecture.startswith("DeepseekV4"):
        windows, full = get_hybrid_layer_ids(hf_config.architectures, text)
    return SimpleNamespace(
        hf_config=hf_config,
        is_draft_model=False,
        linear_attn_registry_result=get_linear_attn_config(hf_config),
        is_hybrid_swa=is_windowed,
        swa_attention_layer_ids=windows,
        full_attention_layer_ids=full,
        is_generation=is_generation_model(hf_config.architectures),
    )


class View:
    """SGLang's arguments by default; what is not named here is off."""

    chunked_prefill_size = 8192
    mamba_radix_cache_strategy = "auto"
    disaggregation_mode = "null"
    pp_size = dcp_size = 1

    def __getattr__(self, name: str) -> None:
        """An option that was not given."""


@pytest.mark.parametrize(
    ("kind", "architecture", "fields", "expected"),
    CASES + WINDOWED,
    ids=[f"{case[1]}-{case[3].strip('()')}" for case in CASES + WINDOWED],
)
def test_each_is_served_left_alone_or_refused(
    kind: type,
    architecture: str,
    fields: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(kind, architecture, fields)
    declared: dict[str, Any] = {}
    stand_in = SimpleNamespace(
        resolved_view=lambda arguments: arguments,
        model_config_of=lambda view: model,
        declare_resolution=lambda arguments, source, **set_: declared.update(set_),
    )
    monkeypatch.setattr(arguments, "overrides", stand_in)
    monkeypatch.setattr(arguments, "requested", lambda: True)
    went_on: list[Any] = []
    if expected in (SERVED, LEFT_ALONE):
        arguments.adjust(View(), went_on.append)
        assert bool(declared) == (expected == SERVED)
        assert len(went_on) == 1, "SGLang's own adjustments follow"
    else:
        with pytest.raises(SystemExit) as refusal:
            arguments.adjust(View(), went_on.append)
        assert SPEECH in str(refusal.value) and expected in str(refusal.value)
        assert not declared


def test_no_configuration_with_states_is_left_out() -> None:
    """A class that SGLang adds must be put into the walk."""
    known = {kind for kind, *_ in CASES}
    named = {
        value
        for name, value in vars(hybrid_arch).items()
        if name.endswith("Config") and isinstance(value, type)
    }
    registered = {spec.config_class for spec in _LINEAR_ATTN_MODEL_REGISTRY}
    assert (named | registered) - NEEDS_A_SERVER <= known
