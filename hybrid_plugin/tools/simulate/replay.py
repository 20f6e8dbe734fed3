# SPDX-License-Identifier: Apache-2.0
"""Serves a trace with a cache, in the calls an engine's adapter makes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Live:
    seq_id: str
    tokens: Tokens
    """Prompt and answer."""
    prompt: int
    steps: int = 0


class Replay:
    """Sends requests through a cache, some of them live at once."""

    def __init__(self, cache: HybridCache, *, chunk: int, concurrency: int = 1) -> None:
        """Prepare.

        Args:
            cache: empty, or warm from an earlier replay.
            chunk: tokens of a prefill step at most.
            concurrency: sequences that stay live while the next ones come.
        """
        self.cache = cache
        self._chunk = chunk
        self._concurrency = concurrency
        self._live: deque[_Live] = deque()
        self._count = 0

    def serve(self, requests: Iterable[Request]) -> Iterator[Served]:
        """Serve all requests in turn; the last ones end when all were yielded."""
        for request in requests:
            yield self._serve(request)
        while self._live:
            self._end_oldest()

    # ---------------------------------------------------------------- internal

    def _serve(self, request: Request) -> Served:
        while len(self._live) >= self._concurrency:
            self._end_oldest()
        tokens = request.make()
        self._count += 1
        live = _Live(str(self._count), tokens + request.answer, request.length)
        hit = self._admit(live, tokens, request)
        if hit is None or not self._prefill(live, tokens, hit):
            return Served(request.length, 0, 0)
        self._live.append(live)
        return Served(request.length, hit, live.steps)

    def _admit(self, live: _Live, tokens: Tokens, request: Request) -> int | None:
        while True:
            found = self.cache.look_up(
                tokens, request.namespace, snapshot_at=request.snapshot_at
            )
            end = self._next_end(found.match.length, found.snapshot_positions, live)
            admission = self.cache.admit(live.seq_id, found, num_tokens=end)
            if admission is not None:
                return admission.hit
            if not self._live:
                return None
            self._end_oldest()

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
            self._end_oldest()
        return True

    def _end_oldest(self) -> None:
        """Generate the answer of the oldest live sequence, and end it."""
        live = self._live.popleft()
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
