# SPDX-License-Identifier: Apache-2.0
"""A progress bar on standard error, where somebody sees it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `total` steps.

    The bar is drawn by `rich`; without that package one line says that it is
    missing.  Nothing is drawn where standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        print(f"{text} (install `rich` for a progress bar)", file=sys.stderr)
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)
