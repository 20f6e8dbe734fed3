# SPDX-License-Identifier: Apache-2.0
"""The table as a part of a page of Markdown, with a column for each engine.

vLLM has two: the release for GPUs, by the source of its wheel, and the build for CPUs,
which can be installed where the page is made.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_plugin.tools.models.table import Table, words
from hybrid_plugin.upstream import matrix
from hybrid_plugin.upstream.contracts import TITLES
from hybrid_plugin.upstream.matrix import Row

BEGIN, END = "<!-- begin: hybrid-plugin models -->", "<!-- end -->"
ABSENT = "not known to it"
RELEASE = "vllm release"
"""The column of vLLM's release for GPUs; the others are called as their engines."""
COLUMNS = (RELEASE, "vllm", "sglang")


def updated(text: str, table: Table) -> str:
    """The page with the columns of `table` as they are now.

    Args:
        text: of the page, with `BEGIN` and `END` around the table.
        table: by column, of the engines that were looked at; others' columns stay.

    Raises:
        ValueError: if the page has no place for the table.
    """
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no lines {BEGIN} and {END}")
    cells = columns(inside)
    for column, found in table.items():
        cells[column] = {s.architecture: words(s, engine_of(column)) for s in found}
    return f"{before}{BEGIN}\n\n{_render(cells)}\n{END}{after}"


def columns(inside: str) -> dict[str, Mapping[str, str]]:
    """What a table says, by column and architecture."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in inside.splitlines()
        if line.startswith("| `")
    ]
    return {
        column: {
            row[0].strip("`"): row[number] for row in rows if row[number] != ABSENT
        }
        for number, column in enumerate(COLUMNS, start=1)
    }


def engine_of(column: str) -> str:
    """The engine that a column is about."""
    return "vllm" if column == RELEASE else column


def release() -> Row:
    """The row of the matrix that the column of vLLM's release is about.

    Raises:
        MatrixError: if no release for GPUs is served.
    """
    rows = [row for row in matrix.load() if row.platform == "cuda"]
    return matrix.newest(rows, "vllm")


def _title(column: str) -> str:
    if column == RELEASE:
        return f"vLLM {release().version}"
    rows = [row for row in matrix.load() if row.platform == "cpu"]
    row = matrix.newest(rows, column)
    build = "'s build for CPUs," if column == "vllm" else ""
    return f"{TITLES[column]}{build} {row.version}"


def _render(cells: Mapping[str, Mapping[str, str]]) -> str:
    names = sorted({name for column in cells.values() for name in column})
    titles = " | ".join(map(_title, COLUMNS))
    lines = [f"| architecture | {titles} |", "|---|" + "---|" * len(COLUMNS)]
    for name in names:
        row = " | ".join(cells[column].get(name, ABSENT) for column in COLUMNS)
        lines.append(f"| `{name}` | {row} |")
    return "\n".join([*lines, "", _summary(cells)]) + "\n"


def _summary(cells: Mapping[str, Mapping[str, str]]) -> str:
    """How many architectures GPUs serve in both engines."""
    both = (RELEASE, "sglang")
    served = (
        {name for name, cell in cells[column].items() if ", served" in cell}
        for column in both
    )
    count = len(set.intersection(*served))
    first, second = map(_title, both)
    return f"Served in both {first} and {second}: {count}."
