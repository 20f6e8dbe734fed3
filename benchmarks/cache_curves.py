# SPDX-License-Identifier: Apache-2.0
"""Hit tokens over memory: the plugin's cache and the engines' own, at equal bytes.

Every cache serves the same requests (`curves.loads`), at the shapes of published
models, behind its own engine's scheduler where it has one; no model computes anything
and nothing takes time.  It tells what is restored, not how fast.

    python -m benchmarks.cache_curves --out NAME
    python -m benchmarks.cache_curves --caches ours ours:lru --shapes nemotron-h-8b \\
        --workloads chats agents --memory 2 4

Memory is given as levels, from what the running requests need (1) to what nearly
everything takes (6), or as sizes such as 8GiB.  `ours:POLICY` has another eviction
policy: `lru`, or `MODULE:NAME` of a class.  `bound` is what no cache can exceed, in the
order in which ours served (`curves.bound`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.curves import sglang_side, vllm_side
from benchmarks.curves.grid import memory_of, tasks
from benchmarks.curves.loads import Traces
from benchmarks.curves.picture import write_picture
from benchmarks.curves.shapes import LEVELS, SHAPES, Task
from benchmarks.curves.sides import Side, run_sides
from benchmarks.curves.table import BOUND, OURS, is_ours, is_stock, table
from benchmarks.prefix_sides import write

Row = dict[str, Any]
CACHES = [OURS, BOUND, *vllm_side.CACHES, *sglang_side.CACHES]


def main() -> int:
    """Serve what is not served yet, and report."""
    args = _arguments()
    places = {
        name: None if path is None else str(path.resolve())
        for name, path in (("mooncake", args.mooncake), ("sessions", args.sessions))
    }
    loads = Traces(args.mooncake, args.sessions).loads()
    if unknown := set(args.workloads or ()) - set(loads):
        print(
            f"No workload {', '.join(sorted(unknown))}; there are {', '.join(loads)}. "
            "mooncake and sessions need the options of those names.",
            file=sys.stderr,
        )
        return 2
    chosen = tasks(
        shapes=args.shapes,
        loads={name: loads[name] for name in args.workloads or loads},
        memory=args.memory,
        seeds=args.seeds,
        caches=args.caches,
    )
    rows = _rows(args, chosen, places)
    print(table(rows))
    if args.out:
        write(args.out, ".json", json.dumps({"rows": rows}, indent=1))
        write(args.out, ".md", table(rows))
        write_picture(rows, args.out.with_name(args.out.name + ".png"))
    return 0


def _rows(
    args: argparse.Namespace, chosen: list[Task], places: dict[str, str | None]
) -> list[Row]:
    """Rows of all tasks, those of an earlier run as they are."""
    resume: Path | None = args.resume
    rows = _earlier(resume)
    left = [task for task in chosen if task.key not in rows]
    lock = Lock()

    def done(row: Row) -> None:
        with lock:
            rows[_key(row)] = row
            if resume is not None:
                with resume.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
            print(_progress(row, len(rows)), file=sys.stderr, flush=True)

    work = []
    for side, mine in _sides(args):
        served = [task for task in left if mine(task.cache)]
        if served:
            work.append((side, served))
    run_sides(work, places, done, args.jobs)
    return [rows[task.key] for task in chosen]


def _sides(args: argparse.Namespace) -> list[tuple[Side, Any]]:
    return [
        (
            Side(OURS, args.python, "benchmarks.curves.ours_side"),
            lambda cache: not is_stock(cache),
        ),
        (
            Side("vllm", args.vllm_python, "benchmarks.curves.vllm_side"),
            vllm_side.CACHES.__contains__,
        ),
        (
            Side("sglang", args.sglang_python, "benchmarks.curves.sglang_side"),
            sglang_side.CACHES.__contains__,
        ),
    ]


def _earlier(resume: Path | None) -> dict[Any, Row]:
    if resume is None or not resume.exists():
        return {}
    rows = [json.loads(line) for line in resume.read_text().splitlines()]
    return {_key(row): row for row in rows if "failed" not in row}


def _key(row: Row) -> tuple[Any, ...]:
    fields = Task.__dataclass_fields__
    return Task(**{name: row[name] for name in fields}).key


def _progress(row: Row, count: int) -> str:
    told = row.get("failed") or f"{100 * row['restored']:.1f} %, {row['seconds']} s"
    where = f"{row['shape']} {row['workload']} {row['memory'] / 2**30:.1f} GiB"
    return f"{count}: {where}: {row['cache']}: {told}"


def _cache(name: str) -> str:
    if name not in CACHES and not is_ours(name):
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(CACHES)}")
    return name


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--workloads", nargs="+", help="all that there are, by default")
    every = list(range(1, LEVELS + 1))
    add("--memory", nargs="+", type=memory_of, default=every, help="levels, or GiB")
    add("--caches", nargs="+", type=_cache, default=CACHES, help=", ".join(CACHES))
    add("--seeds", nargs="+", type=int, default=[0], help="of the workloads")
    add("--mooncake", type=Path, metavar="FILE", help="Mooncake's published trace")
    add("--sessions", type=Path, metavar="FOLDER", help="a coding agent's sessions")
    add("--python", type=Path, default=Path(sys.executable), help="that runs ours")
    add("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"))
    add("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    add("--jobs", type=int, default=1, help="processes at once (%(default)s)")
    add("--resume", type=Path, metavar="FILE", help="keeps rows, and goes on from them")
    add("--out", type=Path, help="path without suffix")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
