# SPDX-License-Identifier: Apache-2.0
"""Broken caches must fail the checks: proof that the fake device can say no."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from hybrid_plugin.core.cache import Admission, HybridCache, LiveSequence, LookUp
from hybrid_plugin.core.commands import (
    Command,
    Copy,
    Pool,
    PoolId,
    SaveInPass,
    Zero,
)
from hybrid_plugin.core.memory.page_pairs import PagePairs
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.promise import Promise
from hybrid_plugin.core.tree.radix import Evicted, Match
from hybrid_plugin.core.tree.tokens import Pages
from hybrid_plugin.core.verification import Ending
from tests.core.device import ContentError
from tests.core.support import Tiers
from tests.core.traffic import Traffic

SEEDS = 25
"""That broken caches are tried with: the eighteenth catches the last of them."""


class SkipsStateCopies(HybridCache):
    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        return [c for c in commands if not _is_copy(c, Pool.STATE)]


class SkipsTailCopies(HybridCache):
    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        return [c for c in commands if not _is_copy(c, Pool.KV)]


class SkipsZeroing(HybridCache):
    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        return [c for c in commands if not isinstance(c, Zero)]


class ReversesCommands(HybridCache):
    def drain_commands(self) -> list[Command]:
        return HybridCache.drain_commands(self)[::-1]


class SnapshotsOneStepLate(HybridCache):
    """Its snapshot copies miss the step they must directly follow."""

    def advance(self, seq_id: str, computed: int) -> None:
        queued = len(self._commands)
        HybridCache.advance(self, seq_id, computed)
        late = self.__dict__.setdefault("late", [])
        late += self._commands[queued:]
        del self._commands[queued:]

    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        self._commands = self.__dict__.pop("late", [])
        return commands


class ForgetsInteriorSnapshots(HybridCache):
    """The tree has what no forward pass was asked to write."""

    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        return [c for c in commands if not isinstance(c, SaveInPass)]


class KeepsTheNextBoundary(HybridCache):
    """Has a pass keep the state of one chunk later."""

    def drain_commands(self) -> list[Command]:
        return [
            replace(c, boundary=c.boundary + 1) if isinstance(c, SaveInPass) else c
            for c in HybridCache.drain_commands(self)
        ]


class OrdersInteriorSnapshotsAtOnce(HybridCache):
    """Has a pass write where a snapshot was before it was evicted for another one."""

    def cross(self, seq_id: str, end: int) -> None:
        HybridCache.cross(self, seq_id, end)
        for order in self._insertion.saves_in_pass():
            self.enqueue(order)


class KeepsWhatDecodeWrote(HybridCache):
    """Offers answers, though it is to keep canonical content only."""

    def finish(
        self,
        seq_id: str,
        tokens: Sequence[int],
        computed: int | None = None,
        *,
        preempted: bool = False,
    ) -> None:
        insertion = self._insertion
        insertion._policy = replace(self.policy, canonical=False)
        HybridCache.finish(self, seq_id, tokens, computed, preempted=preempted)
        insertion._policy = self.policy


class EndsChunksAnywhere(HybridCache):
    """Goes on in the middle of a chunk."""

    def chunk_end(
        self, positions: tuple[int, ...], start: int, end: int, length: int
    ) -> int:
        return end


class LeavesOneToken(HybridCache):
    """Goes on with a pass of one token, which kernels take for a decode step."""

    def chunk_end(
        self, positions: tuple[int, ...], start: int, end: int, length: int
    ) -> int:
        if not self.policy.canonical:
            return HybridCache.chunk_end(self, positions, start, end, length)
        step = self.policy.step
        return end if end >= length else max(end // step * step, start)


class DonatesUnknownTokens(HybridCache):
    """Takes the state of a step in flight for that of the known tokens."""

    def finish(
        self,
        seq_id: str,
        tokens: Sequence[int],
        computed: int | None = None,
        *,
        preempted: bool = False,
    ) -> None:
        known = len(tokens) if computed is None else min(computed, len(tokens))
        HybridCache.finish(self, seq_id, tokens, known, preempted=preempted)


class DonatesShort(HybridCache):
    def finish(
        self,
        seq_id: str,
        tokens: Sequence[int],
        computed: int | None = None,
        *,
        preempted: bool = False,
    ) -> None:
        assert computed is not None
        HybridCache.finish(self, seq_id, tokens, computed - 1, preempted=preempted)


class FreesPagesInUse(HybridCache):
    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        take_back = self.memory.take_back

        def broken(evicted: Evicted) -> None:
            for page in evicted.pages:
                while self.pages.references(page)[0]:
                    self.pages.release([page])
            take_back(evicted)

        self.memory.take_back = broken  # type: ignore[method-assign]


class IgnoresNamespaces(HybridCache):
    def look_up(
        self,
        tokens: Sequence[int],
        namespace: Hashable = None,
        limit: int | None = None,
        *,
        snapshot_at: Sequence[int] = (),
        pause_at: Sequence[int] = (),
        ttl: float | None = None,
    ) -> LookUp:
        return HybridCache.look_up(self, tokens, None, limit, ttl=ttl)


class KeepsPrivateSequences(HybridCache):
    def admit(self, seq_id: str, found: LookUp, **options: Any) -> Admission | None:
        return HybridCache.admit(self, seq_id, found, **options | {"cacheable": True})


class RestoresTooMuch(HybridCache):
    """Offers one token more than its snapshot covers."""

    def admit(self, seq_id: str, found: LookUp, **options: Any) -> Admission | None:
        admission = HybridCache.admit(self, seq_id, found, **options)
        if admission is None or not 0 < admission.hit < found.length - 1:
            return admission
        if admission.hit + 1 >= options["num_tokens"]:
            return admission
        return Admission(admission.pages, admission.slot, admission.hit + 1)


class KeepsNoLock(HybridCache):
    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        settle = self._admissions._settle

        def broken(*args: Any, **options: Any) -> None:
            kept = settle(*args, **options)
            if kept is not None:
                self.tree.unlock(kept)

        self._admissions._settle = broken  # type: ignore[method-assign]


class LocksPagesOfOthers(HybridCache):
    """Promises pages as reclaimable that it has locked."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        extend = self._insertion._extend_lock

        def broken(sequence: LiveSequence, node: Node, gained: int) -> None:
            extend(sequence, node, node.end - sequence.locked_tokens)

        self._insertion._extend_lock = broken  # type: ignore[method-assign]


class EvictsBeforeRefusing(HybridCache):
    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        fits = self.memory.has_room

        def broken(match: Match, *args: Any, **options: Any) -> bool:
            has_room = fits(match, *args, **options)
            if not has_room:
                self.memory.evict_snapshot()
            return has_room

        self.memory.has_room = broken  # type: ignore[method-assign]


class RefusesWhatFits(HybridCache):
    """Lets the cache lower how many sequences can run."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)

        def broken(match: Match, wanted: Mapping[PoolId, int], **_: Any) -> bool:
            return wanted[Pool.KV] <= self.pages.free and self.slots.free > 0

        self.memory.has_room = broken  # type: ignore[method-assign]


class LosesSlots(HybridCache):
    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        donate = self._insertion._donate

        def broken(
            sequence: LiveSequence, tokens: Sequence[int], ending: Ending
        ) -> tuple[Node | None, int | None]:
            node, kept = donate(sequence, tokens, ending)
            return node, sequence.slot if ending.column is None else kept

        self._insertion._donate = broken  # type: ignore[method-assign]


class SkipsWindowCopies(HybridCache):
    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        return [c for c in commands if not c.pool.startswith("window")]


class TrimsWindowsTooEarly(HybridCache):
    """Frees what the next token still looks at."""

    def trim(self, seq_id: str, computed: int) -> None:
        HybridCache.trim(self, seq_id, computed + 1)


class NeverTrims(HybridCache):
    """Keeps pages that no window reaches any more."""

    def trim(self, seq_id: str, computed: int) -> None:
        pass


class TakesAnyWindowPages(HybridCache):
    """Its snapshots take a sequence's window pages, whose KV pages they have or not."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        for pairs in self.memory.pairs:
            pairs.settle = lambda pages, windows: windows  # type: ignore[method-assign]


class TakesWindowPagesOfOthers(HybridCache):
    """Its snapshots take window pages that were freed, and given to others since."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        for pairs in self.memory.pairs:
            pairs.begin = partial(_begin_without_a_mark, pairs)  # type: ignore[method-assign]


def _begin_without_a_mark(pairs: PagePairs, pages: Pages, windows: Pages) -> None:
    for page, window in zip(pages, windows, strict=True):
        pairs._of[page] = pairs._marks[window]


class NeverEndsATtl(HybridCache):
    """Content whose TTL is over stays as dear as it was."""

    def pass_time(self, now: float) -> None:
        self.promises.pace.pass_to(now)


class RemembersWhatIsGone(HybridCache):
    """Its promises hold for snapshots that were evicted."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        self.promises.evicted = lambda node, snapshot: None  # type: ignore[method-assign]


class KeepsTtlsOfRequests(HybridCache):
    """A request's TTL does not begin when the request ends."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        self.promises.begin_ttl = lambda promise, end: None  # type: ignore[method-assign]


class PromisesAfterUse(HybridCache):
    """What was promised once stays promised for ever."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        take_back = self.promises._take_back

        def broken(promise: Promise, node: Node) -> None:
            take_back(promise, node)
            if node.snapshot is not None:
                node.snapshot.promise = promise

        self.promises._take_back = broken  # type: ignore[method-assign]


class RanksTheLapsedAsPromised(HybridCache):
    """What was promised loses its class, but not its place in the order."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        take_back = self.promises._take_back
        rank = self.tree.rank

        def broken(promise: Promise, node: Node) -> None:
            self.tree.rank = lambda node: None  # type: ignore[method-assign]
            take_back(promise, node)
            self.tree.rank = rank  # type: ignore[method-assign]

        self.promises._take_back = broken  # type: ignore[method-assign]


WINDOWS = [
    SkipsWindowCopies,
    TrimsWindowsTooEarly,
    NeverTrims,
    TakesAnyWindowPages,
    TakesWindowPagesOfOthers,
]
CONTENT = [
    SkipsStateCopies,
    SkipsTailCopies,
    SkipsZeroing,
    ReversesCommands,
    SnapshotsOneStepLate,
    ForgetsInteriorSnapshots,
    KeepsTheNextBoundary,
    OrdersInteriorSnapshotsAtOnce,
    DonatesUnknownTokens,
    DonatesShort,
    IgnoresNamespaces,
    KeepsPrivateSequences,
    RestoresTooMuch,
]
CANONICAL = [KeepsWhatDecodeWrote, EndsChunksAnywhere, LeavesOneToken]
BOOKKEEPING = [
    KeepsNoLock,
    LocksPagesOfOthers,
    EvictsBeforeRefusing,
    RefusesWhatFits,
    LosesSlots,
    NeverEndsATtl,
    RemembersWhatIsGone,
    KeepsTtlsOfRequests,
    PromisesAfterUse,
    RanksTheLapsedAsPromised,
]


def _is_copy(command: Command, pool: PoolId) -> bool:
    return isinstance(command, Copy) and command.pool == pool


def first_failure(
    cache: type[HybridCache],
    check_every: int,
    *,
    windows: bool = False,
    guards: bool = True,
) -> Exception:
    """What the first failing traffic fails with.

    Args:
        cache: that is broken.
        check_every: operations between two audits; 10,000 for forward passes alone.
        windows: whether the model has window groups.
        guards: whether the cache's own guards count, which raise ValueError.
    """
    for seed in range(SEEDS):
        for page_size in (1, 4, 16):
            traffic = Traffic.seeded(seed, page_size, cache, windows=windows)
            traffic.engine.counts_ends = check_every < 10_000
            try:
                for count in range(1, 301):
                    traffic.operate()
                    if count % check_every == 0:
                        traffic.engine.check()
            except (AssertionError, ValueError) as failure:
                if guards or isinstance(failure, AssertionError):
                    return failure
    pytest.fail(f"{cache.__name__} went through")


@pytest.mark.parametrize("cache", CONTENT, ids=lambda cache: cache.__name__)
def test_forward_passes_alone_find_wrong_content(cache: type[HybridCache]) -> None:
    failure = first_failure(cache, check_every=10_000)
    assert isinstance(failure, ContentError), repr(failure)


def test_forward_passes_find_pages_that_were_freed_in_use() -> None:
    # Where the sequence ends before its page is written, the pool's guard is first.
    failure = first_failure(FreesPagesInUse, check_every=10_000, guards=False)
    assert isinstance(failure, ContentError), repr(failure)


@pytest.mark.parametrize("cache", BOOKKEEPING, ids=lambda cache: cache.__name__)
def test_audits_find_wrong_counts(cache: type[HybridCache]) -> None:
    assert not isinstance(first_failure(cache, check_every=1), ContentError)


@pytest.mark.parametrize("cache", CANONICAL, ids=lambda cache: cache.__name__)
def test_content_that_is_not_canonical_is_found(cache: type[HybridCache]) -> None:
    with pytest.raises(ContentError, match="bits depend on how it was computed"):
        raise first_failure(cache, check_every=1)


@pytest.mark.parametrize("cache", WINDOWS, ids=lambda cache: cache.__name__)
def test_wrong_windows_are_found(cache: type[HybridCache]) -> None:
    first_failure(cache, check_every=1, windows=True)


@pytest.mark.parametrize("windows", [False, True])
def test_the_sound_cache_goes_through(windows: bool) -> None:
    with pytest.raises(pytest.fail.Exception, match="went through"):
        first_failure(HybridCache, check_every=10_000, windows=windows)
