# SPDX-License-Identifier: Apache-2.0
"""The demo of tiers: chats leave the device and come back, after a restart too.

Both servers run with the plugin, in a cache that holds a few of the chats.  One of them
has host memory behind it, and files behind that.  Where NIXL is installed, a router has
a third one compute prompts that this one answers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hybrid_plugin.tiers.peers.agent import is_installed
from hybrid_plugin.tools.demo.compare import Tally, compare_conversation
from hybrid_plugin.tools.demo.engines import Launch, VllmEngine
from hybrid_plugin.tools.demo.measure import Run, Target, continued, measure_turns
from hybrid_plugin.tools.demo.progress import Display
from hybrid_plugin.tools.demo.report import Outcome, to_json, to_table
from hybrid_plugin.tools.demo.run import complain, running
from hybrid_plugin.tools.demo.server import Server, free_port
from hybrid_plugin.tools.demo.workloads import (
    Conversation,
    Workload,
    returning,
    split,
)

SERVERS = ("device", "tiers")
"""Names of the two: with the device's memory alone, and with tiers behind it."""
LONGEST = 4096
"""Tokens of a prompt and its answer."""
_TURNS = ("first turns", "second turns", "after a restart")
_NO_NIXL = (
    "Left out is one server that computes prompts and another one that answers: it "
    "needs NVIDIA's NIXL (uv pip install --python {python} nixl-cu12, or nixl-cu13 "
    "with CUDA 13)."
)


@dataclass(frozen=True)
class TiersDemo:
    """What to run and where to write."""

    engine: VllmEngine
    host_bytes: int
    disk_bytes: int
    model: Path
    out: Path
    workload: Workload = field(default_factory=returning)
    """Of three questions in each conversation; a restart comes before the last."""
    console: Console = field(default_factory=Console)
    prompts: Workload = field(default_factory=split)
    """For a prefill and a decode server; of one question each."""
    has_nixl: bool = field(default_factory=is_installed)

    def run(self) -> bool:
        """Run everything; returns whether all went well.

        Raises:
            DemoError: if a server fails.
        """
        version = self.engine.version()
        with tempfile.TemporaryDirectory(prefix="hybrid-demo-") as folder:
            outcomes = list(self._compare(*self._serve(Path(folder))))
        settings = {
            **self.engine.settings(),
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
        }
        data = to_json(self.engine.name, version, outcomes, settings, SERVERS)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(data, indent=2) + "\n")
        title = (
            f"{self.engine.name} {version} with hybrid-plugin: {self.workload.title}"
        )
        note = "a page holds KV, and a slot a state"
        self.console.print(to_table(title, outcomes, note, SERVERS))
        self.console.print(f"The same as JSON: {self.out}")
        if not self.has_nixl:
            self.console.print(_NO_NIXL.format(python=sys.executable), soft_wrap=True)
        turns, rest = outcomes[: len(_TURNS)], outcomes[len(_TURNS) :]
        alone, pair = "the device alone", "a prefill and a decode server"
        failed = complain(self.console, turns, (alone, "host memory and disk"))
        return not (complain(self.console, rest, (alone, pair)) or failed)

    def _serve(self, disk: Path) -> Sequence[Sequence[Run]]:
        """The runs of each server."""
        shorter = replace(
            self.workload,
            conversations=tuple(
                Conversation(one.opening, one.questions[:2])
                for one in self.workload.conversations
            ),
        )
        targets = [self._target(name, "", disk) for name in SERVERS]
        with running(targets, self.console):
            before = [self._turns(target, shorter, forget=True) for target in targets]
        rest = [continued(self.workload, runs) for runs in before]
        peers: Mapping[str, Any] = {"peers": {}} if self.has_nixl else {}
        targets = [self._target(name, "-restarted", disk, peers) for name in SERVERS]
        others = self._prefill_and_router(targets[1]) if self.has_nixl else []
        with running([*targets, *others], self.console):
            after = [
                list(self._turns(target, workload, forget=False))
                for target, workload in zip(targets, rest, strict=True)
            ]
            asked = [targets[0], others[-1]] if others else []
            for runs, target in zip(after, asked, strict=False):
                runs += self._turns(target, self.prompts, forget=True)
        return [[*one, *other] for one, other in zip(before, after, strict=True)]

    def _target(
        self, name: str, suffix: str, disk: Path, more: Mapping[str, Any] | None = None
    ) -> Target:
        options: Mapping[str, Any] = {}
        if name == SERVERS[1]:
            options = {
                "host_memory": self.host_bytes,
                "disk": {"path": str(disk), "size": self.disk_bytes},
                **(more or {}),
            }
        return self._server(name, suffix, options)

    def _prefill_and_router(self, decode: Target) -> Sequence[Target]:
        """What has prompts computed elsewhere for a server that answers them."""
        options = {"host_memory": self.host_bytes, "peers": {}}
        prefill, port = self._server("prefill", "", options), free_port()
        command = (
            str(Path(sys.executable).with_name("hybrid-plugin")),
            "route",
            f"--prefill={prefill.server.url}",
            f"--decode={decode.server.url}",
            f"--port={port}",
        )
        log = self.out.parent / "demo-tiers-router.log"
        router = Server("router", Launch(command), port, log)
        return prefill, Target(router, decode.engine, plugin=True)

    def _server(self, name: str, suffix: str, options: Mapping[str, Any]) -> Target:
        engine = replace(self.engine, plugin_options=options)
        port = free_port()
        launch = engine.launch(self.model, port, plugin=True)
        log = self.out.parent / f"demo-tiers-{name}{suffix}.log"
        return Target(Server(name, launch, port, log), engine, plugin=True)

    def _turns(
        self, target: Target, workload: Workload, *, forget: bool
    ) -> Sequence[Run]:
        label = f"{workload.title}: {target.server.name}"
        total = sum(len(one.questions) for one in workload.conversations)
        with Display(self.console).counting(label, total) as tick:
            return measure_turns(target, workload, tick, forget=forget)

    def _compare(
        self, device: Sequence[Run], tiers: Sequence[Run]
    ) -> Iterator[Outcome]:
        """An outcome for each turn, and for prompts that another server computed."""
        equal = [True] * len(self.workload.conversations)
        for label, one, other in zip(_TURNS, device, tiers, strict=False):
            tallies = [
                compare_conversation(expected, got) if same else Tally(not_compared=1)
                for same, expected, got in zip(
                    equal, one.answers, other.answers, strict=True
                )
            ]
            equal = [tally.equal == 1 for tally in tallies]
            workload = replace(
                self.workload, name=f"{self.workload.name}, {label}", label=label
            )
            yield Outcome(
                workload, one.result, other.result, sum(tallies, start=Tally())
            )
        for one, other in zip(device[len(_TURNS) :], tiers[len(_TURNS) :], strict=True):
            tally = sum(
                map(compare_conversation, one.answers, other.answers), start=Tally()
            )
            yield Outcome(self.prompts, one.result, other.result, tally)
