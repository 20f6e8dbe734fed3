# SPDX-License-Identifier: Apache-2.0
"""The subcommand `hybrid-plugin doctor`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hybrid_plugin.tools.numbers import positive

_TEXT = (
    "say whether serving would work here: engine, hook points, and the model's layout"
)
_MORE = """\
Flags after `--` are the server's, as in
`hybrid-plugin doctor --model MODEL -- --max-model-len 32768`.
Exits with 0 only if serving would work."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    doctor = commands.add_parser("doctor", help=_TEXT, description=_TEXT, epilog=_MORE)
    doctor.add_argument(
        "--engine", choices=("vllm", "sglang"), help="by default all that are installed"
    )
    doctor.add_argument(
        "--model", help="a model's folder, its config.json, or its name on a hub"
    )
    doctor.add_argument(
        "--cache-gib",
        type=positive,
        default=16.0,
        help="cache memory to lay the model out in (%(default)s)",
    )
    doctor.add_argument(
        "--no-import",
        action="store_true",
        help="look at the engine's source only, which is quicker; not with --model",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("flags", nargs="*", metavar="-- FLAG", help="of the server")
    doctor.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine and print; returns the exit status."""
    from hybrid_plugin.tools.doctor import render
    from hybrid_plugin.tools.doctor.report import Question, examine

    if args.no_import and args.model is not None:
        print("--model needs the engine: leave --no-import out.", file=sys.stderr)
        return 2
    if args.flags and args.model is None:
        print(
            "Flags are looked at with a model: name it with --model, and give the "
            f"server's flags after --. Not looked at: {' '.join(args.flags)}",
            file=sys.stderr,
        )
        return 2
    # Engines log to standard output, which is the report's.
    with contextlib.redirect_stdout(sys.stderr), _model_folder(args.model) as model:
        report = examine(
            Question(
                engine=args.engine,
                model=model,
                flags=args.flags,
                cache_bytes=int(args.cache_gib * 2**30),
                live=not args.no_import,
            )
        )
    if args.json:
        print(json.dumps(render.as_json(report), indent=2))
    else:
        print(render.as_text(report))
    return 0 if report.ok else 1


@contextlib.contextmanager
def _model_folder(model: str | None) -> Iterator[str | None]:
    """What an engine takes for a model: a file is put into a folder of its own."""
    if model is None or not Path(model).is_file():
        yield model
    elif Path(model).name == "config.json":
        yield str(Path(model).resolve().parent)
    else:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_bytes(Path(model).read_bytes())
            yield folder
