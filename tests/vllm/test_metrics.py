# SPDX-License-Identifier: Apache-2.0
"""The cache's numbers in what vLLM's scheduler reports to its API servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY
from vllm.v1.metrics.stats import SchedulerStats

from hybrid_plugin.engine.metrics import CacheMetrics
from hybrid_plugin.vllm import metrics
from hybrid_plugin.vllm.activation import SCHEDULER
from hybrid_plugin.vllm.metrics import HybridStatLogger, StatsSender
from tests.core.support import make_cache, serve, span

MODEL = "reports"


@pytest.fixture(autouse=True)
def few_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other tests in this process: names are registered with them."""

    def made(labels: dict[str, str]) -> CacheMetrics:
        assert labels == {"model_name": MODEL, "engine": "1"}
        return CacheMetrics({"engine": MODEL})

    monkeypatch.setattr(metrics, "CacheMetrics", made)


def logger(scheduler: str | None = SCHEDULER) -> HybridStatLogger:
    """Of an API server."""
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
        model_config=SimpleNamespace(served_model_name=MODEL),
    )
    return HybridStatLogger(config, 1)


def total(name: str) -> float | None:
    name = f"hybrid_cache_{name}"
    found: float | None = REGISTRY.get_sample_value(name, {"engine": MODEL})
    return found


def test_each_report_goes_to_one_api_server() -> None:
    """Whose counters are summed with those of the others."""
    cache = make_cache(pages=30, slots=9)
    sender = StatsSender(cache)
    servers = [logger(), logger()]
    for turn in range(4):
        serve(cache, str(turn), span(0, 10))
        stats = SchedulerStats()
        sender.attach(stats)
        servers[turn % 2].record(stats, None)
        assert stats.num_kv_fetch_reqs_by_stage == {}, "vLLM would read them"
        assert total("queried_tokens_total") == cache.stats.queried_tokens > 0
        assert total("hit_tokens_total") == cache.stats.hit_tokens
    assert cache.stats.hit_tokens > 0


def test_steps_that_others_follow_report_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 50.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    cache = make_cache(pages=30, slots=9)
    sender = StatsSender(cache)

    def reported(*, is_last: bool = False) -> float | None:
        serve(cache, f"{now} {is_last}", span(0, 10))
        stats = SchedulerStats()
        sender.attach(stats, is_last=is_last)
        return metrics.take_stats(stats).get("queried_tokens")

    assert reported() == 10
    now += 0.06
    assert reported() is None
    assert reported(is_last=True) == 20  # nothing is lost
    now += 0.06
    assert reported() is None
    now += 0.06
    assert reported() == 20


def test_an_engine_of_stock_vllm_publishes_nothing() -> None:
    stats = SchedulerStats()
    StatsSender(make_cache()).attach(stats)
    sent = dict(stats.num_kv_fetch_reqs_by_stage)
    logger(scheduler=None).record(stats, None)
    assert stats.num_kv_fetch_reqs_by_stage == sent
