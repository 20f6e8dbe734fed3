# SPDX-License-Identifier: Apache-2.0
"""A seeded stream of requests as agents send them.

A few agents, each with a system prompt and tool descriptions of its own, run
sessions at the same time.  Some sessions begin with a long document that others
read too.  Every step sends all that was said so far, then a tool's result or a
user's message, short or very long.  Now and then a session tries several ways
from where it stands and goes on with one, or asks for the same step again.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tools.simulate.request import Request


@dataclass(frozen=True, slots=True)
class AgenticStream:
    """What the stream is like; lengths are medians of long-tailed distributions."""

    requests: int = 2000
    agents: int = 8
    system_tokens: int = 2500
    documents: int = 40
    document_tokens: int = 6000
    document_share: float = 0.4
    """Share of sessions that begin with a document."""
    sessions_at_once: int = 40
    steps: float = 8.0
    """Of a session, on average."""
    message_tokens: int = 250
    """Of a user's message or a tool's result."""
    longest_message: int = 12_000
    answer_tokens: int = 120
    branch_share: float = 0.12
    """Share of steps after which a session tries several ways."""
    retry_share: float = 0.05
    """Share of steps that are asked for again."""
    vocabulary: int = 150_000

    def generate(self, seed: int) -> list[Request]:
        """Make the requests; the same ones for the same seed."""
        return list(_Generator(self, np.random.default_rng(seed)).run())


class _Generator:
    def __init__(self, stream: AgenticStream, rng: np.random.Generator) -> None:
        self._stream = stream
        self._rng = rng
        self._systems = [
            self._tokens(self._long_tailed(stream.system_tokens, 0.5))
            for _ in range(stream.agents)
        ]
        self._documents = [
            self._tokens(self._long_tailed(stream.document_tokens, 0.8))
            for _ in range(stream.documents)
        ]

    def run(self) -> Iterator[Request]:
        """Interleave sessions by the time at which each sends its next step."""
        order = count()
        waiting = [
            (self._pause(), next(order), self._session())
            for _ in range(self._stream.sessions_at_once)
        ]
        heapq.heapify(waiting)
        for _ in range(self._stream.requests):
            now, _, session = heapq.heappop(waiting)
            request = next(session, None)
            while request is None:
                session = self._session()
                request = next(session, None)
            yield request
            heapq.heappush(waiting, (now + self._pause(), next(order), session))

    def _session(self) -> Iterator[Request]:
        """The requests of one session, in order."""
        rng, stream = self._rng, self._stream
        history = [self._systems[self._popular(stream.agents)]]
        if rng.random() < stream.document_share:
            history.append(self._documents[self._popular(stream.documents)])
        for _ in range(int(rng.geometric(1 / stream.steps))):
            history = [*history, self._message()]
            answer = self._answer()
            yield _request(history, answer)
            if rng.random() < stream.retry_share:
                answer = self._answer()
                yield _request(history, answer)
            history = [*history, answer]
            if rng.random() < stream.branch_share:
                yield from self._branches(history)

    def _branches(self, history: list[Tokens]) -> Iterator[Request]:
        """Tries that all begin where the session stands, each a few steps long."""
        for _ in range(int(self._rng.integers(2, 5))):
            tried = history
            for _ in range(int(self._rng.integers(1, 4))):
                tried = [*tried, self._message()]
                answer = self._answer()
                yield _request(tried, answer)
                tried = [*tried, answer]

    def _message(self) -> Tokens:
        length = self._long_tailed(self._stream.message_tokens, 1.3)
        return self._tokens(min(length, self._stream.longest_message))

    def _answer(self) -> Tokens:
        return self._tokens(self._long_tailed(self._stream.answer_tokens, 0.8))

    def _popular(self, several: int) -> int:
        """One of several, the first ones more often."""
        weights = 1 / np.arange(1, several + 1)
        return int(self._rng.choice(several, p=weights / weights.sum()))

    def _pause(self) -> float:
        """Time between a session's steps: mostly a tool's, sometimes a person's."""
        scale = 20.0 if self._rng.random() < 0.15 else 1.0
        return float(self._rng.exponential(scale))

    def _long_tailed(self, median: int, spread: float) -> int:
        return max(int(self._rng.lognormal(np.log(median), spread)), 8)

    def _tokens(self, length: int) -> Tokens:
        made = array("q")
        made.frombytes(self._rng.integers(0, self._stream.vocabulary, length).tobytes())
        return made


def _request(history: list[Tokens], answer: Tokens) -> Request:
    return Request(sum(map(len, history)), partial(_join, history), answer)


def _join(parts: list[Tokens]) -> Tokens:
    joined = array("q")
    for part in parts:
        joined += part
    return joined
