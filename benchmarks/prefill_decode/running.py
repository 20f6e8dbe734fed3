# SPDX-License-Identifier: Apache-2.0
"""A side that runs: its servers, the router before them, and what was measured."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.prefill_decode import counters, models, sides, traffic
from benchmarks.prefill_decode.client import MODEL, client, outcome, timed
from benchmarks.prefill_decode.counters import Counters
from benchmarks.prefill_decode.servers import FailedError, Server
from benchmarks.prefill_decode.sides import DECODE, PREFILL, Deployment, Setup
from benchmarks.prefix_workloads import WARM_UP
from hybrid_plugin.tools.demo.server import free_port

LOGS = Path(tempfile.gettempdir()) / "hybrid-bench" / "prefill-decode"
SETTLED_S = 1.0
"""After the last answer, until servers have published their counters."""
WAKING = (64, 8)
"""Tokens of a prompt that wakes a rested server, and of its answer."""
_VLLM = "vllm.entrypoints.cli.main"
_ROUTE = "import sys; from hybrid_plugin.cli import main; sys.exit(main())"


class RunningSide:
    """As `prefix_sides.Side`, for servers that are asked over HTTP."""

    def __init__(
        self, name: str, setup: Setup, deployment: Deployment, lane: int
    ) -> None:
        """Start the servers, and do not wait.

        Args:
            name: of the side.
            setup: of all sides.
            deployment: this one's.
            lane: number of the side.
        """
        self.name = name
        self._setup = setup
        self._deployment = deployment
        self.outcomes: dict[str, list[dict[str, Any]]] = {}
        self.facts: dict[str, Any] | None = None
        self.died_in: str | None = None
        self._said: str | None = None
        """The end of the log of a server that failed."""
        self._folder = LOGS / name.replace(", ", "-").replace(" ", "-")
        self._servers = [self._serve(role, lane) for role in deployment.roles]
        self._router = self._route() if PREFILL in deployment.roles else None

    def wait_until_ready(self, end: float) -> None:
        """Wait until all servers answer, or one has failed to.

        Args:
            end: in seconds of `time.monotonic`.
        """
        try:
            for server in self._processes():
                server.wait_until_ready(end)
            self._make_sure_of_the_plugin()
        except FailedError as failure:
            self._said = str(failure)
            print(f"{self.name} did not start: {failure}", file=sys.stderr, flush=True)
            self.stop()  # others may need what it holds
            return
        version = httpx.get(f"{self._servers[0].url}/version", timeout=30).json()
        self.facts = {"vllm": version["version"]}

    @property
    def runs(self) -> bool:
        """Whether it started, and has not failed since."""
        return self.facts is not None and self.died_in is None

    async def warm_up(self) -> None:
        """Compile what the first request of a kind compiles."""
        if not self.runs:
            return
        try:
            async with asyncio.timeout(self._setup.scale.limit_s):
                await self._warm_up()
        except TimeoutError:
            self._died(WARM_UP, "it hangs")
        self._check(WARM_UP)

    def run(self, workload: str, seed: int) -> None:
        """Run one round of a workload, unless the side failed."""
        if not self.runs:
            return
        try:
            found = asyncio.run(self._run(workload, seed))
        except (TimeoutError, httpx.HTTPError) as failure:
            self._died(workload, f"it hangs or does not answer: {failure!r}")
            return
        self._check(workload)
        self.outcomes.setdefault(workload, []).append(found)
        told = {k: v for k, v in found.items() if not isinstance(v, dict)}
        print(self.name, workload, told, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Ask all processes to end."""
        for server in self._processes():
            server.end()

    def stop(self) -> None:
        """End all processes."""
        self.end()
        for server in self._processes():
            server.stop()

    def result(self) -> dict[str, Any]:
        """What goes to the results file."""
        if self.facts is None:
            return {"failed": True, "log": (self._said or "").splitlines()}
        found: dict[str, Any] = {**self.facts}
        if self.died_in is not None:
            found |= {"died in": self.died_in, "log": (self._said or "").splitlines()}
        return found | {"workloads": self.outcomes}

    # ---------------------------------------------------------------- internal

    @property
    def _url(self) -> str:
        return (self._router or self._servers[-1]).url

    def _processes(self) -> Iterator[Server]:
        yield from self._servers
        if self._router is not None:
            yield self._router

    def _serve(self, role: str, lane: int) -> Server:
        port, channel = free_port(), free_port()
        setup, deployment = self._setup, self._deployment
        command = [sys.executable, "-m", _VLLM, "serve"]
        command += [str(models.folder(setup.model)), f"--served-model-name={MODEL}"]
        command += ["--host=127.0.0.1", f"--port={port}"]
        command += sides.arguments(setup, deployment)
        variables = sides.variables(setup, deployment, role, lane, channel)
        return Server(role, command, variables, port, self._folder / f"{role}.log")

    def _route(self) -> Server:
        by_role = dict(zip(self._deployment.roles, self._servers, strict=True))
        port = free_port()
        command = [sys.executable, "-c", _ROUTE, "route", f"--port={port}"]
        command += [f"--{role}={by_role[role].url}" for role in (PREFILL, DECODE)]
        return Server("router", command, {}, port, self._folder / "router.log")

    def _make_sure_of_the_plugin(self) -> None:
        wanted = self._deployment.options is not None
        for server in self._servers:
            if wanted != (counters.OF_THE_PLUGIN in server.metrics()):
                raise FailedError(
                    f"{server.role}: the plugin is {'not ' if wanted else ''}active"
                )

    async def _warm_up(self) -> None:
        rng = random.Random(WARM_UP)
        scale = self._setup.scale.shorter()
        async with client(self._url) as asking:
            await asking.ask(traffic.text(rng, scale, WAKING[0]), WAKING[1])
            for workload in traffic.workloads(scale).values():
                await workload(asking.ask, rng)

    async def _run(self, name: str, seed: int) -> dict[str, Any]:
        scale = self._setup.scale
        workload = traffic.workloads(scale)[name]
        async with asyncio.timeout(scale.limit_s), client(self._url) as asking:
            rng = random.Random(f"{name} {seed}")
            await asking.ask(traffic.text(rng, scale, WAKING[0]), WAKING[1])
            asking.questions.clear()
            await asyncio.sleep(SETTLED_S)
            before = self._counters()
            wall = await timed(workload, asking.ask, rng)
            await asyncio.sleep(SETTLED_S)
            now = self._counters()
        counted = {role: counters.since(before[role], now[role]) for role in before}
        trained = models.has_weights(self._setup.model)
        found = outcome(asking.questions, wall, answers=trained)
        return found | {"seed": seed, "counters": counted}

    def _counters(self) -> dict[str, Counters]:
        return {one.role: counters.read(one.metrics()) for one in self._servers}

    def _check(self, workload: str) -> None:
        """See whether a process ended meanwhile."""
        for server in self._processes():
            try:
                server.check()
            except FailedError as failure:
                self._died(workload, str(failure))
                return

    def _died(self, workload: str, said: str) -> None:
        self.died_in = self.died_in or workload
        self._said = self._said or said
        print(self.name, "died in", workload, said, file=sys.stderr, flush=True)
        self.stop()


async def warm_up(running: list[RunningSide]) -> None:
    """Warm all sides up at once: nothing is measured yet."""
    begin = time.monotonic()
    await asyncio.gather(*(side.warm_up() for side in running))
    print(f"warm after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
