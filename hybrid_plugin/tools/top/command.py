# SPDX-License-Identifier: Apache-2.0
"""The subcommand `hybrid-plugin top`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from hybrid_plugin.tools.numbers import positive

if TYPE_CHECKING:
    from hybrid_plugin.tools.top.sample import Sample

_TEXT = "show what the cache of a running server does"
_CLEAR = "\x1b[H\x1b[J"
_TIMEOUT_S = 10.0


class NoMetricsError(RuntimeError):
    """Why there is nothing to show, in one sentence."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    top = commands.add_parser("top", help=_TEXT, description=_TEXT)
    top.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of the server (%(default)s)"
    )
    top.add_argument(
        "--every", type=positive, default=2.0, metavar="SECONDS", help="(%(default)s)"
    )
    top.add_argument(
        "--once", action="store_true", help="print the totals since the start, and end"
    )
    top.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        show(args.url, args.every, once=args.once)
    except NoMetricsError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def show(
    url: str,
    every: float,
    *,
    once: bool,
    fetch: Callable[[str], str] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Show samples until it is interrupted.

    Args:
        url: of the server.
        every: seconds between two samples.
        once: show one sample, with the totals since the start.
        fetch: gets a page as text.
        sleep: lets so many seconds pass.
        now: the time in seconds.

    Raises:
        NoMetricsError: if the server does not answer, or not with metrics of the
            plugin.
    """
    from hybrid_plugin.tools.top import sample, view

    whole, at = _sample(url, fetch or _fetch), now()
    print("\n".join(view.lines(whole, None, whole)), flush=True)
    while not once:
        sleep(every)
        before, then, whole, at = whole, at, _sample(url, fetch or _fetch), now()
        lately = sample.between(before, whole)
        text = "\n".join(view.lines(lately, at - then, whole))
        print(f"{_CLEAR}{text}", flush=True)


def _sample(url: str, fetch: Callable[[str], str]) -> Sample:
    from hybrid_plugin.tools.top import sample

    page = f"{url.rstrip('/')}/metrics"
    try:
        found = sample.read(fetch(page))
    except (HTTPException, URLError, OSError, ValueError) as error:
        # What SGLang answers where it was started without metrics.
        is_missing = isinstance(error, HTTPError) and error.code == HTTPStatus.NOT_FOUND
        if not is_missing:
            raise NoMetricsError(f"{page} cannot be read: {error}.") from error
        found = None
    if found is None:
        raise NoMetricsError(
            f"{page} has no metrics of hybrid-plugin: the plugin is inactive there, or "
            "the server was started without metrics (SGLang: --enable-metrics)."
        )
    return found


def _fetch(page: str) -> str:
    with urlopen(page, timeout=_TIMEOUT_S) as answer:
        text: bytes = answer.read()
    return text.decode()
