# SPDX-License-Identifier: Apache-2.0
"""Published traces as workloads: their lengths and what they share, with random text.

Both give an id for each block of a prompt; equal ids are equal blocks behind equal
prefixes.  Times are not modelled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from benchmarks.curves.protocol import Ask, Gate, Load, child, clients, text
from benchmarks.prefix_workloads import Reply

_MOONCAKE_BLOCK = 512


class TraceError(ValueError):
    """A trace that was asked for cannot be read."""


def _block(seed: object, number: int, size: int) -> list[int]:
    return text(random.Random(f"{seed} {number}"), size)


def mooncake(path: Path, requests: int = 160, concurrency: int = 8) -> Load:
    """The first requests of Mooncake's trace (Qin et al., FAST'25), in its order.

    Args:
        path: of the published file: a request a line, an id for 512 tokens.
        requests: how many are served.
        concurrency: requests in flight.

    Raises:
        TraceError: if there is no such file.
    """
    if not path.is_file():
        raise TraceError(f"There is no Mooncake trace at {path}; see --mooncake.")
    with path.open() as lines:
        entries = [json.loads(line) for line in islice(lines, requests)]

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        gate, seed = Gate(concurrency), rng.getrandbits(64)

        async def one(number: int, entry: dict[str, Any]) -> list[Reply]:
            async with gate.at(number):
                ids = entry["hash_ids"]
                blocks = (_block(seed, i, _MOONCAKE_BLOCK) for i in ids)
                prompt = list(chain.from_iterable(blocks))[: entry["input_length"]]
                answer = text(random.Random(number), entry["output_length"])
                return [await ask(prompt, answer)]

        return await clients([one(*numbered) for numbered in enumerate(entries)])

    return Load("Mooncake trace", concurrency, run)


@dataclass(frozen=True)
class _Turn:
    ids: tuple[int, ...]
    prompt: int
    answer: int


def _turns(path: Path) -> tuple[int, list[_Turn]]:
    """Tokens of a block, and the requests of a session; sub-agents are left out."""
    session = json.loads(path.read_text())
    turns = [
        _Turn(
            tuple(request["hash_ids"]), int(request["in"]), max(int(request["out"]), 1)
        )
        for request in session["requests"]
        if request.get("hash_ids")
    ]
    return int(session["block_size"]), turns


def sessions(
    folder: Path,
    count: int = 12,
    longest: int = 64_000,
    turns: int = 20,
    concurrency: int = 4,
) -> Load:
    """Sessions of a coding agent, all open at once.

    Of the folder's sessions those are taken, in the order of their names, that
    have at least six requests with prompts of at most `longest` tokens.

    Args:
        folder: of one JSON file a session (callanjfox/kv-cache-tester).
        count: of sessions.
        longest: a prompt may be; a session ends before a longer one.
        turns: of a session at most.
        concurrency: requests in flight.

    Raises:
        TraceError: if the folder has fewer such sessions.
    """
    chosen: list[tuple[str, int, list[_Turn]]] = []
    for path in sorted(folder.glob("*.json")):
        size, all_turns = _turns(path)
        fitting = []
        for turn in all_turns[:turns]:
            if turn.prompt + turn.answer > longest:
                break
            fitting.append(turn)
        if len(fitting) >= 6:
            chosen.append((path.stem, size, fitting))
        if len(chosen) == count:
            break
    if len(chosen) < count:
        raise TraceError(
            f"{folder} has {len(chosen)} sessions that could be served, {count} are "
            "needed; see --sessions."
        )

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        seed, gate = rng.getrandbits(64), Gate(concurrency)
        tasks = [
            _session(ask, gate, child(rng), f"{seed} {name}", size, served)
            for name, size, served in chosen
        ]
        return await clients(tasks)

    return Load("coding agent's sessions", concurrency, run)


async def _session(
    ask: Ask,
    gate: Gate,
    rng: random.Random,
    seed: str,
    size: int,
    turns: Sequence[_Turn],
) -> list[Reply]:
    prompts = _prompts(rng, seed, size, turns)
    replies: list[Reply] = []
    due = 3 * rng.random()
    for turn, prompt, after in zip(turns, prompts, [*prompts[1:], []], strict=True):
        answer: list[int] = []
        if after[: len(prompt)] == prompt:
            answer = after[len(prompt) :][: turn.answer]
        answer = answer + text(rng, turn.answer - len(answer))
        async with gate.at(due):
            replies.append(await ask(prompt, answer))
        due += rng.expovariate(1)
    return replies


def _prompts(
    rng: random.Random, seed: str, size: int, turns: Sequence[_Turn]
) -> list[list[int]]:
    """Whole blocks by their ids; what is left is the begin of the next one's block."""
    prompts: list[list[int]] = []
    blocks: dict[int, list[int]] = {}
    for turn, after in zip(turns, [*turns[1:], None], strict=True):
        tokens: list[int] = []
        for i in turn.ids[: turn.prompt // size]:
            if i not in blocks:
                blocks[i] = _block(seed, i, size)
            tokens += blocks[i]
        whole, rest = len(tokens) // size, turn.prompt - len(tokens)
        tail = text(rng, rest)
        if after is not None and after.ids[:whole] == turn.ids[:whole]:
            more = after.ids[whole : whole + 1]
            tail = [t for i in more for t in _block(seed, i, size)][:rest] or tail
        prompts.append(tokens + tail + text(rng, rest - len(tail)))
    return prompts
