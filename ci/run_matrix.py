# SPDX-License-Identifier: Apache-2.0
"""Check the engine versions of ci/matrix.toml, and write docs/compatibility.md.

The column of vLLM's release in docs/architectures.md is made of the same wheels.

    ci/run_matrix.py --all --contracts-only     hook points of every row, no engine
    ci/run_matrix.py --engine vllm              one engine's rows, engine tests too
    ci/run_matrix.py --newest                   engine tests of each engine's newest
                                                CPU row; hook points of all rows

Exits with 1, and the names, where something that a row relies on is gone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matrix_document as document
import matrix_environment as environment
import matrix_sources as sources

from hybrid_plugin.tools.models import page as models
from hybrid_plugin.tools.models import table
from hybrid_plugin.upstream import contracts, matrix, patch_expiry
from hybrid_plugin.upstream.matrix import Row

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
MODELS = ROOT / "docs" / "architectures.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = _parser().parse_args(arguments)
    rows = _chosen(args)
    if not rows:
        print("No row of ci/matrix.toml is of that engine and version.")
        return 1
    checked, failures = _check(rows, args)
    _print_table(checked)
    if args.write or args.compare:
        failures += _publish(checked, rows, args)
    if not args.contracts_only:
        failures += _run_engine_tests(rows, args)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    text = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="ci/run_matrix.py", description=text)
    parser.add_argument("--all", action="store_true", help="every row (the default)")
    parser.add_argument("--engine", choices=contracts.ENGINES)
    parser.add_argument("--version", help="of the engine")
    parser.add_argument("--contracts-only", action="store_true", help="start no engine")
    parser.add_argument(
        "--newest",
        action="store_true",
        help="engine tests for each engine's newest CPU row alone",
    )
    parser.add_argument(
        "--source", type=Path, help="an unpacked wheel to check in place of the row's"
    )
    parser.add_argument(
        "--sources",
        type=Path,
        default=ROOT / "build" / "matrix",
        help="where unpacked wheels and environments are kept (%(default)s)",
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        help="download nothing: leave out, and name, rows whose wheel is not there",
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument(
        "--compare", action="store_true", help=f"fail if {PAGE.name} is out of date"
    )
    return parser


def _chosen(args: argparse.Namespace) -> list[Row]:
    return [
        row
        for row in matrix.load()
        if args.engine in (None, row.engine) and args.version in (None, row.version)
    ]


def _check(
    rows: Sequence[Row], args: argparse.Namespace
) -> tuple[list[document.Checked], list[str]]:
    checked: list[document.Checked] = []
    failures: list[str] = []
    for row in rows:
        try:
            root = args.source or sources.find(row, args.sources, offline=args.offline)
        except sources.SourceError as error:
            if args.offline:
                print(f"left out: {error}")
            else:
                failures.append(str(error))
            continue
        findings = contracts.check_source(row.engine, row.version, root)
        checked.append(document.Checked(row, findings))
        wrong = contracts.verdict(row, findings)
        if wrong is not None:
            failures.append(wrong)
    return checked, failures


def _print_table(checked: Sequence[document.Checked]) -> None:
    for cells in map(document.table_row, checked):
        print(
            "  ".join(
                f"{cell:<{width}}"
                for cell, width in zip(cells, (26, 5, 5, 5, 10, 12, 16), strict=True)
            )
        )


def _publish(
    checked: Sequence[document.Checked], rows: Sequence[Row], args: argparse.Namespace
) -> list[str]:
    if len(checked) != len(rows) or len(rows) != len(matrix.load()):
        return [f"{PAGE.name} takes the sources of all rows; not all were checked."]
    try:
        page = document.page(checked, patch_expiry.load())
    except patch_expiry.PatchError as error:
        return [str(error)]
    release = table.of_release(sources.find(models.release(), args.sources))
    columns = {models.RELEASE: release}
    pages = {PAGE: page, MODELS: models.updated(MODELS.read_text(), columns)}
    stale = [file for file in pages if file.read_text() != pages[file]]
    if args.write:
        for file in stale:
            file.write_text(pages[file])
        return []
    return [
        f"{file.name} is out of date: run ci/run_matrix.py --all --write."
        for file in stale
    ]


def _run_engine_tests(rows: Sequence[Row], args: argparse.Namespace) -> list[str]:
    runnable = [row for row in rows if row.install is not None]
    if args.newest:
        newest = {row.engine: matrix.newest(runnable, row.engine) for row in runnable}
        runnable = list(newest.values())
    results = [environment.run_engine_tests(row, args.sources) for row in runnable]
    return [result for result in results if result is not None]


if __name__ == "__main__":
    sys.exit(main())
