# SPDX-License-Identifier: Apache-2.0
"""Every token that attention reads is there, whether it was computed or came back.

As `test_windows_traffic`, on SGLang's own pools with marks in place of KV, but what the
device evicts is restored from host memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("sglang")

from sglang.srt.runtime_context import get_context

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Await, Command, Load, Pool, Store
from hybrid_plugin.core.memory.attention_windows import AttentionWindow
from hybrid_plugin.core.memory.pools import NoSlots, PagePool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.tiers.host_plan import plan_host
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.sglang.allocator import HybridWindowAllocator
from tests.core.support import ByMinimum
from tests.sglang.fakes import PAGE, POLICY
from tests.sglang.test_windows_traffic import (
    WINDOWS,
    MisreadError,
    WindowBench,
    serve,
)

ROW = PAGE * 2 * 2 * 4
"""Bytes of a page of either pool: keys and values of two numbers in float32."""


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


class HostWindowBench(WindowBench):
    """With host memory for everything, from which a load takes some steps."""

    def __init__(self, window: AttentionWindow, **pools: int) -> None:
        super().__init__(window, **pools)
        self.waits = 0
        self.clock.token_seconds = 1.0

    def make_core(self, pages: int, slots: int) -> HybridCache:
        plan = plan_host({Pool.KV: ROW, Pool.window(0): ROW}, 1 << 18)
        return HybridCache(
            PagePool(pages),
            NoSlots(),
            PAGE,
            POLICY,
            windows=(WindowGroup(self.window, PagePool(self.window_pages)),),
            eviction=ByMinimum(),
            host=HostTier(plan, PAGE, ByMinimum(), (self.window,)),
            rates=TransferRates(load_bytes_per_second=500.0),
        )

    def make_allocator(self) -> HybridWindowAllocator:
        allocator = super().make_allocator()
        assert self.core.host is not None
        allocator.executor.attach_host(self.core.host.plan)
        return allocator

    def step(self, chunk: int | None = None) -> list[str]:
        self.clock.now += 1.0
        ran = super().step(chunk)
        self.waits += self.core.lower_tiers.restores_due is not None
        self.cache.idle()
        return ran


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_what_comes_back_is_what_was_computed(window: AttentionWindow) -> None:
    bench = HostWindowBench(window, pages=70, window_pages=26)
    serve(bench, seed=3)
    assert bench.core.host is not None
    stats = bench.core.host.stats
    assert bench.core.stats.pages_evicted > 0
    assert stats.loads > 10 and stats.hit_tokens > 300
    assert bench.waits > 10


@pytest.mark.parametrize("lost", [(Store,), (Load, Await)], ids=["stores", "loads"])
def test_what_is_not_copied_is_noticed(
    lost: tuple[type, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    drain = HybridCache.drain_commands

    def lossy(self: HybridCache) -> list[Command]:
        return [one for one in drain(self) if not isinstance(one, lost)]

    monkeypatch.setattr(HybridCache, "drain_commands", lossy)
    with pytest.raises(MisreadError):
        serve(HostWindowBench(WINDOWS["sliding"], pages=70, window_pages=26), seed=3)
