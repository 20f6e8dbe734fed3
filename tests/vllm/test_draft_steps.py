# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the cache about drafts, step by step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler

from hybrid_plugin.core.commands import Fold, MoveWindow, Pool
from hybrid_plugin.core.memory.pools import NoSlots
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from hybrid_plugin.vllm.scheduler import COMMANDS, ROWS, HybridScheduler
from tests.vllm.fakes import admit, manager, nothing_kept, request

PROMPT = 40
DRAFTS = 3
LOOKAHEAD = 0


class Engine:
    """Schedules steps as vLLM does, of requests that never wait for one another."""

    def __init__(self, of: HybridKVCacheManager) -> None:
        self.of = of
        self.during: Callable[[], object] = lambda: None
        """What happens while a step is scheduled."""
        self.requests: dict[str, Any] = {}

    def add(self, name: str, first: int = 0) -> Any:
        """A request whose prompt is computed, and whose first token is known."""
        one = request(name, PROMPT, first)
        self.requests[name] = one
        assert admit(self.of, one, PROMPT) is not None
        output = self.step({name: PROMPT})
        self.of.draft_steps.take_outcome(output, sampled({name: 1}))
        one.all_token_ids.append(1000)
        return one

    def step(self, counts: dict[str, int], **drafts: int) -> Any:
        """Schedule a step; counts exclude drafts."""
        for name, count in drafts.items():
            self.requests[name].spec_token_ids = list(range(count))
        steps = self.of.draft_steps
        steps.lend([self.requests[name] for name in counts], LOOKAHEAD)
        verified = {name: self.requests[name].spec_token_ids for name in counts}
        scheduled = {n: count + len(verified[n]) for n, count in counts.items()}
        for name, count in scheduled.items():
            one = self.requests[name]
            if one.num_computed_tokens:
                grown = self.of.allocate_slots(
                    one, count, num_lookahead_tokens=LOOKAHEAD
                )
                assert grown is not None
            one.num_computed_tokens += count
            one.spec_token_ids = []
        self.during()
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_spec_decode_tokens={n: d for n, d in verified.items() if d},
        )
        for one in self.requests.values():
            one.num_computed_tokens -= scheduled.get(one.request_id, 0)
        output.proposed = steps.worth_proposing(
            output, self.requests, DRAFTS, LOOKAHEAD
        )
        for one in self.requests.values():
            one.num_computed_tokens += scheduled.get(one.request_id, 0)
        output.commands = self.of.drain_commands()
        output.rows = steps.note(output, self.requests)
        self.of.step_scheduled(self.requests[name] for name in counts)
        return output

    def take(self, output: Any, **accepted: int) -> None:
        """The step's output comes; a request has its accepted drafts and one token."""
        self.of.draft_steps.take_outcome(
            output, sampled({name: a + 1 for name, a in accepted.items()})
        )
        for name, count in accepted.items():
            one = self.requests[name]
            drafts = output.scheduled_spec_decode_tokens.get(name, ())
            one.num_computed_tokens -= len(drafts) - count
            one.all_token_ids += range(2000, 2000 + count + 1)

    def end(self, name: str, *, known: int | None = None) -> None:
        """Free a request, of whose tokens only so many were kept."""
        one = self.requests.pop(name)
        if known is not None:
            del one.all_token_ids[known:]
        self.of.free(one)


def sampled(counts: dict[str, int]) -> Any:
    """A model runner's output with so many tokens of each request."""
    return SimpleNamespace(
        req_id_to_index={name: i for i, name in enumerate(counts)},
        sampled_token_ids=[[0] * count for count in counts.values()],
    )


@pytest.fixture
def engine() -> Engine:
    return Engine(manager(pages=40, slots=12))


def held(engine: Engine, name: str = "a") -> int:
    return len(engine.of.cache.sequence(name).drafts)


def hit(engine: Engine, one: Any) -> int:
    """Tokens that somebody who goes on behind all known tokens would restore."""
    probe = request("probe", 0)
    probe.all_token_ids += [*one.all_token_ids, 1, 2, 3]
    _, found, _ = engine.of.get_computed_blocks(probe)
    engine.of.free(probe)
    return found


# ------------------------------------------------------------------------ slots


def test_a_request_has_one_slot_until_it_verifies(engine: Engine) -> None:
    engine.add("a")
    assert held(engine) == 0
    output = engine.step({"a": 1}, a=DRAFTS)
    sequence = engine.of.cache.sequence("a")
    assert output.rows == {"a": [sequence.slot, *sequence.drafts]}
    assert len(set(output.rows["a"])) == 1 + DRAFTS
    assert output.scheduled_spec_decode_tokens == {"a": [0, 1, 2]}


def test_rows_are_sent_when_they_change_and_not_again(engine: Engine) -> None:
    engine.add("a")
    engine.take(engine.step({"a": 1}, a=2), a=1)
    longer = engine.step({"a": 1}, a=DRAFTS)
    assert len(longer.rows["a"]) == 1 + DRAFTS
    engine.take(longer, a=0)
    assert engine.step({"a": 1}, a=DRAFTS).rows == {}


def test_a_row_waits_for_its_request_to_run(engine: Engine) -> None:
    """What got slots but no place in the step has its row written with a later one."""
    one = engine.add("a")
    one.spec_token_ids = [1, 2]
    engine.of.draft_steps.lend([one], LOOKAHEAD)
    idle = SimpleNamespace(num_scheduled_tokens={}, scheduled_spec_decode_tokens={})
    assert engine.of.draft_steps.note(idle, engine.requests) == {}
    assert list(engine.step({"a": 1}, a=2).rows) == ["a"]


def test_drafts_without_a_slot_are_dropped() -> None:
    engine = Engine(manager(pages=40, slots=4))
    engine.add("a")
    few = engine.step({"a": 1}, a=DRAFTS)
    assert held(engine) == len(few.scheduled_spec_decode_tokens["a"]) == 2
    assert engine.of.cache.stats.drafts_refused == 1


def test_all_requests_verify_equally_many_drafts() -> None:
    """Seven slots for two requests with a state each: two drafts for both."""
    engine = Engine(manager(pages=40, slots=8))
    engine.add("a")
    engine.add("b", first=500)
    output = engine.step({"a": 1, "b": 1}, a=DRAFTS, b=DRAFTS)
    drafts = output.scheduled_spec_decode_tokens
    assert drafts == {"a": [0, 1], "b": [0, 1]}
    assert {len(row) for row in output.rows.values()} == {3}
    assert engine.of.cache.slots.free == 1


def test_who_has_fewer_drafts_does_not_narrow_the_others(engine: Engine) -> None:
    engine.add("a")
    engine.add("b", first=500)
    drafts = engine.step({"a": 1, "b": 1}, a=1, b=DRAFTS).scheduled_spec_decode_tokens
    assert {name: len(some) for name, some in drafts.items()} == {"a": 1, "b": DRAFTS}


def test_drafts_make_way_where_pages_are_short() -> None:
    """Its page has room for 7 tokens, and there is no other: nobody is preempted."""
    engine = Engine(manager(pages=1 + 3, slots=12))
    one = engine.add("a")
    verified = []
    for accepted in (3, 2, 0):
        output = engine.step({"a": 1}, a=DRAFTS)
        verified.append(len(output.scheduled_spec_decode_tokens.get("a", ())))
        engine.take(output, a=accepted)
    assert verified == [3, 3, 0], "44 and 48 tokens need pages, then 48 and no more"
    assert one.num_tokens == PROMPT + 9


def test_models_without_states_need_no_slots() -> None:
    """Drafts are verified, and nothing is lent."""
    of = manager(pages=40)
    of.cache.slots = of.cache.drafts._slots = of.cache.memory.slots = NoSlots()
    of.cache.broker._pools.pop(Pool.STATE)  # type: ignore[attr-defined]
    one = request("a", PROMPT)
    assert admit(of, one, PROMPT) is not None
    one.spec_token_ids = [1, 2, 3]
    of.draft_steps.lend([one], LOOKAHEAD)
    assert one.spec_token_ids == [1, 2, 3]


# --------------------------------------------------------------- what is proposed


def test_as_many_drafts_are_proposed_as_can_be_verified(engine: Engine) -> None:
    engine.add("a")
    assert engine.step({"a": 1}, a=DRAFTS).proposed == DRAFTS


def test_no_drafts_are_proposed_while_somebody_waits() -> None:
    engine = Engine(manager(pages=60, slots=5))
    engine.add("a")
    engine.take(engine.step({"a": 1}, a=DRAFTS), a=2)
    late = request("late", PROMPT, first=500)
    engine.during = lambda: admit(engine.of, late, PROMPT)
    narrowed = engine.step({"a": 1}, a=DRAFTS)
    assert narrowed.proposed == 0, "it was refused in this step"
    engine.take(narrowed, a=1)
    assert engine.step({"a": 1}).proposed == 0
    assert held(engine) == DRAFTS, "the step before verified some"
    engine.during = lambda: None
    engine.of.draft_steps.lend([engine.requests["a"]], LOOKAHEAD)
    assert held(engine) == 0
    assert admit(engine.of, late, PROMPT) is not None


def test_as_many_are_proposed_as_slots_are_left_for() -> None:
    """Slots of content worth more do not count, nor pages that are not there."""
    engine = Engine(manager(pages=40, slots=4))
    engine.add("a")
    assert engine.step({"a": 1}, a=DRAFTS).proposed == 2
    engine = Engine(manager(pages=1 + 3, slots=12))
    engine.add("a")
    first = engine.step({"a": 1}, a=DRAFTS)
    assert first.proposed == DRAFTS
    engine.take(first, a=3)
    assert engine.step({"a": 1}, a=DRAFTS).proposed == 0


def test_a_prompt_in_prefill_wants_no_drafts(engine: Engine) -> None:
    one = request("a", PROMPT)
    engine.requests["a"] = one
    assert admit(engine.of, one, PROMPT) is not None
    engine.of.cache.drafts._refused_now = True
    assert engine.step({"a": 32}).proposed == DRAFTS, "nobody verifies next"


# -------------------------------------------------------------------- turn ends


@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
def test_a_turn_ends_in_the_column_that_was_accepted(
    engine: Engine, accepted: int
) -> None:
    one = engine.add("a")
    output = engine.step({"a": 1}, a=DRAFTS)
    slot, *drafts = output.rows["a"]
    engine.take(output, a=accepted)
    engine.end("a")
    moved = [MoveWindow(Pool.STATE, slot, accepted, drafts[accepted - 1])]
    assert engine.of.drain_commands() == (moved if accepted else [])
    assert hit(engine, one) == PROMPT + 1 + accepted
    assert engine.of.cache.stats.turn_ends_exact == 1
    assert nothing_kept(engine.of)


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_a_stop_inside_what_was_accepted(engine: Engine, kept: int) -> None:
    """A stop token that was a draft was computed: it is part of what is restored."""
    one = engine.add("a")
    engine.take(engine.step({"a": 1}, a=DRAFTS), a=DRAFTS)
    engine.end("a", known=PROMPT + 1 + kept)
    assert hit(engine, one) == PROMPT + 1 + min(kept, DRAFTS)


def test_a_step_in_flight_leaves_the_known_tokens_in_column_0(engine: Engine) -> None:
    """Scheduled ahead, aborted, or preempted: whatever becomes of its drafts."""
    one = engine.add("a")
    engine.take(engine.step({"a": 1}, a=DRAFTS), a=2)
    engine.step({"a": 1}, a=DRAFTS)
    engine.end("a")
    assert engine.of.drain_commands() == []
    assert hit(engine, one) == len(one.all_token_ids) == PROMPT + 4


def test_a_stop_before_a_step_in_flight_is_missed(engine: Engine) -> None:
    """That step started beyond the stop: what is left is the prompt's snapshot."""
    one = engine.add("a")
    output = engine.step({"a": 1}, a=DRAFTS)
    engine.step({"a": 1}, a=DRAFTS)
    engine.take(output, a=DRAFTS)
    engine.end("a", known=PROMPT + 2)
    assert engine.of.cache.stats.turn_ends_missed == 1
    assert hit(engine, one) <= PROMPT
    assert nothing_kept(engine.of)


@pytest.fixture
def recording() -> Engine:
    """Steps record what drafts do, so that there are slots for four requests."""
    return Engine(manager(pages=40, slots=5, records_drafts=True))


@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
def test_a_turn_ends_on_what_is_folded(recording: Engine, accepted: int) -> None:
    one = recording.add("a")
    output = recording.step({"a": 1}, a=DRAFTS)
    assert len(output.scheduled_spec_decode_tokens["a"]) == DRAFTS
    assert output.rows == {} and held(recording) == 0
    slot = recording.of.cache.sequence("a").slot
    recording.take(output, a=accepted)
    recording.end("a")
    assert recording.of.drain_commands() == [Fold(Pool.STATE, slot, 1 + accepted)]
    assert hit(recording, one) == PROMPT + 1 + accepted
    assert nothing_kept(recording.of)


def test_what_was_folded_since_is_not_folded_again(recording: Engine) -> None:
    """A request is aborted that sat out the last step."""
    one, _ = recording.add("a"), recording.add("b", 7)
    recording.take(recording.step({"a": 1}, a=DRAFTS), a=2)
    recording.take(recording.step({"b": 1}, b=DRAFTS), b=1)
    recording.end("a")
    assert recording.of.drain_commands() == []
    assert hit(recording, one) == PROMPT + 3


def test_of_a_recorded_step_in_flight_the_known_token_is_folded(
    recording: Engine,
) -> None:
    one = recording.add("a")
    recording.take(recording.step({"a": 1}, a=DRAFTS), a=2)
    recording.step({"a": 1}, a=DRAFTS)
    slot = recording.of.cache.sequence("a").slot
    recording.end("a")
    assert recording.of.drain_commands() == [Fold(Pool.STATE, slot, 1)]
    assert hit(recording, one) == len(one.all_token_ids) == PROMPT + 4


def test_outcomes_of_a_sequence_that_is_gone_are_not_taken(engine: Engine) -> None:
    """A preempted request begins anew while its old step is in flight."""
    engine.add("a")
    old = engine.step({"a": 1}, a=DRAFTS)
    one = engine.requests["a"]
    one.over = False
    engine.of.free(one)
    one.num_computed_tokens = 0
    blocks, found, _ = engine.of.get_computed_blocks(one)
    rest = one.num_tokens - found
    assert engine.of.allocate_slots(one, rest, found, blocks) is not None
    one.num_computed_tokens = found
    engine.step({"a": rest})
    new = engine.step({"a": 1})
    engine.of.draft_steps.take_outcome(old, sampled({"a": 4}))
    steps = engine.of.cache.sequence("a").steps
    assert steps is not None and len(steps.in_flight) == 1
    engine.of.draft_steps.take_outcome(new, sampled({"a": 1}))
    assert not steps.in_flight


def test_a_count_that_does_not_fit_is_refused(engine: Engine) -> None:
    engine.add("a")
    output = engine.step({"a": 1}, a=DRAFTS)
    with pytest.raises(ValueError, match="4 of 3 drafts"):
        engine.of.draft_steps.take_outcome(output, sampled({"a": 5}))


# --------------------------------------------------------------------- pressure


def test_speculation_narrows_before_anyone_is_refused_twice() -> None:
    """One refusal, one step without drafts, and the slots are the newcomer's."""
    engine = Engine(manager(pages=60, slots=5))
    engine.add("a")
    engine.take(engine.step({"a": 1}, a=DRAFTS), a=2)
    late = request("late", PROMPT, first=500)
    assert admit(engine.of, late, PROMPT) is None, "drafts hold all slots"
    verified = engine.step({"a": 1}, a=DRAFTS)
    assert verified.scheduled_spec_decode_tokens == {}, "the step is narrow"
    engine.take(verified, a=0)
    engine.of.draft_steps.lend([engine.requests["a"]], LOOKAHEAD)
    assert held(engine) == 0
    assert admit(engine.of, late, PROMPT) is not None
    engine.of.free(late)


def test_slots_are_kept_by_a_step_without_drafts_if_nobody_waits(
    engine: Engine,
) -> None:
    engine.add("a")
    engine.take(engine.step({"a": 1}, a=DRAFTS), a=1)
    engine.take(engine.step({"a": 1}), a=0)
    assert held(engine) == DRAFTS
    engine.end("a")
    assert nothing_kept(engine.of)


def test_columns_lent_again_are_written_again() -> None:
    engine = Engine(manager(pages=60, slots=5))
    engine.add("a")
    first = engine.step({"a": 1}, a=DRAFTS)
    engine.take(first, a=0)
    late = request("late", PROMPT, first=500)
    assert admit(engine.of, late, PROMPT) is None
    engine.take(engine.step({"a": 1}, a=DRAFTS), a=0)
    engine.of.draft_steps.lend([engine.requests["a"]], LOOKAHEAD)
    assert admit(engine.of, late, PROMPT) is not None
    engine.take(engine.step({"a": 1}), a=0)
    again = engine.step({"a": 1}, a=DRAFTS)
    assert again.rows["a"][0] == first.rows["a"][0]
    assert 1 <= len(again.rows["a"]) - 1 < DRAFTS


# ----------------------------------------------------------------- the scheduler


@pytest.fixture
def scheduler() -> Any:
    made = HybridScheduler.__new__(HybridScheduler)
    made.kv_cache_manager = manager(pages=40, slots=12)
    made.waiting = []
    made.requests = {}
    made.num_spec_tokens, made.num_lookahead_tokens = DRAFTS, LOOKAHEAD
    made._narrows_drafter = True
    return made


def test_the_scheduler_lends_notes_and_sends(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(scheduler.kv_cache_manager)
    one = engine.add("a")
    scheduler.requests, scheduler.running = {"a": one}, [one]
    one.spec_token_ids = [7, 8, 9]

    def schedule(self: Any) -> Any:
        assert len(self.kv_cache_manager.cache.sequence("a").drafts) == DRAFTS
        self.kv_cache_manager.allocate_slots(one, 1 + DRAFTS)
        one.num_computed_tokens += 1 + DRAFTS
        return SimpleNamespace(
            num_scheduled_tokens={"a": 1 + DRAFTS},
            scheduled_spec_decode_tokens={"a": one.spec_token_ids},
        )

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    taken: list[Any] = []
    monkeypatch.setattr(
        Scheduler, "update_from_output", lambda self, *outputs: taken.append(outputs)
    )
    output = scheduler.schedule()
    assert getattr(output, COMMANDS) == []
    assert len(getattr(output, ROWS)["a"]) == 1 + DRAFTS
    result = sampled({"a": 3})
    scheduler.update_from_output(output, result)
    assert taken == [(output, result)]
    assert scheduler.kv_cache_manager.cache.sequence("a").steps.final == PROMPT + 3


@pytest.mark.parametrize("narrows", [False, True])
def test_the_scheduler_narrows_the_drafter(
    scheduler: Any, narrows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before vLLM reads the number, for the placeholders of steps scheduled ahead."""
    engine = Engine(scheduler.kv_cache_manager)
    scheduler.requests = {"a": engine.add("a")}
    scheduler._narrows_drafter = narrows
    engine.of.cache.drafts._refused_now = True
    read: list[int] = []
    monkeypatch.setattr(
        Scheduler,
        "_update_after_schedule",
        lambda self, output: read.append(output.num_spec_tokens_to_schedule),
    )
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 1},
        scheduled_spec_decode_tokens={},
        num_spec_tokens_to_schedule=DRAFTS,
    )
    scheduler._update_after_schedule(output)
    assert read == [0 if narrows else DRAFTS]


def test_a_newcomer_is_not_padded_with_drafts(scheduler: Any) -> None:
    """vLLM drops the padding of a request whose hit leaves one token, if it is cut."""
    engine = Engine(scheduler.kv_cache_manager)
    engine.add("a")
    engine.end("a")
    late = request("late", PROMPT + 1)
    late.all_token_ids[-1] = 1000
    _, found, _ = scheduler.kv_cache_manager.get_computed_blocks(late)
    assert found == PROMPT
    assert scheduler._mamba_block_aligned_split(late, 1 + DRAFTS, found) == 1


def test_windows_are_trimmed_to_what_is_final(engine: Engine) -> None:
    one = engine.add("a")
    engine.step({"a": 1}, a=DRAFTS)
    assert one.num_computed_tokens == PROMPT + 4
    assert engine.of.draft_steps.final(one) == PROMPT + 1
