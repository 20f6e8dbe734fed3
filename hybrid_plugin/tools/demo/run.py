# SPDX-License-Identifier: Apache-2.0
"""Runs the demo from start to end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from hybrid_plugin.tools.demo import measure, picture
from hybrid_plugin.tools.demo.compare import Tally, compare_conversation
from hybrid_plugin.tools.demo.engines import Engine
from hybrid_plugin.tools.demo.measure import Result, Run, Target
from hybrid_plugin.tools.demo.progress import Display
from hybrid_plugin.tools.demo.report import Outcome, to_json, to_table
from hybrid_plugin.tools.demo.server import DemoError, Server, free_port
from hybrid_plugin.tools.demo.workloads import (
    Workload,
    burst_of,
    shared_prompt,
    sharing_workloads,
)

BUNDLED_MODEL = Path("tests", "assets", "tiny-qwen3-next")


@dataclass(frozen=True)
class Demo:
    """What to run and where to write."""

    engine: Engine
    model: Path
    out: Path
    workloads: Sequence[Workload] = field(default_factory=sharing_workloads)
    """Before the burst, whose size follows from how long they take."""
    console: Console = field(default_factory=Console)

    def run(self) -> bool:
        """Run everything; returns whether all went well.

        Raises:
            DemoError: if a server fails.
        """
        version = self.engine.version()
        with self._servers() as targets:
            outcomes = self._compare(targets)
        data = to_json(self.engine.name, version, outcomes, self.engine.settings())
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(data, indent=2) + "\n")
        title = f"{self.engine.name} {version}, stock and with hybrid-plugin"
        self.console.print(to_table(title, outcomes, self.engine.page_note))
        self.console.print(picture.bars(outcomes))
        self.console.print(picture.sentence(self.engine.name, outcomes), style="bold")
        drawn = self.out.with_suffix(".png")
        try:
            picture.save_png(outcomes, title, drawn)
        except ImportError:
            self.console.print("No picture was drawn: Pillow is not installed.")
        else:
            self.console.print(f"As a picture: {drawn}")
        self.console.print(f"The same as JSON: {self.out}")
        return not complain(self.console, outcomes)

    def _servers(self) -> AbstractContextManager[Sequence[Target]]:
        targets = [self._target(plugin=False), self._target(plugin=True)]
        return running(targets, self.console)

    def _target(self, *, plugin: bool) -> Target:
        name = "plugin" if plugin else "stock"
        port = free_port()
        launch = self.engine.launch(self.model, port, plugin=plugin)
        log = self.out.parent / f"demo-{self.engine.name}-{name}.log"
        return Target(Server(name, launch, port, log), self.engine, plugin)

    def _compare(self, targets: Sequence[Target]) -> list[Outcome]:
        display = Display(self.console)
        for target in targets:
            self._run(shared_prompt(requests=8), "warm-up", target, display)
        outcomes = [self._outcome(w, targets, display) for w in self.workloads]
        last = burst_of(computed_per_s(outcomes[-1].stock))
        return [*outcomes, self._outcome(last, targets, display)]

    @staticmethod
    def _run(workload: Workload, title: str, target: Target, display: Display) -> Run:
        label = f"{title}: {target.server.name}"
        with display.counting(label, workload.requests) as tick:
            return measure.measure(target, workload, tick)

    def _outcome(
        self, workload: Workload, targets: Sequence[Target], display: Display
    ) -> Outcome:
        def run(target: Target) -> Run:
            return self._run(workload, workload.title, target, display)

        stock, plugin = (run(target) for target in targets)
        tally = sum(
            map(compare_conversation, stock.answers, plugin.answers), start=Tally()
        )
        return Outcome(workload, stock.result, plugin.result, tally)


def computed_per_s(result: Result) -> float:
    """Tokens of prompts that a server computed in a second, among other things."""
    return (result.prompt_tokens - result.cached_tokens) / max(result.seconds, 1e-3)


@contextmanager
def running(targets: Sequence[Target], console: Console) -> Iterator[Sequence[Target]]:
    """Start all at once, and end them; while one is measured, the others are idle.

    Raises:
        DemoError: if one does not start.
    """
    try:
        text = f"Starting {len(targets)} servers (a minute or more)"
        with Display(console).waiting(text) as tell:
            for target in targets:
                target.server.start()
            for target in targets:
                target.server.wait_until_ready(tell)
        yield targets
    finally:
        for target in targets:
            target.server.stop()


def complain(
    console: Console,
    outcomes: Sequence[Outcome],
    servers: tuple[str, str] = ("stock", "the plugin"),
) -> bool:
    """Say what went wrong; whether anything did.

    Args:
        console: where to.
        outcomes: one for each workload.
        servers: the names of the two.
    """
    problems = [
        f"{outcome.workload.name}: {problem}"
        for outcome in outcomes
        for problem in _problems(outcome, *servers)
    ]
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    return bool(problems)


def _problems(outcome: Outcome, stock: str, plugin: str) -> Iterator[str]:
    if outcome.plugin.failed:
        yield f"{outcome.plugin.failed} requests failed with {plugin}."
    if outcome.tally.wrong and not outcome.stock.failed:
        yield (
            f"{outcome.tally.wrong} answers differ from {stock} by more than a near "
            "tie."
        )


def bundled_model() -> Path:
    """The model that travels with the repository.

    Raises:
        DemoError: if the package is not used from the repository.
    """
    for root in (Path.cwd(), Path(__file__).parents[3]):
        if (root / BUNDLED_MODEL / "config.json").is_file():
            return root / BUNDLED_MODEL
    raise DemoError(
        f"The bundled model {BUNDLED_MODEL} is not here; run the demo in the "
        "repository, or name a model folder with --model."
    )
