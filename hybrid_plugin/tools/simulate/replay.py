# SPDX-License-Identifier: Apache-2.0
"""Serves a trace with a cache, in the calls an engine's adapter makes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tools.simulate.request import Request


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request."""

    length: int
    """Tokens of its prompt."""
    hit: int
    """Of those, tokens that were restored."""
    steps: int
    """Forward passes that its prefill took; 0 if it was too long to be served."""
    waited: bool = False
    """Whether others had to end before their time to make room for it."""


@dataclass(slots=True, order=True)
class _Live:
    ends: float
    """When it ends: in seconds, or by its number where a trace has no times."""
    number: int
    tokens: Tokens = field(compare=False)
    """Prompt and answer."""
    prompt: int = field(compare=False)
    steps: int = field(default=0, compare=False)
    waited: bool = field(default=False, compare=False)

    @property
    def seq_id(self) -> str:
        return str(self.number)


class Replay:
    """Sends requests through a cache, some of them live at once.

    Where a trace has times, a request is live for as long as it was when the trace was
    recorded, and ends before its time only where another one needs its place.
    Otherwise a request is live until so many others have come.
    """

    def __init__(self, cache: HybridCache, *, chunk: int, concurrency: int = 1) -> None:
        """Prepare.

        Args:
            cache: empty, or warm from an earlier replay.
            chunk: tokens of a prefill step at most.
            concurrency: sequences that are live at once, at most.
        """
        self.cache = cache
        self._chunk = chunk
        self._concurrency = concurrency
        self._live: list[_Live] = []
        """A heap: the next one to end first."""
        self._count = 0

    def serve(self, requests: Iterable[Request]) -> Iterator[Served]:
        """Serve all requests in turn; the last ones end when all were yielded."""
        for request in requests:
            yield self._serve(request)
        while self._live:
            self._end_first()

    # ---------------------------------------------------------------- internal

    def _serve(self, request: Request) -> Served:
        tokens = request.make()
        self._count += 1
        ends = float(self._count)
        if request.arrival is not None:
            ends = request.arrival + request.seconds
            self._end_until(request.arrival)
        live = _Live(ends, self._count, tokens + request.answer, request.length)
        while len(self._live) >= self._concurrency:
            self._end_first()
            live.waited = request.arrival is not None
        hit = self._admit(live, tokens, request)
        if hit is None or not self._prefill(live, tokens, hit):
            return Served(request.length, 0, 0)
        heapq.heappush(self._live, live)
        return Served(request.length, hit, live.steps, live.waited)

    def _end_until(self, now: float) -> None:
        while self._live and self._live[0].ends <= now:
            self._end_first()

    def _admit(self, live: _Live, tokens: Tokens, request: Request) -> int | None:
        while True:
            found = self.cache.look_up(
                tokens, request.namespace, snapshot_at=request.snapshot_at
            )
            end = self._next_end(found.match.length, found.snapshot_positions, live)
            admission = self.cache.admit(
                live.seq_id, found, num_tokens=end, reserve_tokens=live.prompt
            )
            if admission is not None:
                return admission.hit
            if not self._live:
                return None
            live.waited = True
            self._end_first()

    def _prefill(self, live: _Live, tokens: Tokens, position: int) -> bool:
        """Compute the prompt; False, with the sequence ended, if it never fits."""
        while position < live.prompt:
            stops = self.cache.snapshot_positions_of(live.seq_id)
            end = self._next_end(position, stops, live)
            if not self._grow(live, end):
                self.cache.finish(live.seq_id, tokens, position)
                return False
            self.cache.drain_commands()
            self.cache.advance(live.seq_id, end)
            live.steps += 1
            position = end
        return True

    def _next_end(self, position: int, stops: tuple[int, ...], live: _Live) -> int:
        end = min(position + self._chunk, live.prompt)
        return self.cache.chunk_end(stops, position, end, live.prompt)

    def _grow(self, live: _Live, num_tokens: int) -> bool:
        while self.cache.grow(live.seq_id, num_tokens) is None:
            if not self._live:
                return False
            live.waited = True
            self._end_first()
        return True

    def _end_first(self) -> None:
        """Generate the answer of the sequence that ends next, and end it."""
        live = heapq.heappop(self._live)
        # Nobody computes the last token that is generated.
        target = max(len(live.tokens) - 1, live.prompt)
        position = live.prompt
        while position < target:
            end = min(position + self.cache.page_size, target)
            if not self._grow(live, end):
                break
            position = end
            self.cache.trim(live.seq_id, position)
        self.cache.drain_commands()
        self.cache.finish(live.seq_id, live.tokens[:position], position)
