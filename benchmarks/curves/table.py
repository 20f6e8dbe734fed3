# SPDX-License-Identifier: Apache-2.0
"""Rows of a grid as Markdown: ours against the best of the stock caches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
OURS, BOUND = "ours", "bound"
_WORST = 15
_EVEN = 0.98
"""A ratio from which on a cache of ours counts as no worse."""
_LITTLE = 0.01
"""Share of prompt tokens below which the best stock cache restores nothing."""


@dataclass(frozen=True)
class Point:
    """A workload in so much memory, as every cache served it."""

    shape: str
    workload: str
    memory: int
    level: int | None
    restored: dict[str, float]
    """By cache; the mean of the seeds."""

    @property
    def best_stock(self) -> tuple[str, float] | None:
        """The stock cache that restored most, and its share."""
        stock = {c: r for c, r in self.restored.items() if is_stock(c)}
        if not stock:
            return None
        name = max(stock, key=lambda cache: stock[cache])
        return name, stock[name]

    def ratio(self, cache: str = OURS) -> float | None:
        """Restored by a cache of ours over restored by the best stock one.

        None where one is missing, or stock restored next to nothing: such ratios
        have no bound, and would rule every mean.
        """
        best = self.best_stock
        ours = self.restored.get(cache)
        if best is None or ours is None or best[1] < _LITTLE:
            return None
        return max(ours, _LITTLE / 10) / best[1]


def is_ours(cache: str) -> bool:
    """Whether a cache is one of ours, whatever its policy."""
    return cache.partition(":")[0] == OURS


def is_stock(cache: str) -> bool:
    """Whether a cache is an engine's own."""
    return cache != BOUND and not is_ours(cache)


def points(rows: Iterable[Row]) -> list[Point]:
    """Rows of equal shape, workload and memory together."""
    found: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        if "failed" not in row:
            key = (row["shape"], row["workload"], row["level"], row["memory"])
            # Seeds have memories of their own; their level is what they share.
            key = key[:3] if row["level"] is not None else key
            found.setdefault(key, {}).setdefault(row["cache"], []).append(row)
    return [
        Point(
            shape=key[0],
            workload=key[1],
            level=key[2],
            memory=int(_mean(r["memory"] for rs in caches.values() for r in rs)),
            restored={c: _mean(r["restored"] for r in rs) for c, rs in caches.items()},
        )
        for key, caches in found.items()
    ]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def geometric_mean(values: Sequence[float]) -> float:
    """Of ratios.

    Raises:
        ValueError: if there are none.
    """
    if not values:
        raise ValueError("No ratios to take the mean of.")
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def table(rows: Sequence[Row]) -> str:
    """Restored shares of every cache at every point, and what follows from them."""
    found = points(rows)
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    head = [*caches, "ours / best stock", "ours / bound"]
    lines = [
        "| shape | workload | level | GiB | " + " | ".join(head) + " |",
        "|---|---|---:|---:|" + "---:|" * len(head),
        *(_line(point, caches) for point in found),
    ]
    failed = [row for row in rows if "failed" in row]
    if failed:
        lines += ["", f"{len(failed)} points could not be served:", ""]
        lines += [f"* {_place(row)}: {row['cache']}: {row['failed']}" for row in failed]
    for cache in filter(is_ours, caches):
        lines += _summary(found, cache)
    return "\n".join(lines)


def _line(point: Point, caches: Sequence[str]) -> str:
    cells = [_percent(point.restored.get(cache)) for cache in caches]
    ratio, best = point.ratio(), point.best_stock
    against = "" if ratio is None or best is None else f"{ratio:.2f} ({best[0]})"
    return (
        f"| {point.shape} | {point.workload} | {point.level or ''} "
        f"| {point.memory / 2**30:.1f} | "
        + " | ".join([*cells, against, _share(point)])
        + " |"
    )


def _empty(found: Sequence[Point], cache: str) -> int:
    """Points that have no ratio although both sides served them."""
    served = [p for p in found if p.best_stock and cache in p.restored]
    return sum(p.ratio(cache) is None for p in served)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _share(point: Point) -> str:
    ours, bound = point.restored.get(OURS), point.restored.get(BOUND)
    return f"{ours / bound:.2f}" if ours is not None and bound else ""


def _place(row: Row) -> str:
    return f"{row['shape']}, {row['workload']}, {row['memory'] / 2**30:.1f} GiB"


def _summary(found: Sequence[Point], cache: str) -> list[str]:
    """Means of the ratios by shape, and the points where a cache of ours is worst."""
    rated = [(p, ratio) for p in found if (ratio := p.ratio(cache)) is not None]
    if not rated:
        return []
    lines = ["", f"`{cache}` over the best stock cache at each point:", ""]
    for shape in dict.fromkeys(p.shape for p, _ in rated):
        ratios = [ratio for p, ratio in rated if p.shape == shape]
        below = sum(ratio < 1 for ratio in ratios)
        lines.append(
            f"* {shape}: geometric mean {geometric_mean(ratios):.3f}, below 1 at "
            f"{below} of {len(ratios)} points"
        )
    ratios = [ratio for _, ratio in rated]
    if empty := _empty(found, cache):
        lines.append(f"* left out: {empty} points where no stock cache restored 1 %")
    lines += [f"* all: geometric mean {geometric_mean(ratios):.3f}"]
    lines += ["", *_by_level(rated), "", "Worst:", ""]
    for point, ratio in sorted(rated, key=lambda pair: pair[1])[:_WORST]:
        best = point.best_stock
        assert best is not None
        lines.append(
            f"* {ratio:.3f}: {point.shape}, {point.workload}, "
            f"{point.memory / 2**30:.1f} GiB: {100 * point.restored[cache]:.1f} % "
            f"against {100 * best[1]:.1f} % ({best[0]})"
        )
    return lines


def _by_level(rated: Sequence[tuple[Point, float]]) -> Iterator[str]:
    """How many points of each level of memory are even, and the mean of the ratios."""
    yield f"| level | points | at least {_EVEN} | geometric mean |"
    yield "|---:|---:|---:|---:|"
    for level in sorted({p.level for p, _ in rated if p.level is not None}):
        ratios = [ratio for p, ratio in rated if p.level == level]
        even = sum(ratio >= _EVEN for ratio in ratios)
        mean = geometric_mean(ratios)
        yield f"| {level} | {len(ratios)} | {even} | {mean:.2f} |"
