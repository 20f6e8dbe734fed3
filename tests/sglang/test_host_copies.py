# SPDX-License-Identifier: Apache-2.0
"""The host tier's memory on SGLang's ranks: planned, taken, measured, or refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.tiers.host_plan import plan_host
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.device.host.ring import rings_for
from hybrid_plugin.sglang import host_copies
from hybrid_plugin.sglang.pool_memory import PoolMemory
from tests.core.support import ByMinimum
from tests.sglang.fakes import PAGE, POLICY
from tests.sglang.test_memory import PAGES, MHATokenToKVPool, StatePool

HOST = HybridConfig(host_memory=1 << 20)
KV_BYTES = 2 * 2 * PAGE * 2 * 3 * 4
"""Keys and values of a page in two layers, of 2 heads with 3 numbers in float32."""
STATE_BYTES = 2 * (5 * 3 * 2 + 2 * 4 * 3 * 4)


def ranks(monkeypatch: pytest.MonkeyPatch, slowest: int | None = None) -> None:
    """Have others beside this rank; the slowest loads so many bytes a second."""
    monkeypatch.setattr(
        host_copies.elastic, "least_of_all_ranks", lambda own: slowest or own
    )
    first = SimpleNamespace(tp_rank=0, pp_rank=0)
    monkeypatch.setattr(host_copies.pipeline, "get_parallel", lambda: first)


def parts(**rows: int) -> tuple[HybridCache, Executor]:
    """A cache whose host rows have so many bytes, and the pools of a rank."""
    planned = {Pool.KV: KV_BYTES, Pool.STATE: STATE_BYTES} | rows
    cache = HybridCache(
        PagePool(PAGES),
        SlotPool(8),
        PAGE,
        POLICY,
        eviction=ByMinimum(),
        host=HostTier(plan_host(planned, 1 << 20), PAGE, ByMinimum()),
        rates=TransferRates(math.inf),
    )
    pools: Any = SimpleNamespace(full_kv_pool=MHATokenToKVPool(PAGES * PAGE))
    return cache, PoolMemory().executor(pools, StatePool(), PAGE)


def test_copies_pass_through_memory_of_a_gpu() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert host_copies.device_bytes(HOST, gpu) == rings_for(gpu).bytes > 0
    assert host_copies.device_bytes(HOST, cpu) == 0
    assert host_copies.device_bytes(HybridConfig(), gpu) == 0


def test_a_load_is_as_fast_as_on_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks(monkeypatch)
    cache, executor = parts()
    host_copies.attach(cache, executor)
    assert isinstance(executor.host, HostCopies)
    assert cache.rates is not None
    assert 1e6 < cache.rates.load_bytes_per_second < 1e13
    ranks(monkeypatch, slowest=12345)
    cache, executor = parts()
    host_copies.attach(cache, executor)
    assert cache.rates is not None and cache.rates.load_bytes_per_second == 12345


def test_more_of_a_page_than_was_planned_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a draft model has KV that SGLang did not count."""
    ranks(monkeypatch)
    with pytest.raises(ConfigError, match=r"^host_memory: .* 383; leave it out\.$"):
        host_copies.attach(*parts(kv=KV_BYTES - 1))


def test_memory_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Executor, plan: Any) -> None:
        raise MemoryError("no 7 bytes of host memory")

    monkeypatch.setattr(Executor, "attach_host", refuse)
    with pytest.raises(ConfigError, match=r"^host_memory: no 7 bytes .*; lower it\.$"):
        host_copies.attach(*parts())
