# SPDX-License-Identifier: Apache-2.0
"""The cache's numbers in SGLang's /metrics.

SGLang's scheduler processes write to Prometheus' shared directory themselves,
and so do our collectors; there is nothing to send.
"""

from __future__ import annotations

import time

from sglang.srt.runtime_context import get_parallel, get_serving

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.engine.metrics import INTERVAL_S, CacheMetrics, snapshot_of
from hybrid_plugin.sglang import pipeline


class StepMetrics:
    """Publishes one scheduler's cache; every rank's of a replica is equal."""

    def __init__(self, cache: HybridCache) -> None:
        """Register the collectors, on the first rank of each replica."""
        self._cache = cache
        self._due = 0.0
        self._last: dict[str, int] = {}
        self._metrics: CacheMetrics | None = None
        if pipeline.speaks():
            rank = get_parallel().dp_rank or 0
            self._metrics = CacheMetrics(
                {"model_name": get_serving().served_model_name, "engine": str(rank)}
            )

    def publish_now_and_then(self) -> None:
        """Publish what changed, at most once in `INTERVAL_S`."""
        now = time.monotonic()
        if self._metrics is None or now < self._due:
            return
        self._due = now + INTERVAL_S
        numbers = snapshot_of(self._cache)
        if numbers != self._last:
            self._last = numbers
            self._metrics.publish(numbers)
