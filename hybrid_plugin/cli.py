# SPDX-License-Identifier: Apache-2.0
"""The command `hybrid-plugin`; what a subcommand needs is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from hybrid_plugin.tools.demo.engines import Engine
    from hybrid_plugin.tools.demo.tiers import TiersDemo

MIB = 2**20
DRAFTS = 2
"""Of the demo: the bundled model accepts 0.8 of 2, and 1.0 of 3, on held-out text."""
CACHE_MIB, CACHE_MIB_OF_LARGE_STATES = 16, 64
HOST_MIB, DISK_MIB = 128, 1024
"""Of the demo: all chats that come back fit, of usual states."""


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        """End the program; `--help` shows what there is."""
        message = " ".join(message.split())
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    args = _parser().parse_args(arguments)
    status: int = args.run(args)
    return status


def _parser() -> argparse.ArgumentParser:
    from hybrid_plugin.tools.bundle import command as bundle
    from hybrid_plugin.tools.doctor import command as doctor
    from hybrid_plugin.tools.models import command as models
    from hybrid_plugin.tools.plan import command as plan
    from hybrid_plugin.tools.route import command as route
    from hybrid_plugin.tools.session import command as session
    from hybrid_plugin.tools.simulate import command as simulate
    from hybrid_plugin.tools.top import command as top

    parser: argparse.ArgumentParser = _Parser(
        prog="hybrid-plugin", description="Prefix cache for hybrid models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    doctor.add_parser(commands)
    simulate.add_parser(commands)
    plan.add_parser(commands)
    bundle.add_parser(commands)
    top.add_parser(commands)
    session.add_parser(commands)
    models.add_parser(commands)
    route.add_parser(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "serve a small model with and without the plugin, and compare"
    demo = commands.add_parser("demo", help=text, description=text)
    demo.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    demo.add_argument(
        "--model", type=Path, help="a model folder; by default the bundled one"
    )
    demo.add_argument(
        "--cache-mib",
        type=int,
        help=f"cache of each vLLM server ({CACHE_MIB}; with --large-states "
        f"{CACHE_MIB_OF_LARGE_STATES}); SGLang's is counted in tokens and states, and "
        "about as large",
    )
    demo.add_argument(
        "--out", type=Path, help="by default build/demo.json, or demo-sglang.json"
    )
    demo.add_argument(
        "--stock-flag",
        action="append",
        metavar="FLAG",
        help="a flag for the stock server alone, instead of those that suit it best; "
        "may be repeated",
    )
    demo.add_argument(
        "--large-states",
        action="store_true",
        help="the bundled model with states as large, beside its KV, as those of real "
        "models, and the same answers",
    )
    demo.add_argument(
        "--speculate",
        action="store_true",
        help=f"both servers draft {DRAFTS} tokens at a time with the model's MTP head "
        "(vLLM)",
    )
    demo.add_argument(
        "--tiers",
        action="store_true",
        help="both servers run with the plugin, one of them with host memory and files "
        "behind its cache; long chats come back, after a restart too, and with NIXL it "
        "answers prompts that a third one computes (vLLM)",
    )
    demo.add_argument(
        "--host-mib",
        type=int,
        default=HOST_MIB,
        help="host memory with --tiers (%(default)s)",
    )
    demo.add_argument(
        "--disk-mib",
        type=int,
        default=DISK_MIB,
        help="files with --tiers (%(default)s)",
    )
    demo.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    try:
        from hybrid_plugin.tools.demo import large_states
        from hybrid_plugin.tools.demo.run import Demo, bundled_model
        from hybrid_plugin.tools.demo.server import DemoError
    except ModuleNotFoundError as missing:
        print(
            f"The demo needs the package {missing.name}; run `make demo`, which "
            "installs it.",
            file=sys.stderr,
        )
        return 1
    for option in ("speculate", "tiers"):
        if getattr(args, option) and args.engine != "vllm":
            print(f"--{option} needs vLLM: leave --engine out.", file=sys.stderr)
            return 2
    if args.tiers and (args.speculate or args.stock_flag is not None):
        print(
            "--tiers has no stock server, and no drafts: leave --stock-flag and "
            "--speculate out.",
            file=sys.stderr,
        )
        return 2
    name = "demo.json" if args.engine == "vllm" else f"demo-{args.engine}.json"
    out = args.out or Path("build", "demo-tiers.json" if args.tiers else name)
    if args.cache_mib is None:
        large = args.large_states
        args.cache_mib = CACHE_MIB_OF_LARGE_STATES if large else CACHE_MIB
    try:
        model = (args.model or bundled_model()).resolve()
        if args.large_states:
            model = large_states.write(model, Path("build", "demo-large-states"))
        demo = (
            _tiers(args, model, out) if args.tiers else Demo(_engine(args), model, out)
        )
        return 0 if demo.run() else 1
    except (DemoError, RuntimeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; both servers were ended.", file=sys.stderr)
        return 130


def _tiers(args: argparse.Namespace, model: Path, out: Path) -> TiersDemo:
    from hybrid_plugin.tools.demo.engines import VllmEngine
    from hybrid_plugin.tools.demo.tiers import LONGEST, TiersDemo

    engine = VllmEngine(cache_bytes=args.cache_mib * MIB, max_model_len=LONGEST)
    host, disk = args.host_mib * MIB, args.disk_mib * MIB
    return TiersDemo(engine, host, disk, model, out)


def _engine(args: argparse.Namespace) -> Engine:
    from hybrid_plugin.tools.demo.engines import (
        VllmEngine,
        has_gpu,
        speculating,
        with_large_states,
    )
    from hybrid_plugin.tools.demo.sglang import SglangEngine

    stock = {} if args.stock_flag is None else {"stock_flags": args.stock_flag}
    if args.engine == "sglang":
        return SglangEngine(**stock)
    engine = VllmEngine(cache_bytes=args.cache_mib * MIB)
    if args.large_states:
        engine = with_large_states(engine)
    if args.speculate:
        engine = speculating(engine, DRAFTS, gpu=has_gpu())
    return replace(engine, **stock)
