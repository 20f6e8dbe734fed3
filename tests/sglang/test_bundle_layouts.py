# SPDX-License-Identifier: Apache-2.0
"""What is read of a host row by its layout is what SGLang's pools hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from hybrid_plugin.core.commands import Pool, PoolId, Store
from hybrid_plugin.core.memory.elastic_plan import plan_elastic
from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup
from hybrid_plugin.core.tiers.host_plan import HostPlan, plan_host
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.host_arena import HostArena
from hybrid_plugin.sglang.bundle_layouts import (
    NamedRows,
    compressed_rows,
    key_value_rows,
    layouts,
    state_rows,
)
from hybrid_plugin.sglang.elastic import SharedPools
from hybrid_plugin.sglang.pool_memory import PoolMemory
from hybrid_plugin.sglang.pool_rows import page_rows
from hybrid_plugin.sglang.slots import SlotMajorPool, slot_bytes
from hybrid_plugin.tiers.convert import Conversion, conversion
from hybrid_plugin.tiers.fields import dense
from hybrid_plugin.tiers.row_layout import TOKEN, RowLayout

PAGE, PAGES, HEADS, DIM = 16, 5, 2, 8
ATTENTION: dict[str, Any] = {
    "size": PAGE * (PAGES - 1),
    "dtype": torch.bfloat16,
    "page_size": PAGE,
    "head_num": HEADS,
    "head_dim": DIM,
    "full_attention_layer_ids": [1, 3],
    "device": "cpu",
}
STATE_LAYERS = [0, 2]
SLOTS = 6
ROW = 2
"""Page or slot that goes to the host."""


def mamba2_params() -> Any:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=1,
        num_heads=4,
        head_dim=16,
        state_size=8,
        conv_kernel=4,
    )
    return Mamba2CacheParams(shape=shape, layers=STATE_LAYERS)


def kda_params() -> Any:
    shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=3, head_dim=8)
    return KimiLinearCacheParams(shape=shape, layers=STATE_LAYERS)


def slots_of(params: Any) -> Any:
    """SGLang's own slots."""
    return HybridReqToTokenPool(
        size=40,
        mamba_size=SLOTS,
        mamba_spec_state_size=4,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params,
        mamba_layer_ids=STATE_LAYERS,
        enable_mamba_extra_buffer=False,
    ).mamba_pool


@dataclass
class Made:
    """Pools, and what runs commands on them."""

    executor: Executor
    named: dict[PoolId, Sequence[NamedRows] | str]
    ids: Mapping[PoolId, int]
    """A row of each pool that may be used."""
    padding: Mapping[PoolId, int] = field(default_factory=dict)
    """Bytes of a row that nobody uses, where there are any."""


def fixed(params: Any, axes: tuple[str, str, str], **more: Any) -> Made:
    slots = slots_of(params)
    pool = HybridLinearKVPool(mamba_pool=slots, **ATTENTION, **more)
    executor = PoolMemory().executor(pool, slots, PAGE)
    named: dict[PoolId, Sequence[NamedRows] | str] = {
        Pool.KV: key_value_rows(pool.full_kv_pool, PAGE, ["1", "3"]),
        Pool.STATE: state_rows(slots, params.is_kda, axes),
    }
    return Made(executor, named, {Pool.KV: ROW, Pool.STATE: ROW})


def with_a_draft() -> Made:
    """A draft model's KV lies in the pages of its target."""
    params = mamba2_params()
    slots, memory = slots_of(params), PoolMemory()
    pool = HybridLinearKVPool(mamba_pool=slots, **ATTENTION)
    draft = HybridLinearKVPool(
        mamba_pool=slots, **{**ATTENTION, "full_attention_layer_ids": [0]}
    ).full_kv_pool
    executor = memory.executor(pool, slots, PAGE)
    memory.join(page_rows(draft, PAGE))
    pages = key_value_rows(pool.full_kv_pool, PAGE, ["1", "3"])
    drafted = key_value_rows(draft, PAGE, ["draft 0"])
    assert isinstance(pages, list) and isinstance(drafted, list)
    states = state_rows(slots, False, ("head", "channel", "state"))
    named: dict[PoolId, Sequence[NamedRows] | str] = {
        Pool.KV: [*pages, *drafted],
        Pool.STATE: states,
    }
    return Made(executor, named, {Pool.KV: ROW, Pool.STATE: ROW})


def by_heads() -> Made:
    """SGLang's layout with heads before tokens."""
    made = fixed(mamba2_params(), ("head", "channel", "state"))
    MHATokenToKVPool = type("MHATokenToKVPool", (), {})  # noqa: N806
    pool: Any = MHATokenToKVPool()
    pool.kv_cache_layout, pool.dtype = "hnd", torch.bfloat16
    for name in ("k_buffer", "v_buffer"):
        tensors = [torch.zeros(PAGES, HEADS, PAGE, DIM) for _ in range(2)]
        setattr(pool, name, [one.to(torch.bfloat16) for one in tensors])
    slots = slots_of(mamba2_params())
    executor = PoolMemory().executor(SimpleNamespace(full_kv_pool=pool), slots, PAGE)
    named = {
        Pool.KV: key_value_rows(pool, PAGE, ["1", "3"]),
        Pool.STATE: state_rows(slots, False, ("head", "channel", "state")),
    }
    return Made(executor, named, made.ids)


def windows() -> Made:
    common = {k: v for k, v in ATTENTION.items() if k != "size"}
    pool = SWAKVPool(
        size=PAGE * (PAGES - 1),
        size_swa=PAGE * (PAGES - 2),
        swa_attention_layer_ids=[0, 2],
        enable_memory_saver=False,
        **common,
    )
    executor = PoolMemory().executor(pool, None, PAGE)
    named: dict[PoolId, Sequence[NamedRows] | str] = {
        Pool.KV: key_value_rows(pool.full_kv_pool, PAGE, ["1", "3"]),
        Pool.window(0): key_value_rows(pool.swa_kv_pool, PAGE, ["0", "2"]),
    }
    return Made(executor, named, {Pool.KV: ROW, Pool.window(0): 1})


def elastic(packed: bool, params: Any, axes: tuple[str, str, str]) -> Made:
    """Pools that share memory; of each, what is mapped at the start is used."""
    block, budget = 64 << 10, 4 << 20
    page_bytes = HEADS * DIM * 2 * PAGE
    names = tuple(f"KV tensor {i}" for i in range(4))
    layout = CacheLayout(
        page_size=PAGE,
        attention=(AttentionGroup(names, page_bytes),),
        states=(StateGroup(("states",), slot_bytes(params)),),
        packed=packed,
    )
    memory = HostArena(budget + block, block)
    assert memory.hold(memory.usable) is None
    plan = plan_elastic(
        layout, budget, block_bytes=block, max_model_len=512, max_sequences=4
    )
    shared = SharedPools(plan, memory)
    shape = (shared.tokens + PAGE, HEADS, DIM)
    MHATokenToKVPool = type("MHATokenToKVPool", (), {})  # noqa: N806
    pool: Any = MHATokenToKVPool()
    pool.layer_num, pool.store_dtype, pool.dtype = 2, torch.bfloat16, torch.bfloat16
    pool._kv_buffer_shapes = lambda: (shape, shape)
    shared.place_keys_and_values(pool)
    slots = SlotMajorPool(
        shared.slot_rows,
        size=plan.sizes.slots - 1,
        spec_state_size=0,
        cache_params=params,
        mamba_layer_ids=STATE_LAYERS,
        device="cpu",
    )
    named = {
        Pool.KV: key_value_rows(pool, PAGE, ["1", "3"]),
        Pool.STATE: state_rows(slots, params.is_kda, axes),
    }
    padding = {
        Pool.KV: sum(plan.layout.page_padding),
        Pool.STATE: plan.layout.slot_bytes - params.mamba_cache_per_req,
    }
    return Made(shared.start(), named, {Pool.KV: ROW, Pool.STATE: 1}, padding)


MAMBA2, DELTA = ("head", "channel", "state"), ("head", "value", "key")
POOLS: dict[str, Callable[[], Made]] = {
    "Mamba-2": lambda: fixed(mamba2_params(), MAMBA2),
    "Kimi delta attention": lambda: fixed(kda_params(), DELTA),
    "latent attention": lambda: fixed(
        kda_params(), DELTA, use_mla=True, kv_lora_rank=16, qk_rope_head_dim=8
    ),
    "a draft model": with_a_draft,
    "heads first": by_heads,
    "windows": windows,
    "elastic, packed": lambda: elastic(True, mamba2_params(), MAMBA2),
    "elastic, apart": lambda: elastic(False, mamba2_params(), MAMBA2),
    "elastic, packed, taps first": lambda: elastic(True, kda_params(), DELTA),
}


def host_rows(made: Made, slack: int) -> tuple[HostPlan, dict[PoolId, Any]]:
    """What a store of a row of each pool leaves in the host's memory."""
    parts = made.executor.parts()
    row_bytes = {
        pool: sum(part.shape[1] for part in parts[pool]) + slack for pool in made.ids
    }
    plan = plan_host(row_bytes, 64 << 20)
    copies = made.executor.attach_host(plan)
    found = {}
    for pool, row in made.ids.items():
        made.executor.run([Store(pool, (row,), (1,))])
        (view,) = copies.views(Pool.host(pool), [1])
        found[pool] = view[0].copy()
        del view
    copies.close()
    return plan, found


def read(row: Any, layout: RowLayout, named: Sequence[NamedRows]) -> list[torch.Tensor]:
    """Each tensor of one row, in the order of its axes, by the row's layout."""
    fields, place = [], 0
    for one in named:
        sizes = list(zip(one.axes, one.rows.shape[1:], strict=True))
        dtype = str(one.dtype).removeprefix("torch.")
        fields.append(dense(one.name, dtype, place, sizes))
        place = fields[-1].end
    target = RowLayout(place, layout.tokens, tuple(fields))
    move = conversion(layout, target)
    assert isinstance(move, Conversion), move
    out = np.zeros((1, place), dtype=np.uint8)
    if layout.tokens:
        move.pages(row[None], out, 0, layout.tokens)
    else:
        move.state(row, out[0])
    ends = [*[field.offset for field in fields[1:]], place]
    return [
        torch.from_numpy(out[0, field.offset : end].copy())
        .view(one.dtype)
        .view(one.rows.shape[1:])
        for field, end, one in zip(fields, ends, named, strict=True)
    ]


@pytest.mark.parametrize("make", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("slack", [0, 64])
def test_a_row_read_by_its_layout_is_what_the_pools_hold(
    make: Callable[[], Made], slack: int
) -> None:
    made = make()
    for pool, row in made.ids.items():
        for one in made.named[pool]:
            assert isinstance(one, NamedRows)
            assert not one.rows[row].any()
            one.rows[row] = torch.randn(one.rows.shape[1:]).to(one.dtype)
    plan, rows = host_rows(made, slack)
    found = layouts(made.executor.parts(), plan.row_bytes, PAGE, made.named)
    assert (found.state is None) == (Pool.STATE not in made.ids)
    for pool, row in made.ids.items():
        layout = found.state if pool == Pool.STATE else found.pages[pool]
        named = made.named[pool]
        assert layout is not None and not isinstance(named, str)
        for one, values in zip(named, read(rows[pool], layout, named), strict=True):
            assert torch.equal(values, one.rows[row]), one.name
            assert one.rows[row].any()


@pytest.mark.parametrize("make", POOLS.values(), ids=POOLS)
def test_every_byte_of_a_page_or_slot_has_a_name_or_is_padding(
    make: Callable[[], Made],
) -> None:
    """What has none would not get from one engine to the other."""
    made = make()
    parts = made.executor.parts()
    for pool in made.ids:
        named = made.named[pool]
        assert not isinstance(named, str)
        for part in parts[pool]:
            part[1].fill_(-1)
        for one in named:
            one.rows[1] = 0
        left = sum(int((part[1] != 0).sum()) for part in parts[pool])
        assert left == made.padding.get(pool, 0)


def test_a_tensor_that_lies_elsewhere_is_found_out() -> None:
    made = POOLS["Mamba-2"]()
    named = made.named[Pool.KV]
    assert isinstance(named, list)
    stray = NamedRows("1.key", named[0].rows.clone(), named[0].axes, named[0].dtype)
    parts = made.executor.parts()
    sizes = {Pool.KV: sum(part.shape[1] for part in parts[Pool.KV])}
    with pytest.raises(ValueError, match=r"1\.key lies in no part"):
        layouts(parts, sizes, PAGE, {Pool.KV: [stray, *named[1:]]})


def test_what_nobody_can_name_is_opaque_and_alike_only_with_its_like() -> None:
    slots = slots_of(mamba2_params())
    text = state_rows(slots, False, None)
    assert isinstance(text, str)
    assert "float32 (4, 16, 8)" in text and text != state_rows(
        slots_of(kda_params()), True, None
    )
    MHATokenToKVPool = type("MHATokenToKVPool", (), {})  # noqa: N806
    pool: Any = MHATokenToKVPool()
    pool.kv_cache_layout, pool.dtype = "vectorized_5d", torch.bfloat16
    pool.k_buffer = [torch.zeros(PAGES, HEADS, 1, PAGE, 8)]
    pool.v_buffer = [torch.zeros(PAGES, HEADS, 2, DIM, 8)]
    opaque = key_value_rows(pool, PAGE, ["1"])
    assert isinstance(opaque, str) and "vectorized_5d" in opaque
    part = torch.zeros(PAGES, 512, dtype=torch.int8)
    found = layouts({Pool.KV: [part]}, {Pool.KV: 512}, PAGE, {Pool.KV: opaque})
    assert found.pages[Pool.KV] == RowLayout(512, PAGE, opaque=opaque)


def test_short_convolutions_keep_no_other_state() -> None:
    kept = SimpleNamespace(
        conv=[torch.zeros(2, SLOTS, 8, 3)], temporal=torch.zeros(2, SLOTS, 0, 4)
    )
    pool: Any = SimpleNamespace(
        mamba_cache=kept, mamba_layer_ids=[0, 2], _slot_siblings=()
    )
    named = state_rows(pool, False, None)
    assert [one.name for one in named if isinstance(one, NamedRows)] == [
        "0.conv",
        "2.conv",
    ]


def test_quantised_keys_are_of_the_type_that_they_mean() -> None:
    """SGLang stores them as plain bytes."""
    MHATokenToKVPool = type("MHATokenToKVPool", (), {})  # noqa: N806
    pool: Any = MHATokenToKVPool()
    pool.dtype = torch.float8_e4m3fn
    pool.k_buffer = [torch.zeros(2 * PAGE, HEADS, DIM, dtype=torch.uint8)]
    pool.v_buffer = [torch.zeros(2 * PAGE, HEADS, DIM, dtype=torch.uint8)]
    named = key_value_rows(pool, PAGE, ["1"])
    parts = {Pool.KV: page_rows(pool, PAGE)}
    size = sum(part.shape[1] for part in parts[Pool.KV])
    layout = layouts(parts, {Pool.KV: size}, PAGE, {Pool.KV: named}).pages[Pool.KV]
    assert {field.dtype for field in layout.fields} == {"float8_e4m3fn"}
    assert layout.fields[0].size_of(TOKEN) == PAGE


def test_compressed_keys_are_named_by_nobody_else() -> None:
    assert compressed_rows([]) == []
    found = compressed_rows([torch.zeros(5, 4, 1, 8).bfloat16()])
    assert isinstance(found, str)
    assert "compressed keys, torch.bfloat16 (4, 1, 8)" in found


def test_states_beside_the_slots_are_named_by_nobody_else() -> None:
    class ShortConvPool:
        """As SGLang names it."""

        conv_state = torch.zeros(1, 6, 8, 3)

    kept = SimpleNamespace(
        conv=[torch.zeros(2, 6, 4, 3)], temporal=torch.zeros(2, 6, 0, 4)
    )
    pool: Any = SimpleNamespace(
        mamba_cache=kept, mamba_layer_ids=[0, 2], _slot_siblings=(ShortConvPool(),)
    )
    found = state_rows(pool, False, None)
    assert isinstance(found, str) and "(8, 3)" in found
