# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline: ids mean the same on each, which has memory for its layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Copy, Pool, Zero
from hybrid_plugin.engine import untried
from hybrid_plugin.vllm import elastic, patches, pipeline, planning
from hybrid_plugin.vllm.planning import HybridKVCacheConfig
from hybrid_plugin.vllm.pool_memory import PoolMemory
from tests.vllm.test_planning import (
    ATTENTION,
    PAGE_BYTES,
    SLOT_BYTES,
    STATE,
    config_of,
)

Specs = dict[str, KVCacheSpec]
UNTRIED = "pipeline parallelism is served on CPUs only; use tensor parallelism."
FIRST_RUNNER = (
    "pipeline parallelism on GPUs needs vLLM's second model runner; leave "
    "VLLM_USE_V2_MODEL_RUNNER and the external launcher out."
)


def stage(pages: int, states: int, first: int) -> Specs:
    """So many layers of each kind, numbered from the first."""
    return {f"a{first + n}": ATTENTION for n in range(pages)} | {
        f"s{first + n}": STATE for n in range(states)
    }


def planned(
    specs: list[Specs], memory: int = 1 << 20, **options: Any
) -> list[HybridKVCacheConfig]:
    found = planning.plan(config_of(**options), specs, [memory] * len(specs))
    assert all(isinstance(one, HybridKVCacheConfig) for one in found)
    return found  # type: ignore[return-value]


def counts(configs: list[HybridKVCacheConfig]) -> set[tuple[int, int, int]]:
    return {(one.pages, one.slots, one.num_blocks) for one in configs}


def memory_of(config: HybridKVCacheConfig) -> int:
    return sum({tensor.pool: tensor.size for tensor in _tensors(config)}.values())


def _tensors(config: HybridKVCacheConfig) -> Any:
    return config.kv_cache_tensors


def test_stages_that_are_alike_have_as_much_as_one_rank() -> None:
    alone = planned([stage(1, 3, 0)])
    stages = planned([stage(1, 3, 0), stage(1, 3, 4)])
    assert counts(stages) == counts(alone)
    named = [
        [name for group in one.kv_cache_groups for name in group.layer_names]
        for one in stages
    ]
    assert named == [["a0", "s0", "s1", "s2"], ["a4", "s4", "s5", "s6"]]
    assert all(one.largest is None for one in stages)


def test_stages_that_differ_have_equally_many_ids_in_their_memory() -> None:
    """As many as fit beside the most layers of each kind."""
    memory = 1 << 20
    stages = planned([stage(2, 1, 0), stage(1, 3, 4)], memory)
    assert len(counts(stages)) == 1
    assert all(memory_of(one) <= memory for one in stages)
    (one, *_) = stages
    whole = one.pages * 2 * PAGE_BYTES + one.slots * 3 * SLOT_BYTES
    assert memory - 2 * PAGE_BYTES < whole <= memory
    plans = {one.plan for one in stages}
    assert len(plans) == 1, "the scheduler is given any of them"
    assert [len(one.kv_cache_groups) for one in stages] == [2, 2]


def test_groups_are_in_one_order_everywhere() -> None:
    first: Specs = {"s0": STATE, "a0": ATTENTION}
    second: Specs = {"a1": ATTENTION, "s1": STATE}
    specs = [
        [g.kv_cache_spec for g in one.kv_cache_groups]
        for one in planned([first, second])
    ]
    assert specs[0] == specs[1]


def test_elastic_pools_need_stages_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "hybrid_plugin.engine.elastic_memory.obstacle", lambda device: None
    )
    block = {"elastic": True, "memory": 64 << 20}
    alike = planned([stage(1, 3, 0), stage(1, 3, 4)], **block)
    assert all(one.shared is not None for one in alike)
    assert alike[0].shared == alike[1].shared
    with pytest.raises(ConfigError, match="VLLM_PP_LAYER_PARTITION"):
        planned([stage(2, 1, 0), stage(1, 3, 4)], **block)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_that_is_a_stage_says_so_when_it_takes_memory(
    stages: int,
) -> None:
    config = config_of(elastic=True)
    config.parallel_config.pipeline_parallel_size = stages
    memory = elastic.take_memory(config, 4 << 20, torch.device("cpu"))
    memory.close()
    assert memory.waits_for_stream == (stages > 1)


def test_a_stage_without_attention_runs_commands_about_pages() -> None:
    first, _ = planned([stage(0, 2, 0), stage(1, 2, 2)])
    memory = PoolMemory()
    views = memory.allocate(first, torch.device("cpu"), KVCacheLayout.LBHNC)
    assert set(views) == {"s0", "s1"}
    memory.executor.run([Copy(Pool.KV, 1, 2), Zero(Pool.STATE, 1)])
    parts = memory.executor.parts()
    assert parts[Pool.KV][0].shape == (first.pages, 0)
    assert parts[Pool.STATE][0].shape[0] == first.slots


@pytest.mark.parametrize(
    ("options", "drafts", "sentence"),
    [
        ({}, None, None),
        ({}, object(), "drafts are not served with pipeline parallelism yet"),
        ({"host_memory": 1 << 20}, None, "host_memory is not served with pipeline"),
        ({"verify_fraction": 0.5}, None, "verify_fraction is not served with pipeline"),
        ({"deterministic": "prefix"}, None, "deterministic was not tested with"),
    ],
)
def test_what_is_not_served_in_stages(
    options: dict[str, Any], drafts: Any, sentence: str | None
) -> None:
    config: Any = SimpleNamespace(speculative_config=drafts)
    found = list(pipeline.obstacles(config, HybridConfig.from_mapping(options)))
    assert [one.startswith(sentence) for one in found if sentence] == [True] * (
        sentence is not None
    )
    assert sentence is not None or found == []


@pytest.mark.parametrize("v2", [False, True])
def test_gpus_need_the_second_model_runner(
    v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr("vllm.platforms.current_platform", gpu)
    config: Any = SimpleNamespace(speculative_config=None, use_v2_model_runner=v2)
    needed = [] if v2 else [FIRST_RUNNER]
    assert list(pipeline.obstacles(config, HybridConfig())) == [UNTRIED, *needed]
    monkeypatch.setenv(untried.TRIED, f"else, {untried.STAGES}")
    assert list(pipeline.obstacles(config, HybridConfig())) == needed


def test_a_later_stage_has_room_for_what_the_one_before_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, Any]] = []

    def make(**sizes: Any) -> str:
        made.append(sizes)
        return "buffers"

    runner = SimpleNamespace(
        intermediate_tensors=None,
        max_num_tokens=96,
        dtype=torch.bfloat16,
        device="cpu",
        model=SimpleNamespace(make_empty_intermediate_tensors=make),
    )
    group = SimpleNamespace(is_first_rank=True)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: group)
    patches.make_stage_buffers(runner)
    assert runner.intermediate_tensors is None
    group.is_first_rank = False
    patches.make_stage_buffers(runner)
    patches.make_stage_buffers(runner)
    assert runner.intermediate_tensors == "buffers"
    assert made == [{"batch_size": 96, "dtype": torch.bfloat16, "device": "cpu"}]
