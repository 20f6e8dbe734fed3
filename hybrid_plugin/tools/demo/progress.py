# SPDX-License-Identifier: Apache-2.0
"""Shows how far the demo is: bars on a terminal, lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

PERIOD_S = 10.0
"""Time between two lines of a log about the same thing."""


class Display:
    """One for the whole demo."""

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Show nothing yet.

        Args:
            console: where to; bars if it is a terminal.
            clock: tells the time in seconds.
        """
        self._console = console
        self._clock = clock

    @contextmanager
    def waiting(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show that something takes time; what is yielded takes how far it is."""
        if self._console.is_terminal:
            with self._console.status(text) as status:
                yield lambda state: status.update(f"{text} [dim]{escape(state)}[/]")
            return
        lines = _Lines(self._console, self._clock, text)
        yield lines.say
        lines.end()

    @contextmanager
    def counting(self, text: str, total: int) -> Iterator[Callable[[], None]]:
        """Show how many of `total` are done; what is yielded counts one more."""
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                Elapsed(),
            )
            with Progress(*columns, console=self._console) as progress:
                task = progress.add_task(text, total=total)
                yield lambda: progress.advance(task)
            return
        lines = _Lines(self._console, self._clock, text)
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            lines.say(f"{done} of {total}")

        yield count
        lines.end()


class _Lines:
    """A line at once, one now and then, and one at the end."""

    def __init__(self, console: Console, clock: Callable[[], float], text: str) -> None:
        self._console, self._clock, self._text = console, clock, text
        self._begin = self._last = clock()
        self._print(f"{text} ...")

    def say(self, state: str) -> None:
        now = self._clock()
        if now - self._last >= PERIOD_S:
            self._last = now
            self._print(f"{self._text}: {state}, {now - self._begin:.0f} s")

    def end(self) -> None:
        self._print(f"{self._text}: done, {self._clock() - self._begin:.0f} s")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
