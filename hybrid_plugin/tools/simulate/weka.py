# SPDX-License-Identifier: Apache-2.0
"""Recorded conversations of a coding agent, one JSON file each.

The format is that of the captures published with kv-cache-tester (Weka).  A file has
`block_size` (64) and `requests`; each request has `t` (seconds after the conversation's
start), `in` and `out` (tokens of prompt and answer), `api_time` (seconds until it was
answered) and `hash_ids`, one for every whole block of the prompt.  Equal ids of a file
mean equal blocks behind equal prefixes.  A request of type `subagent` has `requests` of
its own, whose times count from its start.

What the tokens are is not told: each block gets tokens of its own.  Where the next
request of a conversation extends a prompt, its blocks also tell what followed the
prompt's last whole block, and what was answered.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tools.simulate.request import Request, TraceError

BLOCK = 64
"""Tokens that one hash id stands for."""
MOST_TOKENS = 10**8
MOST_SECONDS = 1e9
UNKNOWN_SECONDS = 1.0
"""Until the answer, for a request for which that was not recorded."""
_IDS = 1 << 32
"""More than the ids of a file."""


@dataclass(frozen=True, slots=True)
class SessionSample:
    """Which conversations are replayed, and when they start."""

    sessions: int | None = None
    """Number of conversations at most; None for all."""
    skip: int = 0
    """Number of conversations left out before them."""
    gap: float = 30.0
    """Seconds between two starts, on average: they are a Poisson process."""
    seed: int = 0
    """Of the order of the conversations, and of their starts."""

    def choose(self, files: list[Path]) -> list[Path]:
        """The sample of `files`, in random order."""
        files = list(files)
        random.Random(self.seed).shuffle(files)
        end = None if self.sessions is None else self.skip + self.sessions
        return files[self.skip : end]

    def starts(self) -> Iterator[float]:
        """Seconds after which each conversation starts."""
        rng = random.Random(self.seed)
        start = 0.0
        while True:
            yield start
            start += rng.expovariate(1 / self.gap) if self.gap else 0.0


@dataclass(frozen=True, slots=True)
class _Call:
    """A request as it was recorded."""

    arrival: float
    seconds: float
    prompt: int
    answer: int
    blocks: array[int]
    """Numbers of the prompt's whole blocks."""

    def is_extended_by(self, other: _Call) -> bool:
        known = len(self.blocks)
        return (
            known > 0
            and other.prompt > self.prompt
            and other.blocks[:known] == self.blocks
        )


def read_weka(path: Path, sample: SessionSample) -> list[Request]:
    """Read conversations; their requests come in the order of their recorded times.

    A request goes on after the last answer, in its conversation and those nested with
    it, that had been given when it was recorded, and as long after it.

    Args:
        path: of one conversation, or of a folder of them.
        sample: of the folder's conversations.

    Raises:
        TraceError: for a file that cannot be read or is in another format, or if there
            is nothing to read.
    """
    fresh, keys = count(1), count()
    requests: list[Request] = []
    files = sample.choose(_files(path))
    for index, (file, start) in enumerate(zip(files, sample.starts(), strict=False)):
        recorded = [
            one
            for conversation in _conversations(file, start, index * _IDS)
            for one in _requests(conversation, fresh)
        ]
        requests += _chained(recorded, keys)
    if not requests:
        raise TraceError(
            f"{path} has no requests among the conversations that were chosen."
        )
    return sorted(requests, key=_arrival)


def _chained(
    recorded: list[tuple[_Call, Request]], keys: Iterator[int]
) -> Iterator[Request]:
    """The requests of one file, each with the one after whose answer it comes."""
    recorded = sorted(recorded, key=lambda one: one[0].arrival)
    answered: list[tuple[float, int]] = []
    for call, request in recorded:
        key = next(keys)
        end, before = max(
            (one for one in answered if one[0] <= call.arrival), default=(0.0, None)
        )
        yield replace(
            request,
            key=key,
            after=before,
            pause=0.0 if before is None else call.arrival - end,
        )
        answered.append((call.arrival + call.seconds, key))


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.json")) if path.is_dir() else [path]


def _arrival(request: Request) -> float:
    assert request.arrival is not None
    return request.arrival


def _requests(
    calls: list[_Call], fresh: Iterator[int]
) -> Iterator[tuple[_Call, Request]]:
    """The requests of one conversation, the last one first, as they were recorded.

    Args:
        calls: in the order in which they were recorded.
        fresh: numbers of blocks that nobody has seen.
    """
    following: tuple[_Call, array[int]] | None = None
    for call in reversed(calls):
        if following is not None and call.is_extended_by(following[0]):
            after, known = following
            blocks = known[: len(call.blocks) + 1]
            end = min(call.prompt + call.answer, after.prompt)
            answer = _tokens(known, call.prompt, end)
        else:
            blocks = call.blocks + array("q", [-next(fresh)])
            answer = array("q")
        rest = call.answer - len(answer)
        unseen = array("q", [-next(fresh) for _ in range(-(-rest // BLOCK))])
        yield (
            call,
            Request(
                length=call.prompt,
                make=partial(_tokens, blocks, 0, call.prompt),
                answer=answer + _tokens(unseen, 0, rest),
                arrival=call.arrival,
            ),
        )
        following = call, blocks


def _tokens(blocks: array[int], start: int, end: int) -> Tokens:
    """Tokens `start` to `end` of a sequence of blocks."""
    first = start // BLOCK
    numbers = np.array(blocks[first : -(-end // BLOCK)], np.int64)
    tokens = (numbers[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    made = array("q")
    made.frombytes(tokens[start - first * BLOCK : end - first * BLOCK].tobytes())
    return made


def _conversations(file: Path, start: float, base: int) -> Iterator[list[_Call]]:
    """The conversation of a file, and those of its sub-agents."""
    value = _load(file)
    if value.get("block_size") != BLOCK:
        raise TraceError(f"{file}: block_size must be {BLOCK}.")
    yield from _nested(value, start, base, str(file))


def _nested(
    value: dict[str, Any], start: float, base: int, where: str
) -> Iterator[list[_Call]]:
    entries = value.get("requests")
    if not isinstance(entries, list):
        raise TraceError(f"{where}: requests must be a list.")
    calls = []
    for number, entry in enumerate(entries, start=1):
        place = f"{where}, request {number}"
        if not isinstance(entry, dict):
            raise TraceError(f"{place} is no JSON object.")
        arrival = start + _seconds(entry.get("t"), f"{place}: t")
        if "requests" in entry:
            yield from _nested(entry, arrival, base, place)
        else:
            calls.append(_call(entry, arrival, base, place))
    if any(later.arrival < earlier.arrival for earlier, later in pairwise(calls)):
        raise TraceError(f"{where}: its requests must be in the order of their times.")
    yield calls


def _load(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(
            f"Cannot read the trace {str(file)!r}: {error.strerror}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file} is no JSON; is the trace's format weka?") from error
    if not isinstance(value, dict):
        raise TraceError(f"{file} is no JSON object; is the trace's format weka?")
    return value


def _call(entry: dict[str, Any], arrival: float, base: int, where: str) -> _Call:
    prompt = _count(entry.get("in"), 1, f"{where}: in")
    answer = _count(entry.get("out"), 0, f"{where}: out")
    seconds = UNKNOWN_SECONDS
    if entry.get("api_time") is not None:
        seconds = _seconds(entry["api_time"], f"{where}: api_time")
    ids, blocks = entry.get("hash_ids"), prompt // BLOCK
    if not isinstance(ids, list) or len(ids) != blocks:
        raise TraceError(
            f"{where}: hash_ids must be a list of {blocks} ids, one for every {BLOCK} "
            f"of its {prompt} tokens."
        )
    if any(type(i) is not int or not 0 <= i < _IDS for i in ids):
        raise TraceError(f"{where}: hash_ids must be whole numbers below {_IDS}.")
    return _Call(arrival, seconds, prompt, answer, array("q", [base + i for i in ids]))


def _count(value: object, least: int, where: str) -> int:
    if type(value) is not int or not least <= value <= MOST_TOKENS:
        raise TraceError(
            f"{where} must be a whole number from {least} to {MOST_TOKENS}."
        )
    return value


def _seconds(value: object, where: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or not 0 <= value <= MOST_SECONDS
    ):
        raise TraceError(f"{where} must be a number of seconds, at least 0.")
    return float(value)
