# SPDX-License-Identifier: Apache-2.0
"""Numbers in tables of the documents are those of the results that the text names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE, README = ROOT / "docs" / "measurements.md", ROOT / "README.md"

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CELL = re.compile(rf"{_NUMBER.pattern}(?: ?%|x)?(?:, {_NUMBER.pattern}(?: ?%|x)?)*")
_NAMED = re.compile(r"`(?:benchmarks/results/)?([\w.*{},-]+?)(?:\.md|\.json)`")


@dataclass(frozen=True)
class Shown:
    """A number as it is printed."""

    text: str
    is_ratio: bool = False

    @property
    def value(self) -> float:
        return float(self.text.replace(",", ""))

    def is_rounded(self, exact: float) -> bool:
        """Whether it is another number, rounded as this one is."""
        digits = len(self.text.partition(".")[2])
        return abs(exact - self.value) <= 0.5000001 * 10**-digits


@dataclass
class Table:
    """A table, and the names of the results that stand before it."""

    title: str
    names: list[str]
    rows: list[list[str]] = field(default_factory=list)


def tables(text: str) -> Iterator[Table]:
    """All tables of a page; results are named since the table or heading before."""
    title, before, current = "", "", None
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            if current is None:
                current = Table(title, _NAMED.findall(before))
            current.rows.append(cells_of(line))
            continue
        if current is not None:
            yield current
            current, before = None, ""
        if line.startswith("#"):
            title, before = line.lstrip("# "), ""
        before += line + "\n"


def numbers_of(row: list[str]) -> list[Shown]:
    """Of the cells that are numbers and nothing else."""
    plain = [cell.replace("**", "") for cell in row]
    return [
        Shown(found[0], is_ratio=cell[found.end() :].startswith("x"))
        for cell in plain
        if _CELL.fullmatch(cell)
        for found in _NUMBER.finditer(cell)
    ]


def files_of(name: str) -> list[Path]:
    """Of a result, whose name may have braces or a star."""
    braces = re.search(r"\{([^}]*)\}", name)
    if braces:
        parts = braces[1].split(",")
        each = [name[: braces.start()] + p + name[braces.end() :] for p in parts]
        return [file for one in each for file in files_of(one)]
    return [*RESULTS.glob(f"{name}.md"), *RESULTS.glob(f"{name}.json")]


def numbers_in(file: Path) -> Iterator[float]:
    """All that a result has."""
    if file.suffix == ".json":
        yield from _leaves(json.loads(file.read_text()))
    else:
        for found in _NUMBER.findall(file.read_text()):
            yield float(found.replace(",", ""))


def _leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
        yield 100.0 * value


def cells_of(line: str) -> list[str]:
    """Of a row of a table in Markdown."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def compared(label: str, files: Iterable[Path]) -> Iterator[float]:
    """Ratios of numbers in one column of the rows that results have for a label."""
    for file in files:
        if file.suffix != ".md":
            continue
        lines = file.read_text().splitlines()
        rows = [cells_of(line) for line in lines if line.startswith(f"| {label} |")]
        for one, other in permutations(rows, 2):
            for a, b in zip(map(_value, one), map(_value, other), strict=False):
                if a is not None and b:
                    yield a / b


def _value(cell: str) -> float | None:
    return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else None


def strange(table: Table, files: Sequence[Path]) -> list[str]:
    """Numbers of a table that no result has, and that compare no two numbers."""
    known = {number for file in files for number in numbers_in(file)}
    found = []
    for row in table.rows[2:]:
        shown = numbers_of(row)
        plain = [one.value for one in shown if not one.is_ratio]
        ratios = {a / b for a, b in permutations(plain, 2) if b}
        ratios |= set(compared(row[0], files))
        for one in shown:
            others = ratios if one.is_ratio else ()
            if not any(map(one.is_rounded, (*known, *others))):
                found.append(f"{one.text} in {' | '.join(row)}")
    return found


TABLES = [table for table in tables(PAGE.read_text()) if table.names]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_numbers_are_those_of_the_results_that_are_named(table: Table) -> None:
    files = [file for name in table.names for file in files_of(name)]
    assert strange(table, files) == []


def test_all_tables_but_the_summary_name_results() -> None:
    summary, *others = tables(PAGE.read_text())
    assert summary.title == "Where the plugin is behind"
    assert [table.title for table in others if not table.names] == []


def test_numbers_of_the_readme_are_those_of_the_page() -> None:
    readme, page = README.read_text(), PAGE.read_text()
    rows = [row for table in tables(page) for row in table.rows]
    known = {number.value for row in rows for number in numbers_of(row)}
    (found,) = [table for table in tables(readme) if "wall" in table.rows[0]]
    shown = [number for row in found.rows[2:] for number in numbers_of(row)]
    assert len(shown) > 20
    assert [one.text for one in shown if not any(map(one.is_rounded, known))] == []
    assert set(re.findall(r"\d\.\d\dx", readme)) <= set(re.findall(r"\d\.\d\dx", page))


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("| w | 12 | 1.5 % | 0.50x |", []),
        ("| w | **13** | 1.5 % | 0.50x |", ["13"]),
        ("| w | 12 | 1.6 % | 0.50x |", ["1.6"]),
        ("| w | 12 | 1.5 % | 0.60x |", ["0.60"]),
    ],
)
def test_another_number_is_found(row: str, wrong: list[str], tmp_path: Path) -> None:
    file = tmp_path / "result.md"
    file.write_text("| w | a | 12 | 1.52 % |\n| w | b | 24 | 3.00 % |\n")
    table = Table("", [], [["", ""], ["", ""], cells_of(row)])
    assert [text.split()[0] for text in strange(table, [file])] == wrong
