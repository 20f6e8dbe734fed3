# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.elastic import ElasticBroker
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.stats import CacheStats, OuterStats
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.core.tree.events import EventLog
from hybrid_plugin.engine import metrics as metrics_module
from hybrid_plugin.engine.metrics import CacheMetrics, Growth, snapshot_of
from tests.core.elastic import ElasticSetup
from tests.core.support import Economical, make_cache, serve, span, start

_ENGINES = itertools.count()


@pytest.fixture
def labels() -> dict[str, str]:
    """Labels no other test uses: the registry is the process's."""
    return {"engine": f"test-{next(_ENGINES)}"}


def value(name: str, labels: Mapping[str, str], **more: str) -> float | None:
    sample: float | None = REGISTRY.get_sample_value(
        f"hybrid_cache_{name}", {**labels, **more}
    )
    return sample


def numbers(**changed: int) -> dict[str, int]:
    """What a fresh cache would send, but for `changed`."""
    return snapshot_of(make_cache(pages=9, slots=5)) | changed


def test_snapshot_has_every_level_and_total() -> None:
    cache = make_cache(pages=9, slots=5)
    serve(cache, "a", span(0, 10))
    start(cache, "b", span(0, 14))
    found = snapshot_of(cache)
    assert found.items() >= cache.stats.as_dict().items()
    for pool, level in cache.levels().items():
        kinds = [found[f"level/{pool}/{kind}"] for kind in ("used", "cached", "free")]
        assert kinds == [level.used, level.cached, level.free]
    assert found["hit_tokens"] == 10
    assert found["moves"] == found["moved_bytes"] == found["move_seconds"] == 0
    assert not any(name.startswith("mapped") for name in found), (
        "the pools share no memory"
    )


def test_time_that_was_waited_is_sent_in_microseconds() -> None:
    plan = HostPlan({Pool.KV: 1, Pool.STATE: 4}, block_bytes=4, blocks=16)
    cache = HybridCache(
        PagePool(9),
        SlotPool(5),
        4,
        SnapshotPolicy(4, 1_000_000),
        eviction=Economical(),
        host=HostTier(plan, 4, Economical()),
        rates=TransferRates(1.0),
    )
    assert cache.host is not None
    cache.host.stats.wait_seconds = 0.5
    assert snapshot_of(cache)["host_wait_seconds"] == 500_000


def test_snapshot_of_pools_that_share_memory() -> None:
    cache = ElasticSetup(pages=12).build()
    serve(cache, "a", span(0, 10))
    assert isinstance(cache.broker, ElasticBroker)
    cache.broker.stats.device_seconds = 0.25
    found = snapshot_of(cache)
    assert found["mapped/kv"] + found["mapped/state"] + cache.broker.slack == 20
    assert found["moves"] == cache.broker.stats.moves > 0
    assert found["move_seconds"] == 250_000, "whole microseconds"
    assert all(isinstance(number, int) for number in found.values())


def test_gauges_follow_the_levels(labels: dict[str, str]) -> None:
    metrics = CacheMetrics(labels)
    metrics.publish(numbers() | {"level/kv/used": 5, "level/kv/free": 3})
    levels = {"level/kv/used": 2, "level/kv/cached": 4, "level/kv/free": 2}
    metrics.publish(numbers() | levels | {"level/window0/free": 7})
    kinds = ("used", "cached", "free")
    found = [value("pages", labels, pool="kv", kind=kind) for kind in kinds]
    assert found == [2, 4, 2]
    assert value("pages", labels, pool="window0", kind="free") == 7
    assert value("slots", labels, pool="state", kind="free") == 4


def test_counters_advance_to_the_totals(labels: dict[str, str]) -> None:
    metrics = CacheMetrics(labels)
    for total in (7, 7, 19):
        metrics.publish(numbers(hit_tokens=total))
        assert value("hit_tokens_total", labels) == total


def test_moved_memory_is_published(labels: dict[str, str]) -> None:
    metrics = CacheMetrics(labels)
    metrics.publish(numbers(moves=3, move_seconds=250_000))
    assert value("mapped_bytes", labels, pool="kv") is None
    metrics.publish(numbers(moves=4, move_seconds=750_000) | {"mapped/kv": 5})
    assert value("moves_total", labels) == 4
    assert value("move_seconds_total", labels) == pytest.approx(0.75)
    assert value("mapped_bytes", labels, pool="kv") == 5


def test_averages_of_evictions_are_published(labels: dict[str, str]) -> None:
    cache = make_cache(pages=9, slots=5)
    fresh = snapshot_of(cache)
    assert fresh["average/evicted_worth"] == 0, "nothing was evicted"
    cache.memory._lost, cache.memory._freed = 2.5, 1 << 30
    cache.memory.lifetime = 17.25
    found = snapshot_of(cache)
    assert found["average/evicted_worth"] == 2500, "a whole number of thousandths"
    metrics = CacheMetrics(labels)
    for sent in (fresh, found):
        metrics.publish(sent)
    assert value("evicted_worth", labels) == pytest.approx(2.5)
    assert value("lifetime_admissions", labels) == pytest.approx(17.25)


def test_evictions_move_the_averages() -> None:
    cache = HybridCache(
        PagePool(33), SlotPool(5), 4, SnapshotPolicy(4), eviction=Economical()
    )
    before = snapshot_of(cache)
    for first in range(0, 1000, 100):
        serve(cache, str(first), span(first, first + 10))
    assert cache.stats.snapshots_evicted > 0
    found = snapshot_of(cache)
    for name in ("average/evicted_worth", "average/lifetime_admissions"):
        assert found[name] > before[name]


@pytest.mark.parametrize(
    "name", CacheStats().as_dict().keys() - metrics_module._BY_REASON.keys()
)
def test_every_total_is_published(name: str, labels: dict[str, str]) -> None:
    CacheMetrics(labels).publish(numbers(**{name: 3}))
    assert value(f"{name}_total", labels) == 3


@pytest.mark.parametrize(
    "name",
    [
        name
        for tier in ("disk", "peer")
        for name in OuterStats().as_dict(tier)
        if name not in metrics_module._BY_REASON
    ],
)
def test_every_total_of_outer_tiers_is_published(
    name: str, labels: dict[str, str]
) -> None:
    CacheMetrics(labels).publish(numbers(**{name: 3}))
    assert value(f"{name}_total", labels) == 3


def test_failures_are_counted_by_their_reason(labels: dict[str, str]) -> None:
    cache = make_cache(pages=9, slots=5)
    tier: Any = SimpleNamespace(
        name="disk", stats=OuterStats(), used_bytes=77, offers_bundles=False
    )
    cache.lower_tiers.outer = (tier,)
    metrics = CacheMetrics(labels)
    metrics.publish(snapshot_of(cache))
    assert value("disk_used_bytes", labels) == 77
    for _ in range(2):
        tier.stats.load_failures["corrupt"] += 2
        tier.stats.store_failures["disk_full"] += 1
        metrics.publish(snapshot_of(cache))
    failed = value("disk_load_failures_total", labels, reason="corrupt")
    assert failed == 4
    assert value("disk_store_failures_total", labels, reason="disk_full") == 2
    assert value("disk_load_failures_total", labels, reason="torn") is None


def test_computed_tokens_are_counted_by_their_reason(labels: dict[str, str]) -> None:
    cache = make_cache(pages=9, slots=5)
    metrics = CacheMetrics(labels)
    metrics.publish(snapshot_of(cache))
    assert value("computed_tokens_total", labels, reason="kv_evicted") == 0
    serve(cache, "a", span(0, 10))
    serve(cache, "b", (1, 2))
    metrics.publish(snapshot_of(cache))
    assert value("computed_tokens_total", labels, reason="new") == 10
    assert value("computed_tokens_total", labels, reason="too_short") == 2


def test_engines_of_one_process_are_told_apart(labels: dict[str, str]) -> None:
    other = {"engine": labels["engine"] + "-other"}
    first, second = CacheMetrics(labels), CacheMetrics(other)
    first.publish(numbers(refusals=2) | {"level/kv/used": 1})
    second.publish(numbers(refusals=5) | {"level/kv/used": 6})
    first.publish(numbers(refusals=3) | {"level/kv/used": 1})
    assert value("refusals_total", labels) == 3
    assert value("refusals_total", other) == 5
    assert value("pages", labels, pool="kv", kind="used") == 1
    assert value("pages", other, pool="kv", kind="used") == 6


def test_numbers_of_drafts(labels: dict[str, str]) -> None:
    cache = make_cache(pages=20, slots=9)
    start(cache, "a", span(0, 10))
    cache.advance("a", 10)
    cache.drain_commands()
    cache.lend_drafts({"a": 3}, {})
    cache.verify("a", 10, 3)
    cache.accept("a", 2)
    found = snapshot_of(cache)
    assert found["count/draft_slots"] == found["drafts_lent"] == 3
    assert found["average/accepted_drafts"] == 2000
    metrics = CacheMetrics(labels)
    metrics.publish(found)
    assert value("draft_slots", labels) == 3
    assert value("accepted_drafts", labels) == 2
    metrics.publish(found | {"count/draft_slots": 0})
    assert value("draft_slots", labels) == 0


def test_announced_pages_are_counted_where_events_are_on(
    labels: dict[str, str],
) -> None:
    cache = make_cache()
    assert "count/announced_pages" not in snapshot_of(cache)
    cache.report_to(EventLog(cache.page_size))
    start(cache, "a", span(0, 10))
    cache.advance("a", 10)
    cache.drain_commands()
    cache.finish("a", span(0, 10), 10)
    CacheMetrics(labels).publish(snapshot_of(cache))
    assert value("announced_pages", labels) == 2


def test_reports_to_several_processes_are_counted_once(labels: dict[str, str]) -> None:
    """Each has counters of its own, which Prometheus sums; here they share them."""
    growth = Growth()
    processes = [CacheMetrics(labels), CacheMetrics(labels)]
    for step, total in enumerate((7, 7, 19, 20)):
        sent = numbers(hit_tokens=total, move_seconds=total * 1000)
        sent |= {"reason/computed_tokens/new": 2 * total, "level/kv/used": total}
        processes[step % 2].add(growth.take(sent))
        assert value("hit_tokens_total", labels) == total
        found = value("computed_tokens_total", labels, reason="new")
        assert found == 2 * total
        assert value("move_seconds_total", labels) == pytest.approx(total / 1000)
        assert value("pages", labels, pool="kv", kind="used") == total
