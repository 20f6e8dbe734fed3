# SPDX-License-Identifier: Apache-2.0
"""Starts a real engine's server, and talks to it through its driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from hybrid_plugin.tools.demo.server import free_port
from tests.engines import web
from tests.engines.drivers import Driver, Setup
from tests.engines.messages import Answer, Ask, Launch
from tests.engines.warm_start import WarmProcess

START_LIMIT_S = 420.0
ANSWER_LIMIT_S = 900.0
"""A request may wait behind 63 others on a slow machine."""
PATIENCE_S = 20.0
"""In which a server ends after a signal."""
TAKE_IN_S = 3.0
"""A server takes in a handful of requests in less, on a slow machine too."""


class ServerDiedError(RuntimeError):
    """A server ended before it answered."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(f"the server died with status {code}:\n{log[-6000:]}")
        self.code = code
        self.log = log


class Server:
    """A running server; use it as a context manager."""

    def __init__(self, driver: Driver, setup: Setup, log: Path) -> None:
        """Start nothing yet; all that the server prints goes to `log`."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._driver = driver
        self._launch = driver.launch(setup, port)
        self._log = log
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None

    def __enter__(self) -> Server:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._process = _start(self._launch, self._log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and every process it started."""
        process = self._process
        if process is None:
            return
        for kind in (self._driver.last_signal, signal.SIGKILL):
            try:
                os.killpg(process.pid, kind)
                process.wait(PATIENCE_S)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers of a server that died
        self._process = None

    def is_alive(self) -> bool:
        """Whether the server process runs and answers."""
        assert self._process is not None
        if self._process.poll() is not None:
            return False
        return web.get(f"{self.url}/health", timeout=10).status_code == 200

    def log_text(self) -> str:
        """All that the server printed so far."""
        return self._log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """The `hybrid_cache_*` metrics by name.

        Of gauges that pools have: `POOL{KIND}` counts ids, such as `kv{used}`, and
        `NAME{POOL}` is another number of a pool.  Failures are `NAME{REASON}`.
        """
        found: dict[str, float] = {}
        for line in self._driver.metrics(self.url).splitlines():
            if not line.startswith("hybrid_cache_") or "_created" in line:
                continue
            series, value = line.rsplit(" ", 1)
            name = series.split("{", 1)[0].removeprefix("hybrid_cache_")
            labels = dict(re.findall(r'(\w+)="([^"]*)"', series))
            if "kind" in labels:
                name = f"{labels['pool']}{{{labels['kind']}}}"
            elif "pool" in labels:
                name += f"{{{labels['pool']}}}"
            elif "reason" in labels:
                name = f"{name.removesuffix('_total')}{{{labels['reason']}}}"
            found[name.removesuffix("_total")] = float(value)
        return found

    def counter(self, name: str) -> float:
        """The sum of one of the engine's own metrics; 0 if it has none of that name."""
        text = self._driver.metrics(self.url)
        series = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in series)

    def ask_all(self, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
        """Send requests, so many at a time, in order; answers in the same order."""
        return asyncio.run(self._ask_all(asks, concurrency))

    def ask_at_once(self, asks: Sequence[Ask]) -> list[Answer]:
        """Send requests that the engine has all taken in before it computes any."""
        self._driver.pause(self.url)
        resume = threading.Timer(TAKE_IN_S, self._driver.resume, (self.url,))
        resume.start()
        try:
            return self.ask_all(asks, len(asks))
        finally:
            resume.join()

    def ask(
        self, prompt: Sequence[int], max_tokens: int, salt: str | None = None
    ) -> Answer:
        """Send one request."""
        return self.ask_all([Ask(tuple(prompt), max_tokens, salt=salt)], 1)[0]

    def cached_with_prompt_logprobs(self, prompt: Sequence[int]) -> int:
        """Tokens restored for a request that wants logprobs of its prompt."""
        return self._driver.cached_with_prompt_logprobs(self.url, prompt)

    def reset_prefix_cache(self) -> None:
        """Have the engine forget everything cached."""
        self._driver.forget(self.url)

    async def _ask_all(self, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
        gate = asyncio.Semaphore(concurrency)
        # A server may close a connection that waits just when it is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self.url, verify=False, timeout=ANSWER_LIMIT_S, limits=limits
        ) as client:

            async def one(ask: Ask) -> Answer:
                async with gate:
                    return await self._driver.stream(client, ask)

            return await asyncio.gather(*(one(ask) for ask in asks))

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise ServerDiedError(code, self.log_text())
            try:
                if web.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise TimeoutError(f"the server did not start:\n{self.log_text()[-6000:]}")


def _start(launch: Launch, log: Path) -> subprocess.Popen[bytes] | WarmProcess:
    """In a session of its own, so that all its processes can be ended together."""
    if launch.imports:
        return WarmProcess(launch, log, errors=log)
    with log.open("wb") as file:
        return subprocess.Popen(
            launch.command,
            env={**os.environ, **launch.environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
