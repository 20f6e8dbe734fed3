# SPDX-License-Identifier: Apache-2.0
"""The subcommand `hybrid-plugin session`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_plugin.sizes import gib

_TEXT = "save a conversation under a name, and load it in this or another server"
_URL = "http://localhost:8000"
_KEY = "OPENAI_API_KEY"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    session = commands.add_parser("session", help=_TEXT, description=_TEXT)
    actions = session.add_subparsers(required=True, metavar="ACTION")
    text = "keep what is cached of a conversation on disk, under a name"
    save = actions.add_parser("save", help=text, description=text)
    save.add_argument(
        "--body",
        required=True,
        metavar="FILE",
        help="JSON of what a request of the conversation holds: an object with "
        "messages or a prompt, a list of messages, or a list of tokens; - reads "
        "standard input",
    )
    text = "bring a session to host memory before the next request needs it"
    load = actions.add_parser("load", help=text, description=text)
    text = "list sessions, the oldest first"
    ls = actions.add_parser("ls", help=text, description=text)
    ls.add_argument("--json", action="store_true", help="print JSON")
    text = "remove a session, and what nothing else needs of it"
    rm = actions.add_parser("rm", help=text, description=text)
    for action, run in ((save, _save), (load, _load), (ls, _ls), (rm, _rm)):
        action.set_defaults(run=run)
        if action is not ls:
            action.add_argument("name", metavar="NAME")
        action.add_argument(
            "--url", help=f"of the server, without /v1 (by default {_URL})"
        )
        action.add_argument(
            "--api-key", help=f"of the server (by default ${_KEY}, if it is set)"
        )
    for action in (save, load):
        action.add_argument("--salt", help="the conversation's cache_salt, if any")
        action.add_argument("--adapter", help="the adapter's name, if any")
    for action in (ls, rm):
        action.add_argument(
            "--folder", type=Path, help="disk.path of a server, in place of --url"
        )
    rm.add_argument(
        "--model",
        metavar="MODEL",
        help="with --folder: whose session, as ls shows it, if several models have one",
    )


def _save(args: argparse.Namespace) -> int:
    try:
        body = _body(args.body)
    except (OSError, ValueError) as error:
        return _complain(f"{args.body}: {error}")
    return _post(args, "save", body, _saved)


def _load(args: argparse.Namespace) -> int:
    return _post(args, "load", {}, _loaded)


def _ls(args: argparse.Namespace) -> int:
    if args.folder is None:
        return _call(args, "GET", "", None, _json if args.json else _table)
    from hybrid_plugin.tools.session import folder

    found = folder.read(args.folder)
    if found is None:
        return _complain(f"There is no folder {args.folder}.")
    listed = {"sessions": found}
    print(_json(listed) if args.json else _table(listed))
    return 0


def _rm(args: argparse.Namespace) -> int:
    if args.folder is None:
        return _call(args, "DELETE", _place(args.name), None, _removed)
    from hybrid_plugin.errors import ConfigError
    from hybrid_plugin.tools.session import folder

    try:
        freed = folder.remove(args.folder, args.name, args.model)
    except (ConfigError, OSError) as error:
        return _complain(f"{error}")
    print(_removed({"name": args.name, "freed_bytes": freed}))
    return 0


# -------------------------------------------------------------------- requests


def _post(
    args: argparse.Namespace,
    action: str,
    body: dict[str, Any],
    say: Callable[[Mapping[str, Any]], str],
) -> int:
    if args.salt is not None:
        body["cache_salt"] = args.salt
    if args.adapter is not None:
        body["model"] = args.adapter
    return _call(args, "POST", f"{_place(args.name)}/{action}", body, say)


def _call(
    args: argparse.Namespace,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    say: Callable[[Mapping[str, Any]], str],
) -> int:
    """Send a request, and print what comes back; returns the exit status."""
    import httpx

    from hybrid_plugin.engine.session_routes import PREFIX

    key = args.api_key or os.environ.get(_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = (args.url or _URL).rstrip("/") + PREFIX + path
    try:
        found = httpx.request(method, url, json=body, headers=headers, timeout=None)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _complain(f"{url} does not answer: {error}")
    try:
        answer = found.json()
    except ValueError:
        answer = {}
    if not isinstance(answer, dict) or found.status_code != 200:
        return _complain(_sentence(found.status_code, answer))
    print(say(answer))
    return 0


def _sentence(status: int, answer: Any) -> str:
    said = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(said, str):
        return f"{said} ({status})"
    if status == 404:
        return "This server knows no sessions: it needs hybrid-plugin. (404)"
    return f"The server answered {status}."


def _place(name: str) -> str:
    """A name in a URL; a dot alone would be taken for a folder."""
    from urllib.parse import quote

    return "/" + quote(name, safe="").replace(".", "%2E")


def _body(file: str) -> dict[str, Any]:
    """What a request of the conversation holds.

    Raises:
        OSError: if there is no such file.
        ValueError: for anything but JSON of one of the three forms.
    """
    text = sys.stdin.read() if file == "-" else Path(file).read_text()
    value = json.loads(text)
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value:
        return {"messages" if isinstance(value[0], dict) else "prompt": value}
    raise ValueError("neither an object, nor messages, nor tokens")


# ---------------------------------------------------------------------- output


def _saved(answer: Mapping[str, Any]) -> str:
    return (
        f"Saved {answer['tokens']} of {answer['given']} tokens as {answer['name']!r}, "
        f"{gib(answer['bytes'])}."
    )


def _loaded(answer: Mapping[str, Any]) -> str:
    return (
        f"{answer['tokens']} of {answer['saved']} tokens of {answer['name']!r} can be "
        "resumed."
    )


def _removed(answer: Mapping[str, Any]) -> str:
    return f"Removed {answer['name']!r}, and {gib(answer['freed_bytes'])} of files."


def _json(answer: Mapping[str, Any]) -> str:
    return json.dumps(answer["sessions"], indent=2)


def _table(answer: Mapping[str, Any]) -> str:
    sessions: Sequence[Mapping[str, Any]] = answer["sessions"]
    lines = [_line(session) for session in sessions]
    size = answer.get("disk_size")
    pinned = answer.get("pinned_bytes", sum(one["bytes"] for one in sessions))
    of = "" if size is None else f" of {gib(size)}"
    return "\n".join([*lines, f"{len(sessions)} sessions keep {gib(pinned)}{of}"])


def _line(session: Mapping[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(session["created"]))
    tokens, there = session["tokens"], session["on_disk"]
    lost = "" if there == tokens else f", {there} of them on disk"
    return (
        f"{session['name']}  {tokens} tokens{lost}  {gib(session['bytes'])}  {when}  "
        f"{session['engine']}  {session['model']}"
    )


def _complain(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1
