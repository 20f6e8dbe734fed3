# SPDX-License-Identifier: Apache-2.0
"""Starts a real engine's server, and talks to it over its OpenAI API.

What differs between engines is in `Launch` (the command line) and in how a
server names its metrics; the tests see `Server` and `Answer` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

FAULTS = Path(__file__).parent / "faults"
START_LIMIT_S = 420.0


class ServerDiedError(RuntimeError):
    """A server ended before it answered."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(f"the server died with status {code}:\n{log[-6000:]}")
        self.code = code
        self.log = log


@dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    tokens: tuple[int, ...]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    logprobs: tuple[Mapping[int, float], ...] = ()
    """For each token of the answer, the likeliest token ids and their logprobs."""
    aborted: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: tuple[int, ...]
    max_tokens: int
    abort_after: int | None = None
    """Drop the connection after so many tokens of the answer."""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """How to start a server."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def vllm_launch(
    model: Path | str,
    port: int,
    *,
    options: Mapping[str, Any] | None = None,
    plugin: bool = True,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Launch:
    """The command line of `vllm serve`, plugin on or off."""
    command = [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(model),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--enable-prompt-tokens-details",
        *flags,
    ]
    if options:
        command += ["--additional-config", json.dumps({"hybrid_plugin": dict(options)})]
    variables = {
        "HYBRID_PLUGIN": "1" if plugin else "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "HF_HUB_OFFLINE": "1",
        **(environment or {}),
    }
    return Launch(command, variables)


class Server:
    """A running server; use it as a context manager."""

    def __init__(self, launch: Launch, port: int, log: Path) -> None:
        self._launch = launch
        self._log = log
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._launch.command,
                env={**os.environ, **self._launch.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
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
        for kind, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
            try:
                os.killpg(process.pid, kind)
                process.wait(patience)
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
        return httpx.get(f"{self.url}/health", timeout=10).status_code == 200

    def log_text(self) -> str:
        """All that the server printed so far."""
        return self._log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """The `hybrid_cache_*` metrics: name, or `name{kind}` for gauges."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        found: dict[str, float] = {}
        for line in text.splitlines():
            if not line.startswith("hybrid_cache_") or "_created" in line:
                continue
            series, value = line.rsplit(" ", 1)
            name = series.split("{", 1)[0].removeprefix("hybrid_cache_")
            if 'kind="' in series:
                name += "{" + series.split('kind="')[1].split('"')[0] + "}"
            found[name.removesuffix("_total")] = float(value)
        return found

    def ask_all(self, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
        """Send requests, so many at a time, in order; answers in the same order."""
        return asyncio.run(self._ask_all(asks, concurrency))

    def ask(self, prompt: Sequence[int], max_tokens: int, **extra: Any) -> Answer:
        """Send one request."""
        return self.ask_all([Ask(tuple(prompt), max_tokens, extra=extra)], 1)[0]

    def ask_whole(
        self, prompt: Sequence[int], max_tokens: int, **extra: Any
    ) -> dict[str, Any]:
        """Send one request that cannot be streamed; returns its usage, flattened."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        response = httpx.post(
            f"{self.url}/v1/completions", json={**body, **extra}, timeout=300
        )
        response.raise_for_status()
        usage: dict[str, Any] = response.json()["usage"]
        return usage | (usage.pop("prompt_tokens_details") or {"cached_tokens": 0})

    def reset_prefix_cache(self) -> None:
        """Have the engine forget everything cached."""
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=60).raise_for_status()

    async def _ask_all(self, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
        gate = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:

            async def one(ask: Ask) -> Answer:
                async with gate:
                    return await self._stream(client, ask)

            return await asyncio.gather(*(one(ask) for ask in asks))

    async def _stream(self, client: httpx.AsyncClient, ask: Ask) -> Answer:
        body = {
            "prompt": list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **ask.extra,
        }
        tokens: list[int] = []
        logprobs: list[Mapping[int, float]] = []
        usage: dict[str, Any] = {}
        begin = time.monotonic()
        first = 0.0
        request = client.stream("POST", f"{self.url}/v1/completions", json=body)
        async with request as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()
                return Answer((), error=f"{response.status_code}: {text}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return Answer(tuple(tokens), error=str(event["error"]))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    logprobs += _read_logprobs(choice)
                if tokens and not first:
                    first = time.monotonic() - begin
                if ask.abort_after is not None and len(tokens) >= ask.abort_after:
                    return Answer(tuple(tokens), ttft_s=first, aborted=True)
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            tokens=tuple(tokens),
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens") or 0,
            ttft_s=first,
            logprobs=tuple(logprobs),
        )

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                code = self._process.returncode
                raise ServerDiedError(code, self.log_text())
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise TimeoutError(f"the server did not start:\n{self.log_text()[-6000:]}")


def _read_logprobs(choice: Mapping[str, Any]) -> list[Mapping[int, float]]:
    tops = (choice.get("logprobs") or {}).get("top_logprobs") or []
    return [
        {int(name.removeprefix("token_id:")): value for name, value in top.items()}
        for top in tops
        if top
    ]
