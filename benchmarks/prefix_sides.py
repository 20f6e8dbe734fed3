# SPDX-License-Identifier: Apache-2.0
"""Engines side by side: each in a process of its own, measured in turns.

Every workload of every round goes to one engine after the other, in an order that
rotates, so that what slows the machine down for a while slows all of them down.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.prefix_workloads import (
    WORKLOADS,
    Ask,
    Outcome,
    Workload,
    run_once,
)
from hybrid_plugin.config import ENABLE_VARIABLE
from hybrid_plugin.tools.doctor.installed import loading_problem

_Side = TypeVar("_Side")
MARK = "RESULT "
"""Begins the lines that are meant for us: engines log to the same stream."""


def check_plugin(engine: str) -> None:
    """Make sure that a side which is measured with the plugin has it.

    Raises:
        RuntimeError: if the engine would run, and be measured, without.
    """
    if os.environ.get(ENABLE_VARIABLE) == "1" and (problem := loading_problem(engine)):
        raise RuntimeError(f"what is measured would not be the plugin: {problem}.")


async def answer_until_closed(
    ask: Ask,
    facts: Mapping[str, Any],
    workloads: Mapping[str, Workload] = WORKLOADS,
) -> None:
    """Be an engine's process: a line of JSON in, a line with the outcome out."""
    say(facts)
    while line := await asyncio.to_thread(sys.stdin.readline):
        outcome = await run_once(ask=ask, workloads=workloads, **json.loads(line))
        say(asdict(outcome))


def say(result: Mapping[str, Any]) -> None:
    """Tell the process that measures."""
    print(MARK + json.dumps(result), flush=True)


class Side:
    """A configuration, its engine process, and what was measured."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        checkout: Path | None = None,
    ) -> None:
        """Start the process.

        Args:
            name: of the configuration.
            command: of the process.
            variables: of its environment, besides those of this process.
            checkout: of another version of this repository, with the metadata of the
                plugin installed into it; the process runs that one's code.
        """
        self.name = name
        self.outcomes: dict[str, list[dict[str, Any]]] = {}
        self.facts: dict[str, Any] | None = None
        """What the engine says about itself; None if it did not start."""
        self.died_in: str | None = None
        """The workload during which the engine ended."""
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **_imports(checkout), **variables},
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        """Wait until the engine is warm, or has failed to start."""
        self.facts = self._listen()

    def run(self, workload: str, seed: int, **more: float) -> None:
        """Send one round of a workload, unless the engine failed.

        Args:
            workload: its name.
            seed: of its contents.
            more: what the process takes besides.
        """
        if self.facts is None or self.died_in is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"name": workload, "seed": seed} | more) + "\n"
        )
        self._process.stdin.flush()
        outcome = self._listen()
        if outcome is None:
            print(self.name, workload, "died", file=sys.stderr, flush=True)
            self.died_in = workload
            return
        self.outcomes.setdefault(workload, []).append(outcome)
        told = {k: v for k, v in outcome.items() if not isinstance(v, dict)}
        print(self.name, workload, told, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End the process, and those it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # An engine that died may leave processes that hold the device's memory.
        self.kill()

    def kill(self) -> None:
        """End the process, and those it started, in the middle of what they do."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def result(self) -> dict[str, Any]:
        """What goes to the results file."""
        if self.facts is None:
            return {"failed": True}
        died = {} if self.died_in is None else {"died in": self.died_in}
        return {**self.facts, **died, "workloads": self.outcomes}

    def _listen(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
        return None


def _imports(checkout: Path | None) -> dict[str, str]:
    """The variable that has Python import a checkout's modules before all others."""
    if checkout is None:
        return {}
    others = os.environ.get("PYTHONPATH")
    folders = [str(checkout), str(checkout / "kernels"), *([others] if others else [])]
    return {"PYTHONPATH": os.pathsep.join(folders)}


def take_turns(
    sides: Sequence[Side], rounds: int, workloads: Sequence[str] = tuple(WORKLOADS)
) -> Iterator[None]:
    """Measure engines that run, round after round; yields after each workload."""
    for turn in turns(sides, rounds, workloads):
        for side, workload, seed in turn:
            side.run(workload, seed)
        yield


def turns(
    sides: Sequence[_Side], rounds: int, workloads: Sequence[str]
) -> Iterator[list[tuple[_Side, str, int]]]:
    """Every workload of every round, with the side that goes first rotating.

    Args:
        sides: that run, whatever they are.
        rounds: their number.
        workloads: names in order.
    """
    for seed in range(rounds):
        for number, workload in enumerate(workloads):
            first = (seed + number) % len(sides)
            order = [*sides[first:], *sides[:first]]
            yield [(side, workload, seed) for side in order]


def table(results: Mapping[str, Any], base: str) -> str:
    """One Markdown row per workload and configuration.

    Args:
        results: by configuration, as `Side.result` gives them.
        base: the configuration that wall times are compared with; the first one
            where it did not run.
    """
    base = base if base in results else next(iter(results))
    lines = [
        "| workload | configuration | cached | TTFT p50 ms | TTFT p95 ms | wall s | "
        f"wall / {base} |",
        "|---|---|---|---|---|---|---|",
    ]
    ran = [r["workloads"] for r in results.values() if "workloads" in r]
    names = [w for w in WORKLOADS if any(w in workloads for workloads in ran)]
    lines += [_row(w, name, results, base) for w in names for name in results]
    return "\n".join(lines)


def _row(workload: str, name: str, results: Mapping[str, Any], base: str) -> str:
    rounds = results[name].get("workloads", {}).get(workload)
    if not rounds:
        died = results[name].get("died in")
        why = "did not run" if died is None else f"its engine died in `{died}`"
        return f"| {workload} | {name} | {why} | | | | |"
    fields = Outcome.__dataclass_fields__
    value = {field: statistics.median(r[field] for r in rounds) for field in fields}
    share = 100 * value["cached_tokens"] / value["prompt_tokens"]
    compared = results.get(base, {}).get("workloads", {}).get(workload, [])
    ratios = [a["wall_s"] / b["wall_s"] for a, b in zip(rounds, compared, strict=False)]
    ratio = f"{statistics.median(ratios):.2f}x" if ratios else ""
    return (
        f"| {workload} | {name} | {share:.1f} % | {value['ttft_ms_p50']:.1f} | "
        f"{value['ttft_ms_p95']:.1f} | {value['wall_s']:.2f} | {ratio} |"
    )


def write(out: Path, suffix: str, text: str) -> None:
    """Write a file beside others; the name may have a dot in it, as models do."""
    out.with_name(out.name + suffix).write_text(text + "\n")


def machine() -> dict[str, str]:
    """What this ran on."""
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return {"device": name, "torch": torch.__version__}
