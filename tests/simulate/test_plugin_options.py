# SPDX-License-Identifier: Apache-2.0
"""Every option of the plugin is honoured in a simulation, or refused."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from hybrid_plugin.config import HybridConfig
from tests.oneliners import fails_with_one_sentence
from tests.plan.configs import GEMMA3, QWEN3_NEXT, write
from tests.simulate.test_command import SMALL, simulate

MEMORY = ("--gpu-memory", "3GB", "--weights", "1GB")
HONOURED = {
    "enabled": True,
    "page_size": 64,
    "elastic": False,
    "gpu_memory_budget": "1500MB",
    "state_memory_ratio": 0.1,
    "in_batch_prefix_min_tokens": 0,
    "kernels": "ours",
    "deterministic": "prefix",
    "host_memory": "2GB",
}
BESIDE = {"host_memory": ("--host-bandwidth", "50")}
"""Flags that an option needs."""
OF_POOLS = frozenset(
    {
        *("page_size", "elastic", "gpu_memory_budget", "state_memory_ratio"),
        "deterministic",  # its pools are fixed
    }
)


def hybrid_config(**options: object) -> tuple[str, str]:
    return ("--hybrid-config", json.dumps(options))


def model(folder: Path) -> tuple[str, ...]:
    return ("--model-config", str(write(folder, QWEN3_NEXT)), *MEMORY)


@pytest.mark.parametrize("name", [option.name for option in fields(HybridConfig)])
def test_each_changes_the_outcome_or_is_refused(name: str, tmp_path: Path) -> None:
    flags = model(tmp_path)
    if name not in HONOURED:
        value = {
            "eviction_policy": "lru",
            "prefill_graphs": True,
            "draft_states": "replay",
            "disk": {"path": "/var/cache/hybrid", "size": "1GiB"},
            "peers": {},
            "store": {"master": "localhost:50051"},
            "models": ["JambaForCausalLM"],
            "verify_fraction": 0.5,
        }.get(name, 300)
        behind = ("disk", "peers", "store")
        needed = {"host_memory": "1GiB"} if name in behind else {}
        found = ["simulate", *flags, *hybrid_config(**{name: value, **needed}), *SMALL]
        fails_with_one_sentence(found, f"Leave the option {name} out: ")
        return
    flags = (*flags, "--concurrency", "8", *SMALL)
    before = simulate(*flags)
    beside = BESIDE.get(name, ())
    after = simulate(*flags, *hybrid_config(**{name: HONOURED[name]}), *beside)
    assert (before["capacity"] != after["capacity"]) == (name in OF_POOLS)
    # "enabled" is what a simulation is of anyway.
    assert (before["hit_tokens"] != after["hit_tokens"]) == (name != "enabled")


def test_pools_are_elastic_wherever_an_engine_makes_them_so(tmp_path: Path) -> None:
    hybrid = model(tmp_path)
    assert simulate(*hybrid, *SMALL)["memory_moves"] > 0
    kv_alone = simulate(*hybrid, "--kv-only", *SMALL)
    assert kv_alone["memory_moves"] is None
    folder = tmp_path / "windows"
    folder.mkdir()
    windows = ("--model-config", str(write(folder, GEMMA3)), "--gpu-memory", "80GB")
    found = simulate(*windows, "--weights", "50GB", *SMALL)
    assert found["memory_moves"] is not None
    assert found["capacity"]["slots"] == 0
    fixed = simulate(*windows, "--weights", "50GB", "--no-elastic", *SMALL)
    assert fixed["memory_moves"] is None


def test_elastic_pools_give_way_where_they_are_not_asked_for(tmp_path: Path) -> None:
    """Beside a ratio, and without a model."""
    assert simulate(*SMALL)["memory_moves"] is None
    found = simulate(*model(tmp_path), *hybrid_config(state_memory_ratio=0.2), *SMALL)
    assert found["memory_moves"] is None


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--elastic",), "--elastic needs --gpu-memory"),
        (hybrid_config(elastic=True), "--elastic needs --gpu-memory"),
        (hybrid_config(state_memory_ratio=0.2), "state_memory_ratio needs --gpu-mem"),
        (hybrid_config(gpu_memory_budget="1GB"), "gpu_memory_budget needs --gpu-mem"),
        (hybrid_config(enabled=False), "nothing to simulate"),
        (("--page-size", "32", *hybrid_config(page_size=16)), "contradict each other"),
        (("--elastic", *hybrid_config(elastic=False)), "contradict each other"),
        (("--elastic", *hybrid_config(state_memory_ratio=0.2)), "set elastic to false"),
    ],
)
def test_refused(flags: tuple[str, ...], sentence: str) -> None:
    fails_with_one_sentence(["simulate", *flags], sentence)


def test_a_share_for_states_needs_states(tmp_path: Path) -> None:
    ratio = hybrid_config(state_memory_ratio=0.2)
    flags = ["simulate", *model(tmp_path), "--kv-only", *ratio]
    fails_with_one_sentence(flags, "without state layers there are none")
    windows = ("--model-config", str(write(tmp_path, GEMMA3)), "--gpu-memory", "80GB")
    sentence = "without state layers there are none"
    fails_with_one_sentence(["simulate", *windows, *ratio], sentence)
