# SPDX-License-Identifier: Apache-2.0
"""What a server's cache said of itself at one moment, and what it did between two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybrid_plugin.tools.prometheus_text import Metrics

_PREFIX = "hybrid_cache_"
_GAUGES = ("pages", "slots", "scratch_rows", "host_rows")
"""Of ids of pools, by what a pool has."""
TIERS = ("host", "disk", "peer", "store")
"""Behind the device, as their metrics are named."""
COUNTERS = (
    "queried_tokens",
    "hit_tokens",
    "refusals",
    "preemptions",
    "in_batch_prefix_waits",
    "snapshots_taken",
    "snapshots_evicted",
    "pages_evicted",
    "moves",
    "moved_bytes",
    "drafts_lent",
    "drafts_refused",
    *(
        f"{tier}_{what}"
        for tier in TIERS
        for what in ("hit_tokens", "stored_bytes", "loaded_bytes")
    ),
)


@dataclass(frozen=True)
class PoolIds:
    """How many ids of a pool are in which place."""

    used: float
    cached: float
    free: float
    mapped_bytes: float | None
    """None where its memory is fixed."""


@dataclass(frozen=True)
class Sample:
    """The numbers of all engines of a server together."""

    model: str
    totals: Mapping[str, float]
    """By name, of `COUNTERS`."""
    computed: Mapping[str, float]
    """Tokens of prompts that were computed, by reason."""
    pools: Mapping[str, PoolIds]


def read(text: str) -> Sample | None:
    """Read what `/metrics` gave; None if there is nothing of the plugin in it."""
    metrics = Metrics(text)
    counter = f"{_PREFIX}queried_tokens_total"
    if metrics.total(counter) is None:
        return None
    model = metrics.label(counter, "model_name") or "a model without a name"
    totals = {name: metrics.total(f"{_PREFIX}{name}_total") or 0.0 for name in COUNTERS}
    computed = metrics.by(f"{_PREFIX}computed_tokens_total", "reason")
    return Sample(
        model,
        totals,
        {reason: value for (reason,), value in computed.items()},
        _pools(metrics),
    )


def _pools(metrics: Metrics) -> dict[str, PoolIds]:
    mapped = metrics.by(f"{_PREFIX}mapped_bytes", "pool")
    found: dict[str, dict[str, float]] = {}
    for gauge in _GAUGES:
        for (pool, kind), value in metrics.by(
            f"{_PREFIX}{gauge}", "pool", "kind"
        ).items():
            found.setdefault(pool, {})[kind] = value
    return {
        pool: PoolIds(
            ids.get("used", 0.0),
            ids.get("cached", 0.0),
            ids.get("free", 0.0),
            mapped.get((pool,)),
        )
        for pool, ids in found.items()
    }


def between(before: Sample, after: Sample) -> Sample:
    """What happened from one sample to the next; pools are those of the latter.

    A server that was started again counts from 0: then it is what it did since.
    """
    if after.totals["queried_tokens"] < before.totals["queried_tokens"]:
        return after
    return Sample(
        after.model,
        {name: value - before.totals[name] for name, value in after.totals.items()},
        {
            reason: value - before.computed.get(reason, 0.0)
            for reason, value in after.computed.items()
        },
        after.pools,
    )
