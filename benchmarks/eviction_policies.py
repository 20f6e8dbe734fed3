# SPDX-License-Identifier: Apache-2.0
"""Hit tokens of the eviction policies at the same bytes, against an offline bound.

    python benchmarks/eviction_policies.py --out benchmarks/results/NAME
    python benchmarks/eviction_policies.py --mooncake TRACE --out ...

Every policy serves the same requests with the same pools, divided as at an
engine's start-up: the seeded agentic stream, and with `--mooncake` Mooncake's
published trace with states.  The policy was chosen on the seeds 1, 2 and 3, which
are refused here.  Layer shapes are Qwen3-Next's, on one of four GPUs.

The bound (`hybrid_plugin.tools.simulate.bound`) knows the future and ignores much of
what a cache must respect: nobody reaches it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.tools.plan.model import load_shape
from hybrid_plugin.tools.plan.shape import ModelShape
from hybrid_plugin.tools.simulate.agentic import AgenticStream
from hybrid_plugin.tools.simulate.bound import PageTrace, bound_hit_tokens
from hybrid_plugin.tools.simulate.capacity import Capacity
from hybrid_plugin.tools.simulate.mooncake import read_mooncake
from hybrid_plugin.tools.simulate.policies import DEFAULT_POLICY, POLICIES
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.simulation import Serving, Simulation
from hybrid_plugin.tools.simulate.traces import without_answers

MODEL = Path(__file__).with_name("models") / "qwen3-next.json"
RANKS = 4
PAGE = 16
CHUNK = 8192
GIB = 2**30
TUNED_ON = (1, 2, 3)


@dataclass(frozen=True)
class Load:
    """Requests, and the memories they are served with."""

    name: str
    requests: Sequence[Request]
    gib: tuple[float, ...]


def main() -> int:
    """Run all, print and write."""
    args = _arguments()
    if set(args.seeds) & set(TUNED_ON):
        print(f"The seeds {TUNED_ON} were used for tuning.", file=sys.stderr)
        return 2
    shape = load_shape(MODEL, ranks=RANKS)
    rows = [row for load in _loads(args) for row in _serve(load, shape)]
    result = {
        "model": f"{shape.name}, 1 of {RANKS} ranks",
        "page_size": PAGE,
        "machine": args.machine,
        "python": platform.python_version(),
        "rows": rows,
    }
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(_markdown(rows, args.machine))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13, 14, 15])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--gib", type=float, nargs="+", default=[2, 4, 8])
    parser.add_argument("--mooncake", type=Path, metavar="TRACE")
    parser.add_argument("--mooncake-gib", type=float, nargs="+", default=[16, 40, 120])
    parser.add_argument("--machine", default=platform.machine())
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _loads(args: argparse.Namespace) -> Iterator[Load]:
    stream = AgenticStream(requests=args.requests)
    for seed in args.seeds:
        yield Load(f"agentic, seed {seed}", stream.generate(seed), tuple(args.gib))
    if args.mooncake is not None:
        requests = without_answers(read_mooncake(args.mooncake))
        yield Load("Mooncake, with states", requests, tuple(args.mooncake_gib))


def _serve(load: Load, shape: ModelShape) -> Iterator[dict[str, object]]:
    layout, rules = shape.layout(PAGE), HybridConfig().snapshot_policy(PAGE)
    trace = PageTrace.of(load.requests, PAGE)
    for gib in load.gib:
        capacity = Capacity.of_layout(layout, int(gib * GIB), load.requests, CHUNK)
        row: dict[str, object] = {
            "load": load.name,
            "gib": gib,
            "pages": capacity.pages,
            "slots": capacity.slots,
            "queried_tokens": sum(trace.lengths),
            "bound_hit_tokens": bound_hit_tokens(
                trace, pages=capacity.pages, slots=capacity.slots
            ),
        }
        for name in POLICIES:
            serving = Serving(chunk=CHUNK)
            simulation = Simulation(capacity, rules, policy=name, serving=serving)
            row[name] = simulation.run(load.requests).hit_tokens
        print(json.dumps(row), flush=True)
        yield row


def _markdown(rows: Sequence[dict[str, object]], machine: str) -> str:
    """Hit rates, and in parentheses the share of the bound that was missed."""
    lines = [
        "# Eviction policies",
        "",
        f"`benchmarks/eviction_policies.py`, simulated on a {machine}; layer shapes of "
        f"Qwen3-Next on one of {RANKS} GPUs, pages of {PAGE} tokens.  Share of prompt "
        "tokens that were restored; in parentheses how much of the bound was missed, "
        "which knows the future and which nobody can reach.",
        "",
        "| requests | GiB | pages | slots | "
        + " | ".join(POLICIES)
        + f" | bound | {DEFAULT_POLICY} / lru |",
        "|---" * (len(POLICIES) + 6) + "|",
    ]
    totals = _totals(rows)
    lines += [_line(row) for row in [*rows, *totals]]
    wins = sum(_number(row, DEFAULT_POLICY) > _number(row, "lru") for row in rows)
    lines += [
        "",
        f"{DEFAULT_POLICY} has more hit tokens than lru in {wins} of {len(rows)}.",
    ]
    return "\n".join(lines) + "\n"


def _totals(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """All seeds of the stream together, by memory."""
    totals = []
    for gib in dict.fromkeys(row["gib"] for row in rows):
        same = [r for r in rows if r["gib"] == gib and str(r["load"])[:7] == "agentic"]
        if len(same) > 1:
            summed = ("queried_tokens", "bound_hit_tokens", *POLICIES)
            total = {name: sum(_number(row, name) for row in same) for name in summed}
            totals.append({**same[0], **total, "load": "agentic, all seeds"})
    return totals


def _line(row: dict[str, object]) -> str:
    queried, bound = _number(row, "queried_tokens"), _number(row, "bound_hit_tokens")
    rates = [
        f"{100 * _number(row, name) / queried:.2f} % "
        f"({100 - 100 * _number(row, name) / bound:.1f} %)"
        for name in POLICIES
    ]
    gain = _number(row, DEFAULT_POLICY) / _number(row, "lru") - 1
    cells = [
        *(str(row[name]) for name in ("load", "gib", "pages", "slots")),
        *rates,
        f"{100 * bound / queried:.2f} %",
        f"{100 * gain:+.2f} %",
    ]
    return "| " + " | ".join(cells) + " |"


def _number(row: dict[str, object], name: str) -> int:
    value = row[name]
    assert isinstance(value, int)
    return value


if __name__ == "__main__":
    sys.exit(main())
