# SPDX-License-Identifier: Apache-2.0
"""When the plugin is active, idle or refuses, decided from the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ci.features import Standing, refusals
from tests.engines.conftest import DRIVER
from tests.engines.drivers import Driver, Setup

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

CONFLICTS = {} if DRIVER is None else DRIVER.conflicts
REFUSED = {} if DRIVER is None else dict(refusals(DRIVER.name))


def test_hybrid_model_activates_it(driver: Driver) -> None:
    decision = driver.decide(Setup())
    assert decision.refusal is None
    assert decision.active
    assert len(decision.lines) == 1
    assert decision.lines[0].startswith("hybrid-plugin is active: it takes over ")


def test_dense_model_is_left_alone(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    decision = driver.decide(Setup(model=tmp_path))
    stock = driver.decide(Setup(model=tmp_path, plugin=False))
    assert not decision.active
    assert decision.settings == stock.settings
    assert len(decision.lines) == 1
    assert "inactive: the model has no state layers" in decision.lines[0]


def test_prefix_caching_off_leaves_it_alone(driver: Driver) -> None:
    decision = driver.decide(Setup(prefix_cache=False))
    stock = driver.decide(Setup(prefix_cache=False, plugin=False))
    assert not decision.active
    assert decision.settings == stock.settings
    assert len(decision.lines) == 1
    assert decision.lines[0].startswith("hybrid-plugin is inactive: ")


def test_switched_off_configuration_is_stock(driver: Driver) -> None:
    stock = driver.decide(Setup(plugin=False))
    assert not stock.active
    assert stock.settings != driver.decide(Setup()).settings


@pytest.mark.parametrize(("flags", "sentence"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict_is_refused_if_the_plugin_was_demanded(
    driver: Driver, flags: tuple[str, ...], sentence: str
) -> None:
    refusal = driver.decide(Setup(flags=flags), demanded=True).refusal
    assert refusal is not None
    assert "cannot serve this: " + sentence in refusal


@pytest.mark.parametrize("standing", REFUSED.values(), ids=REFUSED)
def test_the_table_of_features_has_what_is_said(
    driver: Driver, standing: Standing
) -> None:
    refusal = driver.decide(Setup(flags=standing.flags), demanded=True).refusal
    assert refusal is not None
    assert "cannot serve this: " + standing.refused in refusal


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may serve it")
def test_deterministic_never_steps_aside(driver: Driver) -> None:
    """An engine that ignores the option would answer as if it were served."""
    options = {"deterministic": "prefix"}
    refusal = driver.decide(Setup(options=options)).refusal
    assert refusal is not None
    assert "deterministic is promised on a GPU only" in refusal
    uncached = driver.decide(Setup(options=options, prefix_cache=False)).refusal
    assert uncached is not None
    assert "cannot serve this: deterministic needs the plugin, and " in uncached


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pagesize": 16}, "Unknown hybrid_plugin option 'pagesize'; known are: "),
        ({"state_memory_ratio": 1.0}, "state_memory_ratio must lie between 0 and 1"),
        ({"state_memory_ratio": 0}, "state_memory_ratio must lie between 0 and 1"),
        ({"page_size": "16"}, "option 'page_size' takes int, got '16'"),
        ({"kernels": "mine"}, "kernels must be auto, ours, engine, got 'mine'"),
        ({"deterministic": "turn"}, "deterministic must be off or prefix, got 'turn'"),
        (
            {"deterministic": "prefix", "elastic": True},
            "deterministic lets nobody be preempted, and elastic pools cannot",
        ),
        (
            {"deterministic": "prefix", "kernels": "engine"},
            "deterministic needs our kernels, and kernels is engine",
        ),
        ({"kv_pages": 100}, "option 'kv_pages' was removed: bound both pools"),
    ],
)
def test_bad_options_are_refused_before_anything_loads(
    driver: Driver, options: dict[str, Any], sentence: str
) -> None:
    refusal = driver.decide(Setup(options=options)).refusal
    assert refusal is not None
    assert sentence in refusal
