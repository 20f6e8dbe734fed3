# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.config import (
    _REMOVED,
    ENABLE_VARIABLE,
    OPTIONS_VARIABLE,
    ConfigError,
    DiskOptions,
    HybridConfig,
    environment_options,
    switched_off_by_environment,
)
from hybrid_plugin.sizes import Multiple


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
        "host_memory": 1 << 33,
        "state_memory_ratio": 0.25,
        "in_batch_prefix_min_tokens": 64,
        "system_snapshot_min_tokens": 512,
    }
    config = HybridConfig.from_mapping(options)
    assert {name: getattr(config, name) for name in options} == options


def test_none_leaves_an_optional_option_to_the_plugin() -> None:
    assert HybridConfig.from_mapping({"page_size": None}) == HybridConfig()


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"deterministic": "prefix"}, "deterministic is not promised with prefill_gra"),
        ({"kernels": "engine"}, "prefill_graphs needs our kernels, and kernels is eng"),
    ],
)
def test_graphs_of_prefills_exclude(other: dict[str, Any], sentence: str) -> None:
    assert HybridConfig.from_mapping({"prefill_graphs": True}).prefill_graphs
    with pytest.raises(ConfigError, match=sentence):
        HybridConfig.from_mapping({"prefill_graphs": True} | other)


def test_host_memory_excludes_deterministic_answers() -> None:
    assert HybridConfig.from_mapping({}).host_memory is None
    with pytest.raises(ConfigError, match="was not tested with host_memory"):
        HybridConfig.from_mapping({"host_memory": "1GiB", "deterministic": "prefix"})


DISK = {"path": "/var/cache/hybrid", "size": "2GiB"}


def test_disk_names_a_folder_and_its_size() -> None:
    def read(disk: object) -> DiskOptions | None:
        options = {"host_memory": "1GiB", "disk": disk}
        return HybridConfig.from_mapping(options).disk

    assert HybridConfig().disk is None is read(None)
    assert read(DISK) == DiskOptions("/var/cache/hybrid", 2 << 30)
    assert read(DISK | {"size": 5, "weights": "ours"}) == DiskOptions(
        "/var/cache/hybrid", 5, "ours"
    )
    at_home = read(DISK | {"path": "~/bundles"})
    assert at_home is not None and at_home.folder == Path.home() / "bundles"


@pytest.mark.parametrize(
    ("disk", "sentence"),
    [
        ("/var/cache", "'disk' takes an object such as .*, got '/var/cache'."),
        ({"path": "/a"}, "option 'disk' needs a size."),
        ({"size": "1GiB"}, "option 'disk' needs a path."),
        (DISK | {"sise": 1}, "Unknown entry 'sise' of .*: path, size, weights."),
        (DISK | {"path": "cache"}, "disk.path must be absolute, .* got 'cache'."),
        (DISK | {"path": 3}, "disk.path takes a string, got 3."),
        (DISK | {"size": "much"}, "disk.size: 'much' is no size"),
        (DISK | {"size": 0}, "disk.size must be at least 1, got 0."),
        (DISK | {"size": True}, "disk.size takes a size such as 100GiB, got True."),
        (DISK | {"size": 1e9}, "disk.size takes a size such as 100GiB, got 1000"),
        (DISK | {"weights": ""}, "disk.weights is empty"),
        (DISK | {"weights": 1}, "disk.weights takes a string, got 1."),
    ],
)
def test_what_is_no_disk(disk: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        HybridConfig.from_mapping({"host_memory": "1GiB", "disk": disk})


@pytest.mark.parametrize(
    ("text", "factor"), [("2x", 2.0), ("0.7x", 0.7), (" 1.25 X ", 1.25)]
)
def test_host_memory_takes_a_multiple(text: str, factor: float) -> None:
    found = HybridConfig.from_mapping({"host_memory": text}).host_memory
    assert found == Multiple(factor)
    assert HybridConfig.from_mapping({"host_memory": str(found)}).host_memory == found


@pytest.mark.parametrize("text", ["0x", "x", "-1x", "1e3x", "2xx"])
def test_what_is_no_multiple(text: str) -> None:
    with pytest.raises(ConfigError, match="hybrid_plugin option 'host_memory': "):
        HybridConfig.from_mapping({"host_memory": text})


def test_disk_needs_host_memory() -> None:
    with pytest.raises(ConfigError, match="disk needs host_memory"):
        HybridConfig.from_mapping({"disk": DISK})


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
        ("in_batch_prefix_min_tokens", 64.0, "int"),
        ("gpu_memory_budget", [8], "a size such as 40GiB"),
        ("gpu_memory_budget", 4e9, "a size such as 40GiB"),
        ("gpu_memory_budget", True, "a size such as 40GiB"),
        ("host_memory", 6.4e10, "a size such as 64GiB, or a multiple such as 2x"),
        ("host_memory", True, "a size such as 64GiB, or a multiple such as 2x"),
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


def test_pools_are_fixed_or_elastic() -> None:
    assert HybridConfig().is_elastic
    assert not HybridConfig(state_memory_ratio=0.5).is_elastic
    assert not HybridConfig(elastic=False, state_memory_ratio=0.5).is_elastic
    with pytest.raises(ConfigError, match="fixes the pools, and elastic pools move"):
        HybridConfig(elastic=True, state_memory_ratio=0.5)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (123456, 123456),
        ("4096", 4096),
        ("40GiB", 40 << 30),
        ("512 MiB", 512 << 20),
        ("4GB", 4 * 10**9),
        ("1.5gib", 3 << 29),
        (None, None),
    ],
    ids=repr,
)
def test_sizes(given: object, size: int | None) -> None:
    for name in ("gpu_memory_budget", "host_memory"):
        config = HybridConfig.from_mapping({name: given})
        assert getattr(config, name) == size


@pytest.mark.parametrize("given", ["", "much", "4 gigs", "-4GB", "0", "1e9", "4GB4"])
def test_what_is_no_size(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HybridConfig.from_mapping({"gpu_memory_budget": given})
    message = str(caught.value)
    assert message.startswith("hybrid_plugin option 'gpu_memory_budget': ")
    assert message.endswith(".") and "\n" not in message


@pytest.mark.parametrize("name", _REMOVED)
def test_removed_options_name_what_to_use(name: str) -> None:
    known = {option.name for option in fields(HybridConfig)}
    assert name not in known
    with pytest.raises(ConfigError) as caught:
        HybridConfig.from_mapping({name: 8})
    assert str(caught.value) == (
        f"hybrid_plugin option {name!r} was removed: {_REMOVED[name]}."
    )


def test_options_that_nobody_could_set_are_gone() -> None:
    """Each was an option once: it is refused, not unknown."""
    assert set(_REMOVED) == {
        *("kv_pages", "state_slots", "kv_pages_floor", "state_slots_floor"),
        *("branch_snapshot_min_tokens", "prompt_snapshot_min_tokens"),
        *("chunk_snapshot_min_tokens", "prompt_body_share"),
        *("max_snapshots_per_path", "follow_min_tokens", "eviction_policy"),
    }


def test_a_renamed_option_names_its_new_name() -> None:
    with pytest.raises(ConfigError, match="its name is in_batch_prefix_min_tokens now"):
        HybridConfig.from_mapping({"follow_min_tokens": 8})


def test_the_eviction_policy_is_no_option() -> None:
    with pytest.raises(ConfigError, match=r"learns what is reused; .*simulate"):
        HybridConfig.from_mapping({"eviction_policy": "lru"})


def test_the_snapshot_policy_of_the_options() -> None:
    policy = HybridConfig().snapshot_policy(16)
    assert (policy.page_size, policy.chunk_end_min_tokens) == (16, 1024)
    assert (policy.system_min_tokens, policy.in_batch_prefix_min_tokens) == (1, 256)
    on_cpu = HybridConfig().snapshot_policy(16, pass_tokens=64)
    assert on_cpu.in_batch_prefix_min_tokens == 64
    asked = HybridConfig(system_snapshot_min_tokens=512, in_batch_prefix_min_tokens=0)
    policy = asked.snapshot_policy(16)
    assert (policy.system_min_tokens, policy.in_batch_prefix_min_tokens) == (512, 0)


def test_each_cache_learns_by_itself() -> None:
    options = HybridConfig()
    one, other = options.snapshot_policy(16), options.snapshot_policy(16)
    assert one.divergences is not other.divergences


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size must be at least 1, got 0."),
        (
            {"system_snapshot_min_tokens": 0},
            "system_snapshot_min_tokens must be at least 1, got 0.",
        ),
        (
            {"in_batch_prefix_min_tokens": -5},
            "in_batch_prefix_min_tokens must be at least 0, got -5.",
        ),
        ({"gpu_memory_budget": 0}, "gpu_memory_budget must be at least 1, got 0."),
        ({"host_memory": 0}, "host_memory must be at least 1, got 0."),
    ],
    ids=["page size", "system message", "in-batch prefix", "memory", "host memory"],
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


def test_options_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OPTIONS_VARIABLE, raising=False)
    assert environment_options() == {}
    monkeypatch.setenv(OPTIONS_VARIABLE, " ")
    assert environment_options() == {}
    monkeypatch.setenv(OPTIONS_VARIABLE, '{"page_size": 32}')
    assert environment_options() == {"page_size": 32}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_size=32", "HYBRID_CONFIG takes JSON: .*"),
        ("[" * 100_000, "HYBRID_CONFIG takes JSON: .*"),
        ("[32]", "HYBRID_CONFIG takes a JSON object of options, got '\\[32\\]'."),
    ],
    ids=["no JSON", "too deep", "no object"],
)
def test_an_environment_that_is_no_object(
    monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"^{message}$"):
        environment_options()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_states": "ring"}, "draft_states must be auto, columns, replay, got"),
        (
            {"draft_states": "replay", "kernels": "engine"},
            "draft_states is replay, which needs our kernels, and kernels is engine",
        ),
    ],
    ids=["unknown", "the engine's kernels"],
)
def test_draft_states_that_cannot_be(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HybridConfig.from_mapping(options)
