# SPDX-License-Identifier: Apache-2.0
"""The subcommand `hybrid-plugin route`."""

from __future__ import annotations

import argparse
import sys

_TEXT = (
    "route OpenAI requests first to a prefill server and then to a decode server; for "
    "demos and tests: it takes servers in turn, and knows nothing of load or caches"
)

_IDLE_SECONDS = 2.0
"""That a connection to a server is kept without a request: servers end theirs after 5,
and a request that meets that end has no answer."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    route = commands.add_parser("route", help=_TEXT, description=_TEXT)
    for role in ("prefill", "decode"):
        route.add_argument(
            f"--{role}",
            nargs="+",
            required=True,
            metavar="URL",
            help=f"{role} servers, such as http://127.0.0.1:8001",
        )
    route.add_argument("--host", default="127.0.0.1", help="(%(default)s)")
    route.add_argument("--port", type=int, default=8000, help="(%(default)s)")
    route.set_defaults(run=_route)


def _route(args: argparse.Namespace) -> int:
    try:
        import httpx
        import uvicorn
    except ModuleNotFoundError as missing:
        print(
            f"The router needs the package {missing.name}, which every engine brings: "
            f"run it where one is installed, or pip install {missing.name}.",
            file=sys.stderr,
        )
        return 1
    from hybrid_plugin.tools.route.router import Router

    limits = httpx.Limits(
        max_connections=None,
        max_keepalive_connections=64,
        keepalive_expiry=_IDLE_SECONDS,
    )
    client = httpx.AsyncClient(timeout=None, limits=limits)
    router = Router(args.prefill, args.decode, client)
    uvicorn.run(router, host=args.host, port=args.port, log_level="warning")
    return 0
