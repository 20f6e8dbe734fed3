# SPDX-License-Identifier: Apache-2.0
"""All layers of a page side by side: what layers, commands and kernels see of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm._custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from hybrid_plugin.core.commands import Copy, Map, Pool, PoolId, Unmap, Zero
from hybrid_plugin.core.memory.elastic_plan import plan_elastic
from hybrid_plugin.device import host_arena
from hybrid_plugin.device.host_arena import HostArena
from hybrid_plugin.vllm import planning
from hybrid_plugin.vllm.planning import HybridKVCacheConfig
from hybrid_plugin.vllm.pool_memory import PoolMemory

PAGE = 16
BLOCK = 16 << 10
BUDGET = 96 * BLOCK
SHAPE: dict[str, Any] = {
    "block_size": PAGE,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SHAPE)
WIDE = FullAttentionSpec(**(SHAPE | {"num_kv_heads": 3}))
NEAR = SlidingWindowSpec(**SHAPE, sliding_window=32)
STATE = MambaSpec(block_size=1024, shapes=((256,),), dtypes=(torch.float32,))
SPECS: dict[str, KVCacheSpec] = {
    "f0": FULL,
    "w0": NEAR,
    "s0": STATE,
    "f1": FULL,
    "wide": WIDE,
    "w1": NEAR,
    "w2": NEAR,
}
POOLS: dict[str, PoolId] = {
    name: Pool.window(0) if name.startswith("w") and name != "wide" else Pool.KV
    for name in SPECS
    if name != "s0"
}


@pytest.fixture(params=[True, False], ids=["packed", "layer-major"])
def packed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def config_of(packed: bool) -> HybridKVCacheConfig:
    groups = planning.make_groups(SPECS)
    plan = plan_elastic(
        planning.make_layout(groups, packed=packed),
        BUDGET,
        block_bytes=BLOCK,
        max_model_len=64,
        max_sequences=4,
    )
    cache = SimpleNamespace(prefix_cache_retention_interval=None)
    engine: Any = SimpleNamespace(cache_config=cache)
    return planning.make_config(engine, groups, plan.sizes, plan)


class Cache:
    """A worker's pools, all mapped that a budget holds, and the layers' views."""

    def __init__(self, packed: bool) -> None:
        self.config = config_of(packed)
        self.memory = HostArena(BUDGET + BLOCK, BLOCK)
        assert self.memory.hold(self.memory.usable) is None
        self.pools = PoolMemory()
        self.pools.share(self.memory)
        self.views = self.pools.allocate(
            self.config, torch.device("cpu"), KVCacheLayout.LBHNC
        )

    @property
    def plan(self) -> Any:
        return self.config.shared

    def ids(self, pool: PoolId) -> int:
        """Ids that have memory from the start."""
        return int(self.plan.pools[pool].start * self.plan.pools[pool].per_granule)

    def rows(self, pool: PoolId, index: int) -> bytes:
        """All bytes of a page, read from the pool's own memory."""
        parts = self.pools.executor._arenas[pool].parts
        return b"".join(bytes(part[index].numpy().tobytes()) for part in parts)


@pytest.fixture
def cache(packed: bool) -> Iterator[Cache]:
    if not host_arena.is_available():
        pytest.skip("needs memory that can be returned")
    made = Cache(packed)
    yield made
    made.views.clear()


def test_layers_cover_each_page_exactly_once(cache: Cache, packed: bool) -> None:
    for pool in (Pool.KV, Pool.window(0)):
        layers = [name for name, its in POOLS.items() if its == pool]
        for number, name in enumerate(layers, start=1):
            raw = cache.views[name].view(torch.int8)
            for index in range(cache.ids(pool)):
                raw[index] += 16 * number + index % 16
        sizes = [cache.views[name][0].nbytes for name in layers]
        padding = cache.config.plan.layout.row_bytes[pool] - sum(sizes)
        for index in range(cache.ids(pool)):
            expected = b"".join(
                bytes([16 * number + index % 16]) * size
                for number, size in enumerate(sizes, start=1)
            )
            assert cache.rows(pool, index) == expected + bytes(padding)
        assert packed or not padding


def test_commands_touch_one_page_of_one_pool(cache: Cache) -> None:
    for name, pool in POOLS.items():
        cache.views[name][: cache.ids(pool)] = float("nan")
    for number, name in enumerate(POOLS, start=1):
        cache.views[name][1] = number
    cache.pools.executor.run([Copy(Pool.KV, 1, 3), Zero(Pool.KV, 2)])
    for number, (name, pool) in enumerate(POOLS.items(), start=1):
        view, own = cache.views[name], pool == Pool.KV
        assert (view[1] == number).all()
        written = {1, 2, 3} if own else {1}
        if own:
            assert (view[3] == number).all() and not view[2].any()
        rest = [i for i in range(cache.ids(pool)) if i not in written]
        assert rest and view[rest].isnan().all()


def test_memory_leaves_and_comes_back_as_zeros(cache: Cache) -> None:
    for name, pool in POOLS.items():
        cache.views[name][: cache.ids(pool)] = 7
    pool = cache.plan.pools[Pool.KV]
    last = pool.start - 1
    cache.pools.executor.run([Unmap(Pool.KV, (last,)), Map(Pool.KV, (last,))])
    left = last * pool.per_granule
    for name, its in POOLS.items():
        view = cache.views[name]
        if its == Pool.KV:
            assert (view[:left] == 7).all()
            assert not view[left : cache.ids(Pool.KV)].any()
        else:
            assert (view[: cache.ids(its)] == 7).all()


def test_a_packed_page_is_one_row_and_one_short_granule() -> None:
    packed, apart = (config_of(kind).shared for kind in (True, False))
    assert packed is not None and apart is not None
    sizes = packed.layout.row_bytes
    for pool, plan in packed.pools.items():
        assert plan.granule_bytes == plan.per_granule * sizes[pool]
        assert plan.granule_bytes % BLOCK == 0
    blocks = [
        [shared.pools[pool].granule_bytes // BLOCK for pool in set(POOLS.values())]
        for shared in (packed, apart)
    ]
    # Apart, each layer has a block of its own; packed, 7 KiB become 8.
    assert (sorted(blocks[0]), sorted(blocks[1])) == ([1, 3], [3, 7])


def test_no_group_is_divided_into_kernel_blocks_with_packed_pages() -> None:
    """vLLM keeps whole pages where a page is farther away than a layer."""
    for tensor in config_of(packed=True).kv_cache_tensors:
        if len(tensor.layers) > 1:
            assert tensor.block_stride > tensor.layer_stride


# ---------------------------------------------------------- vLLM's CPU kernels


@pytest.mark.skipif(current_platform.device_type != "cpu", reason="CPU kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_kernels_read_and_write_no_other_layer(dtype: torch.dtype) -> None:
    pages, heads, size, width, layers, tokens = 12, 2, 32, 64, 3, 75
    apart = torch.zeros((pages, heads, size, 2 * width), dtype=dtype)
    side_by_side = torch.full(
        (pages, layers, heads, size, 2 * width), torch.nan, dtype=dtype
    )
    side_by_side[:, 1] = 0
    expected = attend(apart, tokens)
    assert expected.isfinite().all() and expected.any()
    assert torch.equal(attend(side_by_side[:, 1], tokens), expected)
    assert torch.equal(side_by_side[:, 1], apart)
    assert side_by_side[:, [0, 2]].isnan().all()


def attend(pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Write one sequence's keys and values and attend, as vLLM's CPU backend does."""
    count, heads, size, content = pages.shape
    keys, values = pages.view(count, heads, 2 * size, -1).chunk(2, dim=2)
    table = torch.tensor([[7, 3, 11]], dtype=torch.int32)
    random = torch.Generator().manual_seed(1)
    key, value, query = (
        torch.randn(tokens, n, content // 2, generator=random).to(pages.dtype)
        for n in (heads, heads, 2 * heads)
    )
    at = torch.arange(tokens)
    slots = table[0, at // size].long() * size + at % size
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, "vec")
    output = torch.zeros_like(query)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=2 * heads,
        num_kv_heads=heads,
        head_dim=content // 2,
        seq_lens=lengths,
        dtype=pages.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=False,
    )
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=starts,
        seq_lens=lengths,
        scale=0.125,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=0.0,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return output
