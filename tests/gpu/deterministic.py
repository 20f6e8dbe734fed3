# SPDX-License-Identifier: Apache-2.0
"""Compares logprobs bit for bit: alone, in a crowd, warm, in chunks, after restarts.

    python -m tests.gpu.deterministic all --engine vllm --out /some/folder \\
        --options '{"deterministic": "prefix"}'

starts an engine four times and compares everything with the first run alone.  `run`
makes some of the files, `compare` compares those that are there.  A negative control
must end with a difference:

    python -m tests.gpu.deterministic all ... --fault zero_snapshots --expect-different
    python -m tests.gpu.deterministic all ... --fault grid_of_16 --expect-different

Modes: `alone` forgets the cache before each prompt; `warm` asks one by one what has
been asked before; `crowd` forgets, then asks all at once; `warm-crowd` asks all at once
again; `groups-of-2` forgets, then asks two at once, and so on.  Ends with status 0 if
all have the same bits (or, so wanted, some do not).

    python -m tests.gpu.deterministic settings --engine vllm --out /some/folder \\
        --options '{"deterministic": "prefix"}' --requests 60 --at-once 3

starts vLLM with one setting after the other (`determinism.settings`: CUDA graphs of
each kind and none, other sizes of them) and prints a line about each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.engines.faults import planted
from tests.gpu.determinism import settings
from tests.gpu.determinism.engine import MODES, Setup, ask_all
from tests.gpu.determinism.prompts import prompts
from tests.gpu.determinism.record import differences, load, save, told

MODEL = Path(__file__).parents[1] / "assets" / "tiny-qwen3-next"
SCRATCH = Path(tempfile.gettempdir(), "hybrid-deterministic")
BASE = "chunk-8192-start-0-alone"
RUNS: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (8192, 0, ("alone", "warm", "crowd")),
    (256, 0, ("crowd", "warm")),
    (8192, 1, ("crowd", "warm-crowd", "alone")),
    (256, 2, ("crowd", "warm-crowd")),
)
"""Chunk budget, number of the start, and what is done, of each process of `all`."""


def model_folder(name: str) -> Path:
    """The bundled model, or one that `slow_decay` writes."""
    if name == "bundled":
        return MODEL
    from tests.engines import slow_decay

    # A folder for each process: engines may start together.
    folder = SCRATCH / f"{name}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    write = getattr(slow_decay, f"write_{name}")
    return Path(write(folder))


def run(args: argparse.Namespace) -> int:
    """Ask an engine in each mode, and write what it answers."""
    from benchmarks.passes import engines, log

    setup = Setup(
        args.engine,
        model_folder(args.model),
        args.dtype,
        args.chunk,
        None if args.stock else {"enabled": True, **args.options},
        args.flags,
    )
    setup.set_environment()
    asked = prompts(args.requests)
    top = args.top or setup.vocabulary

    async def work(running: engines.Running) -> None:
        for mode in args.modes:
            begin = time.monotonic()
            answers = await ask_all(setup, running, asked, mode, top, args.start)
            took = time.monotonic() - begin
            name = f"chunk-{args.chunk}-start-{args.start}-{mode}"
            save(args.out / f"{name}.npz", answers)
            prefills = [one for one in log.read(running.passes, begin) if one.prefills]
            print(
                f"{name}: {took:.1f} s, {len(prefills)} prefill passes of up to "
                f"{max(one.prefill_tokens for one in prefills)} tokens and "
                f"{max(one.prefills + one.decodes for one in prefills)} sequences, "
                f"{sum(answer.cached for answer in answers)} tokens restored",
                flush=True,
            )

    args.out.mkdir(parents=True, exist_ok=True)
    engines.run(args.engine, setup.arguments(), work)
    return 0


def compare(args: argparse.Namespace) -> int:
    """Compare all files with the first run alone."""
    base = args.out / f"{BASE}.npz"
    others = sorted(path for path in args.out.glob("chunk-*.npz") if path != base)
    if not base.exists() or not others:
        raise SystemExit(f"{args.out} lacks {base.name}, or others to compare with it.")
    expected, differ = load(base), 0
    for path in others:
        answers = load(path)
        found = differences(expected, answers)
        print(told(path.stem, found, answers))
        differ += bool(found)
    wanted = differ > 0 if args.expect_different else differ == 0
    print(
        f"{differ} of {len(others)} differ from {BASE}: {'good' if wanted else 'BAD'}"
    )
    return 0 if wanted else 1


def run_all(args: argparse.Namespace) -> int:
    """Run all processes, then compare."""
    for old in args.out.glob("chunk-*.npz"):
        old.unlink()  # of another engine, maybe
    with ThreadPoolExecutor(args.at_once) as pool:
        statuses = list(pool.map(partial(_run_one, args), range(len(RUNS))))
    if any(statuses):
        raise SystemExit(f"an engine ended with status {max(statuses)}.")
    return compare(args)


def run_settings(args: argparse.Namespace) -> int:
    """Start vLLM with each of several settings, and tell which change bits."""
    chosen = [one for one in settings.SETTINGS if one.name in args.only]
    folders = [args.out / one.name for one in chosen]
    for folder in folders:
        for old in folder.glob("chunk-*.npz"):
            old.unlink()
    first, bad = None, 0
    with ThreadPoolExecutor(args.at_once) as pool:
        statuses = pool.map(partial(_run_setting, args), chosen)
        for folder, status in zip(folders, statuses, strict=True):
            if status:
                line, differ = f"{folder.name}: ended with status {status}", 1
            else:
                line, differ = settings.report(folder, first)
                first = first or folder
            print(line, flush=True)
            bad += differ
    return 1 if bad else 0


def _run_one(args: argparse.Namespace, number: int) -> int:
    """Be through with one of `RUNS`; the exit status of its process."""
    chunk, start, modes = RUNS[number]
    words = ["--chunk", str(chunk), "--start", str(start), "--modes", *modes]
    return _start([*passed_on(args), *words], f"cache-{number}", planted(args.fault))


def _run_setting(args: argparse.Namespace, setting: settings.Setting) -> int:
    """Ask in all of the settings' modes; the exit status of the process."""
    told = argparse.Namespace(**vars(args))
    told.out, told.flags = args.out / setting.name, {**args.flags, **setting.flags}
    words = [*passed_on(told), "--modes", *settings.MODES]
    return _start(words, f"cache-{setting.name}", {})


def _start(words: Sequence[str], cache: str, variables: Mapping[str, str]) -> int:
    """Run a process that asks one engine; its exit status.

    Args:
        words: of its command line.
        cache: name of its compile cache, which no other engine may write to.
        variables: of its environment, beside this one's.
    """
    command = [sys.executable, "-m", "tests.gpu.deterministic", "run", *words]
    environment = os.environ | variables | {"VLLM_CACHE_ROOT": str(SCRATCH / cache)}
    return abs(subprocess.run(command, check=False, env=environment).returncode)


def passed_on(args: argparse.Namespace) -> list[str]:
    """What `all` was told, for the processes that it starts."""
    names = ("engine", "model", "dtype", "requests", "top", "out")
    words = [word for n in names for word in (f"--{n}", str(getattr(args, n)))]
    words += ["--options", json.dumps(args.options), "--flags", json.dumps(args.flags)]
    return [*words, *(["--stock"] if args.stock else [])]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="all|run|compare|settings")
    for name, work in (
        ("all", run_all),
        ("run", run),
        ("compare", compare),
        ("settings", run_settings),
    ):
        command = commands.add_parser(name, help=work.__doc__)
        command.set_defaults(work=work)
        command.add_argument("--out", type=Path, required=True, help="folder of files")
        if work in (run_all, compare):
            command.add_argument("--expect-different", action="store_true")
        if work is run_all:
            command.add_argument("--fault", help="of tests/engines/faults")
        if work is run_settings:
            names = [one.name for one in settings.SETTINGS]
            command.add_argument("--only", nargs="+", choices=names, default=names)
        if work in (run_all, run_settings):
            command.add_argument(
                "--at-once", type=int, default=1, help="engines (%(default)s)"
            )
        if work is run:
            command.add_argument(
                "--chunk", type=int, default=8192, help="(%(default)s)"
            )
            command.add_argument("--start", type=int, default=0, help="its number")
            command.add_argument("--modes", nargs="+", choices=MODES, default=["alone"])
        if work is not compare:
            _add_engine(command)
    return parser.parse_args(arguments)


def _add_engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    command.add_argument(
        "--model",
        default="bundled",
        help="bundled, or of slow_decay: nemotron_h, falcon_h1 (%(default)s)",
    )
    command.add_argument("--dtype", default="bfloat16", help="(%(default)s)")
    command.add_argument("--requests", type=int, default=300, help="(%(default)s)")
    command.add_argument(
        "--top", type=int, default=0, help="logprobs of a token; 0 for all"
    )
    command.add_argument("--stock", action="store_true", help="without the plugin")
    command.add_argument(
        "--options", type=json.loads, default={}, help="of the plugin, JSON"
    )
    command.add_argument(
        "--flags", type=json.loads, default={}, help="of the engine, JSON"
    )


def main() -> int:
    """Do what the command line asks for."""
    args = parse()
    status: int = args.work(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
