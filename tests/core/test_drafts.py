# SPDX-License-Identifier: Apache-2.0
"""Draft slots: lent, verified in, promoted and given back."""

from __future__ import annotations

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Fold, MoveWindow, Pool, Take
from hybrid_plugin.core.memory.elastic import ElasticBroker, PoolBudget
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.policy.costs import STEP_TOKENS
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.policy.speculation import DraftGain
from tests.core.audit import audit, full_state
from tests.core.support import (
    ByMinimum,
    Economical,
    admit,
    make_cache,
    prefill,
    serve,
    span,
    start,
)


def decoding(slots: int = 9, pages: int = 33) -> HybridCache:
    """Sequence `a` in slot 1 has computed its prompt of 8 tokens."""
    cache = make_cache(slots=slots, pages=pages)
    start(cache, "a", span(0, 8))
    prefill(cache, "a", span(0, 8))
    assert cache.grow("a", 16) is not None
    cache.drain_commands()
    return cache


def lend(cache: HybridCache, count: int, seq_id: str = "a") -> list[int]:
    """Plan a step that verifies drafts of one sequence; returns the slots it got."""
    before = list(cache.sequence(seq_id).drafts)
    cache.lend_drafts({seq_id: count}, {})
    now = cache.sequence(seq_id).drafts
    assert now[: len(before)] == before
    return now[len(before) :]


def test_a_turn_ends_in_the_slot_of_its_accepted_column() -> None:
    cache = decoding()
    assert lend(cache, 3) == [2, 3, 4]
    cache.verify("a", 8, 3)
    cache.accept("a", 2)
    cache.finish("a", span(0, 12))  # 9 were known, 2 accepted, 1 sampled
    assert cache.drain_commands() == [MoveWindow(Pool.STATE, 1, 2, 3)]
    assert cache.slots.free_ids() == [1, 2, 4, 5, 6, 7, 8]
    assert cache.look_up(span(0, 20)).match.length == 11
    assert cache.stats.turn_ends_exact == 1
    audit(cache)


def test_a_turn_ends_in_its_own_slot_if_nothing_was_accepted() -> None:
    cache = decoding()
    lend(cache, 3)
    cache.verify("a", 8, 3)
    cache.accept("a", 0)
    cache.finish("a", span(0, 10))
    assert cache.drain_commands() == []
    assert cache.slots.free_ids() == [2, 3, 4, 5, 6, 7, 8]
    assert cache.look_up(span(0, 20)).match.length == 9


def test_with_a_step_in_flight_column_0_has_all_known_tokens() -> None:
    cache = decoding()
    lend(cache, 3)
    cache.verify("a", 8, 3)
    cache.verify("a", 12, 3)  # counted as if all were accepted
    cache.accept("a", 2)
    cache.finish("a", span(0, 12))
    assert cache.drain_commands() == []
    assert cache.look_up(span(0, 20)).match.length == 12


def test_a_stop_inside_a_run_is_missed_with_a_step_in_flight_only() -> None:
    for in_flight in (False, True):
        cache = decoding()
        lend(cache, 3)
        cache.verify("a", 8, 3)
        if in_flight:
            cache.verify("a", 12, 3)
        cache.accept("a", 2)
        cache.finish("a", span(0, 10))  # the first accepted draft was a stop
        commands = [] if in_flight else [MoveWindow(Pool.STATE, 1, 1, 2)]
        assert cache.drain_commands() == commands
        assert cache.look_up(span(0, 20)).match.length == (0 if in_flight else 10)
        assert cache.stats.turn_ends_missed == in_flight
        audit(cache)


@pytest.mark.parametrize(("known", "folded"), [(12, 3), (10, 2), (9, 1)])
def test_a_turn_ends_on_what_is_folded(known: int, folded: int) -> None:
    """Without slots for drafts; a stop may lie within what was accepted."""
    cache = make_cache(slots=3, pages=33, records_drafts=True)
    start(cache, "a", span(0, 8))
    prefill(cache, "a", span(0, 8))
    assert cache.grow("a", 16) is not None
    assert cache.lend_drafts({"a": 3}, {}) == 3
    assert cache.sequence("a").drafts == []
    cache.drain_commands()
    with pytest.raises(ValueError, match="starts behind 7 tokens"):
        cache.verify("a", 7, 3)  # a snapshot at the prompt's end would be too late
    cache.verify("a", 8, 3)
    cache.accept("a", 2)
    cache.finish("a", span(0, known))
    assert cache.drain_commands() == [Fold(Pool.STATE, 1, folded)]
    assert cache.look_up(span(0, 20)).match.length == min(known, 11)
    assert (cache.stats.drafts_lent, cache.stats.drafts_refused) == (0, 0)
    audit(cache)


def test_what_a_later_step_has_folded_is_not_folded_again() -> None:
    cache = make_cache(slots=3, pages=33, records_drafts=True)
    start(cache, "a", span(0, 8))
    prefill(cache, "a", span(0, 8))
    assert cache.grow("a", 16) is not None
    cache.drain_commands()
    cache.verify("a", 8, 3)
    cache.accept("a", 2)
    cache.drain_commands()  # of a step in which the sequence has no part
    cache.finish("a", span(0, 12))
    assert cache.drain_commands() == []
    assert cache.look_up(span(0, 20)).match.length == 11


def test_a_state_is_taken_from_the_scratch() -> None:
    for known, length, take in ((12, 11, None), (10, 10, 4)):
        cache = decoding()
        cache.verify("a", 8, 5, row=7)
        cache.accept("a", 2, columns=[4, 5])  # a tree
        cache.finish("a", span(0, known))
        commands = [] if take is None else [Take(Pool.STATE, 7, take, 1)]
        assert cache.drain_commands() == commands
        assert cache.look_up(span(0, 20)).match.length == length


def step(cache: HybridCache, seq_id: str, drafts: int, accepted: int) -> None:
    """A step whose outcome is known before the next."""
    cache.drain_commands()
    steps = cache.sequence(seq_id).steps
    length = cache.sequence(seq_id).prompt_length
    cache.verify(seq_id, length if steps is None else steps.counted, drafts)
    cache.accept(seq_id, accepted)


def test_slots_that_are_held_stay_and_are_not_lent_again() -> None:
    cache = decoding()
    assert lend(cache, 2) == [2, 3]
    assert lend(cache, 2) == []
    assert lend(cache, 4) == [4, 5]
    assert cache.drafts_held == 4
    assert cache.levels()[Pool.STATE].used == 5
    assert (cache.stats.drafts_lent, cache.stats.drafts_refused) == (4, 0)


def test_a_preempted_sequence_keeps_its_state_in_a_draft_slot() -> None:
    cache = decoding()
    lend(cache, 2)
    step(cache, "a", 2, 1)
    cache.finish("a", span(0, 11), preempted=True)
    admission = start(cache, "a", span(0, 11), resumed=True)
    assert admission.hit == 10
    assert cache.drain_commands()[0] == MoveWindow(Pool.STATE, 1, 1, 2)
    audit(cache)


def test_a_turn_that_nobody_continues_leaves_no_slot_behind() -> None:
    cache = decoding(slots=4)
    lend(cache, 2)
    step(cache, "a", 2, 2)
    cache.sequence("a").is_last_turn = True
    cache.finish("a", span(0, 12))
    assert cache.slots.free_ids() == [1, 2, 3]
    assert cache.drain_commands() == []
    assert cache.stats.turn_ends_exact == 0


def test_a_turn_that_ends_where_another_did_leaves_no_slot_behind() -> None:
    cache = make_cache()
    serve(cache, "first", span(0, 8), answer=span(8, 11))  # a snapshot at 10 tokens
    start(cache, "a", span(0, 8))
    prefill(cache, "a", span(0, 8))
    assert cache.grow("a", 16) is not None
    lend(cache, 1)
    step(cache, "a", 1, 1)
    free = cache.slots.free
    cache.finish("a", span(0, 11))
    assert cache.slots.free == free + 2
    assert not any(isinstance(one, MoveWindow) for one in cache.drain_commands())
    audit(cache)


# -------------------------------------------------------------------- who gets slots


def test_an_admission_waits_for_drafts_for_one_step() -> None:
    cache = decoding(slots=5)
    assert len(lend(cache, 3)) == 3
    assert not cache.drafts_wanted_back
    step(cache, "a", 3, 1)
    assert admit(cache, "b", span(50, 54)) is None
    assert cache.drafts_wanted_back
    assert cache.lend_drafts({"a": 3}, {}) == 0
    assert cache.drafts_held == 3, "the next step selects one of them"
    assert admit(cache, "b", span(50, 54)) is None
    step(cache, "a", 0, 0)  # the one step that it waits for
    assert cache.lend_drafts({"a": 3}, {}) == 0, "b comes first"
    assert cache.drafts_held == 0
    start(cache, "b", span(50, 54))
    cache.drain_commands()
    assert lend(cache, 3) == [3, 4], "what b left"
    audit(cache)


def test_slots_that_no_step_selects_go_back_at_once() -> None:
    """The last step verified fewer drafts than there are slots."""
    cache = decoding(slots=5)
    lend(cache, 3)
    step(cache, "a", 1, 1)
    assert cache.lend_drafts({"a": 2}, {}) == 2
    assert cache.drafts_held == 3, "what nobody wants stays"
    assert admit(cache, "b", span(50, 54)) is None
    cache.lend_drafts({"a": 2}, {})
    assert cache.sequence("a").drafts == [2]
    start(cache, "b", span(50, 54))


def test_a_slot_that_becomes_free_is_for_who_waits() -> None:
    cache = make_cache(slots=3)
    start(cache, "a", span(0, 8))
    start(cache, "b", span(20, 28))
    cache.drain_commands()
    assert admit(cache, "c", span(50, 54)) is None
    cache.finish("b", span(20, 28), 0)
    assert lend(cache, 1) == []
    start(cache, "c", span(50, 54))


def test_drafts_do_not_help_who_waits_for_pages() -> None:
    cache = decoding(slots=5, pages=5)
    lend(cache, 3)
    assert admit(cache, "b", span(50, 54)) is None
    assert cache.grow("a", 17) is None
    assert not cache.drafts_wanted_back


def test_a_refusal_is_forgotten_after_the_next_step() -> None:
    cache = decoding(slots=3)
    lend(cache, 1)
    assert admit(cache, "b", span(50, 54)) is None
    for wanted in (True, True, False):
        assert cache.drafts_wanted_back == wanted
        cache.drain_commands()


def with_snapshots(policy: ByMinimum | Economical | None = None) -> HybridCache:
    """Four snapshots of 8 tokens in 5 slots; then `a` came and one was used again."""
    cache = make_cache(slots=6, pages=60, policy=policy)
    for first in (100, 200, 300, 400):
        serve(cache, "cold", span(first, first + 8))
    start(cache, "a", span(0, 8))
    prefill(cache, "a", span(0, 8))
    cache.drain_commands()
    cache.concurrency.answer = 10  # nobody waits
    start(cache, "hot", span(400, 410))
    cache.finish("hot", (), 0)
    return cache


def test_drafts_take_no_slot_of_content_that_was_used_since() -> None:
    cache = with_snapshots()
    lend(cache, 9)
    hits = [cache.look_up(span(n, n + 9)).match.length for n in (100, 200, 300, 400)]
    assert hits == [0, 0, 0, 8]
    assert (cache.stats.drafts_lent, cache.stats.drafts_refused) == (3, 6)
    state = full_state(cache)
    assert lend(cache, 9) == [], "and a refusal changes nothing"
    assert full_state(cache) == state


def test_drafts_take_no_slot_of_content_that_saves_more() -> None:
    kept = {}
    for accepted in (0.0, 0.1, 4.0):
        cache = with_snapshots(Economical())
        cache.drafts.gain.accepted = accepted
        cache.concurrency.answer = 0.7
        for number in range(20):  # so many share a decode step
            cache._sequences[f"other{number}"] = cache.sequence("a")
        worth = cache.drafts._worth(cache.sequence("a"), 4)
        lent = len(lend(cache, 4))
        kept[accepted] = (lent, cache.slots.snapshots)
        assert lent == 4 or (cache.tree.snapshot_worth() or 0) >= worth
    # Of three snapshots and a free slot.
    assert kept == {0.0: (1, 3), 0.1: (2, 2), 4.0: (4, 0)}


def test_what_drafts_save() -> None:
    gain = DraftGain()
    assert gain.saved_tokens(3, None, 1) == 0
    assert gain.saved_tokens(3, 100, 1) == 75 * STEP_TOKENS, "all count as accepted"
    for _ in range(3):
        gain.observe(1)
    assert gain.saved_tokens(3, 100, 1) == 50 * STEP_TOKENS
    assert gain.saved_tokens(3, 100, 5) == 2 * STEP_TOKENS
    for _ in range(3000):
        gain.observe(0)
    assert gain.saved_tokens(3, 100, 1) < STEP_TOKENS


def test_acceptance_is_learned_from_steps_with_drafts() -> None:
    cache = decoding()
    lend(cache, 3)
    step(cache, "a", 0, 0)
    assert cache.drafts.gain.accepted is None
    step(cache, "a", 3, 2)
    assert cache.drafts.gain.accepted == 2.0


# --------------------------------------------------------------------- elastic pools


def elastic(budget: int) -> HybridCache:
    """Pages of 4 tokens and 1 byte, slots of 4 bytes."""
    pools = {Pool.KV: PoolBudget(1), Pool.STATE: PoolBudget(4)}
    return HybridCache(
        PagePool(60, 1),
        SlotPool(12, 1),
        4,
        SnapshotPolicy(4),
        eviction=ByMinimum(),
        broker=ElasticBroker(budget, pools),
    )


def test_drafts_leave_pages_to_grow_into() -> None:
    """For the step, and for one without drafts behind it, which gives slots back."""
    cache = elastic(budget=5 + 3 * 4)  # id 0 of both pools, 4 pages and 2 slots
    start(cache, "a", span(0, 8))
    prefill(cache, "a", span(0, 8))
    assert cache.lend_drafts({"a": 1}, {"a": 15}) == 0, "17 tokens are 5 pages"
    assert cache.lend_drafts({"a": 1}, {"a": 14}) == 1, "16 tokens are 4"
    assert not cache.drafts_wanted_back
    step(cache, "a", 1, 1)
    cache.drain_commands()
    assert cache.lend_drafts({}, {"a": 16}) == 0
    assert cache.drafts_wanted_back, "the step to come is the last one that fits"


def test_drafts_are_wanted_back_before_pages_run_out() -> None:
    cache = elastic(budget=6 + 3 * 4)
    start(cache, "a", span(0, 8))
    prefill(cache, "a", span(0, 8))
    cover = 9
    while cache.lend_drafts({"a": 1}, {"a": cover}):
        assert cache.grow("a", cover + 1) is not None
        step(cache, "a", 1, 1)
        cover += 2
    assert cover == 19, "20 tokens and the next one are more than 5 pages"
    assert cache.drafts_held == 1, "the next step selects it"
    assert cache.grow("a", cover) is not None
    step(cache, "a", 0, 0)
    assert cache.grow("a", 21) is None
    assert cache.lend_drafts({"a": 1}, {"a": 20}) == 0
    assert cache.grow("a", 21) is not None, "in the memory of the draft"


def test_an_admission_leaves_what_drafts_need_to_make_way() -> None:
    cache = elastic(budget=7 + 4 * 4)  # 6 pages and 3 slots
    start(cache, "a", span(0, 8))
    prefill(cache, "a", span(0, 8))
    assert cache.lend_drafts({"a": 1}, {"a": 11}) == 1
    assert cache.grow("a", 12) is not None
    step(cache, "a", 1, 0)
    assert admit(cache, "b", span(50, 58)) is None, "3 pages are left, and 4 needed"
    assert cache.drafts_wanted_back
    assert cache.lend_drafts({"a": 1}, {"a": 12}) == 0
    step(cache, "a", 0, 0)
    assert cache.lend_drafts({"a": 1}, {"a": 13}) == 0
    start(cache, "b", span(50, 58))


# ------------------------------------------------------------------------- alike to all


def several(slots: int, pages: int = 60) -> HybridCache:
    """Sequences `a`, `b` and `c` with prompts of 8 tokens."""
    cache = make_cache(slots=slots, pages=pages)
    for name, first in (("a", 0), ("b", 20), ("c", 40)):
        start(cache, name, span(first, first + 8))
        prefill(cache, name, span(first, first + 8))
    cache.drain_commands()
    return cache


@pytest.mark.parametrize(
    ("free", "width"), [(0, 0), (2, 0), (3, 1), (5, 1), (6, 2), (8, 2), (9, 3), (12, 3)]
)
def test_all_verify_as_many_drafts_as_all_find_slots_for(free: int, width: int) -> None:
    cache = several(4 + free)
    wanted = dict.fromkeys("abc", 3)
    assert cache.foresee_drafts(wanted, {}) == width
    assert cache.lend_drafts(wanted, {}) == width
    assert [len(cache.sequence(name).drafts) for name in "abc"] == [width] * 3
    assert cache.slots.free == free - 3 * width
    assert cache.stats.drafts_refused == 9 - 3 * width
    audit(cache)


def test_who_wants_fewer_drafts_leaves_slots_to_the_others() -> None:
    cache = several(4 + 6)
    assert cache.lend_drafts({"a": 1, "b": 3, "c": 2}, {}) == 3
    assert [len(cache.sequence(name).drafts) for name in "abc"] == [1, 3, 2]


def test_slots_are_shared_out_anew_when_somebody_comes() -> None:
    """The first step has the width of who has least; the next one that of all."""
    cache = several(4 + 7)
    assert cache.lend_drafts({"a": 3, "b": 3}, {}) == 3
    for name in "ab":
        cache.verify(name, 8, 3)
        cache.accept(name, 0)
    cache.drain_commands()
    wanted = dict.fromkeys("abc", 3)
    assert cache.lend_drafts(wanted, {}) == 1, "slots of a and b are selected yet"
    for name in "abc":
        cache.verify(name, 8 if name == "c" else 9, 1)
        cache.accept(name, 0)
    assert cache.foresee_drafts(wanted, {}) == 2
    cache.drain_commands()
    assert cache.lend_drafts(wanted, {}) == 2
    assert [len(cache.sequence(name).drafts) for name in "abc"] == [2, 2, 2]
    audit(cache)


@pytest.mark.parametrize(("free", "width"), [(0, 1), (1, 1), (2, 3)])
def test_drafts_take_no_page_that_another_sequence_needs(free: int, width: int) -> None:
    """Two have room for 2 tokens in their last pages; for 4 each wants another one."""
    cache = make_cache(slots=12, pages=5 + free)
    for name, first in (("a", 0), ("b", 20)):
        start(cache, name, span(first, first + 6))
        prefill(cache, name, span(first, first + 6))
    wanted, growth = dict.fromkeys("ab", 3), dict.fromkeys("ab", 7)
    assert cache.foresee_drafts(wanted, growth) == width
    assert cache.lend_drafts(wanted, growth) == width
    for name in "ab":
        assert cache.grow(name, 7 + width) is not None
    assert cache.stats.refusals == 0


def test_nothing_is_foreseen_while_somebody_waits() -> None:
    cache = decoding(slots=5)
    lend(cache, 3)
    assert cache.foresee_drafts({"a": 3}, {}) == 3
    assert admit(cache, "b", span(50, 54)) is None
    assert cache.foresee_drafts({"a": 3}, {}) == 0


def test_slots_of_content_worth_more_are_not_foreseen() -> None:
    cache = with_snapshots()
    assert cache.foresee_drafts({"a": 9}, {}) == 4, "there may be so many"
    assert len(lend(cache, 9)) == 3
    assert cache.foresee_drafts({"a": 9}, {}) == 3, "what is left is worth more"


def test_without_states_no_slots_are_needed() -> None:
    cache = HybridCache(PagePool(33), NoSlots(), 4, SnapshotPolicy(4))
    start(cache, "a", span(0, 8))
    prefill(cache, "a", span(0, 8))
    assert cache.grow("a", 16) is not None
    assert lend(cache, 3) == []
    step(cache, "a", 3, 2)
    cache.finish("a", span(0, 12))
    assert cache.look_up(span(0, 20)).match.length == 8
    assert (cache.stats.turn_ends_exact, cache.stats.drafts_refused) == (0, 0)


# -------------------------------------------------------------------------- refusals


def test_wrong_counts_are_refused() -> None:
    cache = decoding()
    with pytest.raises(ValueError, match="no step was noted"):
        cache.accept("a", 0)
    with pytest.raises(ValueError, match="no step of 'a' was noted"):
        cache.finish("a", span(0, 9))
    with pytest.raises(ValueError, match="3 drafts are verified in 0 slots"):
        cache.verify("a", 8, 3)
    lend(cache, 3)
    for first in (None, 6):
        with pytest.raises(ValueError, match="of a prompt of 8"):
            cache.verify("a", first, 3)
    with pytest.raises(ValueError, match="of a prompt of 8"):
        cache.verify("a", 7, 3, row=0)
    cache.verify("a", 8, 3)
    with pytest.raises(ValueError, match="in slots, or in a scratch"):
        cache.verify("a", 12, 3, row=0)
    with pytest.raises(ValueError, match="those before it compute 12"):
        cache.verify("a", 11, 3)
    for accepted in (-1, 4):
        with pytest.raises(ValueError, match=f"{accepted} of 3 drafts"):
            cache.accept("a", accepted)
    with pytest.raises(ValueError, match="hold a chain"):
        cache.accept("a", 1, columns=[2])
    cache.accept("a", 1)
    with pytest.raises(ValueError, match="no step is in flight"):
        cache.accept("a", 1)
    with pytest.raises(ValueError, match="12 tokens are known"):
        cache.verify("a", 10, 3, known=12)
    with pytest.raises(ValueError, match="the steps of 'a' say"):
        cache.finish("a", span(0, 11), 10)
    for known in (8, 12):
        with pytest.raises(ValueError, match=f"{known} tokens are known"):
            cache.finish("a", span(0, known))
    assert cache.is_live("a"), "a refusal changes nothing"
    cache.finish("a", span(0, 11))
    assert cache.look_up(span(0, 20)).match.length == 10


@pytest.mark.parametrize("columns", [(2, 1), (0, 1), (1, 1), (1,), (1, 6), (1, 2, 3)])
def test_wrong_paths_are_refused(columns: tuple[int, ...]) -> None:
    cache = decoding()
    cache.verify("a", 8, 5, row=2)
    with pytest.raises(ValueError, match="are no columns of 2 of 5 drafts"):
        cache.accept("a", 2, columns=columns)


def test_two_steps_in_flight_have_no_exact_state() -> None:
    cache = decoding()
    lend(cache, 3)
    cache.verify("a", 8, 3)
    cache.verify("a", 12, 3)
    cache.finish("a", span(0, 9))
    assert cache.stats.turn_ends_missed == 1
    assert cache.look_up(span(0, 20)).match.length == 0


@pytest.mark.parametrize("in_flight", [False, True])
def test_rows_that_a_later_pass_wrote_are_not_taken(in_flight: bool) -> None:
    cache = decoding()
    start(cache, "b", span(50, 58))
    prefill(cache, "b", span(50, 58))
    cache.drain_commands()
    cache.verify("a", 8, 3, row=0)
    if not in_flight:
        cache.accept("a", 2)
    cache.drain_commands()
    cache.verify("b", 8, 3, row=0)
    cache.finish("a", span(0, 9 if in_flight else 10))
    assert cache.stats.turn_ends_missed == 1
    assert cache.drain_commands() == []
