# SPDX-License-Identifier: Apache-2.0
"""Two pools, physically apart, and what each layer sees of them."""

from __future__ import annotations

import copy
import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    MambaSpec,
)

from hybrid_plugin.core.commands import Copy, Pool, Zero
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.device.host_arena import HostArena
from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.planning import HybridKVCacheConfig, make_config, make_groups
from hybrid_plugin.vllm.pool_memory import PoolMemory
from hybrid_plugin.vllm.servable import UnservableError

ATTENTION = FullAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32
)
STATE = MambaSpec(
    block_size=1024, shapes=((3, 5), (2, 4, 4)), dtypes=(torch.float32, torch.float32)
)
SPECS = {"a0": ATTENTION, "s0": STATE, "s1": STATE, "a1": ATTENTION}
CPU = torch.device("cpu")
PAGE_BYTES = 16 * 2 * 8 * 2 * 4
STATE_BYTES = (3 * 5 + 2 * 4 * 4) * 4  # 188, in 256: the next multiple of 128


@pytest.fixture
def config() -> HybridKVCacheConfig:
    cache = SimpleNamespace(prefix_cache_retention_interval=None)
    vllm_config: Any = SimpleNamespace(cache_config=cache)
    return make_config(vllm_config, make_groups(SPECS), PoolSizes(pages=6, slots=4))


def views(config: HybridKVCacheConfig, pools: PoolMemory) -> dict[str, torch.Tensor]:
    return pools.allocate(config, CPU, KVCacheLayout.LBHNC)


def test_attention_groups_come_first(config: HybridKVCacheConfig) -> None:
    assert [g.layer_names for g in config.kv_cache_groups] == [
        ["a0", "a1"],
        ["s0", "s1"],
    ]
    assert config.num_blocks == 4, "warm-up may use every id in every group"


def test_placement(config: HybridKVCacheConfig) -> None:
    pages, states = config.kv_cache_tensors
    assert (pages.layer_stride, pages.block_stride) == (6 * PAGE_BYTES, PAGE_BYTES)
    assert (states.layer_stride, states.block_stride) == (256, 512)
    assert pages.size == 2 * 6 * PAGE_BYTES
    assert states.size == 4 * 512


def test_the_pools_are_two_allocations(config: HybridKVCacheConfig) -> None:
    layers = views(config, PoolMemory())
    storages = {n: v.untyped_storage().data_ptr() for n, v in layers.items()}
    assert storages["a0"] == storages["a1"] != storages["s0"] == storages["s1"]
    assert layers["a0"].shape[0] == 6
    assert layers["s0"].shape == (4, 1, 1, STATE_BYTES)


def test_commands_reach_all_layers_of_one_id(config: HybridKVCacheConfig) -> None:
    pools = PoolMemory()
    layers = views(config, pools)
    for value, layer in enumerate(layers.values(), start=1):
        layer[2] = value
    pools.executor.run([Copy(Pool.KV, 2, 5), Copy(Pool.STATE, 2, 3)])
    for value, (name, layer) in enumerate(layers.items(), start=1):
        copied = layer[5] if name.startswith("a") else layer[3]
        assert (copied == value).all()
        assert (layer[1] == 0).all()
    pools.executor.run([Zero(Pool.STATE, 2)])
    assert (layers["s0"][2] == 0).all() and (layers["s1"][2] == 0).all()
    assert (layers["a0"][2] != 0).all()


def test_commands_touch_no_random_generator(config: HybridKVCacheConfig) -> None:
    pools = PoolMemory()
    views(config, pools)
    torch.manual_seed(7)
    random.seed(7)
    before, ours = torch.get_rng_state(), random.getstate()
    commands = [Copy(Pool.KV, 1, 2), Copy(Pool.STATE, 1, 2), Zero(Pool.STATE, 3)]
    pools.executor.run(commands)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == ours


def test_a_kind_of_layer_without_a_pool_is_refused() -> None:
    cross = CrossAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32
    )
    with pytest.raises(UnservableError, match="cannot serve layer c0") as refusal:
        make_groups({"a0": ATTENTION, "c0": cross})
    assert "CrossAttentionSpec" in str(refusal.value)


def test_memory_that_is_not_ours_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="VLLM_PLUGINS"):
        _ = PoolMemory().executor


def test_nothing_but_vllm_keeps_the_cache_for_profiling(
    config: HybridKVCacheConfig,
) -> None:
    from hybrid_plugin.vllm.worker import _allocate_for_profiling

    layers = _allocate_for_profiling(config, CPU, KVCacheLayout.LBHNC)
    memory = weakref.ref(layers.pop("a0"))
    layers.clear()
    assert memory() is None


def test_shared_memory_that_was_not_planned_with_is_given_back(
    config: HybridKVCacheConfig,
) -> None:
    block = 64 << 10
    memory, pools = HostArena(8 * block, block), PoolMemory()
    assert memory.hold(memory.usable) is None
    pools.share(memory)
    views(config, pools)
    assert memory.held == 0


def test_vllm_allocates_ours_by_the_worker_s_pools_and_its_own_by_itself(
    config: HybridKVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import attn_utils

    for module in (gpu_model_runner, attn_utils):
        monkeypatch.setattr(module, "allocate_kv_cache", lambda *_: "vLLM's own")
    asked = config, CPU, KVCacheLayout.LBHNC
    for module in (gpu_model_runner, attn_utils):
        pools, twin = PoolMemory(), copy.deepcopy(config)
        with patches.pool_allocator(pools.allocate):
            ours = module.allocate_kv_cache(twin, *asked[1:])
            assert module.allocate_kv_cache(object(), *asked[1:]) == "vLLM's own"
        assert set(ours) == set(SPECS)
        assert pools.executor is not None
        assert module.allocate_kv_cache(*asked) == "vLLM's own"
