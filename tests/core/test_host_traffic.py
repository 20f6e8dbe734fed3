# SPDX-License-Identifier: Apache-2.0
"""A host tier under random traffic: content, budgets and every invariant.

Rows are few and the link is slow or fast, so content is refused, evicted and restored
all the time, on fixed and elastic pools, with windows and with drafts.  Loads bring
nothing before they are awaited, and until then nothing may touch where they write, or
change what they read.  Tiers that are broken on purpose show that the checks can say
no.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Await, Command, Load, Pool, PoolId, Store
from hybrid_plugin.core.memory.elastic import ElasticBroker
from hybrid_plugin.core.tiers.host_tier import HostSource
from hybrid_plugin.core.tiers.restores import Restore
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.radix import Match
from hybrid_plugin.core.tree.snapshot import Snapshot
from hybrid_plugin.core.tree.tokens import Pages, Tokens
from tests.core.device import ContentError
from tests.core.elastic import ElasticEngine, random_elastic_setup, seeded_traffic
from tests.core.engine import FakeEngine
from tests.core.profiles import SOAK_FACTOR, machine_settings
from tests.core.support import Tiers
from tests.core.test_invariants import EngineMachine
from tests.core.traffic import (
    Traffic,
    random_setup,
    with_drafts,
    with_host,
    with_windows,
)

EPISODES = 24 * SOAK_FACTOR
FIXED_EPISODES = 36 * SOAK_FACTOR
"""On fixed pools, of which stores are seldom refused."""
OPERATIONS = 400
SEEDS = 10
"""That tiers broken on purpose are tried with: the third one catches the last of them.
"""
NAMES = (
    "host_queried_tokens",
    "host_hit_tokens",
    "host_stores",
    "host_stores_refused",
    "host_loads",
    "host_loads_refused",
)
KINDS = ("fixed", "windows", "elastic", "elastic windows", "drafts", "elastic drafts")


def traffic_of(
    kind: str, seed: int, page_size: int, cache: type[HybridCache] = HybridCache
) -> Traffic:
    """Traffic on a random engine of a kind, with a host tier."""
    make = seeded_traffic if "elastic" in kind else Traffic.seeded
    windows, drafts = "windows" in kind, "drafts" in kind
    traffic = make(seed, page_size, cache, windows=windows, drafts=drafts, host=True)
    assert traffic.engine.cache.host is not None
    return traffic


@pytest.mark.parametrize("kind", KINDS)
def test_traffic(kind: str) -> None:
    totals = dict.fromkeys((*NAMES, "evicted", "emptied"), 0)
    for seed in range(FIXED_EPISODES if kind == "fixed" else EPISODES):
        traffic = traffic_of(kind, seed, (1, 4, 16)[seed % 3])
        try:
            traffic.run(OPERATIONS, check_every=10)
        except (AssertionError, ValueError) as error:
            setup = traffic.engine.setup
            raise AssertionError(f"seed {seed}, {setup}: {error}") from error
        host = traffic.engine.cache.host
        assert host is not None
        done = host.stats.as_dict()
        for name in NAMES:
            totals[name] += done[name]
        totals["evicted"] += host.memory.stats.pages_evicted
        totals["emptied"] += host.memory.broker.stats.granules_emptied
    assert all(totals.values()), f"the traffic exercises too little: {totals}"


class _Recorded(HybridCache):
    """Remembers the commands of every step."""

    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        self.__dict__.setdefault("steps", []).append(commands)
        return commands


@pytest.mark.parametrize("kind", ["fixed", "elastic windows"])
def test_ranks_order_the_same(kind: str) -> None:
    """Nothing of it depends on where objects lie in memory."""
    loads = 0
    for seed in range(6):
        ranks = [traffic_of(kind, seed, 4, _Recorded) for _ in range(2)]
        for rank in ranks:
            rank.engine.watch_refusals = False
            for _ in range(300):
                rank.operate()
        first, second = [rank.engine.cache.__dict__["steps"] for rank in ranks]
        assert first == second
        loads += sum(isinstance(c, Load) for step in first for c in step)
    assert loads, "nothing was restored"


class HostMachine(EngineMachine):
    """Requests come, run, end and are preempted, and wait for what the host has."""

    @initialize(seed=st.integers(0, 10_000))
    def start(self, seed: int) -> None:
        rng = random.Random(seed)
        setup = random_setup(rng, self.page_size)
        if rng.random() < 0.4:
            setup = with_windows(rng, setup)
        if rng.random() < 0.3:
            setup = with_drafts(rng, setup)
        self.engine = FakeEngine(with_host(setup))


class ElasticHostMachine(EngineMachine):
    """The same where memory moves on the device, too."""

    @initialize(seed=st.integers(0, 10_000), windows=st.booleans())
    def start(self, seed: int, windows: bool) -> None:
        setup = random_elastic_setup(
            random.Random(seed), self.page_size, windows=windows, drafts=seed % 3 == 0
        )
        self.engine = ElasticEngine(with_host(setup))


TestHost = HostMachine.TestCase
TestHost.settings = machine_settings()
TestElasticHost = ElasticHostMachine.TestCase
TestElasticHost.settings = machine_settings()


# ------------------------------------------------------------- broken on purpose


class _Filtered(HybridCache):
    """Changes the commands of a step."""

    def changed(self, commands: list[Command]) -> list[Command]:
        """What it makes of them."""
        raise NotImplementedError

    def drain_commands(self) -> list[Command]:
        return self.changed(HybridCache.drain_commands(self))


def _is(command: Command, kind: type, pool: PoolId) -> bool:
    return isinstance(command, kind) and getattr(command, "pool", None) == pool


class StoresNoKv(_Filtered):
    """States without KV."""

    def changed(self, commands: list[Command]) -> list[Command]:
        return [c for c in commands if not _is(c, Store, Pool.KV)]


class StoresNoStates(_Filtered):
    """KV without states."""

    def changed(self, commands: list[Command]) -> list[Command]:
        return [c for c in commands if not _is(c, Store, Pool.STATE)]


class LoadsNoKv(_Filtered):
    def changed(self, commands: list[Command]) -> list[Command]:
        return [c for c in commands if not _is(c, Load, Pool.KV)]


class LoadsNoStates(_Filtered):
    def changed(self, commands: list[Command]) -> list[Command]:
        return [c for c in commands if not _is(c, Load, Pool.STATE)]


class LoadsBeforeItStores(_Filtered):
    """Orders a store behind the load that reads what it writes."""

    def changed(self, commands: list[Command]) -> list[Command]:
        rows = {row for c in commands if isinstance(c, Load) for row in c.sources}
        late = [
            c
            for c in commands
            if isinstance(c, Store) and rows.intersection(c.destinations)
        ]
        last = max(
            (i for i, c in enumerate(commands) if isinstance(c, Load)), default=-1
        )
        kept = [c for c in commands[: last + 1] if c not in late]
        behind = [c for c in commands[last + 1 :] if c not in late]
        return kept + late + behind


class StoresLate(_Filtered):
    """Stores with the next step's commands, when the device's ids are others'."""

    def changed(self, commands: list[Command]) -> list[Command]:
        late = self.__dict__.setdefault("late", [])
        kept = [c for c in commands if not isinstance(c, Store)]
        self.__dict__["late"] = [c for c in commands if isinstance(c, Store)]
        return late + kept


class NeverAwaits(_Filtered):
    """Lets look-ups find what is still being loaded."""

    def changed(self, commands: list[Command]) -> list[Command]:
        return [c for c in commands if not isinstance(c, Await)]


class StoresBeforeThePass(HybridCache):
    """Stores states that the planned pass has yet to write."""

    def cross(self, seq_id: str, end: int) -> None:
        HybridCache.cross(self, seq_id, end)
        self._insertion.after_commands()


class MatchesTooEarly(HybridCache):
    """Puts what is to be loaded into the tree at once."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        lower, begin = self.lower_tiers, self.lower_tiers.restore
        self.early: list[tuple[Restore, list[Command]]] = []

        def broken(*args: Any, **options: Any) -> Any:
            restore: Any = begin(*args, **options)
            restores = lower._restores
            if restore is not None and not restore.is_over and restores is not None:
                if restore not in restores.running:  # joined
                    return restore
                queued = len(self._commands)
                restores.end_all()
                restore.is_over = False
                self.early.append((restore, self._commands[queued:]))
                del self._commands[queued:]
            return restore

        lower.restore = broken  # type: ignore[method-assign]

    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        early, self.early = self.early, []
        for restore, awaits in early:
            restore.is_over = True
            self._commands += awaits
        return commands


class FreesWhileLoading(HybridCache):
    """Gives back the pages of a restore before it is over."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        begin, size = self.lower_tiers.restore, self.page_size

        def broken(*args: Any, **options: Any) -> Any:
            restore: Any = begin(*args, **options)
            if restore is not None and not restore.is_over:
                shared = 0 if restore.base is None else restore.base.end // size
                own = restore.pages[shared:]
                self.pages.release(own)
                restore.pages = restore.pages[:shared] + array("i", bytes(4 * len(own)))
            return restore

        self.lower_tiers.restore = broken  # type: ignore[method-assign]


class LetsGoAtOnce(HybridCache):
    """Lets the host reuse rows that are being loaded."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        if self.host is None:
            return
        host, hold = self.host, self.host.hold

        def broken(*args: Any) -> HostSource:
            source = hold(*args)
            host.let_go(source)
            return source

        self.host.hold = broken  # type: ignore[method-assign]
        self._let_go = host.let_go
        end = self.lower_tiers.end_restores
        self.lower_tiers.end_restores = (  # type: ignore[method-assign]
            lambda: bool(_without_letting_go(self, end))
        )

    def pass_time(self, now: float) -> None:
        _without_letting_go(self, lambda: HybridCache.pass_time(self, now))


def _without_letting_go(cache: Any, call: Any) -> Any:
    host = cache.host
    host.let_go = lambda source: None
    try:
        return call()
    finally:
        host.let_go = cache._let_go


class TwoBudgets(HybridCache):
    """Has each host pool use all blocks, whatever the others have."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        if self.host is not None:
            broker = self.host._broker
            broker.budget *= len(broker._members)


class DropsNamespaces(HybridCache):
    """Stores under no namespace."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        if self.host is None:
            return
        store = self.host.store

        def broken(
            namespace: Hashable,
            tokens: Tokens,
            pages: Pages,
            snapshot: Snapshot,
            **options: Any,
        ) -> bool:
            return store(None, tokens, pages, snapshot, **options)

        self.host.store = broken  # type: ignore[method-assign]


class LooksUpEverywhere(HybridCache):
    """Restores from no namespace what was asked of one."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        if self.host is None:
            return
        match = self.host.match

        def broken(namespace: Hashable, tokens: Tokens, limit: int) -> Match:
            return match(None, tokens, limit)

        self.host.match = broken  # type: ignore[method-assign]


class KeepsPartOfABundle(HybridCache):
    """Leaves KV on the host where there was no room for the state."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        if self.host is not None:
            self.host.tree.remove = lambda leaf: leaf.pages  # type: ignore[method-assign]


class ForgetsToFlush(HybridCache):
    """A flush leaves what the host has."""

    def flush(self) -> bool:
        lower = self.lower_tiers
        host, lower.host = lower.host, None
        flushed = HybridCache.flush(self)
        lower.host = host
        return flushed


class RestoresWithoutALock(HybridCache):
    """Does not keep the KV in the tree that a restore continues."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        restores = self.lower_tiers._restores
        if restores is None:
            return
        lock, tree = restores._lock, self.tree

        def broken(node: Node | None, length: int) -> Node | None:
            base = lock(node, length)
            if base is not None:
                tree.unlock(base)
            return base

        restores._lock = broken  # type: ignore[method-assign]


class PairsTooEarly(HybridCache):
    """Lets snapshots find window pages that are being loaded."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        restores = self.lower_tiers._restores
        if restores is None:
            return
        begin = restores._begin

        def broken(*args: Any) -> Restore | None:
            restore = begin(*args)
            if restore is None:
                return None
            for index, own in enumerate(restore.windows):
                if len(own):
                    path = restore.pages[len(restore.pages) - len(own) :]
                    self.memory.pairs[index].settle(path, own)
            return restore

        restores._begin = broken  # type: ignore[method-assign]


class SkipsWindows(_Filtered):
    """Stores no pages of windows."""

    def changed(self, commands: list[Command]) -> list[Command]:
        return [
            c
            for c in commands
            if not (isinstance(c, Store) and c.pool.startswith("window"))
        ]


class _Generous(ElasticBroker):
    """Has room for everything."""

    def offer(self, wanted: Mapping[PoolId, int], worth: float) -> bool:
        return True


class StoresWithoutRoom(HybridCache):
    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        if self.host is not None:
            self.host._broker.__class__ = _Generous


class LoadsOneRowOff(_Filtered):
    """Loads a state of another snapshot."""

    def changed(self, commands: list[Command]) -> list[Command]:
        return [
            replace(c, sources=_shifted(c.sources)) if isinstance(c, Load) else c
            for c in commands
        ]


def _shifted(rows: Sequence[int]) -> tuple[int, ...]:
    return tuple(rows[1:]) + tuple(rows[:1]) if len(rows) > 1 else tuple(rows)


BROKEN = [
    StoresNoKv,
    StoresNoStates,
    LoadsNoKv,
    LoadsNoStates,
    LoadsBeforeItStores,
    StoresLate,
    NeverAwaits,
    StoresBeforeThePass,
    MatchesTooEarly,
    FreesWhileLoading,
    LetsGoAtOnce,
    TwoBudgets,
    DropsNamespaces,
    LooksUpEverywhere,
    KeepsPartOfABundle,
    ForgetsToFlush,
    RestoresWithoutALock,
    StoresWithoutRoom,
    LoadsOneRowOff,
]
BROKEN_WINDOWS = [PairsTooEarly, SkipsWindows]
EXPECTED = (AssertionError, ValueError, LookupError)


def first_failure(cache: type[HybridCache], kinds: Iterable[str]) -> Exception:
    """What the first failing traffic fails with; fails if none does."""
    for seed in range(SEEDS):
        for page_size in (1, 4):
            for kind in kinds:
                traffic = traffic_of(kind, seed, page_size, cache)
                try:
                    traffic.run(300, check_every=5)
                except EXPECTED as failure:
                    return failure
    pytest.fail(f"{cache.__name__} went through")


@pytest.mark.parametrize("cache", BROKEN, ids=lambda cache: cache.__name__)
def test_a_broken_one_is_caught(cache: type[HybridCache]) -> None:
    assert isinstance(first_failure(cache, ("fixed", "elastic")), EXPECTED)


@pytest.mark.parametrize("cache", BROKEN_WINDOWS, ids=lambda cache: cache.__name__)
def test_broken_windows_are_caught(cache: type[HybridCache]) -> None:
    assert isinstance(first_failure(cache, ("windows", "elastic windows")), EXPECTED)


@pytest.mark.parametrize(
    ("cache", "found"),
    [
        (StoresNoKv, "was never stored"),
        (StoresNoStates, "was never stored"),
        (NeverAwaits, "while it is being loaded"),
        (MatchesTooEarly, "while it is being loaded"),
        (FreesWhileLoading, "while it is being loaded"),
        (LetsGoAtOnce, "while it is being loaded|while it is loaded"),
        (LoadsBeforeItStores, "was never stored"),
        (DropsNamespaces, "holds"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_device_alone_finds_it(cache: type[HybridCache], found: str) -> None:
    """Without any look at the trees: passes and copies touch what they must not."""
    for seed in range(40):
        for kind, page_size in (("fixed", 1), ("fixed", 4), ("elastic", 1)):
            traffic = traffic_of(kind, seed, page_size, cache)
            traffic.engine.watch_refusals = traffic.engine.counts_ends = False
            try:
                for _ in range(300):
                    traffic.operate()
            except ContentError as error:
                if re.search(found, str(error)):
                    return
            except EXPECTED:
                continue  # its own guards were first
    pytest.fail("it went through")


@pytest.mark.parametrize("kind", ["fixed", "windows"])
def test_the_sound_one_goes_through(kind: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="went through"):
        first_failure(HybridCache, [kind])
