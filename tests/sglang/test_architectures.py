# SPDX-License-Identifier: Apache-2.0
"""Every hybrid architecture of SGLang: served, left alone, or refused in a sentence.

Configurations are SGLang's own classes, shrunken; nothing is loaded or started.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import sglang.srt.configs as configs
from sglang.srt.configs import hybrid_arch
from sglang.srt.configs.linear_attn_model_registry import (
    _LINEAR_ATTN_MODEL_REGISTRY,
)

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.engine.outlook import Prospect
from hybrid_plugin.sglang import arguments
from hybrid_plugin.sglang.architectures import (
    EXAMPLES,
    Example,
    _load,
    model_of,
    standings,
)
from hybrid_plugin.tools.models import page, table

SERVED = "served"
LEFT_ALONE = "left alone"

SPEECH = "it cannot serve this: SGLang keeps more of a request of this model than"
_HERE = "sglang.srt.configs"

OTHERWISE = {e.architecture: LEFT_ALONE for e in EXAMPLES if e.is_uncached}
"""What becomes of the examples that are not served."""
Case = tuple[Example, str]
CASES: tuple[Case, ...] = (
    *((example, OTHERWISE.get(example.architecture, SERVED)) for example in EXAMPLES),
    (
        Example(
            "GraniteMoeHybridForCausalLM",
            f"{_HERE}:GraniteMoeHybridConfig",
            {"num_hidden_layers": 2, "layer_types": ["attention", "attention"]},
        ),
        LEFT_ALONE,
    ),
    (
        Example(
            "MiniCPMForCausalLM",
            f"{_HERE}:MiniCPMHybridConfig",
            {"num_hidden_layers": 2, "mixer_types": ["minicpm4", "minicpm4"]},
        ),
        LEFT_ALONE,
    ),
)

LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWED: tuple[Case, ...] = (
    (
        Example(
            "AfmoeForCausalLM", "transformers:AfmoeConfig", {"num_hidden_layers": 2}
        ),
        LEFT_ALONE,
    ),
    (
        Example(
            "Cohere2ForCausalLM", "transformers:Cohere2Config", {"num_hidden_layers": 2}
        ),
        LEFT_ALONE,
    ),
    (Example("DeepseekV4ForCausalLM", "transformers:PretrainedConfig", {}), LEFT_ALONE),
    (
        Example(
            "EmbeddingGemma2Model",
            "transformers:Gemma4TextConfig",
            {"num_hidden_layers": 6},
        ),
        LEFT_ALONE,
    ),
    (
        Example(
            "Gemma3ForCausalLM",
            "transformers:Gemma3TextConfig",
            {"num_hidden_layers": 6},
        ),
        LEFT_ALONE,
    ),
    (
        Example(
            "Gemma4ForCausalLM",
            "transformers:Gemma4TextConfig",
            {"num_hidden_layers": 6},
        ),
        SERVED,
    ),
    (
        Example(
            "GptOssForCausalLM", "transformers:GptOssConfig", {"num_hidden_layers": 2}
        ),
        SERVED,
    ),
    (
        Example(
            "LagunaForCausalLM",
            "transformers:LagunaConfig",
            {"num_hidden_layers": 2} | LAYERS,
        ),
        SERVED,
    ),
    (
        Example("Llama4ForConditionalGeneration", "transformers:Llama4Config", {}),
        SERVED,
    ),
    (
        Example(
            "MellumForCausalLM",
            "transformers:MellumConfig",
            {"num_hidden_layers": 2} | LAYERS,
        ),
        SERVED,
    ),
    (
        Example(
            "MiMoV2FlashForCausalLM",
            "transformers:PretrainedConfig",
            {"num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1]},
        ),
        SERVED,
    ),
    (
        Example(
            "MistralForCausalLM", "transformers:MistralConfig", {"sliding_window": 4096}
        ),
        LEFT_ALONE,
    ),
)
"""Models with windows and no states."""


NEEDS_A_SERVER = {configs.InklingMMConfig, configs.InklingModelConfig}
"""Their layers are known only once SGLang has published a server's arguments."""


class View:
    """SGLang's arguments by default; what is not named here is off."""

    chunked_prefill_size = 8192
    mamba_radix_cache_strategy = "auto"
    disaggregation_mode = "null"
    pp_size = dcp_size = 1

    def __getattr__(self, name: str) -> None:
        """An option that was not given."""


@pytest.mark.parametrize(
    ("example", "expected"),
    CASES + WINDOWED,
    ids=[
        f"{e.architecture}-{expected.strip('()')}" for e, expected in CASES + WINDOWED
    ],
)
def test_each_is_served_left_alone_or_refused(
    example: Example,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(example)
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


def test_drafts_for_states_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (mamba2,) = [e for e in EXAMPLES if e.architecture == "Mamba2ForCausalLM"]
    stand_in = SimpleNamespace(
        resolved_view=lambda arguments: arguments,
        model_config_of=lambda view: model_of(mamba2),
    )
    monkeypatch.setattr(arguments, "overrides", stand_in)
    monkeypatch.setattr(arguments.speculation, "conflicts", lambda *_, **__: ())
    monkeypatch.setattr(arguments.speculation, "unrecorded", lambda *_: ())
    view: Any = View()
    view.speculative_algorithm = "NGRAM"
    with pytest.raises(ConfigError, match="without attention layers are not supported"):
        arguments.settle(view, HybridConfig())


def test_without_prefix_caching_that_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = SimpleNamespace(
        resolved_view=lambda arguments: arguments,
        model_config_of=lambda view: model_of(CASES[0][0]),
    )
    monkeypatch.setattr(arguments, "overrides", stand_in)
    view: Any = View()
    view.disable_radix_cache = True
    assert arguments.reason_to_stay_idle(view) == (
        "prefix caching is switched off (--disable-radix-cache)"
    )


def test_no_configuration_with_states_is_left_out() -> None:
    """A class that SGLang adds must be put into the walk."""
    known = {_load(example.config) for example, _ in CASES}
    named = {
        value
        for name, value in vars(hybrid_arch).items()
        if name.endswith("Config") and isinstance(value, type)
    }
    registered = {spec.config_class for spec in _LINEAR_ATTN_MODEL_REGISTRY}
    assert (named | registered) - NEEDS_A_SERVER <= known


def test_the_table_says_the_same() -> None:
    prospects = {SERVED: Prospect.SERVED, LEFT_ALONE: Prospect.LEFT_ALONE}
    found = {standing.architecture: standing for standing in standings(["Ours"])}
    assert found.pop("Ours").prospect == Prospect.SERVED
    for example in EXAMPLES:
        expected = OTHERWISE.get(example.architecture, SERVED)
        standing = found[example.architecture]
        assert standing.prospect == prospects.get(expected, Prospect.REFUSED)
        if standing.prospect == Prospect.REFUSED:
            assert expected in standing.reason


def test_sglang_switches_caches_off_for_what_is_said_to_be_uncached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.arg_groups import model_override_base
    from sglang.srt.arg_groups.model_overrides import minicpm

    monkeypatch.setattr(minicpm, "resolving_view", lambda arguments: arguments)
    monkeypatch.setattr(minicpm, "attn_dp_enabled_of", lambda arguments: False)
    server = SimpleNamespace(enable_hierarchical_cache=False)
    uncached = [example for example in EXAMPLES if example.is_uncached]
    assert uncached
    for example in uncached:
        config = _load(example.config)(**example.fields)
        functions = model_override_base._MODEL_OVERRIDE_FNS[example.architecture]
        found = [function(server, config) for function in functions]
        assert any(declared.get("disable_radix_cache") for declared in found)


def test_the_page_is_current() -> None:
    """`hybrid-plugin models --write docs/architectures.md` brings it up to date."""
    text = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text()
    assert page.updated(text, table.of_installed_engines("sglang")) == text
