# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from prometheus_client import REGISTRY

from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.engine.metrics import CacheMetrics, snapshot_of
from tests.core.elastic import ElasticSetup
from tests.core.support import make_cache, serve, span, start

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
    assert found.items() >= (cache.levels() | cache.stats.as_dict()).items()
    assert found["hit_tokens"] == 10
    assert found["moves"] == found["moved_bytes"] == found["move_seconds"] == 0
    assert "mapped_pages" not in found, "the pools share no memory"


def test_snapshot_of_pools_that_share_memory() -> None:
    cache = ElasticSetup(pages=12).build()
    serve(cache, "a", span(0, 10))
    assert cache.elastic is not None
    cache.elastic.stats.device_seconds = 0.25
    found = snapshot_of(cache)
    assert found["mapped_pages"] + found["mapped_slots"] + cache.elastic.slack == 20
    assert found["moves"] == cache.elastic.stats.moves > 0
    assert found["move_seconds"] == 250_000, "whole microseconds"
    assert all(isinstance(number, int) for number in found.values())


def test_gauges_follow_the_levels(labels: dict[str, str]) -> None:
    metrics = CacheMetrics(labels)
    metrics.publish(numbers(pages_used=5, pages_free=3))
    metrics.publish(numbers(pages_used=2, pages_cached=4, pages_free=2))
    found = [value("pages", labels, kind=kind) for kind in ("used", "cached", "free")]
    assert found == [2, 4, 2]
    assert value("slots", labels, kind="free") == 4


def test_counters_advance_to_the_totals(labels: dict[str, str]) -> None:
    metrics = CacheMetrics(labels)
    for total in (7, 7, 19):
        metrics.publish(numbers(hit_tokens=total))
        assert value("hit_tokens_total", labels) == total


def test_moved_memory_is_published(labels: dict[str, str]) -> None:
    metrics = CacheMetrics(labels)
    metrics.publish(numbers(moves=3, move_seconds=250_000))
    assert value("mapped_bytes", labels, kind="pages") is None
    metrics.publish(numbers(moves=4, move_seconds=750_000, mapped_pages=5))
    assert value("moves_total", labels) == 4
    assert value("move_seconds_total", labels) == pytest.approx(0.75)
    assert value("mapped_bytes", labels, kind="pages") == 5


@pytest.mark.parametrize("name", CacheStats().as_dict())
def test_every_total_is_published(name: str, labels: dict[str, str]) -> None:
    CacheMetrics(labels).publish(numbers(**{name: 3}))
    assert value(f"{name}_total", labels) == 3


def test_engines_of_one_process_are_told_apart(labels: dict[str, str]) -> None:
    other = {"engine": labels["engine"] + "-other"}
    first, second = CacheMetrics(labels), CacheMetrics(other)
    first.publish(numbers(refusals=2, pages_used=1))
    second.publish(numbers(refusals=5, pages_used=6))
    first.publish(numbers(refusals=3, pages_used=1))
    assert value("refusals_total", labels) == 3
    assert value("refusals_total", other) == 5
    assert value("pages", labels, kind="used") == 1
    assert value("pages", other, kind="used") == 6
