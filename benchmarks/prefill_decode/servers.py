# SPDX-License-Identifier: Apache-2.0
"""Server processes: started, waited for, and ended with all that they started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

TAIL = 25
"""Lines of a log that are told of a server that failed."""
POLL_S = 0.5
PATIENCE_S = 20.0
"""For a server that was asked to end."""
_ERROR = re.compile(r"\b\w*(Error|Exception)\b(: |$)|\berror: ")
_FOLLOWS = re.compile(r"Engine core initialization failed|Engine core proc .* failed")
"""Errors that tell of an earlier one."""


class FailedError(RuntimeError):
    """A server did not start, or ended; carries the end of its log."""


class Server:
    """A process that listens at a port, and logs to a file."""

    def __init__(
        self,
        role: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        port: int,
        log: Path,
    ) -> None:
        """Start it, and do not wait.

        Args:
            role: for messages and results.
            command: of the process.
            variables: of its environment, besides those of this process.
            port: where it will listen.
            log: all that it prints goes there.
        """
        self.role = role
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._is_over = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self, end: float) -> None:
        """Wait until it answers.

        Args:
            end: in seconds of `time.monotonic`.

        Raises:
            FailedError: if it ends, or does not answer until then.
        """
        while time.monotonic() < end:
            self.check()
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(POLL_S)
        raise FailedError(self._said("it did not answer in time"))

    def check(self) -> None:
        """Make sure that it runs.

        Raises:
            FailedError: if it does not.
        """
        code = self._process.poll()
        if code is not None:
            raise FailedError(self._said(f"it ended with status {code}"))

    def metrics(self) -> str:
        """All that it publishes, as Prometheus reads it."""
        answer = httpx.get(f"{self.url}/metrics", timeout=30)
        answer.raise_for_status()
        return answer.text

    def end(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """Wait for its end, and make sure of that of all that it started."""
        if self._is_over:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._is_over = True

    def _signal(self, number: signal.Signals) -> None:
        if self._is_over:
            return  # its number may be another process's by now
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _said(self, what: str) -> str:
        text = self.log.read_text(errors="replace")
        return f"{self.role}: {what}\n{last_words(text)}"


def last_words(log: str, tail: int = TAIL) -> str:
    """The error that a log's end comes from, where one stands out, and its end.

    Args:
        log: of a process that failed.
        tail: lines of the end.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    causes = [
        line for line in lines if _ERROR.search(line) and not _FOLLOWS.search(line)
    ]
    shown = lines[-tail:]
    return "\n".join([*(one for one in causes[-1:] if one not in shown), *shown])
