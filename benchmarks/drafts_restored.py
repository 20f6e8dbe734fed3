# SPDX-License-Identifier: Apache-2.0
"""Tokens restored with drafts beside those without, on the demo's four workloads.

Both servers run the plugin on the bundled model, one of them with drafts of the model's
trained MTP head, which are accepted or not for what they are.  They have equal pools
(SGLang) or equal bytes (vLLM), and answer in turns; each forgets its cache before each
workload.

    python -m benchmarks.drafts_restored vllm --out benchmarks/results/x
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.prefix_sides import write
from hybrid_plugin.tools.demo.engines import Engine, Launch, VllmEngine
from hybrid_plugin.tools.demo.measure import Result, Target, measure
from hybrid_plugin.tools.demo.report import machine
from hybrid_plugin.tools.demo.run import bundled_model
from hybrid_plugin.tools.demo.server import Server, free_port
from hybrid_plugin.tools.demo.sglang import SglangEngine
from hybrid_plugin.tools.demo.workloads import Workload, all_workloads, shared_prompt

WITHOUT, WITH = "without drafts", "with drafts"
POINTS = 1.0
"""How far apart the shares of restored tokens may be."""


@dataclass(frozen=True)
class Drafting(SglangEngine):
    """SGLang's server with drafts of the model's own head."""

    drafts: int = 0

    def launch(self, model: Path, port: int, *, plugin: bool) -> Launch:
        """With SGLang's flags of NEXTN."""
        found = super().launch(model, port, plugin=plugin)
        if not self.drafts:
            return found
        flags = (
            "--speculative-algorithm=NEXTN",
            f"--speculative-num-steps={self.drafts}",
            "--speculative-eagle-topk=1",
            f"--speculative-num-draft-tokens={self.drafts + 1}",
        )
        return replace(found, command=[*found.command, *flags])


def engines(name: str, drafts: int, cache_mib: int) -> Mapping[str, Engine]:
    """By side.

    Args:
        name: "vllm" or "sglang".
        drafts: of a step, on the side that has any.
        cache_mib: of each vLLM.
    """
    if name == "vllm":
        plain = VllmEngine(cache_bytes=cache_mib << 20)
        return {WITHOUT: plain, WITH: replace(plain, drafts=drafts)}
    return {WITHOUT: Drafting(), WITH: Drafting(drafts=drafts)}


Results = dict[str, dict[str, Result]]
"""By workload and side."""


def run(
    found: Mapping[str, Engine],
    workloads: Sequence[Workload],
    logs: Path,
    save: Callable[[Results], None],
) -> Results:
    """Serve the workloads, one after the other.

    Args:
        found: servers, by side.
        workloads: to send to each.
        logs: folder of what the servers print.
        save: told of all results so far, after each workload.
    """
    with ExitStack() as stack:
        targets = {}
        for side, engine in found.items():
            port = free_port()
            launch = engine.launch(bundled_model(), port, plugin=True)
            log = logs / f"{engine.name}-{side.replace(' ', '-')}.log"
            targets[side] = Target(Server(side, launch, port, log), engine, True)
            stack.callback(targets[side].server.stop)
            targets[side].server.start()
        for target in targets.values():
            target.server.wait_until_ready()
            measure(target, shared_prompt(requests=8), lambda: None)
        results: Results = {}
        for workload in workloads:
            for side, target in targets.items():
                result = measure(target, workload, lambda: None).result
                results.setdefault(workload.name, {})[side] = result
                print(workload.name, side, result, file=sys.stderr, flush=True)
            save(results)
        return results


def difference(of_sides: Mapping[str, Result]) -> float:
    """Points of the share restored that drafts cost, negative where they gain some."""
    without, drafted = of_sides[WITHOUT], of_sides[WITH]
    return round(100 * (without.cached_share - drafted.cached_share), 3)


def table(results: Mapping[str, Mapping[str, Result]]) -> str:
    """One Markdown row a workload."""
    names = (
        "workload",
        "restored without",
        "restored with drafts",
        "points lost",
        "tokens a verification",
        "at once without",
        "at once with",
        "answers right without",
        "with",
        "of",
    )
    lines = [_row(names), "|---" * len(names) + "|"]
    for workload, of_sides in results.items():
        without, drafted = of_sides[WITHOUT], of_sides[WITH]
        cells = (
            workload,
            f"{without.cached_share:.1%}",
            f"{drafted.cached_share:.1%}",
            f"{difference(of_sides):+.1f}",
            _told(drafted.acceptance_length),
            _told(without.peak_running),
            _told(drafted.peak_running),
            str(without.right_answers),
            str(drafted.right_answers),
            str(without.requests),
        )
        lines.append(_row(cells))
    beyond = [name for name, r in results.items() if difference(r) > POINTS]
    verdict = f"More than {POINTS:g} point is lost in: {', '.join(beyond)}."
    within = f"Drafts cost no workload more than {POINTS:g} point."
    return "\n".join([*lines, "", verdict if beyond else within])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _told(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def document(
    engine: str, results: Mapping[str, Mapping[str, Result]], **about: Any
) -> dict[str, Any]:
    """All that goes to the results file."""
    return {
        "engine": engine,
        "machine": machine(),
        **about,
        "workloads": {
            workload: {side: asdict(result) for side, result in of_sides.items()}
            for workload, of_sides in results.items()
        },
    }


def main() -> int:
    """Measure one engine, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("--drafts", type=int, default=3, help="(%(default)s)")
    parser.add_argument(
        "--cache-mib", type=int, default=16, help="of vLLM (%(default)s)"
    )
    parser.add_argument("--workloads", nargs="+", metavar="NAME")
    parser.add_argument("--logs", type=Path, help="folder of the servers' logs")
    parser.add_argument("--out", type=Path, help="path without suffix")
    args = parser.parse_args()
    found = engines(args.engine, args.drafts, args.cache_mib)
    named = args.workloads or [one.name for one in all_workloads()]
    workloads = [one for one in all_workloads() if one.name in named]
    version = found[WITHOUT].version()

    def save(results: Results) -> None:
        if args.out is None:
            return
        about = {"drafts": args.drafts, "settings": found[WITH].settings()}
        written = document(args.engine, results, version=version, **about)
        write(args.out, ".json", json.dumps(written, indent=1))
        title = f"# Restored with and without drafts, {args.engine} {version}, CPU\n\n"
        write(args.out, ".md", title + table(results))

    with tempfile.TemporaryDirectory() as scratch:
        results = run(found, workloads, args.logs or Path(scratch), save)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
