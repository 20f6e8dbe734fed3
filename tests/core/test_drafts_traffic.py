# SPDX-License-Identifier: Apache-2.0
"""Speculation under random traffic, in draft slots, in a scratch and recorded.

Drafts are right or wrong by chance and come in any number; outputs come at once or a
step later; requests are preempted and aborted with steps in flight.  What is rejected
leaves states of tokens that nobody ever asks for, so a state that is taken from a wrong
column, too early or too late, fails at the first look at it.  Caches and engines that
are broken on purpose show that the checks can say no.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Command, Fold, MoveWindow, Take
from hybrid_plugin.core.sequence import LiveSequence
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.verification import Ending
from tests.core.device import ContentError
from tests.core.elastic import ElasticEngine, random_elastic_setup, seeded_traffic
from tests.core.engine import FakeEngine
from tests.core.profiles import SOAK_FACTOR, machine_settings
from tests.core.requests import Access, Output, Request
from tests.core.support import Tiers
from tests.core.test_invariants import EngineMachine
from tests.core.traffic import Traffic, random_setup, with_drafts, with_windows

EPISODES = 14 * SOAK_FACTOR
OPERATIONS = 500
EXAMPLES = 200
"""Of each machine: of 18 caches that are broken below, the one with draft slots catches
15 by its 142nd; seeded traffic finds all of them."""
NAMES = (
    "hit_tokens",
    "resumed_hit_tokens",
    "drafts_lent",
    "drafts_refused",
    "turn_ends_exact",
    "turn_ends_missed",
)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["fixed", "windows", "elastic"])
def test_traffic(kind: str, page_size: int) -> None:
    make = seeded_traffic if kind == "elastic" else Traffic.seeded
    totals = dict.fromkeys(NAMES, 0)
    for seed in range(EPISODES):
        traffic = make(seed, page_size, windows=kind == "windows", drafts=True)
        try:
            traffic.run(OPERATIONS, check_every=10)
        except (AssertionError, ValueError) as error:
            setup = traffic.engine.setup
            raise AssertionError(f"seed {seed}, {setup}: {error}") from error
        for name in NAMES:
            totals[name] += getattr(traffic.engine.cache.stats, name)
    assert all(totals.values()), f"the traffic exercises too little: {totals}"


class DraftMachine(EngineMachine):
    """Requests verify drafts on pools that are too small."""

    @initialize(seed=st.integers(0, 10_000))
    def start(self, seed: int) -> None:
        rng = random.Random(seed)
        setup = random_setup(rng, self.page_size)
        if rng.random() < 0.3:
            setup = with_windows(rng, setup)
        self.engine = FakeEngine(with_drafts(rng, setup))


class ElasticDraftMachine(EngineMachine):
    """Draft slots share their memory with pages."""

    @initialize(seed=st.integers(0, 10_000))
    def start(self, seed: int) -> None:
        rng = random.Random(seed)
        self.engine = ElasticEngine(
            random_elastic_setup(rng, self.page_size, drafts=True)
        )


def test_an_admission_leaves_pages_whatever_slot_it_takes() -> None:
    """It counts on its snapshot's own slot, so it must not take one in a new granule.

    Nor does it forget the engine's look-ahead.
    """
    state = ElasticDraftMachine()
    state.start(seed=500)
    submit = partial(state.submit, namespace=None, access=Access.NORMAL, limit=None)
    state.submit_and_serve(which=0, kept=0, extra=[], ttl=None)
    submit(which=0, kept=2, extra=[0] * 13, answer=1)
    state.submit_and_serve(which=0, kept=0, extra=[], ttl=None)
    state.flush()
    submit(which=1, kept=15, extra=[], answer=3)
    state.submit_and_serve(which=1, kept=11, extra=[0] * 16, ttl=None)
    state.steps(steps=2)
    state.everything_adds_up()
    assert not state.engine.running


TestDrafts = DraftMachine.TestCase
TestDrafts.settings = machine_settings(EXAMPLES)
TestElasticDrafts = ElasticDraftMachine.TestCase
TestElasticDrafts.settings = machine_settings(EXAMPLES)


# ------------------------------------------------------------ caches that are broken


class TakesTheColumnBefore(HybridCache):
    """Takes the state of one accepted draft less."""

    def _ending(self, seq_id: str, known: int, computed: int | None) -> Ending:
        ending = HybridCache._ending(self, seq_id, known, computed)
        return replace(ending, column=ending.column - 1) if ending.column else ending


class TakesTheColumnBehind(HybridCache):
    """Takes the state of one draft more than was accepted."""

    def _ending(self, seq_id: str, known: int, computed: int | None) -> Ending:
        ending = HybridCache._ending(self, seq_id, known, computed)
        columns = len(self.sequence(seq_id).drafts)
        if ending.column is None or ending.step or ending.column >= columns:
            return ending
        return replace(ending, column=ending.column + 1)


class TakesColumnZero(HybridCache):
    """Takes the state after the known token, with nothing in flight."""

    def _ending(self, seq_id: str, known: int, computed: int | None) -> Ending:
        ending = HybridCache._ending(self, seq_id, known, computed)
        steps = self.sequence(seq_id).steps
        if steps is None or steps.in_flight or ending.step:
            return ending
        return replace(ending, column=0)


class TakesWhatWasOverwritten(HybridCache):
    """Takes column 0 of a step in flight that started beyond a stop."""

    def _ending(self, seq_id: str, known: int, computed: int | None) -> Ending:
        ending = HybridCache._ending(self, seq_id, known, computed)
        noted = self.is_verifying(seq_id)
        return replace(ending, column=0) if noted and ending.column is None else ending


class MovesNoWindow(HybridCache):
    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        return [c for c in commands if not isinstance(c, MoveWindow)]


class MovesTheWindowOfTheKnownToken(HybridCache):
    def drain_commands(self) -> list[Command]:
        return [
            replace(c, offset=0) if isinstance(c, MoveWindow) else c
            for c in HybridCache.drain_commands(self)
        ]


class FreesDraftsAStepEarly(HybridCache):
    """Lends a draft slot to the next one before the step that selects it has run."""

    def verify(
        self,
        seq_id: str,
        start: int | None,
        drafts: int,
        *,
        row: int | None = None,
        known: int | None = None,
    ) -> None:
        HybridCache.verify(self, seq_id, start, drafts, row=row, known=known)
        self.drafts.free(self.sequence(seq_id))


class TakesNothingFromTheScratch(HybridCache):
    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        return [c for c in commands if not isinstance(c, Take)]


class TakesTheStepBefore(HybridCache):
    def drain_commands(self) -> list[Command]:
        return [
            replace(c, step=c.step - 1) if isinstance(c, Take) and c.step else c
            for c in HybridCache.drain_commands(self)
        ]


class TakesRowsOfOthers(HybridCache):
    """Takes a row of the scratch that a later pass wrote."""

    def _ending(self, seq_id: str, known: int, computed: int | None) -> Ending:
        steps = self.sequence(seq_id).steps
        if steps is None or self.records_drafts:
            return HybridCache._ending(self, seq_id, known, computed)
        return steps.end(known)


class FoldsOneLess(HybridCache):
    def drain_commands(self) -> list[Command]:
        return [
            replace(c, tokens=c.tokens - 1)
            if isinstance(c, Fold) and c.tokens > 1
            else c
            for c in HybridCache.drain_commands(self)
        ]


class FoldsOneMore(HybridCache):
    """Folds the draft behind the last accepted one, if there is one."""

    def _ending(self, seq_id: str, known: int, computed: int | None) -> Ending:
        ending = HybridCache._ending(self, seq_id, known, computed)
        step, column = ending.step, ending.column
        if step is None or not step.recorded or column is None or column == step.drafts:
            return ending
        return replace(ending, column=column + 1)


class FoldsWhatWasAccepted(HybridCache):
    """Leaves it to the device how many tokens of an ended sequence are folded."""

    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        return [c for c in commands if not isinstance(c, Fold)]


class FoldsRecordsOfOthers(HybridCache):
    """Takes a record for that of the last pass that a later one has replaced."""

    def _ending(self, seq_id: str, known: int, computed: int | None) -> Ending:
        steps = self.sequence(seq_id).steps
        if steps is None or not self.records_drafts:
            return HybridCache._ending(self, seq_id, known, computed)
        return steps.end(known)


class HoldsNoRowsForPadding(HybridCache):
    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        if self.scratch is not None:
            layout = self.scratch._layout
            self.scratch._layout = replace(layout, batches=())


class LosesDrafts(HybridCache):
    """Forgets the draft slots that a turn's end leaves."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        donate = self._insertion._donate

        def broken(
            sequence: LiveSequence, tokens: Sequence[int], ending: Ending
        ) -> tuple[Node | None, int | None]:
            found = donate(sequence, tokens, ending)
            sequence.drafts = sequence.drafts[1:]
            return found

        self._insertion._donate = broken  # type: ignore[method-assign]


class DropsAcceptedColumns(HybridCache):
    """Ends no turn in a draft slot."""

    def _ending(self, seq_id: str, known: int, computed: int | None) -> Ending:
        ending = HybridCache._ending(self, seq_id, known, computed)
        return replace(ending, column=None) if ending.column else ending


class NeverWantsDraftsBack(HybridCache):
    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        self.drafts.refused = lambda *_, **__: None  # type: ignore[method-assign]


class LendsWhileOthersWait(HybridCache):
    """Gives drafts what an admission was refused."""

    def lend_drafts(
        self, wanted: Mapping[str, int], growth: Mapping[str, int], lookahead: int = 0
    ) -> int:
        self.drafts._refused_now = self.drafts._refused_before = False
        return HybridCache.lend_drafts(self, wanted, growth, lookahead)


class IgnoresPages(HybridCache):
    """Lends what sequences grow into, and has drafts want pages of others."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        self.drafts._fits = lambda *_, **__: True  # type: ignore[method-assign]


class AdmitsIntoWhatDraftsNeed(HybridCache):
    """Leaves no pages for the step that gives drafts back."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        self.drafts.kept_pages = lambda *_: 0  # type: ignore[method-assign]


CONTENT = [
    TakesTheColumnBefore,
    TakesTheColumnBehind,
    TakesColumnZero,
    MovesNoWindow,
    MovesTheWindowOfTheKnownToken,
    FreesDraftsAStepEarly,
    TakesNothingFromTheScratch,
    TakesTheStepBefore,
    FoldsOneLess,
    FoldsOneMore,
    FoldsWhatWasAccepted,
    FoldsRecordsOfOthers,
]
COUNTED = [TakesWhatWasOverwritten, TakesRowsOfOthers]
"""Wrong content as well, but the count of exact turn ends is wrong before that."""
BOOKKEEPING = [
    LosesDrafts,
    DropsAcceptedColumns,
    NeverWantsDraftsBack,
    LendsWhileOthersWait,
]


# ----------------------------------------------------------- engines that are broken


class ReportsOneLess(FakeEngine):
    def _accept(self, request: Request, output: Output) -> None:
        accepted = max(len(output.steps) - 1, 0)
        columns = output.steps[:accepted] if self.setup.scratch else None
        self.cache.accept(request.seq_id, accepted, columns)


class ReportsNothing(FakeEngine):
    def _accept(self, request: Request, output: Output) -> None:
        pass


class ReportsLateAcceptance(FakeEngine):
    """Says of a step what became of the one before."""

    def _accept(self, request: Request, output: Output) -> None:
        late: dict[Request, Output] = self.__dict__.setdefault("late", {})
        last, late[request] = late.get(request, output), output
        FakeEngine._accept(self, request, last)


class NotesNoStepWithoutDrafts(FakeEngine):
    def _note(self, request: Request, drafts: int, row: int | None) -> None:
        if drafts or not self.cache.is_verifying(request.seq_id):
            FakeEngine._note(self, request, drafts, row)

    def _accept(self, request: Request, output: Output) -> None:
        if output.drafts:
            FakeEngine._accept(self, request, output)


class NotesStepsTwice(FakeEngine):
    def _note(self, request: Request, drafts: int, row: int | None) -> None:
        FakeEngine._note(self, request, drafts, row)
        FakeEngine._note(self, request, drafts, row)


class TakesNothingBack(FakeEngine):
    """Counts rejected drafts as computed."""

    def _rejected(self, output: Output) -> int:
        return 0


class VerifiesMoreThanTheWidth(FakeEngine):
    def _plan_width(self) -> None:
        FakeEngine._plan_width(self)
        for request, drafts in self._planned.items():
            self._planned[request] = drafts + 1


ENGINES = [
    ReportsOneLess,
    ReportsNothing,
    ReportsLateAcceptance,
    NotesNoStepWithoutDrafts,
    NotesStepsTwice,
    TakesNothingBack,
    VerifiesMoreThanTheWidth,
]


# ---------------------------------------------------------------------- are they caught


def first_failure(
    cache: type[HybridCache] = HybridCache,
    engine: type[FakeEngine] = FakeEngine,
    *,
    check_every: int = 10_000,
    guards: bool = True,
    counts: bool = True,
) -> Exception:
    """What the first failing traffic fails with; fails if none does.

    Args:
        cache: used.
        engine: that drives it.
        check_every: operations between two audits.
        guards: whether the cache's own guards count, which raise ValueError.
        counts: whether the count of exact turn ends is checked.
    """
    for seed in range(20):
        for page_size in (1, 4, 16):
            traffic = Traffic.seeded(seed, page_size, drafts=True)
            traffic.engine = engine(traffic.engine.setup, cache)
            traffic.engine.counts_ends = counts
            try:
                for count in range(1, 301):
                    traffic.operate()
                    if count % check_every == 0:
                        traffic.engine.check()
            except (AssertionError, LookupError, ValueError) as failure:
                if guards or isinstance(failure, AssertionError):
                    return failure
    pytest.fail(f"{cache.__name__} with {engine.__name__} went through")


@pytest.mark.parametrize("cache", CONTENT, ids=lambda cache: cache.__name__)
def test_forward_passes_alone_find_wrong_content(cache: type[HybridCache]) -> None:
    failure = first_failure(cache, guards=False)
    assert isinstance(failure, ContentError), repr(failure)


@pytest.mark.parametrize("cache", COUNTED, ids=lambda cache: cache.__name__)
def test_states_that_are_lost_are_not_kept(cache: type[HybridCache]) -> None:
    with pytest.raises(AssertionError, match="turn_ends"):
        raise first_failure(cache)
    assert isinstance(first_failure(cache, check_every=1, counts=False), ContentError)


@pytest.mark.parametrize("cache", BOOKKEEPING, ids=lambda cache: cache.__name__)
def test_audits_find_wrong_counts(cache: type[HybridCache]) -> None:
    failure = first_failure(cache, check_every=1)
    assert not isinstance(failure, ContentError), repr(failure)


@pytest.mark.parametrize("make", [Traffic.seeded, seeded_traffic])
def test_drafts_that_do_not_make_way_are_found(make: Callable[..., Traffic]) -> None:
    with pytest.raises(AssertionError, match="drafts have not made way"):
        fail_with(IgnoresPages, make)


def test_admissions_that_leave_drafts_no_way_out_are_found() -> None:
    with pytest.raises(AssertionError, match="drafts have not made way"):
        fail_with(AdmitsIntoWhatDraftsNeed, seeded_traffic)


def fail_with(cache: type[HybridCache], make: Callable[..., Traffic]) -> None:
    """Run traffic on a broken cache until something fails."""
    for seed in range(100):
        for page_size in (1, 4):
            traffic = make(seed, page_size, cache, drafts=True)
            traffic.run(300, check_every=10_000)


def test_rows_without_memory_are_found() -> None:
    with pytest.raises(ContentError, match="was touched, but has no memory"):
        for seed in range(20):
            seeded_traffic(seed, 4, HoldsNoRowsForPadding, drafts=True).run(
                300, check_every=10_000
            )


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.__name__)
def test_counts_that_do_not_fit_are_refused_before_they_harm(
    engine: type[FakeEngine],
) -> None:
    failure = first_failure(engine=engine)
    assert isinstance(failure, ValueError), repr(failure)


def test_the_sound_ones_go_through() -> None:
    with pytest.raises(pytest.fail.Exception, match="went through"):
        first_failure()
