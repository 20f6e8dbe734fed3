# SPDX-License-Identifier: Apache-2.0
"""Traces of plain token ids: JSON Lines.

A line is a list of the prompt's token ids, or an object with `prompt` and, if
need be, `answer` (ids that are generated), `namespace` (a string: requests of
different ones share nothing) and `keep` (positions worth a snapshot).
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tools.simulate.lines import read_lines
from hybrid_plugin.tools.simulate.request import Request, TraceError


def read_token_lists(path: Path) -> list[Request]:
    """Read a trace.

    Raises:
        TraceError: for a file that cannot be read or is in another format.
    """
    return [
        _request(line, f"{path}, line {number}") for number, line in read_lines(path)
    ]


def _request(line: str, where: str) -> Request:
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
    prompt = _ids(value.get("prompt"), f"{where}: prompt")
    if not prompt:
        raise TraceError(f"{where}: a prompt has at least one token.")
    namespace = value.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise TraceError(f"{where}: namespace must be a string.")
    return Request(
        length=len(prompt),
        make=lambda: prompt,
        answer=_ids(value.get("answer", []), f"{where}: answer"),
        namespace=namespace,
        snapshot_at=tuple(_ids(value.get("keep", []), f"{where}: keep")),
    )


def _ids(value: Any, where: str) -> Tokens:
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise TraceError(f"{where} must be a list of whole numbers.")
    try:
        return array("q", value)
    except OverflowError as error:
        raise TraceError(f"{where} has a number beyond 64 bits.") from error
