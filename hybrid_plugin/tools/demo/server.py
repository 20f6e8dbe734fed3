# SPDX-License-Identifier: Apache-2.0
"""Starts a server, waits for it, and ends it with all it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx

from hybrid_plugin.tools.demo.engines import Launch

START_LIMIT_S = 420.0
LAST_LINES = 15


class DemoError(RuntimeError):
    """Why the demo cannot go on, in one sentence; may carry lines of a log."""


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process; starting does not wait, `wait_until_ready` does."""

    def __init__(self, name: str, launch: Launch, port: int, log: Path) -> None:
        """`name` is for messages; all that the server prints goes to `log`."""
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._launch = launch
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._begin = 0.0
        self.start_s = 0.0
        """Seconds from start to ready."""

    def start(self) -> None:
        """Start the process."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._begin = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._launch.command,
                env={**os.environ, **self._launch.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            DemoError: if it ends or does not get ready.
        """
        while time.monotonic() - self._begin < START_LIMIT_S:
            self.check_alive()
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    self.start_s = time.monotonic() - self._begin
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise self._failure(f"was not ready after {START_LIMIT_S:.0f} seconds")

    def check_alive(self) -> None:
        """Check that the process runs.

        Raises:
            DemoError: if it has ended.
        """
        assert self._process is not None, "the server was not started"
        status = self._process.poll()
        if status is not None:
            raise self._failure(f"ended with status {status}")

    def stop(self) -> None:
        """End the server and every process it started."""
        process, self._process = self._process, None
        if process is None:
            return
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, kind)
                process.wait(15)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break
        process.wait()
        with contextlib.suppress(ProcessLookupError):  # workers that outlived it
            os.killpg(process.pid, signal.SIGKILL)

    def _failure(self, what: str) -> DemoError:
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        quoted = "\n".join(f"  | {line}" for line in lines)
        return DemoError(
            f"The {self.name} server {what}; its whole log is {self._log}, and ends "
            f"with:\n{quoted}"
        )
