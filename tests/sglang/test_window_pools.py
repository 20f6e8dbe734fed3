# SPDX-License-Identifier: Apache-2.0
"""SGLang's two pools under the core: what is taken over, what is refused, who waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_context

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Copy, Pool
from hybrid_plugin.core.memory.attention_windows import ChunkedLocal, SlidingWindow
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.core.memory.pools import NoSlots
from hybrid_plugin.engine.metrics import snapshot_of
from hybrid_plugin.sglang import window_pools
from hybrid_plugin.sglang.log import logger
from hybrid_plugin.sglang.pool_memory import PoolMemory
from tests.sglang.fakes import PAGE, Bench, pausing, request
from tests.sglang.test_windows_traffic import WindowBench

SIZE = 16
TOKENS, WINDOW_TOKENS = 512, 256
BYTES = 4


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


class Pools(msgspec.Struct):
    """As much of SGLang's `_InitializedPools` as is replaced."""

    token_to_kv_pool_allocator: Any
    req_to_token_pool: Any


def pools(window_tokens: int = WINDOW_TOKENS) -> Pools:
    """Two layers of full attention and one with windows, of other heads."""
    pool = SWAKVPool(
        size=TOKENS,
        size_swa=window_tokens,
        page_size=SIZE,
        dtype=torch.float32,
        head_num=2,
        head_dim=8,
        swa_head_num=1,
        swa_head_dim=4,
        swa_v_head_dim=4,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0, 2],
        device="cpu",
    )
    stock = SWATokenToKVPoolAllocator(
        TOKENS, window_tokens, SIZE, torch.float32, "cpu", pool, False
    )
    rows = ReqToTokenPool(
        size=4, max_context_len=64, device="cpu", enable_memory_saver=False
    )
    return Pools(stock, rows)


def configurator(**model: Any) -> Any:
    """As much of SGLang's `KVCacheConfigurator` as is read."""
    known = {"context_len": 4096, "is_local_attention_model": False} | model
    return SimpleNamespace(
        model_config=SimpleNamespace(**known),
        sliding_window_size=31,
        post_capture_kv_active=False,
    )


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's arguments about scheduling."""
    found = SimpleNamespace(chunked_prefill_size=64, page_size=SIZE)
    monkeypatch.setattr(window_pools, "get_schedule", lambda: found)
    monkeypatch.setattr(window_pools, "delimiters", lambda options: None)
    return found


def take_over(given: Pools, of: Any = None, **options: Any) -> Any:
    found = window_pools.take_over(
        of or configurator(), given, HybridConfig(**options), PoolMemory()
    )
    return found.token_to_kv_pool_allocator


@pytest.mark.usefixtures("schedule")
def test_the_core_owns_all_pages_but_the_reserved_ones() -> None:
    given = pools()
    allocator = take_over(given)
    core = allocator.cache
    assert isinstance(core.slots, NoSlots)
    assert [group.window for group in core.windows] == [SlidingWindow(32)]
    assert core.pages.usable * SIZE == TOKENS == allocator.size
    assert core.windows[0].pages.usable * SIZE == WINDOW_TOKENS == allocator.size_swa
    numbers = snapshot_of(core)
    assert numbers["level/kv/free"] == TOKENS // SIZE
    assert numbers["level/window0/free"] == WINDOW_TOKENS // SIZE
    assert allocator.get_kvcache() is given.token_to_kv_pool_allocator.get_kvcache()


@pytest.mark.usefixtures("schedule")
def test_commands_reach_both_pools() -> None:
    allocator = take_over(pools())
    kv = allocator.get_kvcache()
    for pool in (kv.full_kv_pool, kv.swa_kv_pool):
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[2 * SIZE : 3 * SIZE] = 5
    allocator.executor.run([Copy(Pool.KV, 2, 4), Copy(Pool.window(0), 2, 7)])
    for pool, page in ((kv.full_kv_pool, 4), (kv.swa_kv_pool, 7)):
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            assert (buffer[page * SIZE : (page + 1) * SIZE] == 5).all()
            assert int((buffer == 5).sum()) == 2 * SIZE * buffer[0].numel()


@pytest.mark.usefixtures("schedule")
def test_sizes_of_pages_are_those_of_the_tensors() -> None:
    memory = PoolMemory()
    window_pools.take_over(configurator(), pools(), HybridConfig(), memory)
    plan = memory.plan
    assert plan is not None
    assert plan.sizes == PoolSizes(TOKENS // SIZE + 1, 2, (WINDOW_TOKENS // SIZE + 1,))
    assert plan.layout.page_bytes == SIZE * 2 * 2 * (2 * 8) * BYTES
    assert plan.layout.window_page_bytes == (SIZE * 2 * (1 * 4) * BYTES,)
    first, second = plan.describe()
    assert "33 KV pages of 16 tokens" in first and "slots" not in first
    assert "a sliding window of 32: 17 KV pages" in second


@pytest.mark.usefixtures("schedule")
def test_elastic_pools_are_off_with_a_sentence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger.name):
        take_over(pools())
    said = [m for m in caplog.messages if "elastic pools" in m]
    assert len(said) == 1 and "do not hold SGLang's window pools yet" in said[0]
    with pytest.raises(ConfigError, match="elastic pools do not hold SGLang's window"):
        take_over(pools(), elastic=True)


@pytest.mark.usefixtures("schedule")
def test_a_window_pool_that_is_too_small_for_one_sequence() -> None:
    # The window lies in 3 pages at most, a chunk in 5; one is reserved.
    assert take_over(pools(8 * SIZE)).cache.windows[0].pages.capacity == 9
    with pytest.raises(ConfigError, match="raise --swa-full-tokens-ratio") as refusal:
        take_over(pools(7 * SIZE))
    assert (
        "a sliding window of 32 holds 8 pages, and one sequence of 512 tokens"
        in str(refusal.value)
    )
    # What is never longer than its window needs no more pages than it has.
    short = configurator(context_len=64)
    assert take_over(pools(4 * SIZE), short).cache.windows[0].pages.capacity == 5


@pytest.mark.usefixtures("schedule")
def test_local_chunks_need_a_backend_that_keeps_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = configurator(is_local_attention_model=True, attention_chunk_size=64)
    monkeypatch.setattr(window_pools, "attention_backends", lambda: ("fa3", "fa3"))
    assert take_over(pools(), of).cache.windows[0].window == ChunkedLocal(64)
    monkeypatch.setattr(window_pools, "attention_backends", lambda: ("fa3", "triton"))
    with pytest.raises(ConfigError, match="backend triton reads beyond local chunks"):
        take_over(pools(), of)


@pytest.mark.usefixtures("schedule")
def test_other_allocators_and_late_sizes_are_refused() -> None:
    late = configurator()
    late.post_capture_kv_active = True
    with pytest.raises(ConfigError, match="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        take_over(pools(), late)
    given = pools()
    given.token_to_kv_pool_allocator = SimpleNamespace()
    with pytest.raises(ConfigError, match="of the kind SimpleNamespace"):
        take_over(given)


@pytest.mark.usefixtures("schedule")
def test_a_tensor_that_a_later_version_adds() -> None:
    given = pools()
    given.token_to_kv_pool_allocator.get_kvcache().summaries = torch.zeros(5, 8)
    with pytest.raises(ConfigError, match=r"SWAKVPool\.summaries"):
        take_over(given)


@pytest.mark.usefixtures("schedule")
def test_the_budget_holds_for_both_pools_and_their_reserved_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = SimpleNamespace(_full_cell_bytes=lambda: 100, _swa_cell_bytes=lambda: 20)
    monkeypatch.setattr(
        window_pools, "create_memory_pool_configurator", lambda of: cells
    )
    free = 1 << 30
    budget = HybridConfig(gpu_memory_budget=1 << 20)
    on_cpu = SimpleNamespace(device="cpu")
    assert window_pools.limited(on_cpu, free, HybridConfig()) == free
    assert window_pools.limited(on_cpu, free, budget) == (1 << 20) - 120 * SIZE
    assert window_pools.limited(on_cpu, 5000, budget) == 5000


# ------------------------------------------------------------------- who waits


def bench(window_pages: int, pages: int = 200) -> WindowBench:
    return WindowBench(SlidingWindow(8), pages=pages, window_pages=window_pages)


def test_a_prompt_longer_than_the_window_pool_is_served() -> None:
    """It holds its window and a chunk at once: 3 pages and 3."""
    small = bench(window_pages=7)
    req = request("long", range(100))
    small.queue(req)
    ran = 0
    while not req.output_ids:
        assert small.step() == ["long"]
        ran += 1
        assert small.core.windows[0].pages.in_use <= 6
    assert ran == 9
    small.check()


def test_pages_of_full_attention_are_reserved_for_the_whole_prompt() -> None:
    small = bench(window_pages=30, pages=12)
    first, second = request("first", range(30)), request("second", range(100, 120))
    small.queue(first, second)
    assert small.step() == ["first"]
    assert small.core.promised_pages() == 5
    assert small.core.pages.free == 8
    small.adder = small.new_adder()
    assert small.add(second) is AddReqResult.NO_TOKEN
    assert not small.allocator.check_decode_capacity(num_tokens=4 * PAGE)
    assert small.allocator.check_decode_capacity(num_tokens=3 * PAGE)
    while first.extend_end < 30:
        assert small.step() == ["first"]
    small.check()


def test_a_request_waits_for_pages_of_windows_and_is_served() -> None:
    """Two have all of them reserved; the third waits, though most are free."""
    small = bench(window_pages=13)
    reqs = [request(name, range(100 * i, 100 * i + 60)) for i, name in enumerate("abc")]
    small.queue(*reqs)
    assert small.step() == ["a"]
    assert small.step() == ["a"]
    small.adder = small.new_adder()
    small.add(reqs[1])
    assert small.cache.is_live(reqs[1])
    small.adder = small.new_adder()
    assert small.add(reqs[2]) is AddReqResult.NO_TOKEN
    assert small.core.windows[0].pages.free > 3


@pytest.mark.parametrize("windows", [True, False])
def test_a_prompt_with_images_is_not_cut_for_a_snapshot(windows: bool) -> None:
    """Where attention looks both ways within an image, which no chunk may split."""
    ends = []
    for images in (None, object()):
        served = bench(window_pages=30) if windows else Bench()
        req = pausing("a", range(10), at=8)
        req.multimodal_inputs = images
        served.queue(req)
        served.step()
        ends.append(req.extend_end)
    assert ends == [8, 10 if windows else 8]
