# SPDX-License-Identifier: Apache-2.0
"""The report as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid_plugin.config import DiskOptions
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan
from hybrid_plugin.core.memory.layout import CacheLayout
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.engine.outlook import Outlook, Prospect
from hybrid_plugin.sizes import gib
from hybrid_plugin.tools.doctor.points import OK
from hybrid_plugin.tools.doctor.report import EngineReport, Report, environment

_PROSPECTS = {
    Prospect.SERVED: "the plugin would serve it",
    Prospect.LEFT_ALONE: "the plugin would leave it alone",
    Prospect.REFUSED: "the plugin would refuse or step aside",
    Prospect.FAILS: "the engine would not start",
}


def as_text(report: Report) -> str:
    """The report for a terminal."""
    lines = [", ".join(f"{name} {text}" for name, text in environment().items())]
    for engine in report.engines:
        lines += ["", *_engine_lines(engine, report.question.cache_bytes)]
    lines.append("")
    lines += [f"problem: {problem}" for problem in report.problems]
    lines.append("Serving would work." if report.ok else "Serving would not work.")
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    """The same, with every number as a number."""
    return {
        "ok": report.ok,
        "environment": environment(),
        "problems": report.problems,
        "engines": [_engine_json(engine) for engine in report.engines],
    }


def _engine_lines(report: EngineReport, cache_bytes: int) -> Iterator[str]:
    yield f"{report.title} ({report.engine.distribution}), {report.standing}"
    held = sum(point.status == OK for point in report.points)
    yield f"  hook points: {held} of {len(report.points)} ok"
    for point in report.points:
        if point.status != OK:
            yield f"    {point.status}: {point.problem}"
    if report.outlook is not None:
        yield from _outlook_lines(report.outlook, cache_bytes)
    told = {point.problem for point in report.points}
    yield from (f"  warning: {warning}" for warning in report.warnings)
    yield from (f"  problem: {p}" for p in report.problems if p not in told)


def _outlook_lines(outlook: Outlook, cache_bytes: int) -> Iterator[str]:
    reason = f": {outlook.reason}" if outlook.prospect is Prospect.LEFT_ALONE else ""
    yield f"  model: {_PROSPECTS[outlook.prospect]}{reason}"
    if outlook.note:
        yield f"    {outlook.note}"
    if outlook.layout is None:
        return
    layout = outlook.layout
    yield from _row_lines(layout)
    if outlook.sizes is not None:
        longest, typical = _fitting(outlook)
        most = "up to " if outlook.shared is not None else ""
        pages = f"{most}{outlook.sizes.pages} pages and {most}"
        yield (
            f"    {cache_bytes / 2**20:.1f} MiB of cache: "
            f"{'' if layout.has_states_alone else pages}{outlook.sizes.slots} slots"
        )
        if outlook.shared is not None:
            yield f"    granules: {_granules(outlook.shared)}"
        yield (
            f"    at once: {longest} sequences of {outlook.max_model_len} tokens, "
            f"{typical} of 1024"
        )
    if outlook.host is not None:
        yield f"    {_host(outlook.host, layout.page_size)}"
    if outlook.disk is not None:
        yield f"    {_files(outlook.disk, layout)}"
    if outlook.peers is not None:
        yield f"    peers read and are read at {outlook.peers.listen}"
    if outlook.store is not None:
        yield (
            f"    a store at {outlook.store.master}, to which each rank lends "
            f"{gib(outlook.store.size)}; whether it answers is not tried"
        )


def _row_lines(layout: CacheLayout) -> Iterator[str]:
    """A page and a slot."""
    if layout.has_states_alone:
        yield f"    page: {layout.page_size} tokens, and no KV: no layer attends"
    else:
        yield (
            f"    page: {layout.page_size} tokens, {_kib(layout.page_bytes)} over "
            f"{_layers(layout, 'attention')} attention layers"
        )
    slot = f"    slot: {_kib(layout.slot_bytes)} over {_layers(layout, 'states')} state"
    if layout.page_bytes:
        as_pages = layout.slot_bytes / layout.page_bytes
        yield f"{slot} layers, as much as {as_pages:.1f} pages"
    else:
        yield f"{slot} layers"


def _fitting(outlook: Outlook) -> tuple[int, int]:
    """Sequences that fit: of the greatest length, and of 1024 tokens."""
    assert outlook.layout is not None and outlook.sizes is not None
    layout, sizes, shared = outlook.layout, outlook.sizes, outlook.shared
    longest, typical = (
        shared.sequences(tokens)
        if shared is not None
        else min((sizes.pages - 1) // layout.pages_for(tokens), sizes.slots - 1)
        for tokens in (outlook.max_model_len, min(1024, outlook.max_model_len))
    )
    return longest, typical


def _granules(shared: ElasticPlan) -> str:
    """What memory moves between the pools in."""
    return ", ".join(
        f"{pool.per_granule} {Pool.noun(name)} of {name} ({_kib(pool.granule_bytes)})"
        for name, pool in shared.pools.items()
    )


def _host(plan: HostPlan, page_size: int) -> str:
    """What is kept when the device evicts it."""
    rows = ", ".join(
        f"{plan.rows(pool)} {Pool.noun(pool)} of {pool}" for pool in plan.row_bytes
    )
    return (
        f"{gib(plan.budget)} of host memory: {rows}, or a mixture; the KV of "
        f"{plan.rows(Pool.KV) * page_size} tokens at most"
    )


def _files(disk: DiskOptions, layout: CacheLayout) -> str:
    """What outlives the server."""
    tokens = disk.size // layout.page_bytes * layout.page_size
    return (
        f"{gib(disk.size)} of files in {disk.path}; the KV of {tokens} tokens at most"
    )


def _layers(layout: CacheLayout, kind: str) -> int:
    return sum(len(group.layers) for group in getattr(layout, kind))


def _kib(count: int) -> str:
    return f"{count / 2**10:.1f} KiB"


def _engine_json(report: EngineReport) -> dict[str, Any]:
    return {
        "engine": report.engine.name,
        "distribution": report.engine.distribution,
        "version": report.engine.version,
        "standing": report.standing,
        "hook_points": [
            {"target": p.target, "status": p.status, "problem": p.problem}
            for p in report.points
        ],
        "warnings": report.warnings,
        "problems": report.problems,
        "model": None if report.outlook is None else _outlook_json(report.outlook),
    }


def _outlook_json(outlook: Outlook) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prospect": outlook.prospect.value,
        "reason": outlook.reason,
        "note": outlook.note,
    }
    if outlook.layout is not None:
        found |= {
            "page_size": outlook.layout.page_size,
            "page_bytes": outlook.layout.page_bytes,
            "slot_bytes": outlook.layout.slot_bytes,
            "attention_layers": _layers(outlook.layout, "attention"),
            "state_layers": _layers(outlook.layout, "states"),
            "max_model_len": outlook.max_model_len,
        }
    if outlook.sizes is not None:
        longest, typical = _fitting(outlook)
        found |= {
            "pages": outlook.sizes.pages,
            "slots": outlook.sizes.slots,
            "sequences_of_max_model_len": longest,
            "sequences_of_1024": typical,
        }
    if outlook.shared is not None:
        found |= {
            "granules": {
                name: {"ids": pool.per_granule, "bytes": pool.granule_bytes}
                for name, pool in outlook.shared.pools.items()
            }
        }
    if outlook.host is not None:
        host = outlook.host
        found["host_memory"] = {
            "bytes": host.budget,
            "block_bytes": host.block_bytes,
            "rows": {pool: host.rows(pool) for pool in host.row_bytes},
        }
    if outlook.disk is not None:
        found["disk"] = {"path": outlook.disk.path, "bytes": outlook.disk.size}
    if outlook.peers is not None:
        found["peers"] = {"listen": outlook.peers.listen}
    if outlook.store is not None:
        found["store"] = {"master": outlook.store.master, "bytes": outlook.store.size}
    return found
