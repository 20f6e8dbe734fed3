# SPDX-License-Identifier: Apache-2.0
"""Model shapes, the memories they are measured with, and the tasks of a grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.curves.loads import Stream
from benchmarks.prefix_models import slot_bytes, token_bytes

STATE_ITEMSIZE = {"qwen3-next": 2, "nemotron-h-8b": 4, "falcon-h1-7b": 4}
"""Bytes of a number of the recurrent states, equal for all caches.

A snapshot of these weighs as much as the KV of 1,600, 6,200 and 3,100 tokens."""
SHAPES = tuple(STATE_ITEMSIZE)
LEVELS = 6
MAX_RUNNING, CHUNK = 64, 8192
"""Requests that run at once and tokens of a step, at most."""
_BLOCK = 16


@dataclass(frozen=True)
class Task:
    """One point of one curve: a cache serves a workload in so much memory."""

    shape: str
    workload: str
    seed: int
    level: int | None
    """Of the memory, from 1 to `LEVELS`; None where bytes were asked for."""
    memory: int
    """Bytes."""
    longest: int
    """Tokens of the longest request at its end."""
    cache: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from all others."""
        return (self.shape, self.workload, self.seed, self.memory, self.cache)


def state_bytes(shape: str) -> int:
    """Of a sequence's states, or a snapshot."""
    return slot_bytes(shape, STATE_ITEMSIZE[shape])


def levels(shape: str, stream: Stream) -> list[int]:
    """Six memories for a workload, in bytes, with equal ratios between them.

    The first is what the requests in flight need, with a quarter more, but at least
    one and a half times what the longest takes.  The last is what all distinct
    tokens take, with two states for each request.  Absolute sizes would put some
    workloads wholly into the memory, and leave others none to cache in.
    """
    token, state = token_bytes(shape), state_bytes(shape)
    lengths = stream.lengths
    each = token * sum(lengths) / len(lengths) + state
    least = max(
        1.25 * stream.concurrency * each, 1.5 * (token * max(lengths) + 2 * state)
    )
    most = max(token * distinct_tokens(stream) + 2 * state * len(lengths), 1.5 * least)
    steps = range(LEVELS)
    return [int(least * (most / least) ** (step / (LEVELS - 1))) for step in steps]


def distinct_tokens(stream: Stream) -> int:
    """Tokens of all requests, those in equal places behind equal prefixes once.

    To a multiple of 16 for each request.
    """
    seen: set[int] = set()
    for tokens in _sequences(stream):
        prefix = 0
        for start in range(0, len(tokens), _BLOCK):
            prefix = hash((prefix, *tokens[start : start + _BLOCK]))
            seen.add(prefix)
    return len(seen) * _BLOCK


def _sequences(stream: Stream) -> Iterator[Sequence[int]]:
    for prompt, answer in zip(stream.prompts, stream.answers, strict=True):
        yield [*prompt, *answer]
