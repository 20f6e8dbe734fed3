# SPDX-License-Identifier: Apache-2.0
"""The subcommand `hybrid-plugin models`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

_TEXT = "list hybrid architectures: whose class runs them, and whether they are cached"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    models = commands.add_parser("models", help=_TEXT, description=_TEXT)
    models.add_argument(
        "--engine", choices=("vllm", "sglang"), help="by default all that are installed"
    )
    models.add_argument("--json", action="store_true", help="print JSON")
    models.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="put the table into a page of Markdown, where columns of engines that are "
        "not installed stay as they are",
    )
    models.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, and print; returns the exit status."""
    from hybrid_plugin.tools.models import page, table

    # Engines log to standard output, which is the table's.
    with contextlib.redirect_stdout(sys.stderr):
        found = table.of_installed_engines(args.engine)
    if not found:
        print("No engine is installed in this environment.", file=sys.stderr)
        return 1
    if args.write is not None:
        args.write.write_text(page.updated(args.write.read_text(), found))
    elif args.json:
        print(json.dumps(table.as_json(found), indent=2))
    else:
        print(table.as_text(found))
    return 0
