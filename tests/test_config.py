# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from hybrid_plugin.config import (
    ENABLE_VARIABLE,
    ConfigError,
    HybridConfig,
    switched_off_by_environment,
)
from hybrid_plugin.core.policy.eviction import FlopAware, LeastRecentlyUsed, UsedFirst


def test_defaults() -> None:
    assert HybridConfig.from_mapping({}) == HybridConfig()
    assert HybridConfig().enabled is None


def test_every_option_is_explained() -> None:
    for option in fields(HybridConfig):
        assert option.metadata["help"].endswith("."), option.name


def test_all_options_are_taken() -> None:
    options: dict[str, Any] = {
        "enabled": True,
        "page_size": 32,
        "elastic": False,
        "gpu_memory_budget": 1 << 30,
        "state_memory_ratio": 0.25,
        "branch_snapshot_min_tokens": 64,
        "prompt_snapshot_min_tokens": 512,
    }
    config = HybridConfig.from_mapping(options)
    assert {name: getattr(config, name) for name in options} == options


def test_none_leaves_an_optional_option_to_the_plugin() -> None:
    assert HybridConfig.from_mapping({"page_size": None}) == HybridConfig()


def test_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        HybridConfig.from_mapping({"pagesize": 16})
    known = ", ".join(sorted(option.name for option in fields(HybridConfig)))
    assert str(caught.value) == (
        f"Unknown hybrid_plugin option 'pagesize'; known are: {known}."
    )


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("page_size", "16", "int"),
        ("page_size", 16.0, "int"),
        ("page_size", True, "int"),
        ("enabled", 1, "bool"),
        ("enabled", "yes", "bool"),
        ("state_memory_ratio", "0.5", "float"),
        ("state_memory_ratio", True, "float"),
        ("branch_snapshot_min_tokens", None, "int"),
        ("kv_pages", [8], "int"),
    ],
    ids=lambda value: repr(value),
)
def test_wrong_type(name: str, value: object, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HybridConfig.from_mapping({name: value})
    assert str(caught.value) == (
        f"hybrid_plugin option {name!r} takes {wanted}, got {value!r}."
    )


@pytest.mark.parametrize("ratio", [0, 1, -0.5, 1.5, math.nan, math.inf])
def test_ratio_outside_its_range(ratio: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1, both excluded"):
        HybridConfig.from_mapping({"state_memory_ratio": ratio})


@pytest.mark.parametrize("ratio", [0.001, 0.5, 0.999])
def test_ratio_inside_its_range(ratio: float) -> None:
    assert HybridConfig(state_memory_ratio=ratio).state_memory_ratio == ratio


@pytest.mark.parametrize("name", ["kv_pages", "state_slots"])
def test_exact_sizes_come_in_pairs(name: str) -> None:
    with pytest.raises(ConfigError, match="give both or none"):
        HybridConfig.from_mapping({name: 8})


@pytest.mark.parametrize(
    "fixed",
    [{"state_memory_ratio": 0.5}, {"kv_pages": 8, "state_slots": 4}],
    ids=["ratio", "exact"],
)
def test_pools_are_fixed_or_elastic(fixed: dict[str, Any]) -> None:
    assert not HybridConfig(elastic=None, **fixed).is_elastic
    assert not HybridConfig(elastic=False, **fixed).is_elastic
    with pytest.raises(ConfigError, match="fixes the pools, and elastic pools move"):
        HybridConfig(elastic=True, **fixed)


def test_floors_are_for_elastic_pools() -> None:
    config = HybridConfig(elastic=True, kv_pages_floor=100, state_slots_floor=5)
    assert config.is_elastic
    for name in ("kv_pages_floor", "state_slots_floor"):
        with pytest.raises(ConfigError, match=f"{name} is for elastic pools"):
            HybridConfig(elastic=False, **{name: 5})
        with pytest.raises(ConfigError, match="must be at least 1, got 0"):
            HybridConfig(elastic=True, **{name: 0})


def test_exact_sizes_exclude_a_ratio() -> None:
    config = HybridConfig(kv_pages=8, state_slots=4)
    assert (config.kv_pages, config.state_slots) == (8, 4)
    with pytest.raises(ConfigError, match="give one or the other"):
        HybridConfig(kv_pages=8, state_slots=4, state_memory_ratio=0.5)


def test_tuning_wants_fixed_pools() -> None:
    assert HybridConfig(eviction_policy="flop-aware-tuned").is_tuned
    assert not HybridConfig(eviction_policy="flop-aware").is_tuned
    assert not HybridConfig(elastic=None, eviction_policy="flop-aware-tuned").is_elastic
    with pytest.raises(ConfigError, match="flop-aware-tuned replays through copies"):
        HybridConfig(elastic=True, eviction_policy="flop-aware-tuned")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size must be at least 1, got 0."),
        ({"kv_pages": 1, "state_slots": 2}, "kv_pages must be at least 2, got 1."),
        ({"kv_pages": 2, "state_slots": 1}, "state_slots must be at least 2, got 1."),
        (
            {"branch_snapshot_min_tokens": 0},
            "branch_snapshot_min_tokens must be at least 1, got 0.",
        ),
        (
            {"prompt_snapshot_min_tokens": -5},
            "prompt_snapshot_min_tokens must be at least 1, got -5.",
        ),
    ],
    ids=["page size", "pages", "slots", "branch", "prompt end"],
)
def test_too_little(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HybridConfig.from_mapping(options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("value", "off"),
    [
        (None, False),
        ("", False),
        ("1", False),
        ("True", False),
        (" on ", False),
        ("yes", False),
        ("0", True),
        ("FALSE", True),
        ("off", True),
        (" no", True),
    ],
    ids=repr,
)
def test_environment_switch(
    monkeypatch: pytest.MonkeyPatch, value: str | None, off: bool
) -> None:
    monkeypatch.delenv(ENABLE_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(ENABLE_VARIABLE, value)
    assert switched_off_by_environment() is off


def test_environment_switch_that_says_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, "maybe")
    with pytest.raises(ConfigError, match="HYBRID_PLUGIN must be 0 or 1, got 'maybe'"):
        switched_off_by_environment()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("used-first", UsedFirst),
        ("lru", LeastRecentlyUsed),
        ("flop-aware", FlopAware),
        ("flop-aware-tuned", FlopAware),
    ],
)
def test_eviction_policies_by_name(name: str, kind: type) -> None:
    config = HybridConfig.from_mapping({"eviction_policy": name})
    assert type(config.eviction(token_bytes=100, slot_bytes=5000)) is kind


def test_an_eviction_policy_knows_the_sizes() -> None:
    config = HybridConfig(eviction_policy="flop-aware")
    policy = config.eviction(token_bytes=100, slot_bytes=5000)
    assert isinstance(policy, FlopAware)
    assert (policy.token_bytes, policy.slot_bytes) == (100, 5000)


def test_an_unknown_eviction_policy() -> None:
    with pytest.raises(ConfigError, match="eviction_policy must be one of used-first"):
        HybridConfig(eviction_policy="fifo")
    with pytest.raises(ConfigError, match="takes str, got 3"):
        HybridConfig.from_mapping({"eviction_policy": 3})


def test_the_cap_per_path_reaches_the_policy() -> None:
    assert HybridConfig().snapshot_policy(16).max_per_path is None
    config = HybridConfig(max_snapshots_per_path=4)
    assert config.snapshot_policy(16).max_per_path == 4
