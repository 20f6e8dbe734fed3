# SPDX-License-Identifier: Apache-2.0
"""The table as a part of a page of Markdown, with a column for each engine."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_plugin.tools.models.table import Table, words
from hybrid_plugin.upstream.contracts import ENGINES, TITLES

BEGIN, END = "<!-- begin: hybrid-plugin models -->", "<!-- end -->"
ABSENT = "not known to it"


def updated(text: str, table: Table) -> str:
    """The page with the columns of `table` as they are now.

    Args:
        text: of the page, with `BEGIN` and `END` around the table.
        table: of the engines that were looked at; others' columns stay.

    Raises:
        ValueError: if the page has no place for the table.
    """
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no lines {BEGIN} and {END}")
    cells = columns(inside)
    for engine, found in table.items():
        cells[engine] = {s.architecture: words(s, engine) for s in found}
    return f"{before}{BEGIN}\n\n{_render(cells)}\n{END}{after}"


def columns(inside: str) -> dict[str, Mapping[str, str]]:
    """What a table says of each engine, by architecture."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in inside.splitlines()
        if line.startswith("| `")
    ]
    return {
        engine: {
            row[0].strip("`"): row[number] for row in rows if row[number] != ABSENT
        }
        for number, engine in enumerate(ENGINES, start=1)
    }


def _render(cells: Mapping[str, Mapping[str, str]]) -> str:
    names = sorted({name for column in cells.values() for name in column})
    titles = " | ".join(TITLES[engine] for engine in ENGINES)
    lines = [f"| architecture | {titles} |", "|---|" + "---|" * len(ENGINES)]
    for name in names:
        row = " | ".join(cells[engine].get(name, ABSENT) for engine in ENGINES)
        lines.append(f"| `{name}` | {row} |")
    return "\n".join(lines) + "\n"
