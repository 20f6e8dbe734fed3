# SPDX-License-Identifier: Apache-2.0
"""Dynamo's index of what servers have cached, as a process of its own.

HYBRID_DYNAMO_PYTHON names the interpreter of an environment with `ai-dynamo-runtime`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

PYTHON = os.environ.get("HYBRID_DYNAMO_PYTHON")
_MODEL = "default"
_WORKER = "1"


class DynamoIndexer:
    """Listens to one server's KV cache events, and scores prompts."""

    def __init__(self, endpoint: str, block_size: int, log: Path) -> None:
        """Start it, before or after the server.

        Args:
            endpoint: of the events, for ZMQ.
            block_size: tokens of a block of the server.
            log: to write to what it says.
        """
        assert PYTHON is not None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        command = [PYTHON, "-m", "dynamo.indexer", f"--block-size={block_size}"]
        command += [f"--port={port}", "--threads=1", f"--workers={_WORKER}={endpoint}"]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                # None of this environment's packages.
                env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            )
        self._wait()

    def _wait(self, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self._process.poll() is None, "the indexer has ended"
            try:
                self._client.get("/health").raise_for_status()
            except httpx.TransportError:
                time.sleep(0.1)
            else:
                return
        raise TimeoutError("the indexer does not answer")

    def close(self) -> None:
        """End it."""
        self._client.close()
        self._process.terminate()
        self._process.wait(30)

    def score(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that it takes for cached; one is always computed."""
        body = {"model_name": _MODEL, "token_ids": list(prompt[:-1])}
        reply = self._client.post("/query", json=body)
        reply.raise_for_status()
        found = reply.json()["scores"].get(_WORKER, {})
        return max(found.values(), default=0)
