# SPDX-License-Identifier: Apache-2.0
"""The demo's outcome as a table for people and as JSON for programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hybrid_plugin.tools.demo.compare import NEAR_TIE, Tally
from hybrid_plugin.tools.demo.measure import Result
from hybrid_plugin.tools.demo.workloads import Workload

_Row = tuple[str, Callable[[Result], str]]
"""A heading, and how its number is shown."""


STOCK_AND_PLUGIN = ("stock", "plugin")
"""Names of the two servers."""


@dataclass(frozen=True)
class Outcome:
    """A workload on both servers."""

    workload: Workload
    stock: Result
    plugin: Result
    tally: Tally


def to_json(
    engine: str,
    version: str,
    outcomes: Sequence[Outcome],
    settings: dict[str, Any],
    servers: tuple[str, str] = STOCK_AND_PLUGIN,
) -> dict[str, Any]:
    """The form of `build/demo.json`; each server's numbers by its name."""
    return {
        "engine": engine,
        "engine_version": version,
        "machine": machine(),
        "settings": settings,
        "workloads": [_workload_json(outcome, servers) for outcome in outcomes],
    }


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def to_table(
    title: str,
    outcomes: Sequence[Outcome],
    page_note: str,
    servers: tuple[str, str] = STOCK_AND_PLUGIN,
) -> Table:
    """One table: a row for each number, two columns for each workload.

    Args:
        title: above it.
        outcomes: one for each workload.
        page_note: what a page is; half a sentence.
        servers: the names of the two.
    """
    drafts = _speculation_rows(outcomes)
    caption = _CAPTION.format(page_note=page_note, near_tie=NEAR_TIE)
    if drafts:
        caption += " tokens a step: of a request that verifies drafts, on average."
    table = Table(title=title, box=SIMPLE_HEAD, caption=caption)
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    table.title_justify = table.caption_justify = "left"
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        head = f"{outcome.workload.label}\n{servers[0]}"
        table.add_column(head, justify="right")
        table.add_column(f"\n{servers[1]}", justify="right", style="bold")
    rows = (*_CACHED, *_host_rows(outcomes), *_ROWS, *drafts)
    for heading, show in rows:
        pairs = ((show(outcome.stock), show(outcome.plugin)) for outcome in outcomes)
        table.add_row(heading, *(cell for pair in pairs for cell in pair))
    verdicts = ((_verdict(o.tally), _verdict_detail(o.tally)) for o in outcomes)
    table.add_row("equal answers", *(cell for pair in verdicts for cell in pair))
    return table


def _workload_json(outcome: Outcome, servers: tuple[str, str]) -> dict[str, Any]:
    return {
        "name": outcome.workload.name,
        "title": outcome.workload.title,
        "concurrency": outcome.workload.concurrency,
        "outputs_equal": outcome.tally.acceptable,
        "comparison": {**asdict(outcome.tally), "near_tie_bound_nats": NEAR_TIE},
        servers[0]: _result_json(outcome.stock),
        servers[1]: _result_json(outcome.plugin),
    }


def _result_json(result: Result) -> dict[str, Any]:
    return {**asdict(result), "cached_share": round(result.cached_share, 4)}


def _verdict(tally: Tally) -> str:
    return f"{tally.equal}/{tally.compared}"


def _verdict_detail(tally: Tally) -> str:
    if tally.wrong:
        return f"[red]{tally.wrong} wrong[/]"
    return f"~{tally.near_ties}" if tally.near_ties else ""


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _speculation_rows(outcomes: Sequence[Outcome]) -> Sequence[_Row]:
    """The drafts' row, where any server speculated."""
    results = [result for o in outcomes for result in (o.stock, o.plugin)]
    if all(result.acceptance_length is None for result in results):
        return ()
    return (("tokens a step", lambda r: _length(r.acceptance_length)),)


def _host_rows(outcomes: Sequence[Outcome]) -> Sequence[_Row]:
    """What came from other tiers, where anything did."""
    rows: Sequence[tuple[_Row, Callable[[Result], int | None]]] = (
        (
            ("from the host", lambda r: _count(r.host_hit_tokens)),
            lambda r: r.host_hit_tokens,
        ),
        (
            ("from the disk", lambda r: _count(r.disk_hit_tokens)),
            lambda r: r.disk_hit_tokens,
        ),
        (
            ("from a server", lambda r: _count(r.peer_hit_tokens)),
            lambda r: r.peer_hit_tokens,
        ),
    )
    results = [result for o in outcomes for result in (o.stock, o.plugin)]
    return [row for row, value in rows if any(map(value, results))]


def _length(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


_CACHED: Sequence[_Row] = (
    ("prompt tokens", lambda r: _count(r.prompt_tokens)),
    ("cached tokens", lambda r: _count(r.cached_tokens)),
    ("cached share", lambda r: f"{r.cached_share:.1%}"),
)
_ROWS: Sequence[_Row] = (
    ("TTFT p50, ms", lambda r: _milliseconds(r.ttft_ms_p50)),
    ("TTFT p95, ms", lambda r: _milliseconds(r.ttft_ms_p95)),
    ("time, s", lambda r: f"{r.seconds:.1f}"),
    ("peak running", lambda r: _count(r.peak_running)),
    ("peak pages", lambda r: _count(r.peak_pages)),
    ("peak slots", lambda r: _count(r.peak_slots)),
    ("preemptions", lambda r: _count(r.preemptions)),
    ("failed", lambda r: _count(r.failed)),
    ("right answers", lambda r: f"{r.right_answers}/{r.requests}"),
)

_CAPTION = (
    "cached: prompt tokens restored, not computed. TTFT: time to first token. Peaks "
    "are of live sequences, looked at ten times a second; {page_note}. right answers: "
    "those that begin with the code that was asked for. equal answers: greedy answers "
    "equal in both; ~ counts near ties (up to {near_tie} nats at the first difference, "
    "as rounding in bfloat16 gives)."
)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
