# SPDX-License-Identifier: Apache-2.0
"""Seeded traffic for a fake engine: prompts that share prefixes, and mishaps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.core.memory.attention_windows import (
    AttentionWindow,
    ChunkedLocal,
    SlidingWindow,
)
from hybrid_plugin.core.tiers.host_plan import plan_host
from tests.core.engine import FakeEngine
from tests.core.requests import Access
from tests.core.setups import Setup
from tests.core.support import Tokens

NAMESPACES = (None, None, None, "adapter")
TTLS = (None, None, None, 0, 1, 20, 1000)
ACCESSES = (Access.NORMAL,) * 8 + (Access.WRITE_ONLY, Access.PRIVATE)


def fork(
    seen: Sequence[Tokens], which: int, keep: int, extra: Sequence[int], most: int
) -> Tokens:
    """A sequence that leaves an earlier one after `keep` tokens.

    Args:
        seen: sequences so far.
        which: index of the one to fork, taken modulo their number.
        keep: tokens to share at most.
        extra: tokens behind.
        most: length to cut to.
    """
    base = seen[which % len(seen)] if seen else ()
    tokens = (*base[:keep], *extra)[:most]
    return tokens if len(tokens) > 1 else (0, 1)


def random_setup(rng: random.Random, page_size: int) -> Setup:
    """A small engine, mostly short of pages or slots."""
    setup = Setup(
        page_size=page_size,
        pages=rng.randint(4, 6 + 48 // page_size),
        slots=rng.randint(2, 9),
        lagging=rng.random() < 0.5,
        lookahead=rng.choice((0, 0, 1, 3)) if page_size > 1 else 0,
        watermark=rng.choice((0, 0, 1)),
        full_fit=rng.random() < 0.3,
        branch_min=rng.choice((1, 1, page_size, 2 * page_size)),
        prompt_end_min=rng.choice((1, 1, 2 * page_size)),
        chunk_end_min=rng.choice((1, 2 * page_size, 1000)),
        max_running=rng.choice((2, 4, 8)),
    )
    # Of its own, so that the traffic is that of the seed whatever is added here.
    side = random.Random(repr(setup))
    setup = replace(
        setup,
        economical=side.random() < 0.3,
        follow=side.choice((0, 1, 2 * page_size)),
        grid=side.choice((0, 0, 1, 3, 2 * page_size)),
        hears_first=setup.lagging and side.random() < 0.5,
    )
    return replace(setup, canonical=setup.grid > 1 and side.random() < 0.5)


def with_windows(rng: random.Random, setup: Setup) -> Setup:
    """The same for a model with one or two window groups, half without states."""
    spans: list[AttentionWindow] = [
        SlidingWindow(rng.choice((1, 2, 3, 5, 8, 17, 33))),
        ChunkedLocal(rng.choice((2, 4, 7, 16, 32))),
    ]
    rng.shuffle(spans)
    windows = [(span, rng.choice((0, 0, 2, 9))) for span in spans]
    return replace(
        setup,
        windows=tuple(windows[: rng.choice((1, 2))]),
        has_states=rng.random() < 0.5,
        canonical=False,  # nobody has room reserved in windows
    )


def with_drafts(rng: random.Random, setup: Setup) -> Setup:
    """The same with speculation, in draft slots, in a scratch or recorded."""
    drafts = rng.choice((1, 2, 3, 3, 5))
    slots, how = setup.slots + rng.choice((0, drafts, 3 * drafts)), rng.random()
    setup = replace(
        setup,
        slots=slots,
        drafts=drafts,
        scratch=how < 0.25,
        records=0.25 <= how < 0.5,
        acceptance=rng.choice((0.2, 0.6, 0.9)),
        canonical=False,  # a verified token's bits depend on what was verified with it
    )
    return replace(setup, pages=setup.pages + -(-setup.overrun // setup.page_size))


_Setup = TypeVar("_Setup", bound=Setup)


def with_host(setup: _Setup) -> _Setup:
    """The same with a host tier, mostly short of rows, behind a slow link or a fast."""
    rng = random.Random(f"host/{setup!r}")
    rows: dict[PoolId, int] = {Pool.KV: rng.choice((1, 2, 3))}
    for index in range(len(setup.windows)):
        rows[Pool.window(index)] = rng.choice((1, 2))
    if setup.has_states:
        rows[Pool.STATE] = rng.choice((1, 3, 3, 8))
    longest = setup.max_length // setup.page_size + 1
    budget = max(rows.values()) * (8 * (len(rows) + 2) + rng.randint(0, 40))
    budget += longest * rows[Pool.KV] * rng.choice((0, 1, 3))
    return replace(
        setup,
        host=plan_host(rows, budget),
        load_bytes_per_second=rng.choice((0.5, 5.0, 100.0, 1e9)),
        prefill_seconds_per_token=rng.choice((None, None, 0.01, 1.0, 10.0)),
    )


def with_outer(setup: _Setup) -> _Setup:
    """The same with a tier behind the host, mostly short of room, and in trouble."""
    assert setup.host is not None, "it is behind the host"
    rng = random.Random(f"outer/{setup!r}")
    longest = setup.max_length // setup.page_size + 1
    each = sum(setup.host.row_bytes.values())
    return replace(
        setup,
        outer_bytes=longest * each * rng.choice((1, 4, 40, 400)) // 4,
        read_bytes_per_second=rng.choice((0.5, 50.0, 1e9)),
        trouble=rng.choice((0.0, 0.0, 0.1, 0.5)),
    )


def with_peers(setup: _Setup) -> _Setup:
    """The same with other servers behind the host, beside a disk or alone."""
    assert setup.host is not None, "it is behind the host"
    rng = random.Random(f"peers/{setup!r}")
    alone = rng.random() < 0.6
    setup = setup if alone else with_outer(setup)
    trouble, read = rng.choice((0.0, 0.1, 0.3)), rng.choice((0.5, 50.0, 1e9))
    if not alone:
        read = setup.read_bytes_per_second
    return replace(setup, peers=True, trouble=trouble, read_bytes_per_second=read)


@dataclass(slots=True)
class Traffic:
    """Random operations on one fake engine."""

    rng: random.Random
    engine: FakeEngine
    seen: list[Tokens] = field(default_factory=list)
    side: random.Random = field(default_factory=lambda: random.Random(2))
    """For TTLs and the time, so that the rest is that of the seed."""
    order: random.Random = field(default_factory=lambda: random.Random(3))
    """For what somebody orders to be saved and brought, likewise."""

    @classmethod
    def seeded(
        cls,
        seed: int,
        page_size: int,
        cache: type[HybridCache] = HybridCache,
        *,
        windows: bool = False,
        drafts: bool = False,
        host: bool = False,
        outer: bool = False,
        peers: bool = False,
        states_alone: bool = False,
    ) -> Traffic:
        """Traffic on a random engine.

        Args:
            seed: of all randomness.
            page_size: tokens in a page.
            cache: under test.
            windows: whether the model has window groups.
            drafts: whether sequences verify drafts.
            host: whether there is a host tier.
            outer: whether there is a disk behind it.
            peers: whether there are other servers behind it.
            states_alone: whether no layer attends, and pages only number tokens.
        """
        rng = random.Random(f"{seed}/{page_size}")
        setup = random_setup(rng, page_size)
        if windows:
            setup = with_windows(rng, setup)
        if drafts:
            setup = with_drafts(rng, setup)
        if host:
            setup = with_host(setup)
        if outer:
            setup = with_outer(setup)
        if peers:
            setup = with_peers(setup)
        if states_alone:
            setup = replace(setup, states_alone=True, economical=True)
        return cls(rng, FakeEngine(setup, cache))

    def run(self, operations: int, check_every: int) -> None:
        """Do `operations`, with a full check after every so many."""
        for count in range(1, operations + 1):
            thorough = count % check_every == 0
            self.engine.watch_refusals = thorough
            self.operate()
            if thorough:
                self.engine.check()
        self.drain()

    def operate(self) -> None:
        """Do one random operation."""
        roll = self.rng.random()
        engine = self.engine
        if self.side.random() < 0.3:
            engine.pass_time(self.side.choice((0.1, 1, 15, 400)))
        if engine.ranks is not None and self.side.random() < 0.04:
            engine.evict_all()
        if engine.ranks is not None and self.seen:
            self.order_something()
        if roll < 0.25 and len(engine.waiting) < 6:
            self.submit()
        elif roll < 0.93:
            budget = self.rng.choice((1, 3, 5, 8, 16, 40, 40))
            engine.step(budget, victim=self.rng.choice((-1, -1, 0)))
        elif roll < 0.95:
            engine.receive()
        elif roll < 0.97 and (engine.running or engine.waiting):
            engine.end(self.rng.choice([*engine.running, *engine.waiting]))
        elif roll < 0.99 and engine.running:
            engine.preempt(self.rng.choice(engine.running))
        else:
            engine.flush()

    def order_something(self) -> None:
        """Have a sequence saved, or brought to the host, now and then."""
        what, tokens = self.order.random(), self.order.choice(self.seen)
        if what >= 0.1:
            return
        namespace = self.order.choice(NAMESPACES)
        keeps = any(tier.keeps_bundles for tier in self.engine.cache.lower_tiers.outer)
        if what >= 0.06:
            self.engine.bring(tokens, namespace)
        elif keeps:
            self.engine.save(tokens, namespace)

    def submit(self) -> None:
        """Queue a request that often budgets a prefix with an earlier one."""
        rng, most = self.rng, self.engine.setup.max_length
        extra = [rng.randrange(3) for _ in range(rng.choice((0, 1, 2, 7, 20)))]
        tokens = fork(self.seen, rng.randrange(6), self._keep(), extra, most)
        self.seen = [*self.seen[-5:], tokens]
        answer = min(rng.choice((1, 1, 2, 5, 9)), len(tokens) - 1)
        self.engine.submit(
            tokens,
            len(tokens) - answer,
            namespace=rng.choice(NAMESPACES),
            access=rng.choice(ACCESSES),
            limit=rng.choice((None, None, None, rng.randrange(most))),
            ttl=self.side.choice(TTLS),
            named=self.side.choice(((), (), (self.side.randrange(most),))),
        )

    def _keep(self) -> int:
        """Tokens to share: a whole conversation, a common prefix, anything."""
        page_size, most = self.engine.setup.page_size, self.engine.setup.max_length
        return self.rng.choice(
            (most, most, page_size + 1, 2 * page_size, self.rng.randrange(most))
        )

    def drain(self) -> None:
        """Serve what is left; every request must come to an end."""
        engine = self.engine
        for _ in range(10_000):
            if not (engine.running or engine.waiting or engine.has_io):
                break
            engine.step(max(64, 2 * engine.setup.chunk))
        engine.check()
        assert not engine.running and not engine.waiting, "requests starve"
        assert not engine.has_io, "what is to be written never is"
        engine.check_files()
        engine.flush()
        engine.check()
        levels = engine.cache.levels()
        assert levels["kv"].free == engine.cache.pages.usable
        assert levels["state"].free == engine.cache.slots.usable
        if engine.cache.host is not None:
            assert all(
                level.used == level.cached == 0
                for level in engine.cache.host.levels().values()
            )
