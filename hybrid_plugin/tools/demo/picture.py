# SPDX-License-Identifier: Apache-2.0
"""The demo's outcome as a sentence, as bars in a terminal, and as a PNG file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hybrid_plugin.tools.demo.measure import Result
from hybrid_plugin.tools.demo.report import STOCK_AND_PLUGIN, Outcome

_CELLS = 30
"""Characters of a bar in a terminal, at most."""
_EIGHTHS = " ▏▎▍▌▋▊▉"
_WIDTH, _BAR, _GAP, _LEFT, _TOP = 900, 26, 40, 190, 80
"""Pixels of the picture: its width, a bar's height, what lies between two workloads,
beside the bars and above them."""
_COLOURS = ("#9aa5b1", "#1f77b4")
"""Of the bars of the two servers."""
_BLACK, _WHITE = "#222222", "#ffffff"


def sentence(engine: str, outcomes: Sequence[Outcome]) -> str:
    """What all workloads come to: the share restored, and the time to first tokens.

    The share is of workloads whose prompts have something in common; the time is the
    geometric mean over all of the medians' ratios.

    Args:
        engine: its name.
        outcomes: one for each workload, at least one.
    """
    sharing = [outcome for outcome in outcomes if outcome.workload.shares]
    stock = _restored([outcome.stock for outcome in sharing])
    plugin = _restored([outcome.plugin for outcome in sharing])
    told = (
        f"Of prompts that have a beginning in common the plugin restored {plugin:.0%}, "
        f"{engine} alone {stock:.0%}"
    )
    ratios = list(_ratios(outcomes))
    if not ratios:
        return f"{told}."
    mean = math.prod(ratios) ** (1 / len(ratios))
    return (
        f"{told}; the median time to the first token was {mean:.2f} times that of "
        f"{engine} alone."
    )


def bars(
    outcomes: Sequence[Outcome], servers: tuple[str, str] = STOCK_AND_PLUGIN
) -> Table:
    """A bar for each workload and server: the share of prompt tokens restored.

    Args:
        outcomes: one for each workload.
        servers: the names of the two.
    """
    table = Table(title="prompt tokens restored", box=SIMPLE_HEAD, show_header=False)
    table.title_justify, table.pad_edge = "left", False
    for bar in _bars(outcomes, servers):
        style = "bold" if bar.server == servers[1] else ""
        table.add_row(bar.label, bar.server, _line(bar.share), bar.text, style=style)
    return table


def save_png(
    outcomes: Sequence[Outcome],
    title: str,
    path: Path,
    servers: tuple[str, str] = STOCK_AND_PLUGIN,
) -> None:
    """Write the bars as a picture.

    Args:
        outcomes: one for each workload.
        title: above the bars.
        path: of the file.
        servers: the names of the two.

    Raises:
        ImportError: without Pillow, which both engines install.
        OSError: if the file cannot be written.
    """
    from PIL import Image, ImageDraw, ImageFont

    height = _TOP + len(outcomes) * (2 * _BAR + _GAP)
    image = Image.new("RGB", (_WIDTH, height), _WHITE)
    draw = ImageDraw.Draw(image)
    large, small = ImageFont.load_default(22), ImageFont.load_default(17)
    draw.text((20, 16), title, _BLACK, large)
    draw.text((20, 46), "share of prompt tokens restored", _BLACK, small)
    full = _WIDTH - _LEFT - 100
    for number, bar in enumerate(_bars(outcomes, servers)):
        top = _TOP + number // 2 * (2 * _BAR + _GAP) + number % 2 * _BAR
        width = round(bar.share * full)
        colour = _COLOURS[number % 2]
        draw.rectangle((_LEFT, top, _LEFT + width, top + _BAR - 4), colour)
        draw.text((20, top), bar.label, _BLACK, small)
        draw.text((_LEFT - 75, top), bar.server, _BLACK, small)
        draw.text((_LEFT + width + 8, top), bar.text, _BLACK, small)
    image.save(path)


@dataclass(frozen=True)
class _Bar:
    label: str
    """Of the workload; empty for the second server's bar."""
    server: str
    share: float
    text: str


def _bars(outcomes: Sequence[Outcome], servers: tuple[str, str]) -> Iterator[_Bar]:
    for outcome in outcomes:
        for server, result in zip(
            servers, (outcome.stock, outcome.plugin), strict=True
        ):
            share = result.cached_share
            label = outcome.workload.label if server == servers[0] else ""
            yield _Bar(label, server, share, f"{share:.1%}")


def _line(share: float) -> str:
    eighths = round(share * _CELLS * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _restored(results: Sequence[Result]) -> float:
    prompts = sum(result.prompt_tokens for result in results)
    return sum(result.cached_tokens for result in results) / max(prompts, 1)


def _ratios(outcomes: Sequence[Outcome]) -> Iterator[float]:
    for outcome in outcomes:
        ours, theirs = outcome.plugin.ttft_ms_p50, outcome.stock.ttft_ms_p50
        if ours and theirs:
            yield ours / theirs
