# SPDX-License-Identifier: Apache-2.0
"""Traces in the format published with Mooncake (FAST '25).

One JSON object a line: `timestamp` (milliseconds) of the request, `input_length`
tokens of the prompt, `output_length` generated, and `hash_ids`, one for every 512
tokens of the prompt, the last block being shorter.  Equal ids mean equal blocks behind
equal prefixes; what the tokens are is not told, so each block gets tokens of its own.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tools.simulate.lines import read_lines
from hybrid_plugin.tools.simulate.request import Request, TraceError

BLOCK = 512
"""Tokens that one hash id stands for."""
MOST_TOKENS = 10**8
MOST_MS = 10**12
_OUTSIDE = 1 << 62
"""Above the tokens of any block: generated ones."""


def read_mooncake(path: Path) -> list[Request]:
    """Read a trace.

    Answers cannot be hit, for the trace does not tell which later prompt contains them.
    Without a time in every line the requests have none.

    Args:
        path: of the trace.

    Raises:
        TraceError: for a file that cannot be read or is in another format.
    """
    requests: list[Request] = []
    generated = 0
    for number, line in read_lines(path):
        where = f"{path}, line {number}"
        value = _parse(line, where)
        length, output, ids = _fields(value, where)
        start = -_OUTSIDE + generated
        generated += output
        requests.append(
            Request(
                length,
                partial(_tokens, ids, length),
                array("q", range(start, start + output)),
                arrival=_arrival(value, where),
            )
        )
    if any(request.arrival is None for request in requests):
        return [replace(request, arrival=None) for request in requests]
    return requests


def _arrival(value: dict[str, Any], where: str) -> float | None:
    milliseconds = value.get("timestamp")
    if milliseconds is None:
        return None
    if type(milliseconds) not in (int, float) or not 0 <= milliseconds <= MOST_MS:
        raise TraceError(f"{where}: timestamp must be milliseconds, at least 0.")
    return float(milliseconds) / 1000


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is no JSON; is the trace's format mooncake?") from (
            error
        )
    if not isinstance(value, dict):
        raise TraceError(f"{where} is no JSON object; is the trace's format mooncake?")
    return value


def _fields(value: dict[str, Any], where: str) -> tuple[int, int, array[int]]:
    length, output = value.get("input_length"), value.get("output_length", 0)
    if type(length) is not int or not 1 <= length <= MOST_TOKENS:
        raise TraceError(
            f"{where}: input_length must be a whole number from 1 to {MOST_TOKENS}."
        )
    if type(output) is not int or not 0 <= output <= MOST_TOKENS:
        raise TraceError(
            f"{where}: output_length must be a whole number from 0 to {MOST_TOKENS}."
        )
    ids, blocks = value.get("hash_ids"), -(-length // BLOCK)
    if not isinstance(ids, list) or len(ids) != blocks:
        raise TraceError(
            f"{where}: hash_ids must be a list of {blocks} ids, one for every {BLOCK} "
            f"of its {length} tokens."
        )
    try:
        return length, output, array("q", ids)
    except (TypeError, OverflowError) as error:
        raise TraceError(f"{where}: hash_ids must be whole numbers.") from error


def _tokens(ids: array[int], length: int) -> Tokens:
    blocks = np.frombuffer(ids, np.int64)
    tokens = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()[:length]
    made = array("q")
    made.frombytes(tokens.tobytes())
    return made
