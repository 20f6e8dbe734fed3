# SPDX-License-Identifier: Apache-2.0
"""Models without attention in vLLM: slots alone, and pages that nobody but we know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec, MambaSpec

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Copy, Pool, Zero
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.vllm import elastic, page_size, planning
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from hybrid_plugin.vllm.planning import HybridKVCacheConfig, make_groups
from hybrid_plugin.vllm.pool_memory import PoolMemory
from hybrid_plugin.vllm.servable import UnservableError
from tests.core.support import ByMinimum
from tests.vllm.fakes import admit, compute, ids, nothing_kept, request

STATE = MambaSpec(block_size=1024, shapes=((3, 5),), dtypes=(torch.float32,))
WIDE = MambaSpec(block_size=1024, shapes=((4, 8),), dtypes=(torch.float32,))
SPECS: dict[str, KVCacheSpec] = {"s0": STATE, "s1": WIDE, "s2": STATE}
SLOT_BYTES = 512
"""Of three layers, each in 128 bytes, in whole 256."""


def engine(flag: int | None = None, **options: Any) -> Any:
    """What is read of vLLM's configuration."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_cache_retention_interval=None,
            kv_cache_memory_bytes=None,
            block_size=flag or 128,
            user_specified_block_size=flag is not None,
        ),
        model_config=SimpleNamespace(
            max_model_len=100,
            original_max_model_len=100,
            is_attention_free=True,
            has_inner_state=True,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(
            local_world_size=1, decode_context_parallel_size=1
        ),
        additional_config={"hybrid_plugin": options},
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
    )


@pytest.fixture(autouse=True)
def layout_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM settles on for layers that have pages."""
    monkeypatch.setattr(planning.page_layout, "is_packed", lambda config: True)


def planned(config: Any, available: int) -> HybridKVCacheConfig:
    (found,) = planning.plan(config, [SPECS], [available])
    assert isinstance(found, HybridKVCacheConfig)
    return found


def test_all_memory_becomes_slots() -> None:
    found = planned(engine(), 9 * SLOT_BYTES)
    assert (found.slots, found.pages) == (9, 9 * 7 + 1)
    assert found.num_blocks == 9
    assert sum(tensor.size for tensor in found.kv_cache_tensors[:1]) == 9 * SLOT_BYTES
    assert {tensor.pool for tensor in found.kv_cache_tensors} == {Pool.STATE}


@pytest.mark.parametrize("wanted", [None, True])
def test_one_pool_is_as_elastic_as_it_can_be(wanted: bool | None) -> None:
    """It has all the memory whatever is asked for, and nothing is taken to be moved."""
    config = engine(elastic=wanted)
    assert not elastic.is_wanted(config)
    assert planned(config, 9 * SLOT_BYTES) == planned(engine(), 9 * SLOT_BYTES)


def test_a_budget_bounds_the_slots() -> None:
    config = engine(gpu_memory_budget=4 * SLOT_BYTES)
    assert planned(config, 1 << 20).slots == 4
    with pytest.raises(ConfigError, match="cannot hold one sequence of 100 tokens"):
        planned(engine(), 2 * SLOT_BYTES - 1)


@pytest.mark.parametrize(
    ("flag", "option", "size"), [(None, None, 16), (48, None, 48), (None, 7, 7)]
)
def test_pages_of_any_size_number_the_tokens(
    flag: int | None, option: int | None, size: int
) -> None:
    config = engine(flag) if option is None else engine(flag, page_size=option)
    found = planned(config, 9 * SLOT_BYTES)
    assert found.page_size == found.plan.layout.page_size == size
    assert page_size.of_states(config) == size


def test_sizes_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="--block-size 48 and the option page_size 7"):
        planned(engine(48, page_size=7), 1 << 20)


def test_a_model_that_keeps_nothing_is_not_served() -> None:
    with pytest.raises(UnservableError, match="keep nothing for later tokens"):
        make_groups({})


def config_of(pages: int = 33, slots: int = 5) -> HybridKVCacheConfig:
    return planning.make_config(engine(), make_groups(SPECS), PoolSizes(pages, slots))


def test_the_memory_has_slots_and_rows_of_nothing() -> None:
    memory = PoolMemory()
    views = memory.allocate(config_of(), torch.device("cpu"), KVCacheLayout.LBHNC)
    assert set(views) == {"s0", "s1", "s2"}
    before = [view.clone() for view in views.values()]
    for index, view in enumerate(views.values()):
        view[1].fill_(index + 1)
    executor = memory.executor
    executor.run([Copy(Pool.KV, 1, 32), Copy(Pool.STATE, 1, 4)])
    for index, view in enumerate(views.values()):
        assert bool((view[4] == index + 1).all())
    executor.run([Zero(Pool.STATE, 4), Zero(Pool.STATE, 1)])
    assert all(map(torch.equal, before, views.values()))


def manager() -> HybridKVCacheManager:
    made = HybridKVCacheManager(
        config_of(), HybridConfig(), watermark=0.0, log_stats=True, clock=lambda: 0.0
    )
    made.cache.tree.eviction = ByMinimum(prompt_end=32)
    return made


def test_vllm_hears_of_the_slot_alone() -> None:
    of = manager()
    first = request("first", 40)
    assert ids(admit(of, first, 40)) == ([1], [1]), "a group for each shape of states"
    compute(of, first, 40)
    assert of.get_block_ids("first") == ([1], [1])
    assert ids(of.allocate_slots(first, 10)) == ([], [])
    first.all_token_ids.extend(range(40, 51))
    compute(of, first, 50)
    of.free(first)
    again = request("again", 60)
    blocks, hit, _ = of.get_computed_blocks(again)
    assert (hit, ids(blocks)) == (50, ([], [])), "a turn's last token is sampled only"
    admitted = of.allocate_slots(again, 10, hit, blocks)
    assert [len(group) for group in ids(admitted)] == [1, 1]
    copies = [one for one in of.drain_commands() if isinstance(one, Copy)]
    assert Pool.STATE in {one.pool for one in copies}
    compute(of, again, 60)
    of.free(again)
    assert nothing_kept(of)


def test_the_load_is_that_of_the_slots() -> None:
    of = manager()
    admit(of, request("first", 40), 40)
    assert of.usage == 1 / 4
