# SPDX-License-Identifier: Apache-2.0
"""Drafts in a simulation: steps saved, slots lent and given back, too little memory."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.tools.simulate.arrivals import Pace
from hybrid_plugin.tools.simulate.capacity import Capacity
from hybrid_plugin.tools.simulate.cost_model import Costs
from hybrid_plugin.tools.simulate.drafting import Drafting, Speculation
from hybrid_plugin.tools.simulate.job import Job
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.served_cache import PluginCache
from hybrid_plugin.tools.simulate.server import Server
from hybrid_plugin.tools.simulate.serving import serve
from tests.oneliners import fails_with_one_sentence, run_quietly
from tests.plan.configs import QWEN3_NEXT, write
from tests.simulate.traces import request, tokens

COSTS = Costs(
    pass_s=1.0,
    prefill_pass_s=2.0,
    prefill_token_s=0.25,
    prefill_pair_s=0.0,
    decode_sequence_s=0.5,
    kv_token_s=0.125,
    move_s=0.0,
)
ALL = Speculation(3, 4.0)
NONE = Speculation(3, 1.0)


def server(
    speculation: Speculation | None,
    slots: int | None = 40,
    pages: int = 200,
    **options: Any,
) -> Server:
    rules = HybridConfig().snapshot_policy(4)
    cache = Capacity(4, pages, slots).build(rules, LeastRecentlyUsed())
    drafting = None if speculation is None else Drafting(cache, speculation)
    return Server(PluginCache(cache), COSTS, drafting=drafting, **options)


def run(engine: Server, requests: Sequence[Request]) -> list[Job]:
    """All jobs, in the order of their arrivals; nothing is left behind."""
    jobs = sorted(serve(engine, requests, Pace()), key=lambda job: job.number)
    cache = engine.cache
    assert isinstance(cache, PluginCache)
    assert cache.cache.drafts_held == 0
    return jobs


def at(arrival: float, prompt: int, answer: int, start: int = 0) -> Request:
    return replace(
        request(tokens(start, start + prompt), answer=answer), arrival=arrival
    )


def drafting_of(engine: Server) -> Drafting:
    assert engine.drafting is not None
    return engine.drafting


# ----------------------------------------------------------------------- acceptance


@settings(deadline=None)
@given(st.integers(1, 8), st.floats(0, 1))
def test_the_chance_gives_the_length(drafts: int, share: float) -> None:
    length = 1 + share * drafts
    chance = Speculation(drafts, length).chance
    assert sum(chance**n for n in range(drafts + 1)) == pytest.approx(length, abs=1e-6)


@pytest.mark.parametrize("length", [0.9, 4.1, float("nan"), float("inf")])
def test_lengths_that_cannot_be_are_refused(length: float) -> None:
    with pytest.raises(ConfigError, match="from 1 to 4 with 3 drafts"):
        Speculation(3, length)


def test_a_long_run_has_the_length_that_was_asked_for() -> None:
    engine = server(Speculation(3, 2.5), pages=2000)
    run(engine, [at(0.0, 4, 4000)])
    found = drafting_of(engine)
    assert 1 + found.accepted / found.verifications == pytest.approx(2.5, abs=0.06)


# ------------------------------------------------------------------------ one by hand


def test_a_verification_by_hand() -> None:
    """A prefill, then 4 + 4 tokens: three drafts are one decode and a half more."""
    engine = server(ALL)
    (job,) = run(engine, [at(0.0, 8, 9)])
    prefill = 1 + 2 + 8 * 0.25
    first = 1 + 2.5 * 0.5 + 3 * 0.25 + 12 * 0.125
    second = 1 + 2.5 * 0.5 + 3 * 0.25 + 16 * 0.125
    assert job.first_token == prefill
    assert job.end == engine.now == prefill + first + second
    assert engine.work.passes == 3 and engine.work.prefill_passes == 1
    assert engine.work.decode_sequences == 5.0
    assert engine.work.prefill_tokens == 8 + 3 + 3
    assert drafting_of(engine).verifications == 2


def test_drafts_that_are_all_wrong_cost_and_save_nothing() -> None:
    plain, drafted = server(None), server(NONE)
    (without,) = run(plain, [at(0.0, 8, 9)])
    (with_them,) = run(drafted, [at(0.0, 8, 9)])
    assert plain.work.passes == drafted.work.passes == 9
    assert with_them.end - without.end == 8 * (1.5 * 0.5 + 3 * 0.25 + 3 * 0.125)
    assert drafting_of(drafted).accepted == 0


def test_an_answer_ends_where_it_ends() -> None:
    """Two tokens more are accepted than there are: the turn is exact all the same."""
    chat = [at(0.0, 8, 7), replace(at(0.0, 8, 3), arrival=500.0)]
    history = tokens(0, 8) + chat[0].answer
    chat[1] = replace(request(history + tokens(900, 905), answer=3), arrival=500.0)
    for speculation in (None, ALL, NONE):
        first, second = run(server(speculation), chat)
        assert first.generated == 7
        assert second.hit == len(history) - (1 if speculation is not ALL else 0)


def test_without_states_drafts_take_pages_alone() -> None:
    engine = server(ALL, slots=None)
    (job,) = run(engine, [at(0.0, 8, 9)])
    assert job.generated == 9 and engine.work.passes == 3
    assert drafting_of(engine).peak_slots == 0


# ---------------------------------------------------------------------------- memory


def test_each_sequence_holds_a_slot_a_draft() -> None:
    engine = server(ALL)
    run(engine, [at(0.0, 8, 40, 100 * n) for n in range(4)])
    assert drafting_of(engine).peak_slots == 4 * 3


def test_drafts_get_what_is_left() -> None:
    """Eight slots, four sequences: four drafts in all, and nobody waits."""
    engine = server(ALL, slots=8)
    jobs = run(engine, [at(0.0, 8, 40, 100 * n) for n in range(4)])
    assert drafting_of(engine).peak_slots == 4
    assert engine.peak_running == 4 and not any(job.waited for job in jobs)


def test_who_comes_gets_the_slots_of_drafts() -> None:
    """The first has all four slots; the others come, and none waits for its end."""
    requests = [at(0.0, 8, 200), *(at(9.0, 8, 200, 100 * n) for n in (1, 2, 3))]
    engine = server(ALL, slots=4)
    jobs = run(engine, requests)
    assert engine.peak_running == 4
    assert drafting_of(engine).peak_slots == 3
    assert drafting_of(engine).narrowed > 0
    assert max(job.admitted for job in jobs) < min(job.end for job in jobs)


def test_what_a_pass_has_no_room_for_is_not_verified() -> None:
    engine = server(ALL, chunk=6)
    jobs = run(engine, [at(0.0, 4, 30, 100 * n) for n in range(2)])
    assert [job.generated for job in jobs] == [30, 30]


def test_drafts_end_no_answer_that_is_alone() -> None:
    """As long as without them: the last page has room for one token, not for four."""
    (without,) = run(server(None, pages=3, slots=8), [at(0.0, 8, 100)])
    (drafted,) = run(server(ALL, pages=3, slots=8), [at(0.0, 8, 100)])
    assert without.generated == drafted.generated == 5


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.integers(8, 24),
    st.one_of(st.none(), st.integers(2, 12)),
    st.floats(1, 4),
)
def test_any_traffic_is_served_to_its_end(
    seed: int, pages: int, slots: int | None, length: float
) -> None:
    rng = random.Random(seed)
    requests = [
        at(rng.uniform(0, 60), rng.randint(1, 12), rng.randint(1, 12), 20 * n % 100)
        for n in range(12)
    ]
    engine = server(Speculation(3, length), slots=slots, pages=pages)
    for job in run(engine, requests):
        assert job.generated == job.answer
    again = server(Speculation(3, length), slots=slots, pages=pages)
    run(again, requests)
    assert again.work == engine.work and again.now == engine.now


def test_whatever_is_lent_the_same_drafts_are_right() -> None:
    """The tokens of a pass depend on its drafts alone, not on who runs beside."""
    alone = server(Speculation(3, 2.5))
    run(alone, [at(0.0, 8, 50)])
    beside = server(Speculation(3, 2.5))
    jobs = run(beside, [at(0.0, 8, 50), at(0.0, 8, 50, 100)])
    assert alone.work.decode_sequences > 0
    assert jobs[0].generated == 50
    first = drafting_of(alone)
    assert first.accepted <= drafting_of(beside).accepted


# --------------------------------------------------------------------------- scratch

SCRATCH = Speculation(3, 4.0, scratch=True)


def test_a_scratch_takes_no_slots_and_a_copy_more() -> None:
    engine = server(SCRATCH, slots=4)
    jobs = run(engine, [at(0.0, 8, 9, 100 * n) for n in range(4)])
    assert [job.generated for job in jobs] == [9] * 4
    assert drafting_of(engine).peak_slots == drafting_of(engine).narrowed == 0
    assert engine.work.passes == 3
    assert engine.work.decode_sequences == 4 * 2 * (1 + 1 + 3 / 2)


def test_a_scratch_has_a_row_a_sequence_and_one_for_padding() -> None:
    assert SCRATCH.scratch_bytes(48, 100) == 49 * 4 * 100
    assert ALL.scratch_bytes(48, 100) == 0


def test_turns_from_a_scratch_end_where_they_end() -> None:
    first = at(0.0, 8, 7)
    history = tokens(0, 8) + first.answer
    goes_on = replace(request(history + tokens(900, 905), answer=3), arrival=500.0)
    _, second = run(server(SCRATCH), [first, goes_on])
    assert second.hit == len(history)


# ---------------------------------------------------------------------- command line

SMALL = ("--requests", "40", "--concurrency", "4", "--json")


def simulate(*flags: str) -> dict[str, Any]:
    status, out, error = run_quietly(["simulate", *SMALL, *flags])
    assert (status, error) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_command_tells_what_became_of_drafts() -> None:
    plain, drafted = simulate(), simulate("--drafts", "3", "--acceptance", "2.5")
    assert plain["drafts"] is None
    found = drafted["drafts"]
    assert found["peak_slots"] == 12 and found["turn_ends_missed"] == 0
    assert 1 + found["accepted"] / found["verifications"] == pytest.approx(2.5, abs=0.2)
    assert drafted["times"]["wall"] < plain["times"]["wall"]
    # There is room for everything, so nothing that drafts hold is missed.
    assert abs(drafted["hit_rate"] - plain["hit_rate"]) < 0.01


def test_drafts_are_part_of_the_text() -> None:
    flags = ["simulate", "--requests", "20", "--drafts", "2", "--acceptance", "3"]
    status, out, _ = run_quietly(flags)
    assert status == 0
    assert "3.00 tokens each" in out and "turn ends missed   0" in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--drafts", "3"), "--drafts and --acceptance go together"),
        (("--acceptance", "2"), "--drafts and --acceptance go together"),
        (("--drafts", "0", "--acceptance", "1"), "--drafts must lie between 1"),
        (("--drafts", "3", "--acceptance", "4.5"), "from 1 to 4 with 3 drafts"),
        (("--draft-states", "scratch"), "needs --drafts, and --gpu-memory"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    flags: tuple[str, ...], sentence: str
) -> None:
    fails_with_one_sentence(["simulate", *flags], sentence)


def test_the_others_know_no_drafts(tmp_path: Path) -> None:
    model = write(tmp_path, QWEN3_NEXT)
    flags = ["--gpu-memory", "200GiB", "--model-config", str(model), "--compare"]
    fails_with_one_sentence(
        ["simulate", *flags, "--drafts", "3", "--acceptance", "2"],
        "without drafts: leave --drafts out",
    )


def test_a_scratch_takes_memory_from_the_pools(tmp_path: Path) -> None:
    model = write(tmp_path, QWEN3_NEXT)
    flags = ["--gpu-memory", "200GiB", "--no-elastic", "--model-config", str(model)]
    drafts = ["--drafts", "3", "--acceptance", "2.5"]
    slots = simulate(*flags, *drafts)
    scratch = simulate(*flags, *drafts, "--draft-states", "scratch")
    assert scratch["drafts"]["peak_slots"] == 0
    for kind in ("pages", "slots"):
        assert scratch["capacity"][kind] < slots["capacity"][kind]
