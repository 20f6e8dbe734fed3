# SPDX-License-Identifier: Apache-2.0
"""SGLang's pools on memory that comes and goes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Copy, Map, Pool, Unmap, Zero
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan, plan_elastic
from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup
from hybrid_plugin.core.memory.scratch import ScratchLayout
from hybrid_plugin.device import host_arena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.host_arena import HostArena
from hybrid_plugin.device.row_pool import RowTensor, apart_bytes, together_bytes
from hybrid_plugin.sglang import elastic, page_layout
from hybrid_plugin.sglang.allocator import (
    HybridSlotAllocator,
    HybridTokenAllocator,
    most_pages,
    most_slots,
)
from hybrid_plugin.sglang.elastic import SharedPools
from hybrid_plugin.sglang.pool_memory import PoolMemory

pytestmark = pytest.mark.skipif(
    not host_arena.is_available(), reason="needs memory that can be returned"
)

LAYERS, HEADS, WIDTH, PAGE = 2, 2, 64, 16
BLOCK = 64 << 10
BUDGET = 4 << 20
TOKEN_BYTES = LAYERS * 2 * HEADS * WIDTH * 2


@pytest.fixture(autouse=True)
def no_disaggregation(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's flags for it are not published where there is no server."""
    plain = SimpleNamespace(disaggregation_mode="null")
    monkeypatch.setattr(elastic, "get_disagg", lambda: plain)


def plan(budget: int = BUDGET, *, packed: bool = False) -> ElasticPlan:
    names = tuple(f"KV tensor {i}" for i in range(2 * LAYERS))
    layout = CacheLayout(
        page_size=PAGE,
        attention=(AttentionGroup(names, TOKEN_BYTES * PAGE // (2 * LAYERS)),),
        states=(StateGroup(("states",), 126 << 10),),
        packed=packed,
    )
    return plan_elastic(
        layout, budget, block_bytes=BLOCK, max_model_len=512, max_sequences=4
    )


@pytest.fixture(params=[False, True], ids=["layer-major", "packed"])
def shared(request: pytest.FixtureRequest) -> Iterator[SharedPools]:
    memory = HostArena(BUDGET + BLOCK, BLOCK)
    assert memory.hold(memory.usable) is None
    yield SharedPools(plan(packed=request.param), memory)
    memory.close()


def key_value_pool(tokens: int, width: int = WIDTH) -> Any:
    """As much of SGLang's `MHATokenToKVPool` as placing needs."""
    shape = (tokens + PAGE, HEADS, width)
    return SimpleNamespace(
        layer_num=LAYERS,
        store_dtype=torch.bfloat16,
        _kv_buffer_shapes=lambda: (shape, shape),
        k_buffer=None,
        v_buffer=None,
    )


def test_keys_and_values_of_a_layer_lie_behind_each_other(shared: SharedPools) -> None:
    pool = key_value_pool(shared.tokens)
    shared.place_keys_and_values(pool)
    assert len(pool.k_buffer) == len(pool.v_buffer) == LAYERS
    packed = shared.plan.layout.packed
    for keys, values in zip(pool.k_buffer, pool.v_buffer, strict=True):
        assert keys.shape == (shared.tokens + PAGE, HEADS, WIDTH)
        assert keys[0].is_contiguous() and values.stride() == keys.stride()
        assert keys.is_contiguous() != packed
        apart = keys[0].nbytes if packed else keys.nbytes
        assert values.data_ptr() == keys.data_ptr() + apart


def test_layers_cover_each_page_exactly_once(shared: SharedPools) -> None:
    pool = key_value_pool(shared.tokens)
    shared.place_keys_and_values(pool)
    executor = shared.start()
    mapped = shared.plan.pools[Pool.KV].start * shared.plan.pools[Pool.KV].per_granule
    tensors = [
        tensor
        for layer in zip(pool.k_buffer, pool.v_buffer, strict=True)
        for tensor in layer
    ]
    for number, tensor in enumerate(tensors, start=1):
        for token in range(mapped * PAGE):
            tensor.view(torch.int8)[token] += 16 * number + token % 16
    parts = executor._arenas[Pool.KV].parts
    row = HEADS * WIDTH * 2
    for index in range(mapped):
        tokens = [
            [
                bytes([16 * number + t % 16]) * row
                for number in range(1, len(tensors) + 1)
            ]
            for t in range(index * PAGE, (index + 1) * PAGE)
        ]
        if not shared.plan.layout.packed:
            tokens = [list(layer) for layer in zip(*tokens, strict=True)]
        expected = b"".join(part for token in tokens for part in token)
        assert b"".join(part[index].numpy().tobytes() for part in parts) == expected


def test_commands_touch_one_page(shared: SharedPools) -> None:
    pool = key_value_pool(shared.tokens)
    shared.place_keys_and_values(pool)
    executor = shared.start()
    mapped = shared.plan.pools[Pool.KV].start * shared.plan.pools[Pool.KV].per_granule
    tensors = [
        tensor[: mapped * PAGE].unflatten(0, (mapped, PAGE))
        for tensor in (*pool.k_buffer, *pool.v_buffer)
    ]
    for number, tensor in enumerate(tensors, start=1):
        tensor.fill_(torch.nan)
        tensor[1] = number
    executor.run([Copy(Pool.KV, 1, 3), Zero(Pool.KV, 2)])
    for number, tensor in enumerate(tensors, start=1):
        assert (tensor[[1, 3]] == number).all() and not tensor[2].any()
        rest = [i for i in range(mapped) if i not in (1, 2, 3)]
        assert rest and tensor[rest].isnan().all()


def test_tokens_stay_evenly_apart_however_a_page_is_padded() -> None:
    names = tuple(f"KV tensor {i}" for i in range(7))
    layout = CacheLayout(
        page_size=PAGE,
        attention=(AttentionGroup(names, 32 * PAGE),),
        states=(StateGroup(("states",), 126 << 10),),
        packed=True,
    )
    made = plan_elastic(
        layout, BUDGET, block_bytes=BLOCK, max_model_len=512, max_sequences=4
    )
    assert made.layout.page_padding == (32 * PAGE,), "a token of 224 bytes takes 256"
    rows = torch.arange(4 * made.layout.page_bytes).to(torch.int8).view(4, -1)
    tokens = 4 * PAGE
    found = page_layout.views(rows, PAGE, [(tokens, 1, 16)] * 7, torch.bfloat16)
    assert found is not None and len(found) == 7
    for number, tensor in enumerate(found):
        assert tensor.shape == (tokens, 1, 16) and tensor.stride(0) == 128
        assert tensor.data_ptr() == rows.data_ptr() + 32 * number
    assert page_layout.views(rows, PAGE, [(tokens, 1, 20)], torch.bfloat16) is None
    assert page_layout.views(rows, PAGE, [(tokens - 1, 16)], torch.bfloat16) is None
    assert page_layout.views(rows, PAGE, [(tokens, 144)], torch.bfloat16) is None


@pytest.mark.parametrize(
    ("backends", "row", "reason"),
    [
        (("triton", "triton"), 512, None),
        (("fa3", "flashinfer"), 1152, None),
        (("torch_native",), 16, None),
        (("fa4", "triton"), 512, "fa4 are not known"),
        (("flashmla", None), 512, "None, flashmla are not known"),
        (("triton",), 200, "200 bytes in each tensor, no multiple of 16"),
    ],
)
def test_packed_where_kernels_are_known_to_take_it(
    backends: tuple[str | None, ...], row: int, reason: str | None
) -> None:
    found = page_layout.obstacle(backends, row)
    assert found is None if reason is None else reason in (found or "")


def test_what_is_mapped_keeps_content_and_what_left_is_gone(
    shared: SharedPools,
) -> None:
    pool = key_value_pool(shared.tokens)
    shared.place_keys_and_values(pool)
    executor, per_granule = (
        shared.start(),
        shared.plan.pools[Pool.KV].per_granule * PAGE,
    )
    hole = shared.plan.pools[Pool.KV].start
    addresses = [tensor.data_ptr() for tensor in (*pool.k_buffer, *pool.v_buffer)]
    first = slice(hole * per_granule, (hole + 1) * per_granule)
    executor.run([Unmap(Pool.STATE, (shared.plan.pools[Pool.STATE].start - 1,))])
    executor.run([Map(Pool.KV, (hole,))])
    for tensor in (*pool.k_buffer, *pool.v_buffer):
        assert not tensor[first].any()
        tensor[first] = 3
        tensor[0] = 5
    executor.run([Unmap(Pool.KV, (hole,)), Map(Pool.KV, (hole,))])
    for tensor in (*pool.k_buffer, *pool.v_buffer):
        assert not tensor[first].any()
        assert bool((tensor[0] == 5).all())
    assert addresses == [t.data_ptr() for t in (*pool.k_buffer, *pool.v_buffer)]
    assert executor.moves.granules == 4


def test_at_the_start_as_much_is_mapped_as_the_core_takes_for_granted(
    shared: SharedPools,
) -> None:
    shared.place_keys_and_values(key_value_pool(shared.tokens))
    shared.start()
    broker = shared.plan.build().broker
    pools = shared.plan.pools.values()
    assert shared.memory.mapped == sum(
        pool.start * pool.granule_bytes for pool in pools
    )
    assert shared.memory.usable == broker.budget


@pytest.mark.parametrize(
    "pool", [key_value_pool(1024), key_value_pool(plan().sizes.pages * PAGE - PAGE, 32)]
)
def test_another_cache_than_planned_is_refused(shared: SharedPools, pool: Any) -> None:
    with pytest.raises(ConfigError, match="planned for another KV cache"):
        shared.place_keys_and_values(pool)


def test_a_cache_that_sglang_built_elsewhere_is_refused(shared: SharedPools) -> None:
    with pytest.raises(ConfigError, match="not for this kind of KV cache"):
        shared.start()


def test_pools_are_built_on_what_was_planned_and_only_meanwhile(
    shared: SharedPools,
) -> None:
    memory = PoolMemory()
    with memory.building():
        assert memory.lent is None
    memory.shared = shared
    assert memory.lent is None
    with memory.building():
        assert memory.lent is shared
    assert memory.lent is None


def test_the_pools_of_one_process_run_all_commands_on_one_executor(
    shared: SharedPools,
) -> None:
    class MHATokenToKVPool(SimpleNamespace):
        """Built on what was planned."""

    pool = MHATokenToKVPool(**vars(key_value_pool(shared.tokens)))
    shared.place_keys_and_values(pool)
    states: Any = SimpleNamespace(
        _slot_siblings=(),
        mamba_cache=SimpleNamespace(
            conv=[shared.slot_rows[None, :, :1024]],
            temporal=torch.zeros(0),
        ),
    )
    memory = PoolMemory()
    memory.shared = shared
    executor = memory.executor(SimpleNamespace(full_kv_pool=pool), states, PAGE)
    pool.k_buffer[1][PAGE : 2 * PAGE] = 3
    states.mamba_cache.conv[0][0, 1] = 4
    executor.run([Copy(Pool.KV, 1, 2), Copy(Pool.STATE, 1, 2), Zero(Pool.STATE, 1)])
    assert bool((pool.k_buffer[1][2 * PAGE : 3 * PAGE] == 3).all())
    assert not pool.k_buffer[0][2 * PAGE : 3 * PAGE].any()
    assert bool((states.mamba_cache.conv[0][0, 2] == 4).all())
    assert not states.mamba_cache.conv[0][0, 1].any()


# ------------------------------------------------------- what stands against it


def configure(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """SGLang's configurator on a GPU, and what it reads, as far as is looked at."""
    backends = ("prefill", "decode", "verify")
    mamba = dict.fromkeys([f"linear_attn_{one}_backend" for one in backends]) | {
        "linear_attn_backend": "triton",
        "mamba_backend": "triton",
    }
    seen = {
        "schedule": {"max_mamba_cache_size": None, "max_total_tokens": None},
        "mamba": mamba,
        "spec": {"speculative_algorithm": None},
        "configurator": {
            "post_capture_kv_active": False,
            "side_states": {},
            "attn_dp_size": 1,
            "model_config": SimpleNamespace(hf_config=SimpleNamespace()),
        },
    }
    for name, value in changes.items():
        (part,) = (part for part in seen.values() if name in part)
        part[name] = value
    made = {name: SimpleNamespace(**part) for name, part in seen.items()}
    running = SimpleNamespace(mamba=made["mamba"])
    monkeypatch.setattr(elastic, "get_schedule", lambda: made["schedule"])
    monkeypatch.setattr(elastic, "get_exec", lambda: running)
    monkeypatch.setattr(elastic, "get_spec", lambda: made["spec"])
    monkeypatch.setattr(
        "hybrid_plugin.engine.elastic_memory.obstacle", lambda device: None
    )
    configurator = made["configurator"]
    configurator._get_ple_req_pool_kwargs = lambda: configurator.side_states
    return configurator


def against(configurator: Any, device_type: str = "cuda") -> str | None:
    found = elastic.hindrance(device_type)
    return found or elastic.hindrance_of_pools(configurator)


def test_nothing_stands_against_sglangs_own_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert against(configure(monkeypatch)) is None
    flashinfer = configure(monkeypatch, linear_attn_decode_backend="flashinfer")
    assert against(flashinfer) is None


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("max_mamba_cache_size", 64, "drop --max-mamba-cache-size"),
        ("max_total_tokens", 8192, "drop --max-total-tokens"),
        ("post_capture_kv_active", True, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        ("side_states", {"short_conv_layer_ids": [1]}, "set elastic to false"),
        ("linear_attn_prefill_backend", "cutedsl", "--linear-attn-backend triton"),
        ("linear_attn_decode_backend", "helion", "--linear-attn-backend triton"),
        ("mamba_backend", "flashinfer", "--mamba-backend triton"),
    ],
)
def test_what_stands_against_it_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, way_out: str
) -> None:
    found = against(configure(monkeypatch, **{name: value}))
    assert found is not None and way_out in found and found.endswith(".")


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({}, None),
        ({"attn_dp_size": 2}, "drop --enable-dp-attention"),
        ({"linear_attn_decode_backend": "flashinfer"}, "--linear-attn-verify-backend"),
        ({"linear_attn_backend": "flashinfer"}, "--linear-attn-verify-backend triton"),
        ({"linear_attn_verify_backend": "helion"}, "--linear-attn-verify-backend"),
        (
            {
                "linear_attn_decode_backend": "flashinfer",
                "linear_attn_verify_backend": "triton",
            },
            None,
        ),
    ],
)
def test_what_stands_against_drafts_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], way_out: str | None
) -> None:
    found = against(configure(monkeypatch, speculative_algorithm="NGRAM", **changes))
    assert (found is None) == (way_out is None)
    assert way_out is None or (found is not None and way_out in found)
    alone = against(configure(monkeypatch, **changes))
    assert alone is None or way_out is None


def test_the_cpu_s_kernels_take_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    configurator = configure(monkeypatch, mamba_backend="flashinfer")
    assert against(configurator, "cpu") is None


# ------------------------------------------------------- drafts beside the model

DRAFT_HEADS, ROWS = 1, 5
ROW_TENSORS = (
    RowTensor(3, (4, 10, 3), torch.bfloat16),
    RowTensor(3, (4, 2, 8, 16), torch.float32, apart=True),
)


@pytest.fixture(params=[False, True], ids=["layer-major", "packed"])
def with_drafts(request: pytest.FixtureRequest) -> Iterator[SharedPools]:
    names = tuple(f"KV tensor {i}" for i in range(2 * LAYERS))
    layout = CacheLayout(
        page_size=PAGE,
        attention=(
            AttentionGroup(names, TOKEN_BYTES * PAGE // (2 * LAYERS)),
            AttentionGroup(("keys", "values"), DRAFT_HEADS * WIDTH * 2 * PAGE),
        ),
        states=(StateGroup(("states",), 126 << 10),),
        packed=request.param,
        scratch=ScratchLayout(
            ROWS, apart_bytes(ROW_TENSORS), together_bytes(ROW_TENSORS)
        ),
    )
    made = plan_elastic(
        layout, BUDGET, block_bytes=BLOCK, max_model_len=512, max_sequences=4
    )
    memory = HostArena(BUDGET + BLOCK, BLOCK)
    assert memory.hold(memory.usable) is None
    yield SharedPools(made, memory, ROW_TENSORS)
    memory.close()


def draft_pool(tokens: int, heads: int = DRAFT_HEADS) -> Any:
    """One layer of a model with other heads."""
    shape = (tokens + PAGE, heads, WIDTH)
    return SimpleNamespace(
        layer_num=1,
        store_dtype=torch.bfloat16,
        _kv_buffer_shapes=lambda: (shape, shape),
    )


def test_a_page_carries_the_draft_model_s_keys_and_values(
    with_drafts: SharedPools,
) -> None:
    shared = with_drafts
    target, draft = key_value_pool(shared.tokens), draft_pool(shared.tokens)
    shared.place_keys_and_values(target)
    executor = shared.start()
    assert not shared.is_complete
    shared.place_keys_and_values(draft)  # SGLang loads draft models later
    assert shared.is_complete
    tensors = [*target.k_buffer, *target.v_buffer, *draft.k_buffer, *draft.v_buffer]
    for number, tensor in enumerate(tensors, start=1):
        tensor[PAGE : 2 * PAGE] = number
    executor.run([Copy(Pool.KV, 1, 2)])
    for number, tensor in enumerate(tensors, start=1):
        assert bool((tensor[2 * PAGE : 3 * PAGE] == number).all())
        assert bool((tensor[PAGE : 2 * PAGE] == number).all())
    executor.run([Zero(Pool.KV, 1)])
    assert not any(bool(tensor[PAGE : 2 * PAGE].any()) for tensor in tensors)


def test_a_draft_model_of_other_sizes_is_refused(with_drafts: SharedPools) -> None:
    with_drafts.place_keys_and_values(key_value_pool(with_drafts.tokens))
    with pytest.raises(ConfigError, match="planned for another KV cache"):
        with_drafts.place_keys_and_values(draft_pool(with_drafts.tokens, 2))


def test_rows_of_the_scratch_come_and_go(with_drafts: SharedPools) -> None:
    shared = with_drafts
    shared.place_keys_and_values(key_value_pool(shared.tokens))
    executor = shared.start()
    windows, states = shared.scratch
    per = shared.plan.pools[Pool.SCRATCH].per_granule
    granules = shared.plan.ids(Pool.SCRATCH) // per
    assert windows.shape == (3, granules * per, 4, 10, 3)
    assert states.shape == (3, granules * per, 4, 2, 8, 16) and states.is_contiguous()
    assert states.shape[1] >= ROWS
    more = tuple(range(1, granules))
    if more:
        executor.run([Map(Pool.SCRATCH, more)])
    before = shared.memory.mapped
    addresses = windows.data_ptr(), states.data_ptr()
    for number, tensor in enumerate((windows, states), start=1):
        tensor.fill_(number)
    assert bool((windows == 1).all() and (states == 2).all())
    if more:
        executor.run([Unmap(Pool.SCRATCH, more)])
        taken = len(more) * shared.plan.pools[Pool.SCRATCH].granule_bytes
        assert shared.memory.mapped == before - taken
        assert not states[:, per:].any() and not windows[:, per:].any()
    assert bool((windows[:, :per] == 1).all() and (states[:, :per] == 2).all())
    assert addresses == (windows.data_ptr(), states.data_ptr())


# ------------------------------------------------- what SGLang is told is left


def core(made: ElasticPlan) -> HybridCache:
    pools = made.build()
    policy = HybridConfig().snapshot_policy(PAGE)
    return HybridCache(pools.pages, pools.slots, PAGE, policy, broker=pools.broker)


def serve(cache: HybridCache, rid: str, tokens: list[int], *, end: bool) -> bool:
    """One sequence, computed to its end, and finished if `end`."""
    found = cache.look_up(tokens)
    if cache.admit(rid, found, num_tokens=len(tokens)) is None:
        return False
    cache.drain_commands()
    cache.advance(rid, len(tokens))
    if end:
        cache.finish(rid, tokens, len(tokens))
    return True


def test_what_is_left_and_cached_and_used_adds_up_whatever_moves() -> None:
    cache = core(plan())
    stock: Any = SimpleNamespace(dtype=None, device="cpu", get_kvcache=lambda: None)
    tokens = HybridTokenAllocator(cache, stock, Executor({}))
    slots = HybridSlotAllocator(cache, "cpu")
    sizes = set()
    for number in range(60):
        length = 400 if 20 <= number < 40 else 20
        prompt = [number * 1000 + i for i in range(length)]
        serve(cache, str(number), prompt, end=number % 4 != 0)
        pages = cache.pages
        cached, used = pages.reclaimable * PAGE, pages.in_use * PAGE
        assert tokens.available_size() + cached + used == tokens.size
        assert tokens.available_size() >= pages.free * PAGE
        assert slots.available_size() >= cache.slots.free
        sizes.add(tokens.size)
    assert cache.broker.stats.moves > 10
    assert len(sizes) > 3


def test_what_is_said_to_be_left_can_be_had_and_no_page_more() -> None:
    cache = core(plan())
    for number in range(8):
        serve(
            cache, str(number), [number * 1000 + i for i in range(90)], end=number > 2
        )
    for pool, most in ((Pool.KV, most_pages(cache)), (Pool.STATE, most_slots(cache))):
        assert cache.broker.fits({pool: most})
        assert not cache.broker.fits({pool: most + 1})
    assert cache.broker.provide({Pool.KV: most_pages(cache)})
    assert cache.pages.free == most_pages(cache)
