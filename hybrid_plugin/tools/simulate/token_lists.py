# SPDX-License-Identifier: Apache-2.0
"""Traces of plain token ids: JSON Lines.

A line is a list of the prompt's token ids, or an object with `prompt` and, if
need be, `answer` (ids that are generated), `namespace` (a string: requests of
different ones share nothing), `keep` (positions worth a snapshot), `ttl` (seconds
within which it is promised to go on, 0 for never), `arrival` (seconds after the
trace's start) and `conversation` (a string).  A request of a conversation comes
`pause` seconds after the previous one of it was answered.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.engine.hints import MAX_TTL
from hybrid_plugin.tools.simulate.lines import read_lines
from hybrid_plugin.tools.simulate.request import Request, TraceError

MOST_SECONDS = 1e9


def read_token_lists(path: Path) -> list[Request]:
    """Read a trace.

    Raises:
        TraceError: for a file that cannot be read or is in another format.
    """
    requests = []
    last: dict[str, int] = {}
    for number, line in read_lines(path):
        where = f"{path}, line {number}"
        value = _parse(line, where)
        request = _request(value, where)
        name = _text(value, "conversation", where)
        if name is not None:
            pause = _seconds(value, "pause", where) or 0.0
            request = replace(request, key=number, after=last.get(name), pause=pause)
            last[name] = number
        elif "pause" in value:
            raise TraceError(f"{where}: a pause needs a conversation.")
        requests.append(request)
    return requests


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is no JSON; is the trace's format tokens?") from (
            error
        )
    if isinstance(value, list):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise TraceError(f"{where} is neither a list of token ids nor an object.")
    return value


def _request(value: dict[str, Any], where: str) -> Request:
    prompt = _ids(value.get("prompt"), f"{where}: prompt")
    if not prompt:
        raise TraceError(f"{where}: a prompt has at least one token.")
    return Request(
        length=len(prompt),
        make=lambda: prompt,
        answer=_ids(value.get("answer", []), f"{where}: answer"),
        namespace=_text(value, "namespace", where),
        snapshot_at=tuple(_ids(value.get("keep", []), f"{where}: keep")),
        ttl=_seconds(value, "ttl", where, MAX_TTL),
        arrival=_seconds(value, "arrival", where),
    )


def _text(value: dict[str, Any], name: str, where: str) -> str | None:
    text = value.get(name)
    if text is not None and not isinstance(text, str):
        raise TraceError(f"{where}: {name} must be a string.")
    return text


def _seconds(
    value: dict[str, Any], name: str, where: str, most: float = MOST_SECONDS
) -> float | None:
    seconds = value.get(name)
    if seconds is None:
        return None
    if type(seconds) not in (int, float) or not 0 <= seconds <= most:
        raise TraceError(f"{where}: {name} must be seconds, at least 0.")
    return float(seconds)


def _ids(value: Any, where: str) -> Tokens:
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise TraceError(f"{where} must be a list of whole numbers.")
    try:
        return array("q", value)
    except OverflowError as error:
        raise TraceError(f"{where} has a number beyond 64 bits.") from error
