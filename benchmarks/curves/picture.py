# SPDX-License-Identifier: Apache-2.0
"""A grid as a picture: a panel per shape and workload, a curve per cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.curves.table import BOUND, Point, is_ours, points

_COLUMNS = 4
_COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9")


def write_picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a PNG file.

    Args:
        rows: of a grid.
        path: of the file.

    Raises:
        ValueError: if no point could be served.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[Point]] = {}
    for point in points(rows):
        panels.setdefault((point.shape, point.workload), []).append(point)
    if not panels:
        raise ValueError("No point was served: there is nothing to draw.")
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    lines = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 3 * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, _COLUMNS, squeeze=False).flat
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    for ax, ((shape, workload), found) in zip(axes, panels.items(), strict=False):
        ax.set_title(f"{shape}, {workload}", fontsize=9)
        ax.set_ylim(0, 100)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        for number, cache in enumerate(caches):
            _curve(ax, found, cache, _COLOURS[number % len(_COLOURS)])
    figure.supxlabel("memory of the cache, GiB", fontsize=9)
    figure.supylabel("prompt tokens restored, %", fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=len(caches), fontsize=8
    )
    figure.savefig(path, dpi=110, format="png")


def _curve(ax: Any, found: Sequence[Point], cache: str, colour: str) -> None:
    served = sorted(
        (point.memory / 2**30, 100 * point.restored[cache])
        for point in found
        if cache in point.restored
    )
    ours = is_ours(cache)
    ax.plot(
        [memory for memory, _ in served],
        [restored for _, restored in served],
        label=cache,
        color="black" if cache == BOUND else colour,
        linestyle=":" if cache == BOUND else "-",
        linewidth=2.2 if ours else 1.1,
        marker="o" if ours else ".",
        markersize=4,
    )
