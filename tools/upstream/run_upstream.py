# SPDX-License-Identifier: Apache-2.0
"""Run an engine's own tests with the plugin in place of what they test.

    python tools/upstream/run_upstream.py --upstream-checkout DIR [PYTEST_FLAG...]

DIR is the engine's source at the commit that the expectations name.  Run it with the
Python of an environment that has the engine, this package and what the engine's tests
import (for vLLM: pytest-asyncio and tblib).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import checkout
import expectations
import hub
import upstream_tests
from expectations import Expectations

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None, lists: Path = HERE) -> int:
    """Run the command line; returns pytest's exit status, or 2.

    Args:
        arguments: of the command line.
        lists: the folder with the files of expectations.
    """
    args, flags = _parser().parse_known_args(arguments)
    file = args.expectations or _for_installed(lists)
    if file is None:
        print("No list of tests is for the engine that is installed.", file=sys.stderr)
        return 2
    expected = expectations.load(file)
    differences = checkout.differences(args.upstream_checkout, expected)
    if differences:
        print(*differences, sep="\n", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        stage = _stage(args.upstream_checkout, expected, Path(folder))
        models = hub.write(Path(folder) / "hub", expected.models)
        variables = {**models, **_variables(file, stock=args.stock)}
        return _run(stage, expected, flags, variables)


def _parser() -> argparse.ArgumentParser:
    text = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        description=text, epilog="Other flags are passed on to pytest."
    )
    parser.add_argument("--upstream-checkout", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--expectations", type=Path, help="by default those of the installed version"
    )
    parser.add_argument(
        "--stock",
        action="store_true",
        help="leave the plugin out, to see what fails without it too",
    )
    return parser


def _for_installed(lists: Path) -> Path | None:
    for file in sorted(lists.glob("*.yaml")):
        expected = expectations.load(file)
        for distribution in (expected.engine, f"{expected.engine}-cpu"):
            try:
                version = metadata.version(distribution).partition("+")[0]
            except metadata.PackageNotFoundError:
                continue
            if version == expected.version:
                return file
    return None


def _stage(source: Path, expected: Expectations, folder: Path) -> Path:
    """A folder with the tests alone: beside them the source hides what is installed."""
    stage = folder / "stage"
    stage.mkdir()
    for name in {Path(file).parts[0] for file in expected.tests}:
        (stage / name).symlink_to((source / name).resolve())
    return stage


def _variables(file: Path, *, stock: bool) -> dict[str, str]:
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        upstream_tests.FILE_VARIABLE: str(file.resolve()),
        upstream_tests.STOCK_VARIABLE: "1" if stock else "0",
        "HYBRID_PLUGIN": "0" if stock else "1",
    }


def _run(
    stage: Path,
    expected: Expectations,
    flags: Sequence[str],
    variables: Mapping[str, str],
) -> int:
    command = [sys.executable, "-m", "pytest", "-p", "upstream_tests"]
    command += ["-p", "no:cacheprovider", "-W", "ignore", *flags]
    if not any("::" in flag for flag in flags):
        command += expected.tests
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=stage, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
