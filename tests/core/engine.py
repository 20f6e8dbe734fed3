# SPDX-License-Identifier: Apache-2.0
"""A fake engine: schedules like vLLM, computes on a `FakeDevice`.

The calls and their order are those of `hybrid_plugin/vllm/scheduler.py` and
`manager.py`: running sequences grow first, the last one is preempted where
there is no room; then waiting ones are admitted; the commands are drained and
run before the forward pass; only then the cache hears of the progress.

Tokens that a sequence generates are settled beforehand, but the engine
*receives* them later: at once, or with one more step in flight (`lagging`),
so that a sequence may end when more of its tokens are computed than known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TypeVar

from hybrid_plugin.core.cache import Admission, HybridCache, LookUp
from hybrid_plugin.core.memory.attention_windows import AttentionWindow
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.core.policy.in_batch_sharing import (
    InBatchPrefixSharing,
    Prefill,
    waiting_prefill,
)
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tree.tokens import Pages
from tests.core.audit import audit, cached_content, full_state
from tests.core.device import FakeDevice, Forward, Prefixes
from tests.core.support import ByMinimum, Economical, Tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes and habits of a fake engine."""

    page_size: int = 4
    pages: int = 13
    slots: int = 6
    lagging: bool = False
    """Whether outputs arrive one step late (asynchronous scheduling)."""
    lookahead: int = 0
    watermark: int = 0
    full_fit: bool = False
    """Whether admission asks for room for all tokens."""
    branch_min: int = 1
    prompt_end_min: int = 1
    chunk_end_min: int = 1
    max_running: int = 8
    economical: bool = True
    """Whether evictions weigh what content is expected to save."""
    has_states: bool = True
    windows: tuple[tuple[AttentionWindow, int], ...] = ()
    """The window of each group, and the pages that it has beyond those of `pages`."""
    grid: int = field(default=0, repr=False)
    """Tokens between the states that a forward pass can keep; 0 if it keeps none."""
    canonical: bool = field(default=False, repr=False)
    """Whether the cache keeps canonical content only; with a grid."""
    follow: int = field(default=0, repr=False)
    """Tokens for which a sequence waits for another one's prefill; 0 for never."""
    hears_first: bool = field(default=False, repr=False)
    """Whether outputs that come late come between a step's plan and its launch."""

    @property
    def window_pools(self) -> list[tuple[AttentionWindow, int]]:
        """AttentionWindow and pages of each window group."""
        return [(span, self.pages + more) for span, more in self.windows]

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that fits alone."""
        return (self.pages - 1) * self.page_size - self.lookahead

    @property
    def chunk(self) -> int:
        """Tokens of the chunks of canonical content; 0 without."""
        return math.lcm(self.page_size, self.grid) if self.canonical else 0

    @property
    def eviction(self) -> LeastRecentlyUsed:
        """A new policy."""
        policy = Economical if self.economical else ByMinimum
        return policy(self.branch_min, self.prompt_end_min)

    def build(self, cls: type[HybridCache] = HybridCache) -> HybridCache:
        """The cache under test."""
        return cls(
            pages=PagePool(self.pages),
            slots=SlotPool(self.slots) if self.has_states else NoSlots(),
            page_size=self.page_size,
            policy=SnapshotPolicy(
                page_size=self.page_size,
                chunk_end_min_tokens=self.chunk_end_min,
                in_batch_prefix_min_tokens=self.follow,
                grid=self.grid,
                canonical=self.canonical,
            ),
            eviction=self.eviction,
            windows=tuple(
                WindowGroup(span, PagePool(pages)) for span, pages in self.window_pools
            ),
        )


class Access(Enum):
    """How a request uses the cache."""

    NORMAL = "normal"
    WRITE_ONLY = "write only"
    """Must compute everything itself, but others may use it."""
    PRIVATE = "private"
    """Its tokens do not say all about it: neither reads nor writes."""


@dataclass(slots=True, eq=False)
class Request:
    """What the fake engine knows of a sequence."""

    seq_id: str
    tokens: Tokens
    """Its prompt and all it will ever generate."""
    namespace: Hashable
    access: Access
    history: list[int]
    known: int
    limit: int | None = None
    ttl: float | None = None
    """Seconds within which it is said to be continued."""
    named: tuple[int, ...] = ()
    """Positions at which it asks for a snapshot."""
    computed: int = 0
    unseen: int = 0
    """Tokens that were generated but not received."""
    preemptions: int = 0
    table: list[int] = field(default_factory=list)
    slot: int = 0

    @property
    def known_tokens(self) -> Tokens:
        return self.tokens[: self.known]


class FakeEngine:
    """Drives a cache, and checks every step against the fake device."""

    def __init__(self, setup: Setup, cls: type[HybridCache] = HybridCache) -> None:
        self.setup = setup
        self.cache = setup.build(cls)
        self.device = FakeDevice(
            setup.pages,
            setup.slots if setup.has_states else 0,
            setup.page_size,
            setup.window_pools,
            setup.grid,
            setup.chunk,
        )
        self.following = InBatchPrefixSharing(self.cache)
        self.prefixes = Prefixes()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.outputs: list[list[Request]] = []
        """Per step in flight, the requests that it generates a token for."""
        self.finished = 0
        self.watch_refusals = True
        """Whether to compare the full state around calls that may refuse."""
        self.now = 0.0
        self._submitted = 0
        self._work: dict[Request, int] = {}

    # -------------------------------------------------------------- operations

    def submit(
        self,
        tokens: Tokens,
        prompt_length: int,
        *,
        namespace: Hashable = None,
        access: Access = Access.NORMAL,
        limit: int | None = None,
        ttl: float | None = None,
        named: tuple[int, ...] = (),
    ) -> None:
        """Queue a request whose last `len(tokens) - prompt_length` are generated."""
        assert 0 < prompt_length < len(tokens) <= self.setup.max_length
        self._submitted += 1
        seq_id = f"r{self._submitted}"
        meaning = (seq_id,) if access is Access.PRIVATE else namespace
        history = self.prefixes.history(meaning, tokens)
        self.waiting.append(
            Request(
                seq_id,
                tokens,
                namespace,
                access,
                history,
                prompt_length,
                limit,
                ttl,
                named,
            )
        )

    def step(self, budget: int, victim: int = -1) -> None:
        """Schedule and run one step of at most `budget` tokens.

        Args:
            budget: tokens in the step.
            victim: index of the running request to preempt for want of room.
        """
        if len(self.outputs) > int(self.setup.lagging):
            self.receive()
        self._work = {}
        preempted, budget = self._schedule_running(budget, victim)
        if not preempted:
            self._schedule_waiting(budget)
        if self.setup.hears_first:
            self.receive()
        for request, end in self._work.items():
            self.cache.cross(request.seq_id, end)
        self.device.run(self.cache.drain_commands())
        self.device.forward([self._forward(r, end) for r, end in self._work.items()])
        for request, end in self._work.items():
            request.computed = end
        for request in self._work:
            if self.cache.is_prefilling(request.seq_id):
                self.cache.advance(request.seq_id, request.computed)
            else:
                self.cache.trim(request.seq_id, request.computed)
        self.outputs.append([r for r in self._work if self._has_sampled(r)])
        if not self.setup.lagging:
            self.receive()

    def pass_time(self, seconds: float) -> None:
        """Let time pass; it only changes what is worth how much."""
        self.now += seconds
        before = cached_content(self.cache)
        self.cache.pass_time(self.now)
        assert cached_content(self.cache) == before

    def receive(self) -> None:
        """Take the outputs of the oldest step in flight."""
        for request in self.outputs.pop(0) if self.outputs else ():
            request.unseen -= 1
            request.known += 1
            if request.known == len(request.tokens):
                self.end(request)
                self.finished += 1

    def end(self, request: Request) -> None:
        """Finish or abort a request, wherever it is."""
        self._forget_outputs(request)
        if request in self.waiting:
            self.waiting.remove(request)
            return
        self._work.pop(request, None)
        self.running.remove(request)
        self.cache.finish(request.seq_id, request.known_tokens, request.computed)

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue."""
        self._forget_outputs(request)
        self._work.pop(request, None)
        self.running.remove(request)
        self.cache.finish(
            request.seq_id, request.known_tokens, request.computed, preempted=True
        )
        request.computed, request.table, request.slot = 0, [], 0
        request.preemptions += 1
        self.waiting.insert(0, request)

    def flush(self) -> None:
        """Forget what is cached; refused while a request runs."""
        before = full_state(self.cache)
        flushed = self.cache.flush()
        assert flushed == (not self.running)
        if not flushed:
            assert full_state(self.cache) == before

    def check(self) -> None:
        """Check all invariants, and everything the tree offers."""
        audit(self.cache)
        self.device.check_tree(self.cache, self.prefixes)
        for request in self.running:
            self._check_windows(request)

    def _check_windows(self, request: Request) -> None:
        """No page is held that no token to come looks at."""
        tables = self.cache.sequence(request.seq_id).windows
        for group, table in zip(self.cache.windows, tables, strict=True):
            first = group.window.first_needed(request.computed) // self.setup.page_size
            assert table.first == min(first, len(table.pages)), "a window grows"

    # ---------------------------------------------------------------- schedule

    def _schedule_running(self, budget: int, victim: int) -> tuple[bool, int]:
        preempted = False
        for request in list(self.running):
            if budget <= 0 or request not in self.running:
                continue
            end = self._next_end(request, request.computed, budget)
            if end == request.computed:
                continue
            while (fresh := self._grow(request, end)) is None:
                loser = self.running[victim % len(self.running)]
                budget += self._work.get(loser, loser.computed) - loser.computed
                assert not self.setup.canonical, "a sequence has no room reserved"
                self.preempt(loser)
                preempted = True
                if loser is request:
                    break
            if fresh is not None:
                request.table += fresh
                self._work[request] = end
                budget -= end - request.computed
        return preempted, budget

    def _grow(self, request: Request, end: int) -> Pages | None:
        attempt = self.cache.grow
        num_tokens = end + self.setup.lookahead
        fresh = self._watch(lambda: attempt(request.seq_id, num_tokens))
        alone = len(self.running) == 1
        assert fresh is not None or not alone, "a sequence alone finds no room"
        return fresh

    def _schedule_waiting(self, budget: int) -> None:
        self._plan_following()
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) == self.setup.max_running:
                return
            if self.following.holds(request.seq_id):
                continue
            found = self._look_up(request)
            hit = found.match.length
            assert hit < request.known, "nothing is left to compute"
            whole = min(hit + budget, request.known)
            end = self.cache.chunk_end(
                found.snapshot_positions, hit, whole, request.known
            )
            if end == hit:  # waits for a larger budget
                assert self.setup.canonical and budget <= self.setup.chunk
                return
            assert end > 1 or whole == 1, "a split leaves a first chunk of one token"
            admission = self._admit(request, found, end)
            if admission is None:
                assert self.running, "a sequence alone is refused"
                return
            self._take_in(request, admission, end)
            budget -= end - hit

    def _plan_following(self) -> None:
        normal = [r for r in self.waiting if r.access is Access.NORMAL]
        self.following.plan([(r.seq_id, partial(self._prefill, r)) for r in normal])
        held = [r for r in self.waiting if self.following.holds(r.seq_id)]
        assert not held or len(held) < len(self.waiting + self.running), "none leads"

    def _prefill(self, request: Request) -> Prefill:
        return waiting_prefill(
            self.cache, request.seq_id, request.known_tokens, request.namespace
        )

    def _look_up(self, request: Request) -> LookUp:
        tokens, namespace = request.known_tokens, request.namespace
        if request.access is not Access.NORMAL:
            return self.cache.bypass(tokens, namespace, ttl=request.ttl)
        keep = (*request.named, *self.following.pauses_of(request.seq_id))
        return self.cache.look_up(
            tokens, namespace, request.limit, snapshot_at=keep, ttl=request.ttl
        )

    def _admit(self, request: Request, found: LookUp, end: int) -> Admission | None:
        attempt = self.cache.admit
        return self._watch(
            lambda: attempt(
                request.seq_id,
                found,
                num_tokens=end + self.setup.lookahead,
                reserve_tokens=self._reserve(request),
                watermark_pages=self.setup.watermark if self.running else 0,
                cacheable=request.access is not Access.PRIVATE,
                resumed=request.preemptions > 0,
            )
        )

    def _reserve(self, request: Request) -> int:
        if self.setup.canonical:  # nobody may be preempted
            return len(request.tokens) + self.setup.lookahead
        return request.known if self.setup.full_fit else 0

    def _take_in(self, request: Request, admission: Admission, end: int) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.table, request.slot = list(admission.pages), admission.slot
        request.computed = admission.hit
        self._work[request] = end

    def _next_end(self, request: Request, start: int, budget: int) -> int:
        target = min(request.known + request.unseen, len(request.tokens))
        stops = self.cache.snapshot_positions_of(request.seq_id)
        end = min(start + budget, target)
        return self.cache.chunk_end(stops, start, end, request.known)

    # ---------------------------------------------------------------- internal

    def _watch(self, call: Callable[[], T | None]) -> T | None:
        """Make a call that may refuse; refusing must change nothing."""
        if not self.watch_refusals:
            return call()
        before = full_state(self.cache)
        result = call()
        if result is None:
            assert full_state(self.cache) == before
        return result

    def _forward(self, request: Request, end: int) -> Forward:
        table, slot = tuple(request.table), request.slot
        groups = self.cache.sequence(request.seq_id).windows
        windows = tuple(tuple(group.pages) for group in groups)
        prompt = self.cache.sequence(request.seq_id).prompt_length
        start, history = request.computed, request.history
        return Forward(table, slot, history, start, end, windows, prompt)

    def _has_sampled(self, request: Request) -> bool:
        sampled = request.computed == request.known + request.unseen
        if sampled and request.computed < len(request.tokens):
            request.unseen += 1
            return True
        return False

    def _forget_outputs(self, request: Request) -> None:
        request.unseen = 0
        for step in self.outputs:
            if request in step:
                step.remove(request)
