# SPDX-License-Identifier: Apache-2.0
"""Engine processes that are forked from one that has imported the engine already.

On a CPU, nine tenths of a server's start are imports, once in each of its three
processes.  Here a fork server of the standard library imports the engine once, and
servers are forked from it, as are the processes that they start.  What is read while
the engine is imported is the fork server's: whatever depends on that starts cold.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import context
from pathlib import Path
from typing import Any

from tests.engines.messages import Launch

ROOT = Path(__file__).parents[2]


class WarmProcess:
    """One such process, with as much of Popen's interface as tests need."""

    def __init__(self, launch: Launch, output: Path, errors: Path) -> None:
        """Start it in a session of its own; all that it prints goes to files."""
        self._process = _context(tuple(launch.imports)).Process(
            target=_become,
            args=(launch, str(output), str(errors)),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Its status; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: if it does not end in so many seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode


def completed(launch: Launch) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, forked if `launch` names imports."""
    if not launch.imports:
        return subprocess.run(
            launch.command,
            cwd=ROOT,
            env=os.environ | dict(launch.environment),
            capture_output=True,
            text=True,
        )
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        status = WarmProcess(launch, output, errors).wait()
        return subprocess.CompletedProcess(
            launch.command, status, output.read_text(), errors.read_text()
        )


@functools.cache
def _context(imports: tuple[str, ...]) -> context.ForkServerContext:
    """One for all of a test session, whose engine is always the same."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*imports, __name__])
    return found


def _become(launch: Launch, output: str, errors: str) -> None:
    """In the forked process: do what the command line says."""
    command, environment = launch.command, launch.environment
    os.setsid()
    os.chdir(ROOT)
    for stream, name in ((1, output), (2, errors)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update(environment)
    for module, constants in launch.constants.items():
        vars(importlib.import_module(module)).update(constants)
    _fork_from_here_on()
    if "PYTHONPATH" in environment:
        for planted in environment["PYTHONPATH"].split(os.pathsep):
            if (Path(planted) / "sitecustomize.py").is_file():
                runpy.run_path(str(Path(planted) / "sitecustomize.py"))
    try:
        if command[0] == sys.executable and command[1] == "-m":
            sys.argv = list(command[2:])
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        elif command[0] == sys.executable and command[1] == "-c":
            sys.argv = ["-c", *command[3:]]
            exec(command[2], {"__name__": "__main__"})
        else:
            sys.argv = list(command)
            runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.stdout.flush()


def _fork_from_here_on() -> None:
    """Have the engine fork its processes although it asks to spawn them."""
    named = multiprocessing.get_context

    def forking(method: str | None = None) -> Any:
        return named("fork")

    multiprocessing.get_context = forking
    multiprocessing.set_start_method = lambda *_, **__: None
    multiprocessing.Process = named("fork").Process
    os.register_at_fork(after_in_child=_choose_metrics)


def _choose_metrics() -> None:
    """Have processes that serve one endpoint share their metrics, as fresh ones would.

    prometheus_client looks at the environment when it is imported, which is before vLLM
    names the folder that the processes share.
    """
    from prometheus_client import values

    if values.ValueClass is values.MutexValue:
        values.ValueClass = values.get_value_class()
