# SPDX-License-Identifier: Apache-2.0
"""An outer tier behind the host under random traffic.

What is written and fetched takes any time, comes in any order and fails; rows of what
is out are nobody else's, nothing of it is found before the report, and nothing leaks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import (
    Command,
    Discard,
    Fetch,
    PageRows,
    PoolId,
    Write,
)
from hybrid_plugin.core.tiers.outer import OuterTiers
from hybrid_plugin.core.tiers.outer_tier import Storing
from hybrid_plugin.core.tiers.writes import FLUSHED
from hybrid_plugin.core.tree.tokens import Pages, Tokens
from tests.core.elastic import ElasticEngine, random_elastic_setup, seeded_traffic
from tests.core.engine import FakeEngine
from tests.core.outer import FakeTier, key_of
from tests.core.profiles import SOAK_FACTOR, machine_settings
from tests.core.support import Tiers
from tests.core.test_invariants import EngineMachine
from tests.core.traffic import (
    Traffic,
    random_setup,
    with_drafts,
    with_host,
    with_outer,
    with_windows,
)

EPISODES = 15 * SOAK_FACTOR
OPERATIONS = 400
KINDS = ("fixed", "windows", "elastic", "elastic windows", "drafts", "elastic drafts")
EXERCISED = (
    "queried_tokens",
    "hit_tokens",
    "stores",
    "stores_refused",
    "store_failures",
    "loads",
    "load_failures",
)


def traffic_of(
    kind: str, seed: int, page_size: int, cache: type[HybridCache] = HybridCache
) -> Traffic:
    """Traffic on a random engine of a kind, with a tier behind the host."""
    make = seeded_traffic if "elastic" in kind else Traffic.seeded
    windows, drafts = "windows" in kind, "drafts" in kind
    return make(
        seed, page_size, cache, windows=windows, drafts=drafts, host=True, outer=True
    )


@pytest.mark.parametrize("kind", KINDS)
def test_traffic(kind: str) -> None:
    totals = dict.fromkeys(EXERCISED, 0)
    for seed in range(EPISODES):
        traffic = traffic_of(kind, seed, (1, 4, 16)[seed % 3])
        try:
            traffic.run(OPERATIONS, check_every=10)
        except (AssertionError, ValueError) as error:
            setup = traffic.engine.setup
            raise AssertionError(f"seed {seed}, {setup}: {error}") from error
        (tier,) = traffic.engine.cache.lower_tiers.outer
        done = tier.stats.as_dict("disk")
        for name in EXERCISED:
            totals[name] += done[f"disk_{name}"]
        totals["saved"] = totals.get("saved", 0) + traffic.engine.saved
    assert all(totals.values()), f"the traffic exercises too little: {totals}"


class _Recorded(HybridCache):
    """Remembers the commands of every step."""

    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        self.__dict__.setdefault("steps", []).append(commands)
        return commands


@pytest.mark.parametrize("kind", ["fixed", "elastic windows"])
def test_ranks_order_the_same(kind: str) -> None:
    """Where each rank has a cache, and all of them hear the same reports."""
    seen: Counter[type] = Counter()
    for seed in range(4):
        ranks = [traffic_of(kind, seed, 4, _Recorded) for _ in range(2)]
        for rank in ranks:
            rank.engine.watch_refusals = False
            for _ in range(400):
                rank.operate()
        first, second = [rank.engine.cache.__dict__["steps"] for rank in ranks]
        assert first == second
        seen.update(type(c) for step in first for c in step)
    assert seen[Write] and seen[Fetch] and seen[Discard], "too little happened"


class OuterMachine(EngineMachine):
    """Requests come, run, end and are preempted; what is evicted comes from a disk."""

    @initialize(seed=st.integers(0, 10_000))
    def start(self, seed: int) -> None:
        rng = random.Random(seed)
        setup = random_setup(rng, self.page_size)
        if rng.random() < 0.4:
            setup = with_windows(rng, setup)
        if rng.random() < 0.3:
            setup = with_drafts(rng, setup)
        self.engine = FakeEngine(with_outer(with_host(setup)))

    @rule()
    def evict(self) -> None:
        self.engine.evict_all()


class ElasticOuterMachine(OuterMachine):
    """The same where memory moves on the device, too."""

    @initialize(seed=st.integers(0, 10_000), windows=st.booleans())
    def start(self, seed: int, windows: bool) -> None:  # type: ignore[override]
        setup = random_elastic_setup(
            random.Random(seed), self.page_size, windows=windows, drafts=seed % 3 == 0
        )
        self.engine = ElasticEngine(with_outer(with_host(setup)))


TestOuter = OuterMachine.TestCase
TestOuter.settings = machine_settings(100)
TestElasticOuter = ElasticOuterMachine.TestCase
TestElasticOuter.settings = machine_settings(100)


# ------------------------------------------------------------- broken on purpose


class _Broken(HybridCache):
    """Changes the tiers behind the host, where there are any."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        outer, host = self.outer(), self.host
        assert outer._writes is not None and host is not None
        self.change(outer._fetches, outer._writes, host)

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        """What is wrong."""
        raise NotImplementedError

    def outer(self) -> OuterTiers:
        """The tiers behind the host."""
        outer = self.lower_tiers._outer
        assert outer is not None
        return outer


class FindsBeforeTheReport(_Broken):
    """Has the host find what is still fetched."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        begin, done = fetches._begin, self.lower_tiers.done
        early: set[int] = set()

        def broken(*args: Any, **how: Any) -> Any:
            fetch = begin(*args, **how)
            if fetch is not None:
                fetches.succeeded(fetch.ticket, 0.0, None)
                early.add(fetch.ticket)
            return fetch

        def report(ticket: int, ok: bool, **details: Any) -> None:
            if ticket not in early:
                done(ticket, ok, **details)

        fetches._begin = broken
        self.lower_tiers.done = report  # type: ignore[method-assign]


class FreesWhatIsWritten(_Broken):
    """Lets the host reuse rows that are being written."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        hold = host.hold_bundle

        def broken(*args: Any) -> Any:
            source = hold(*args)
            host.let_go(source)
            return source

        def end(ticket: int) -> Any:
            writes._is_settled = False
            return writes.running.pop(ticket)

        host.hold_bundle = broken
        writes._end = end
        writes.flush = lambda: writes._noted.clear()


class FreesWhatIsFetched(_Broken):
    """Gives back rows that are being filled."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        begin, drop = fetches._begin, host.drop

        def broken(*args: Any, **how: Any) -> Any:
            fetch = begin(*args, **how)
            if fetch is not None:
                drop(fetch.rows)
                fetch.is_flushed = True
                if fetch.base is not None:
                    host.tree.unlock(fetch.base)
                    fetch.base = None
            return fetch

        fetches._begin = broken
        host.drop = lambda rows: None


class IgnoresFailures(_Broken):
    """Takes what failed for done."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        done = self.lower_tiers.done

        def broken(ticket: int, ok: bool, **details: Any) -> None:
            done(ticket, True)

        self.lower_tiers.done = broken  # type: ignore[method-assign]


class FetchesTheLastOnly(_Broken):
    """Brings a state without the KV before its bundle."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        rows = fetches._rows_of
        fetches._rows_of = lambda fetch: rows(fetch)[-1:]


class _Filtered(_Broken):
    """Changes the commands of a step."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        send = host._enqueue
        host.send_to(lambda command: send(self.changed(command)))

    def changed(self, command: Command) -> Command:
        """What it makes of one."""
        raise NotImplementedError


class WritesNoStates(_Filtered):
    """KV without states."""

    def changed(self, command: Command) -> Command:
        if not isinstance(command, Write):
            return command
        return replace(command, rows=replace(command.rows, state=None))


class FetchesNoStates(_Filtered):
    """Leaves the row of a state as it was."""

    def changed(self, command: Command) -> Command:
        if not isinstance(command, Fetch):
            return command
        rows = tuple([replace(bundle, state=None) for bundle in command.rows])
        return replace(command, rows=rows)


class DropsNamespaces(_Broken):
    """Writes and looks up under no namespace."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        (tier,) = self.lower_tiers.outer
        find, begin = tier.find, tier.begin_store
        tier.find = lambda namespace, *rest: find(None, *rest)  # type: ignore[method-assign]
        tier.begin_store = lambda namespace, *rest: begin(None, *rest)  # type: ignore[method-assign]


class EvictsParents(_Broken):
    """Lets the bundle go before the one that is written."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        (tier,) = self.lower_tiers.outer
        begin = tier.begin_store

        def broken(
            namespace: Hashable, tokens: Tokens, start: int, size: int
        ) -> Storing | None:
            found = begin(namespace, tokens, start, size)
            if found is None or not start:
                return found
            return replace(
                found, discard=(*found.discard, key_of(namespace, tokens[:start]))
            )

        tier.begin_store = broken  # type: ignore[method-assign]


class BeginsBehindWhatIsOut(_Broken):
    """Writes a bundle behind one whose outcome nobody knows."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        (tier,) = self.lower_tiers.outer
        assert isinstance(tier, FakeTier)
        find, begun = tier.find, tier.begun

        def broken(namespace: Hashable, tokens: Tokens, limit: int) -> Any:
            ahead = {**begun, **tier.entries}
            tier.entries, kept = ahead, tier.entries
            found = find(namespace, tokens, limit)
            tier.entries = kept
            return found

        begin = writes.begin

        def begin_all() -> None:
            out, writes.running, writes._is_settled = writes.running, {}, False
            begin()
            writes.running |= out

        tier.find = broken  # type: ignore[method-assign]
        writes.begin = begin_all


class FreesAtAFlush(_Broken):
    """Gives back rows that are being filled when everything is flushed."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        flush, drop = fetches.flush, host.drop
        dropped: list[Any] = []

        def broken() -> None:
            flush()
            for fetch in fetches.running.values():
                if not any(fetch.rows is one for one in dropped):
                    dropped.append(fetch.rows)
                    drop(fetch.rows)

        fetches.flush = broken
        host.drop = lambda rows: None if any(rows is o for o in dropped) else drop(rows)


class FetchesThroughAFlush(_Broken):
    """Has what is on its way found behind a flush."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        def broken() -> None:
            for fetch in fetches.running.values():
                if fetch.base is not None:
                    host.tree.unlock(fetch.base)
                fetch.base = None

        fetches.flush = broken


class WritesThroughAFlush(_Broken):
    """Keeps what is being written while everything is flushed."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        (tier,) = self.lower_tiers.outer
        failed = tier.store_failed

        def broken(key: str, reason: str) -> Sequence[str]:
            if reason != FLUSHED:
                return failed(key, reason)
            tier.stored(key, None)
            return ()

        tier.store_failed = broken  # type: ignore[method-assign]


class ForgetsToFlush(_Broken):
    """A flush leaves what the tier has."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        self.lower_tiers.outer[0].clear = lambda: ()  # type: ignore[method-assign]


class NeverDiscards(_Broken):
    """Leaves files that nobody finds."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        self.outer()._discard = lambda keys: None  # type: ignore[method-assign]


class FetchesWithoutALock(_Broken):
    """Does not keep the KV on the host that a fetch continues."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        begin, tree = fetches._begin, host.tree

        def broken(*args: Any, **how: Any) -> Any:
            fetch = begin(*args, **how)
            if fetch is not None and fetch.base is not None:
                tree.unlock(fetch.base)
                fetch.base = None
            return fetch

        fetches._begin = broken


class LetsGoOfWhatItFetched(_Broken):
    """Lets others take the place of what a sequence has yet to come to."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        fetches._keep = lambda fetch: None


class KeepsWhatItFetched(_Broken):
    """Has what was fetched in use for ever."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        fetches._let_go = lambda fetch: None


class FetchesWithoutRoom(_Broken):
    """Takes rows that there are not."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        obtain = host.obtain

        def broken(*args: Any, **how: Any) -> Any:
            make_room, host._make_room = host._make_room, lambda *args: True
            try:
                return obtain(*args, **how)
            finally:
                host._make_room = make_room

        host.obtain = broken


class TwoBudgets(_Broken):
    """Has each host pool use all blocks, whatever the others have."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        host._broker.budget *= len(host._broker._members)


class SkipsTheStartOfAPage(_Broken):
    """Takes a page of the host for one that ends with a bundle inside it."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        fetches._whole = lambda tokens: tokens


class CutsWindows(_Broken):
    """Brings no more of a window's first page than one position needs."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        whole = host.window_rows

        def broken(end: int, windows: Sequence[Pages]) -> dict[PoolId, PageRows]:
            return {
                pool: replace(
                    part, start=max(part.start, group.window.first_needed(end))
                )
                for group, (pool, part) in zip(
                    host.memory.windows, whole(end, windows).items(), strict=True
                )
            }

        host.window_rows = broken


class SavesWithoutHolding(_Broken):
    """Lets the host evict what somebody wants to have written."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        saves: Any = self.outer()._saves
        hold = saves._hold

        def broken(saving: Any, store: Any) -> None:
            hold(saving, store)
            if saving._source is not None:
                host.let_go(saving._source)
                saving._source = None

        saves._hold = broken


class SavesWithoutLooking(_Broken):
    """Says that it is there whatever became of it."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        saves: Any = self.outer()._saves
        end = saves._end
        saves._end = lambda saving, reason: end(saving, "")


class SavesThroughAFlush(_Broken):
    """Holds rows of the host that everything was forgotten of."""

    def change(self, fetches: Any, writes: Any, host: Any) -> None:
        saves: Any = self.outer()._saves
        saves.flush = lambda: None


BROKEN = [
    FindsBeforeTheReport,
    FreesWhatIsWritten,
    FreesWhatIsFetched,
    IgnoresFailures,
    FetchesTheLastOnly,
    WritesNoStates,
    FetchesNoStates,
    DropsNamespaces,
    EvictsParents,
    BeginsBehindWhatIsOut,
    FreesAtAFlush,
    FetchesThroughAFlush,
    WritesThroughAFlush,
    ForgetsToFlush,
    NeverDiscards,
    FetchesWithoutALock,
    LetsGoOfWhatItFetched,
    KeepsWhatItFetched,
    FetchesWithoutRoom,
    TwoBudgets,
    SkipsTheStartOfAPage,
    SavesWithoutHolding,
    SavesWithoutLooking,
    SavesThroughAFlush,
]
BROKEN_WINDOWS = [CutsWindows]
EXPECTED = (AssertionError, ValueError, LookupError)


def first_failure(cache: type[HybridCache], kinds: Iterable[str]) -> Exception:
    """What the first failing traffic fails with; fails if none does."""
    for seed in range(25):
        for page_size in (1, 4):
            for kind in kinds:
                traffic = traffic_of(kind, seed, page_size, cache)
                try:
                    traffic.run(400, check_every=5)
                except EXPECTED as failure:
                    return failure
    pytest.fail(f"{cache.__name__} went through")


@pytest.mark.parametrize("cache", BROKEN, ids=lambda cache: cache.__name__)
def test_a_broken_one_is_caught(cache: type[HybridCache]) -> None:
    assert isinstance(first_failure(cache, ("fixed", "elastic")), EXPECTED)


@pytest.mark.parametrize("cache", BROKEN_WINDOWS, ids=lambda cache: cache.__name__)
def test_broken_windows_are_caught(cache: type[HybridCache]) -> None:
    assert isinstance(first_failure(cache, ("windows", "elastic windows")), EXPECTED)
