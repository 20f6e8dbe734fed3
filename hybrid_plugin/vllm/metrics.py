# SPDX-License-Identifier: Apache-2.0
"""The cache's numbers on their way to vLLM's own /metrics endpoint.

vLLM sends a fixed set of scheduler statistics to the process that serves the
endpoint.  Ours ride in a dictionary of counts per KV load stage, which is
empty without a KV connector (refused at start-up) and which its readers index
by stage; our stat logger, which runs before vLLM's own, takes them out.

With several API server processes each step's statistics go to one of them, the one
that the step has answers for.  So totals are sent as what they grew by.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

from hybrid_plugin.engine.metrics import (
    INTERVAL_S,
    CacheMetrics,
    Growth,
    snapshot_of,
)
from hybrid_plugin.vllm.activation import is_active

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

    from hybrid_plugin.core.cache import HybridCache

_PREFIX = "hybrid_plugin/"


class StatsSender:
    """Puts the cache's numbers into what the scheduler reports."""

    def __init__(self, cache: HybridCache) -> None:
        """Send nothing yet."""
        self._cache = cache
        self._growth = Growth()
        self._due = -math.inf

    def attach(self, stats: SchedulerStats, *, is_last: bool = True) -> None:
        """Add what changed since the last report; each must reach an API server.

        Args:
            stats: of a step.
            is_last: whether no step may follow; another one may leave it to later ones.
        """
        now = time.monotonic()
        if now < self._due and not is_last:
            return
        self._due = now + INTERVAL_S
        numbers = self._growth.take(snapshot_of(self._cache))
        stats.num_kv_fetch_reqs_by_stage.update(
            {_PREFIX + name: value for name, value in numbers.items()}
        )


def take_stats(stats: SchedulerStats) -> dict[str, int]:
    """Take them out again; empty where a scheduler that is not ours reports."""
    carried = stats.num_kv_fetch_reqs_by_stage
    mine = [name for name in carried if name.startswith(_PREFIX)]
    return {name.removeprefix(_PREFIX): carried.pop(name) for name in mine}


class HybridStatLogger(StatLoggerBase):
    """Publishes the cache's numbers, one instance per engine core."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        """Register the metrics, unless the plugin is not active."""
        self._metrics: CacheMetrics | None = None
        if is_active(vllm_config):
            model = vllm_config.model_config.served_model_name
            self._metrics = CacheMetrics(
                {"model_name": str(model), "engine": str(engine_index)}
            )

    def record(
        self, scheduler_stats: SchedulerStats | None, *args: Any, **kwargs: Any
    ) -> None:
        """Publish what came with one step."""
        if self._metrics is None or scheduler_stats is None:
            return
        numbers = take_stats(scheduler_stats)
        if numbers:
            self._metrics.add(numbers)

    def log_engine_initialized(self) -> None:
        """Nothing to add: the pools are logged when they are planned."""
