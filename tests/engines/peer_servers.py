# SPDX-License-Identifier: Apache-2.0
"""A server that computes prompts, and what another one is told of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from hybrid_plugin.tools.route.router import of_prompt
from tests.engines import web
from tests.engines.messages import Ask
from tests.engines.server import Server, free_port
from tests.engines.traffic import encode

OPTIONS: Mapping[str, Any] = {
    "host_memory": "64MiB",
    "peers": {"weights": "of the tests"},
}


def prefilled(url: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Have a prompt computed as a router does; what the answer says of it."""
    body = of_prompt({"prompt": list(prompt), "temperature": 0})
    answer = web.post(f"{url}/v1/completions", json=body, timeout=300)
    answer.raise_for_status()
    found = answer.json()["kv_transfer_params"]
    assert isinstance(found, dict), found
    return found


@contextmanager
def router(prefill: Server, decode: Server, log: Path) -> Iterator[str]:
    """`hybrid-plugin route` between two servers; its URL."""
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("hybrid-plugin")),
        "route",
        f"--prefill={prefill.url}",
        f"--decode={decode.url}",
        f"--port={port}",
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert process.poll() is None, log.read_text()
            try:
                web.get(f"{url}/health", timeout=10).raise_for_status()
                break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def until(server: Server, name: str, wanted: float) -> dict[str, float]:
    """Metrics of a server once one of them is what it should become.

    Ranks say what became of offers with a step, so steps are made.
    """
    levels: dict[str, float] = {}
    for _ in range(120):
        levels = server.metrics()
        if levels.get(name, 0.0) == wanted:
            return levels
        server.ask(encode("tick"), 1)
        time.sleep(0.25)
    raise AssertionError(f"{name} is {levels.get(name)}, not {wanted}")


def stop(server: Server) -> None:
    """Have all processes of a server stand still."""
    _signal(server, signal.SIGSTOP)


def kill(server: Server) -> None:
    """End all processes of a server, without a word."""
    _signal(server, signal.SIGKILL)


def _signal(server: Server, number: signal.Signals) -> None:
    process = server._process
    assert process is not None
    os.killpg(process.pid, number)


def asks(prompts: Sequence[Sequence[int]], answer: int) -> list[Ask]:
    """Requests for so many tokens."""
    return [Ask(tuple(prompt), answer, logprobs=5) for prompt in prompts]
