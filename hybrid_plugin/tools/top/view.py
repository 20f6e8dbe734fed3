# SPDX-License-Identifier: Apache-2.0
"""Samples as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_plugin.tools.top.sample import TIERS, PoolIds, Sample

_WIDTH = 40
"""Characters of a pool's bar."""
_GIB, _MIB = 2**30, 2**20


def lines(sample: Sample, seconds: float | None, whole: Sample) -> list[str]:
    """What to show.

    Args:
        sample: what happened lately.
        seconds: how long that took; None for all since the start.
        whole: since the start.
    """
    period = "since the start" if seconds is None else f"of the last {seconds:.1f} s"
    return [
        f"{sample.model}, {period}",
        "",
        *_tokens(sample, whole, seconds),
        "",
        *_pools(sample),
        "",
        *_events(sample, seconds),
    ]


def _tokens(sample: Sample, whole: Sample, seconds: float | None) -> Iterator[str]:
    queried = sample.totals["queried_tokens"]
    yield f"prompt tokens  {_amount(queried, seconds)}"
    hit = sample.totals["hit_tokens"]
    behind = {tier: sample.totals[f"{tier}_hit_tokens"] for tier in TIERS}
    tiers = {"device": hit - sum(behind.values())} | behind
    parts = [f"{name} {_share(n, queried)}" for name, n in tiers.items() if n]
    since = ""
    if seconds is not None:
        share = _share(whole.totals["hit_tokens"], whole.totals["queried_tokens"])
        since = f"  (since the start {share})"
    yield f"restored       {_share(hit, queried)}{since}"
    if tiers["device"] != hit:
        yield f"               {', '.join(parts)}"
    reasons = sorted(sample.computed.items(), key=lambda one: -one[1])
    named = [f"{reason} {_share(n, queried)}" for reason, n in reasons if n > 0]
    yield f"computed       {', '.join(named) or 'nothing'}"


def _pools(sample: Sample) -> Iterator[str]:
    name = max([4, *map(len, sample.pools)])
    yield f"{'pool':<{name}}  {'used':>9} {'cached':>9} {'free':>9}"
    for pool, ids in sample.pools.items():
        memory = "" if ids.mapped_bytes is None else f"  {_bytes(ids.mapped_bytes)}"
        counts = f"{ids.used:9,.0f} {ids.cached:9,.0f} {ids.free:9,.0f}"
        yield f"{pool:<{name}}  {counts}  {_bar(ids)}{memory}"


def _bar(ids: PoolIds) -> str:
    """Used, cached and free ids side by side."""
    whole = ids.used + ids.cached + ids.free
    used = round(_WIDTH * ids.used / whole) if whole else 0
    full = round(_WIDTH * (ids.used + ids.cached) / whole) if whole else 0
    return f"[{'#' * used}{'=' * (full - used)}{'.' * (_WIDTH - full)}]"


def _events(sample: Sample, seconds: float | None) -> Iterator[str]:
    total = sample.totals

    def of(**names: str) -> str:
        return ", ".join(
            f"{word} {_amount(total[name], seconds)}" for word, name in names.items()
        )

    yield "requests       " + of(
        refused="refusals", preempted="preemptions", waited="in_batch_prefix_waits"
    )
    yield "snapshots      " + of(taken="snapshots_taken", evicted="snapshots_evicted")
    yield "pages          " + of(evicted="pages_evicted")
    if total["moves"]:
        moved = _bytes(total["moved_bytes"])
        yield f"memory         {moved} moved in {total['moves']:,.0f} granules"
    for tier in TIERS:
        stored, loaded = (total[f"{tier}_{way}_bytes"] for way in ("stored", "loaded"))
        if stored or loaded:
            yield f"{tier:<15}{_bytes(stored)} stored, {_bytes(loaded)} loaded"
    if total["drafts_lent"] or total["drafts_refused"]:
        yield "draft slots    " + of(lent="drafts_lent", refused="drafts_refused")


def _amount(count: float, seconds: float | None) -> str:
    if seconds is None:
        return f"{count:,.0f}"
    return f"{count / seconds:,.1f}/s"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _bytes(count: float) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"
