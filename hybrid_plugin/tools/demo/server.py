# SPDX-License-Identifier: Apache-2.0
"""Starts a server, waits for it, and ends it with all it started."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from hybrid_plugin.tools.demo.engines import Launch

START_SILENCE_S = 600.0
"""How long a server that starts may print nothing; on a busy machine it starts slowly,
and a single import or compilation may take minutes."""
LAST_LINES = 15
LINE_LENGTH = 100
"""Characters of a log's last line that are shown."""
TAIL_BYTES = 4096
"""Bytes at the end of a log in which its last line is looked for."""
POLL_S = 0.25
_FIRST_PORT, _EPHEMERAL_PORTS = 15000, 32768
"""Ports that are neither common services' nor, by Linux' defaults, given to outgoing
connections."""


class DemoError(RuntimeError):
    """Why the demo cannot go on, in one sentence; may carry lines of a log."""


def free_port() -> int:
    """A port nobody listens on at this moment.

    It lies below those that the system gives to outgoing connections: a server binds
    it seconds later, and until then any process here may open connections.
    """
    with socket.socket() as probe:
        while True:
            port = secrets.choice(range(_FIRST_PORT, _EPHEMERAL_PORTS))
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


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

    def wait_until_ready(
        self,
        tell: Callable[[str], None] = lambda state: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wait until the server answers, for as long as it goes on starting.

        Args:
            tell: called again and again with what the server printed last.
            clock: tells the time in seconds.

        Raises:
            DemoError: if it ends, or prints nothing for too long.
        """
        printed, since = -1, clock()
        while clock() - since < START_SILENCE_S:
            self.check_alive()
            if self._log.stat().st_size > printed:
                printed, since = self._log.stat().st_size, clock()
            tell(f"{self.name}: {self._last_line()}")
            if self._answers():
                self.start_s = time.monotonic() - self._begin
                return
            time.sleep(POLL_S)
        raise self._failure(
            f"has printed nothing for {START_SILENCE_S:.0f} seconds and is not ready"
        )

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _last_line(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last[:LINE_LENGTH]

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
