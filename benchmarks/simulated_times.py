# SPDX-License-Identifier: Apache-2.0
"""Virtual time beside measured time: the costs of `hybrid-plugin simulate`.

Runs of vLLM with the plugin on an H200, whose results are kept, are served again by the
simulator.  Its costs are fitted to some of them; the others show how far it is off.

    python -m benchmarks.simulated_times --out benchmarks/results/simulated-times
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.elastic_workloads import Scale, phases
from benchmarks.no_model.virtual_engine import VirtualEngine
from benchmarks.prefix_models import cache_layout
from benchmarks.prefix_workloads import WORKLOADS, Workload
from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.engine.cache_assembly import build_cache
from hybrid_plugin.engine.memory_blocks import block_bytes
from hybrid_plugin.engine.sizing import EngineLimits, divide
from hybrid_plugin.tools.simulate.calibration import Equation, Measured, calibrate
from hybrid_plugin.tools.simulate.cost_model import CostModel, Costs
from hybrid_plugin.tools.simulate.served_cache import PluginCache

RESULTS = Path(__file__).parent / "results"
CHUNK, PAGE = 8192, 16
START = Costs(
    pass_s=10e-3,
    prefill_pass_s=40e-3,
    prefill_token_s=20e-6,  # 6 GFLOP at 300 TFLOP/s
    prefill_pair_s=5e-10,  # 12 layers x 16 heads x 256 x 4 FLOP at 400 TFLOP/s
    decode_sequence_s=50e-6,  # two times 37 MB of states, and sampling
    kv_token_s=7e-9,  # 24 KiB at 3.5 TB/s
    move_s=3e-3,  # memory-moves-h200.md: 1 to 6 ms
)
"""What an H200 should take, which measured times correct."""
ALIKE = 0.1
"""Of the prompt tokens."""
NOTE = f"""# Virtual time beside measured time

Measured / simulated, by `benchmarks/simulated_times.py`: runs of vLLM with the plugin
on an H200, medians of rounds.  The results are older than the plugin's present policy
(one economy for memory).  Runs in which the simulator restores at least {ALIKE:.0%} of
the prompts more or less than was measured are not fitted.  They are listed last, and
their errors apart; how much of these is due to the change of policy was not measured.
"""
FITTED = ("vllm-prefix-qwen3-next", "elastic-vllm-long-documents-h200")
"""Prompts of 50 to 100,000 tokens."""
HELD_OUT = (
    "elastic-vllm-h200",
    "elastic-vllm-nothing-shared-h200",
    "steady-vllm-h200",
)
"""Other lengths, other concurrency, and prompts that share nothing."""
SIDES = {"plugin": None, "elastic": None, "fixed, 50% states": 0.5}
"""What the plugin is called in the results, and its split."""


@dataclass(frozen=True)
class Run:
    """A workload that was measured."""

    file: str
    side: str
    workload: str
    serve: Workload
    memory: int
    longest: int
    max_running: int
    cached: float
    """Share of prompt tokens that were restored."""
    times: Measured
    """Medians of the rounds."""


def runs(file: str) -> Iterator[Run]:
    """All that was measured of the plugin, of a file of results."""
    data = json.loads((RESULTS / f"{file}.json").read_text())
    loads = dict(WORKLOADS)
    if "scale" in data:
        # Runs with nothing shared do not name a system prompt.
        loads = phases(Scale(**{"system_tokens": 0} | data["scale"]))
    flags = data["flags"]
    for side, found in data["results"].items():
        for workload, rounds in found["workloads"].items() if side in SIDES else ():
            yield Run(
                file,
                side,
                workload,
                loads[workload],
                flags["kv_cache_memory_bytes"],
                flags["max_model_len"],
                flags["max_num_seqs"],
                _median(rounds, "cached_tokens") / _median(rounds, "prompt_tokens"),
                Measured(
                    data["machine"]["device"],
                    "Qwen3-Next shapes, 16 to 64 of 512 experts",
                    _median(rounds, "wall_s"),
                    {p: _median(rounds, f"ttft_ms_{p}") / 1e3 for p in ("p50", "p95")},
                    {},
                ),
            )


def serve(run: Run, costs: Costs) -> tuple[float, list[Equation]]:
    """Share of prompt tokens restored, and the times, in virtual time."""
    engine = VirtualEngine(
        PluginCache(_cache(run)), costs, chunk=CHUNK, max_running=run.max_running
    )
    replies = engine.drive(run.serve, seed=0)
    cached = sum(reply.cached_tokens for reply in replies)
    share = cached / sum(reply.prompt_tokens for reply in replies)
    return share, run.times.equations(engine.server)


def _cache(run: Run) -> HybridCache:
    ratio = SIDES[run.side]
    options = HybridConfig(elastic=ratio is None, state_memory_ratio=ratio)
    limits = EngineLimits(
        max_model_len=run.longest,
        max_sequences=run.max_running,
        block_bytes=block_bytes(run.memory, "cuda"),
    )
    layout = cache_layout("qwen3-next", PAGE, state_itemsize=2)
    plan = divide(layout, run.memory, options, limits, logging.getLogger(__name__))
    return build_cache(plan, options)


def restores_alike(run: Run) -> bool:
    """Whether the simulator restores what the measured run did.

    Otherwise its passes do something else, and their times say little of the costs.
    """
    return abs(serve(run, START)[0] - run.cached) <= ALIKE


def all_equations(chosen: Sequence[Run], costs: Costs) -> list[Equation]:
    """Of all these runs."""
    return [
        replace(one, name=f"{run.file}, {run.side}, {run.workload}, {one.name}")
        for run in chosen
        for one in serve(run, costs)[1]
    ]


def report(costs: Costs, groups: Mapping[str, Sequence[Run]]) -> list[Any]:
    """A row for each run of each group."""
    rows = []
    for group, chosen in groups.items():
        for run in chosen:
            share, equations = serve(run, costs)
            rows.append(
                {
                    "group": group,
                    "file": run.file,
                    "side": run.side,
                    "workload": run.workload,
                    "cached": run.cached,
                    "simulated_cached": share,
                    "times": {
                        one.name: {
                            "measured": one.measured,
                            "simulated": one.simulated,
                        }
                        for one in equations
                    },
                }
            )
    return rows


def table(rows: Sequence[Any]) -> str:
    """As Markdown."""
    names = ("wall", "TTFT p50", "TTFT p95")
    head = "".join(f" {name}, s |" for name in names)
    lines = [NOTE, f"| run | workload | restored |{head}", "|---|---|---|---|---|---|"]
    for row in rows:
        shown = " | ".join(
            f"{time['measured']:.3g} / {time['simulated']:.3g}"
            for time in (row["times"][name] for name in names)
        )
        lines.append(
            f"| {row['file']}, {row['side']} ({row['group']}) | {row['workload']} | "
            f"{row['cached']:.1%} / {row['simulated_cached']:.1%} | {shown} |"
        )
    lines.append(f"\n| error, median / largest | runs |{head}\n|---|---|---|---|---|")
    for group in dict.fromkeys(row["group"] for row in rows):
        chosen = [row["times"] for row in rows if row["group"] == group]
        errors = (
            [abs(one[name]["simulated"] / one[name]["measured"] - 1) for one in chosen]
            for name in names
        )
        shown = " | ".join(f"{statistics.median(e):.0%} / {max(e):.0%}" for e in errors)
        lines.append(f"| {group} | {len(chosen)} | {shown} |")
    return "\n".join(lines)


def _median(rounds: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(one[name] for one in rounds)


def main() -> None:
    """Fit, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="without an ending")
    args = parser.parse_args()
    every = [run for file in (*FITTED, *HELD_OUT) for run in runs(file)]
    alike = [run for run in every if restores_alike(run)]
    groups = {
        "fitted": [run for run in alike if run.file in FITTED],
        "not fitted": [run for run in alike if run.file in HELD_OUT],
        "restores otherwise": [run for run in every if run not in alike],
    }
    fitted = groups["fitted"]
    costs, equations = calibrate(START, partial(all_equations, fitted))
    model = CostModel(
        fitted[0].times.machine,
        fitted[0].times.model,
        f"fitted to {len(equations)} measured times",
        costs,
    )
    model.write(args.out.with_suffix(".costs.json"))
    rows = report(costs, groups)
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    text = table(rows)
    args.out.with_suffix(".md").write_text(text + "\n")
    print(costs, text, sep="\n")


if __name__ == "__main__":
    main()
