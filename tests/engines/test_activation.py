# SPDX-License-Identifier: Apache-2.0
"""When the plugin is active, idle or refuses, decided from the configuration."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs

from hybrid_plugin.config import ConfigError
from hybrid_plugin.vllm import activation
from hybrid_plugin.vllm.activation import SCHEDULER, is_active
from tests.engines.conftest import MODEL

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 264,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def dense_model(tmp_path: Path) -> Path:
    """A model without state layers, as far as its configuration goes."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    return tmp_path


def config_of(model: Path, options: object = None, **arguments: Any) -> Any:
    """The engine configuration `vllm serve` would come to."""
    extra = {} if options is None else {"hybrid_plugin": options}
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        additional_config=extra,
        **arguments,
    ).create_engine_config()


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What the plugin logs, on a logger that vLLM does not reconfigure."""
    monkeypatch.setattr(activation, "logger", logging.getLogger("activation"))
    caplog.set_level(logging.INFO)
    return caplog


def our_lines(log: pytest.LogCaptureFixture) -> list[str]:
    return [m for m in log.messages if m.startswith("hybrid-plugin")]


def test_hybrid_model_activates_it(log: pytest.LogCaptureFixture) -> None:
    config = config_of(MODEL)
    assert is_active(config)
    assert config.cache_config.mamba_cache_mode == "none"
    assert config.cache_config.mamba_block_size == 1024
    assert ".Hybrid" in config.parallel_config.worker_cls
    assert our_lines(log) == ["hybrid-plugin is active: it takes over prefix caching."]


def test_dense_model_is_left_alone(
    dense_model: Path, log: pytest.LogCaptureFixture
) -> None:
    config = config_of(dense_model)
    assert config.scheduler_config.scheduler_cls is None
    assert config.cache_config.enable_prefix_caching
    assert config.parallel_config.worker_cls.startswith("vllm.")
    assert our_lines(log) == [
        "hybrid-plugin is inactive: the model has no state layers beside its "
        "attention layers."
    ]


def differences(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Fields of two configurations that differ, less what is new every time."""
    ours = ("additional_config", "instance_id")
    return {
        f"{section}.{name}": (value, vars(getattr(other, section)).get(name))
        for section in ("scheduler_config", "cache_config", "parallel_config")
        for name, value in vars(getattr(one, section)).items()
        if name not in ours
        and not name.startswith("_data_parallel")
        and value != vars(getattr(other, section)).get(name)
    }


def test_switched_off_configuration_is_stock(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    by_option = config_of(MODEL, {"enabled": False})
    monkeypatch.setenv("HYBRID_PLUGIN", "0")
    by_environment = config_of(MODEL)
    assert by_option.scheduler_config.scheduler_cls is None
    assert by_option.cache_config.mamba_cache_mode == "align"
    assert differences(by_option, by_environment) == {}
    assert our_lines(log) == [
        "hybrid-plugin is inactive: it is switched off in --additional-config.",
        "hybrid-plugin is inactive: HYBRID_PLUGIN=0 is set.",
    ]


def test_prefix_caching_off_leaves_it_alone(log: pytest.LogCaptureFixture) -> None:
    config = config_of(MODEL, enable_prefix_caching=False)
    assert config.scheduler_config.scheduler_cls is None
    assert our_lines(log) == [
        "hybrid-plugin is inactive: prefix caching is switched off."
    ]


CONFLICTS = [
    pytest.param(
        {"pipeline_parallel_size": 2},
        "pipeline parallelism is not supported yet; use tensor parallelism.",
        id="pipeline parallel",
    ),
    pytest.param(
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "speculative decoding is not supported yet; drop --speculative-config.",
        id="speculative",
    ),
    pytest.param(
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        "it brings its own scheduler; drop --scheduler-cls.",
        id="scheduler class",
    ),
    pytest.param(
        {
            "kv_transfer_config": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
            }
        },
        "KV connectors are not supported yet; drop --kv-transfer-config.",
        id="connector",
    ),
]


@pytest.mark.parametrize(("arguments", "sentence"), CONFLICTS)
def test_conflict_steps_aside_with_a_warning(
    arguments: dict[str, Any], sentence: str, log: pytest.LogCaptureFixture
) -> None:
    config = config_of(MODEL, **arguments)
    assert config.scheduler_config.scheduler_cls != SCHEDULER
    assert our_lines(log) == [f"hybrid-plugin is inactive: {sentence}"]


@pytest.mark.parametrize(("arguments", "sentence"), CONFLICTS)
def test_conflict_is_refused_if_the_plugin_was_asked_for(
    arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Exception, match="hybrid-plugin cannot serve this") as refusal:
        config_of(MODEL, {"enabled": True}, **arguments)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pagesize": 16}, "Unknown hybrid_plugin option 'pagesize'; known are: "),
        ({"state_memory_ratio": 1.0}, "state_memory_ratio must lie between 0 and 1"),
        ({"state_memory_ratio": 0}, "state_memory_ratio must lie between 0 and 1"),
        ({"page_size": "16"}, "option 'page_size' takes int, got '16'"),
        ({"kv_pages": 100}, "give both or none"),
        ([], "takes a JSON object of options"),
    ],
)
def test_bad_options_are_refused_before_anything_loads(
    options: object, sentence: str
) -> None:
    with pytest.raises((ConfigError, ValueError)) as refusal:
        config_of(MODEL, options)
    assert sentence in str(refusal.value)


def test_a_moved_hook_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.delattr(Scheduler, "_mamba_block_aligned_split")
    with pytest.raises(Exception, match="does not fit vLLM") as refusal:
        config_of(MODEL)
    assert "Scheduler._mamba_block_aligned_split is missing" in str(refusal.value)
