# SPDX-License-Identifier: Apache-2.0
"""The plugin's cache behind steps like an engine's."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.no_model.stepping import step_beside
from benchmarks.prefix_workloads import Reply
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Map, Unmap
from hybrid_plugin.core.policy.in_batch_sharing import (
    LOOK_AHEAD,
    InBatchPrefixSharing,
    waiting_prefill,
)

MAX_RUNNING, MAX_STEP_TOKENS = 64, 8192
"""As in `vllm_prefix`."""


@dataclass(eq=False)
class Request:
    """A sequence, from its arrival to its last token."""

    name: str
    tokens: array[int]
    prompt: int
    length: int
    """Tokens at its end."""
    done: asyncio.Future[None]
    answer: Sequence[int]
    """What it generates; empty for random tokens."""
    hit: int | None = None
    end: int = 0
    """Requests that had started when it ended."""
    computed: int = 0
    resumed: bool = False


@dataclass(eq=False)
class Bookkeeper:
    """Schedules like an engine, on a cache, and computes nothing."""

    cache: HybridCache
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    steps: int = 0
    preemptions: int = 0
    moving: int = 0
    """Steps before which memory moved: a device waits there."""
    tokens: int = 0
    """Computed in all steps."""
    served: list[Request] = field(default_factory=list)
    """All requests, in the order in which they started."""
    following: InBatchPrefixSharing = field(init=False)
    _count: int = 0
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.following = InBatchPrefixSharing(self.cache)

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, answer: Sequence[int] = ()
    ) -> Reply:
        """Serve a request among others; its answer is random if none is given."""
        self._count += 1
        request = Request(
            str(self._count),
            array("q", prompt),
            len(prompt),
            len(prompt) + max_tokens,
            asyncio.get_running_loop().create_future(),
            answer,
        )
        self.waiting.append(request)
        await request.done
        made = tuple(request.tokens[request.prompt :])
        return Reply(made, request.prompt, request.hit or 0, 0.0)

    def drive(self, serving: Coroutine[Any, Any, list[Reply]]) -> list[Reply]:
        """Step until the clients are done."""
        return step_beside(self.run(), serving)

    async def run(self) -> None:
        """Step while there is something to do, for ever."""
        while True:
            await asyncio.sleep(0)
            if self.waiting or self.running:
                self.step()

    def step(self) -> None:
        """Grow what runs, admit what waits, compute."""
        self.steps += 1
        work: dict[Request, int] = {}
        budget = MAX_STEP_TOKENS
        for request in list(self.running):
            if request in self.running and budget:
                budget = self._go_on(request, work, budget)
        self._plan()
        for request in list(self.waiting):
            if not budget or len(self.running) >= MAX_RUNNING:
                break
            if self.following.holds(request.name):
                continue
            spent = self._admit(request, work, budget)
            if not spent:
                break
            budget -= spent
        assert work, "nothing can run"
        for request, end in work.items():
            self.cache.cross(request.name, end)
        commands = self.cache.drain_commands()
        self.moving += any(isinstance(c, Map | Unmap) for c in commands)
        for request, end in work.items():
            self._compute(request, end)

    def _plan(self) -> None:
        if self.following is not None:
            self.following.plan(
                [
                    (
                        r.name,
                        partial(waiting_prefill, self.cache, r.name, r.tokens, None),
                    )
                    for r in self.waiting[:LOOK_AHEAD]
                ]
            )

    def _go_on(self, request: Request, work: dict[Request, int], budget: int) -> int:
        end = min(request.computed + budget, len(request.tokens))
        stops = self.cache.snapshot_positions_of(request.name)
        end = self.cache.chunk_end(stops, request.computed, end, len(request.tokens))
        while self.cache.grow(request.name, end) is None:
            last = self.running[-1]
            budget += work.pop(last, last.computed) - last.computed
            self._preempt(last)
            if last is request:
                return budget
        work[request] = end
        return budget - (end - request.computed)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.running.remove(request)
        self.cache.finish(request.name, request.tokens, request.computed)
        request.computed, request.resumed = 0, True
        self.waiting.insert(0, request)

    def _admit(self, request: Request, work: dict[Request, int], budget: int) -> int:
        pauses = self.following.pauses_of(request.name)
        found = self.cache.look_up(request.tokens, pause_at=pauses)
        length = len(request.tokens)
        hit = found.match.length
        end = self.cache.chunk_end(
            found.snapshot_positions, hit, min(hit + budget, length), length
        )
        admission = self.cache.admit(
            request.name,
            found,
            num_tokens=end,
            reserve_tokens=length,
            resumed=request.resumed,
        )
        if admission is None:
            return 0
        self.waiting.remove(request)
        self.running.append(request)
        request.computed = hit
        if request.hit is None:
            request.hit = hit
            self.served.append(request)
        work[request] = end
        return end - hit

    def _compute(self, request: Request, end: int) -> None:
        self.tokens += end - request.computed
        request.computed = end
        if self.cache.is_prefilling(request.name):
            self.cache.advance(request.name, end)
        if end < len(request.tokens):
            return
        request.tokens.append(self._next_token(request))
        if len(request.tokens) == request.length:
            self.running.remove(request)
            self.cache.finish(request.name, request.tokens, end)
            request.end = len(self.served)
            request.done.set_result(None)

    def _next_token(self, request: Request) -> int:
        if request.answer:
            return request.answer[len(request.tokens) - request.prompt]
        return self._rng.randrange(1 << 15)
