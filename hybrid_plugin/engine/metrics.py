# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the cache, with equal names in every engine.

The process that owns the cache sends plain numbers (`snapshot_of`); the one
that serves `/metrics` turns them into gauges and counters (`CacheMetrics`).
Where several processes serve it and each report reaches one of them, what is sent of a
total is what it grew by (`Growth`): Prometheus sums the counters of all processes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from prometheus_client import Counter, Gauge

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.misses import MissReason
from hybrid_plugin.core.stats import HostStats, OuterStats
from hybrid_plugin.tiers.disk import DiskTier

INTERVAL_S = 0.1
"""Between two reports while steps follow one another: counting takes a tenth of a
millisecond, and nobody reads the endpoint more often than every second."""
_POOLS = {
    "pages": "KV pages",
    "slots": "State slots",
    "scratch_rows": "Rows in which drafts are verified",
    "host_rows": "Rows of host memory, used while they are copied to the device,",
}
_GAUGES = {Pool.STATE: "slots", Pool.SCRATCH: "scratch_rows"}
"""Of the pools that hold no pages."""
_KINDS = {
    "used": "of live sequences",
    "cached": "that only the prefix cache holds",
    "free": "that are free",
}
_TOTALS = {
    "queried_tokens": "Tokens of admitted prompts.",
    "hit_tokens": "Tokens of admitted prompts that were restored, not computed.",
    "resumed_queried_tokens": "Tokens of sequences resumed after a preemption.",
    "resumed_hit_tokens": "Tokens of resumed sequences that were restored.",
    "snapshots_taken": "State snapshots that entered the prefix cache.",
    "interior_snapshots": "State snapshots that a forward pass wrote without a pause.",
    "graph_passes": "Passes with prompts that replayed a CUDA graph of the whole model "
    "(vLLM).",
    "snapshots_evicted": "State snapshots that left it for want of room.",
    "pages_evicted": "KV pages that left the prefix cache for want of room.",
    "refusals": "Admissions and growths that found no room.",
    "pools_emptied": "Times that all went because a lone request found no room.",
    "preemptions": "Sequences preempted.",
    "in_batch_prefix_waits": "Requests that waited while one computed their prefix.",
    "promised_hits": "Requests that resumed from a snapshot within its TTL.",
    "promises_broken": "TTLs that ended without a use of what they kept.",
    "promises_evicted": "TTLs within which all that they kept was evicted.",
    "drafts_lent": "State slots lent to requests that verify drafts.",
    "drafts_refused": "Proposed drafts dropped for want of slots or pages.",
    "turn_ends_exact": "Requests that left the state after their last known token.",
    "turn_ends_missed": "Requests whose last state was overwritten before they ended.",
    "hit_checks": "Hits that were computed again and compared.",
    "hit_checks_failed": "Of these, hits that differed by more than rounding.",
    "moves": "Granules of memory that pools got or lost.",
    "moved_bytes": "Bytes of them.",
    "granules_emptied": "Granules emptied by moving what was cached in them.",
    "move_seconds": "Time a rank spent on moving memory.",
    "host_queried_tokens": "Tokens of admitted prompts that the device did not have.",
    "host_hit_tokens": "Tokens of admitted prompts restored from host memory.",
    "host_stores": "Prefixes that were copied to host memory.",
    "host_stored_bytes": "Bytes that were copied to host memory.",
    "host_stores_refused": "Prefixes for which host memory had no room worth less.",
    "host_loads": "Prefixes that were copied from host memory to the device.",
    "host_loaded_bytes": "Bytes that were copied from host memory to the device.",
    "host_loads_refused": "Prefixes on the host for which the device had no room.",
    "host_wait_seconds": "Time a rank's device stood still for copies to and from host "
    "memory.",
    "disk_queried_tokens": "Tokens of admitted prompts that neither the device nor the "
    "host had.",
    "disk_hit_tokens": "Tokens of admitted prompts restored from disk.",
    "disk_stores": "Prefixes that were written to disk.",
    "disk_stored_bytes": "Bytes of host memory that each rank wrote to disk.",
    "disk_stores_refused": "Prefixes that the disk did not take.",
    "disk_loads": "Prefixes that were read from disk.",
    "disk_loaded_bytes": "Bytes of host memory that each rank filled from disk.",
    "disk_loads_refused": "Prefixes on disk for which the host had no room worth less.",
    "peer_queried_tokens": "Tokens of admitted prompts that neither the device nor the "
    "host had.",
    "peer_hit_tokens": "Tokens of admitted prompts that another server computed.",
    "peer_stores": "Offered prefixes that another server read.",
    "peer_stored_bytes": "Bytes of these on each rank.",
    "peer_stores_refused": "Prefixes to be offered that the host did not have.",
    "peer_loads": "Prefixes that were read from other servers.",
    "peer_loaded_bytes": "Bytes of host memory that each rank filled from these.",
    "peer_loads_refused": "Prefixes of other servers for which the host had no room "
    "worth less.",
    "store_queried_tokens": "Tokens of admitted prompts that neither the device nor "
    "the host had.",
    "store_hit_tokens": "Tokens of admitted prompts restored from the shared store.",
    "store_stores": "Prefixes that were written to the store.",
    "store_stored_bytes": "Bytes of host memory that each rank wrote to the store.",
    "store_stores_refused": "Prefixes that were not to be written to the store.",
    "store_loads": "Prefixes that were read from the store.",
    "store_loaded_bytes": "Bytes of host memory that each rank filled from the store.",
    "store_loads_refused": "Prefixes in the store for which the host had no room worth "
    "less.",
}
_BY_REASON = {
    "computed_tokens": "Tokens of admitted prompts that were not restored, by reason.",
    "disk_store_failures": "Prefixes that could not be written to disk, by reason.",
    "disk_load_failures": "Prefixes that could not be read from disk, by reason.",
    "store_store_failures": "Prefixes that could not be written to the store, by "
    "reason.",
    "store_load_failures": "Prefixes that could not be read from the store, by reason.",
    "peer_store_failures": "Offered prefixes that nobody read, by reason.",
    "peer_load_failures": "Prefixes of other servers that were of no use, by reason.",
}
_OUTER = ("disk", "peer", "store")
"""Names of the tiers behind the host."""
_AVERAGES = {
    "evicted_worth": "Tokens of prefill that what was evicted lately was expected to "
    "save, per GiB and admission.",
    "lifetime_admissions": "Admissions between last use and eviction, as of late.",
    "accepted_drafts": "Drafts accepted by a step that verified some, as of late.",
}
_COUNTS = {
    "draft_slots": "State slots that are lent for drafts; they count as used ones too.",
    "announced_pages": "KV pages in events: a request can resume at their end or "
    "behind.",
    "disk_used_bytes": "Bytes of all files on disk.",
    "disk_sessions": "Saved sessions on disk.",
    "disk_pinned_bytes": "Bytes of their files, which nothing makes room of.",
    "store_used_bytes": "Bytes of what this server knows to be in the store.",
    "peer_used_bytes": "Bytes of host memory, on all ranks, that others may read.",
    "peer_offers": "Prefixes that are offered to other servers.",
}
_LEVEL, _MAPPED, _AVERAGE, _COUNT = "level", "mapped", "average", "count"
_REASON = "reason"
_FRACTIONS = {
    **dict.fromkeys(("move_seconds", "host_wait_seconds"), 1e-6),
    **dict.fromkeys(_AVERAGES, 1e-3),
}
"""What is sent as whole numbers of a smaller unit, and that unit."""
_GIB = 1 << 30


def snapshot_of(cache: HybridCache) -> dict[str, int]:
    """All numbers `CacheMetrics` publishes, by name; whole numbers, as engines send.

    `level/POOL/KIND` counts ids; `mapped/POOL`, bytes, is there where pools share
    memory; `average/NAME` is an average of late, `count/NAME` a number of now,
    `reason/NAME/REASON` a total; the others are totals.
    """
    levels = {
        f"{_LEVEL}/{pool}/{kind}": getattr(level, kind)
        for pool, level in cache.levels().items()
        for kind in _KINDS
    }
    mapped = cache.broker.mapped_bytes().items()
    stats = cache.broker.stats
    moved = {
        "moves": stats.moves,
        "moved_bytes": stats.moved_bytes,
        "granules_emptied": stats.granules_emptied,
        "move_seconds": _whole("move_seconds", stats.device_seconds),
    }
    sizes = {f"{_MAPPED}/{pool}": size for pool, size in mapped}
    if cache.tree.events is not None:
        sizes[f"{_COUNT}/announced_pages"] = cache.tree.events.announced_pages
    memory = cache.memory
    averages = {
        "evicted_worth": memory.lost_per_byte * _GIB,
        "lifetime_admissions": memory.lifetime,
        "accepted_drafts": cache.drafts.gain.accepted or 0.0,
    }
    sent = {f"{_AVERAGE}/{name}": _whole(name, one) for name, one in averages.items()}
    sent[f"{_COUNT}/draft_slots"] = cache.drafts_held
    host = HostStats() if cache.host is None else cache.host.stats
    totals = cache.stats.as_dict() | host.as_dict()
    totals["host_wait_seconds"] = _whole("host_wait_seconds", host.wait_seconds)
    # With those that are 0: a rate needs a counter's beginning.
    reasons: dict[str, int] = {
        why: cache.stats.computed_tokens[why] for why in MissReason
    }
    computed = _by_reason("computed_tokens", reasons)
    found = levels | totals | moved | sizes | sent | computed
    for name in _OUTER:
        found |= _outer_numbers(cache, name)
    return found


def _outer_numbers(cache: HybridCache, name: str) -> dict[str, int]:
    """Those of a tier behind the host, whether or not it is there."""
    tier = next((one for one in cache.lower_tiers.outer if one.name == name), None)
    stats = OuterStats() if tier is None else tier.stats
    found = stats.as_dict(name)
    found |= _by_reason(f"{name}_store_failures", stats.store_failures)
    found |= _by_reason(f"{name}_load_failures", stats.load_failures)
    if tier is not None:
        found[f"{_COUNT}/{name}_used_bytes"] = tier.used_bytes
        if tier.offers_bundles:
            found[f"{_COUNT}/{name}_offers"] = cache.lower_tiers.offering
    if isinstance(tier, DiskTier):
        found[f"{_COUNT}/disk_sessions"] = tier.sessions
        found[f"{_COUNT}/disk_pinned_bytes"] = tier.pinned_bytes
    return found


def _by_reason(name: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f"{_REASON}/{name}/{why}": count for why, count in counts.items()}


def _gauge_of(pool: str) -> str:
    """Name of the gauge of a pool's ids."""
    return "host_rows" if Pool.is_host(pool) else _GAUGES.get(pool, "pages")


def _whole(name: str, value: float) -> int:
    return round(value / _FRACTIONS[name])


class Growth:
    """Turns totals into what they grew by since the last time."""

    def __init__(self) -> None:
        """All totals begin at 0."""
        self._taken: dict[str, int] = {}

    def take(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """The numbers of `snapshot_of`, with growth in place of totals."""
        totals = {name: value for name, value in numbers.items() if _is_total(name)}
        grown = {
            name: value - self._taken.get(name, 0) for name, value in totals.items()
        }
        self._taken |= totals
        return {**numbers, **grown}


def _is_total(name: str) -> bool:
    return name in _TOTALS or name.startswith(f"{_REASON}/")


class CacheMetrics:
    """Publishes the numbers of one engine."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        """Create the metrics of an engine told from others by `labels`."""
        self._gauges, self._counters = _collectors(tuple(labels))
        self._labels = dict(labels)
        self._growth = Growth()

    def publish(self, numbers: Mapping[str, int]) -> None:
        """Set gauges, and advance counters to the totals in `numbers`."""
        self.add(self._growth.take(numbers))

    def add(self, numbers: Mapping[str, int]) -> None:
        """Set gauges, and advance counters by what `Growth` made of totals."""
        for name, value in numbers.items():
            what, _, place = name.partition("/")
            pool, _, kind = place.partition("/")
            if what == _LEVEL:
                gauge = self._gauges[_gauge_of(pool)]
                gauge.labels(**self._labels, pool=pool, kind=kind).set(value)
            elif what == _MAPPED:
                self._gauges["mapped"].labels(**self._labels, pool=pool).set(value)
            elif what == _AVERAGE:
                gauge = self._gauges[place].labels(**self._labels)
                gauge.set(value * _FRACTIONS[place])
            elif what == _COUNT:
                self._gauges[place].labels(**self._labels).set(value)
            elif what == _REASON:
                counter = self._counters[pool].labels(**self._labels, reason=kind)
                counter.inc(value)
        for name in _TOTALS:
            grown = numbers[name] * _FRACTIONS.get(name, 1)
            self._counters[name].labels(**self._labels).inc(grown)


@functools.cache
def _collectors(
    label_names: tuple[str, ...],
) -> tuple[dict[str, Gauge], dict[str, Counter]]:
    """Register with the process's registry, once however many engines it has."""
    gauges = {
        name: Gauge(
            f"hybrid_cache_{name}",
            f"{title} by pool and by who holds them: "
            + ", ".join(f"{kind}: {meaning}" for kind, meaning in _KINDS.items()),
            [*label_names, "pool", "kind"],
            multiprocess_mode="mostrecent",
        )
        for name, title in _POOLS.items()
    }
    gauges["mapped"] = Gauge(
        "hybrid_cache_mapped_bytes",
        "Bytes of memory that each pool has, where pools share it",
        [*label_names, "pool"],
        multiprocess_mode="mostrecent",
    )
    for name, text in {**_AVERAGES, **_COUNTS}.items():
        gauges[name] = Gauge(
            f"hybrid_cache_{name}", text, label_names, multiprocess_mode="mostrecent"
        )
    counters = {
        name: Counter(f"hybrid_cache_{name}", text, label_names)
        for name, text in _TOTALS.items()
    }
    for name, text in _BY_REASON.items():
        counters[name] = Counter(f"hybrid_cache_{name}", text, [*label_names, "reason"])
    return gauges, counters
