# SPDX-License-Identifier: Apache-2.0
"""Traffic, arrivals and tables of the benchmark with few requests at a time."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.low_load import table
from benchmarks.low_load.arrivals import at_times, poisson, so_many_at_a_time
from benchmarks.low_load.cells import CLOSED, POISSON, Cell, cells
from benchmarks.low_load.observed import Observed, of_passes
from benchmarks.low_load.traffic import ANSWERS, PLANS, TURNS, Conversation, Turn
from benchmarks.passes.log import Pass
from benchmarks.prefix_workloads import Reply

PLUGIN = "plugin, ours kernels, "


def reply(prompt: Sequence[int], max_tokens: int) -> Reply:
    """An answer of the right length."""
    return Reply((7,) * max_tokens, len(prompt), 0, 0.0)


# ------------------------------------------------------------------------ arrivals


@settings(deadline=None)
@given(st.integers(1, 200), st.floats(0.1, 50), st.integers())
def test_arrivals_are_seeded_and_in_order(count: int, rate: float, seed: int) -> None:
    times = poisson(random.Random(seed), rate, count)
    assert times == poisson(random.Random(seed), rate, count)
    assert len(times) == count and times[0] == 0 and times == sorted(times)


def test_gaps_of_arrivals_are_exponential_at_the_rate() -> None:
    times = poisson(random.Random(1), 4.0, 20_001)
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 4, rel=0.03)
    # The standard deviation of an exponential distribution is its mean.
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.03)


def test_conversations_begin_at_their_times_whatever_runs() -> None:
    begun: list[int] = []

    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        begun.append(prompt[0])
        await asyncio.sleep(0.05)
        return reply(prompt, max_tokens)

    plan = [(Turn((n,), 1),) for n in range(3)]
    asyncio.run(at_times(ask, plan, [0.02, 0.0, 0.01]))
    assert begun == [1, 2, 0]


def test_no_more_than_so_many_are_held_at_a_time() -> None:
    running: list[int] = []
    now = 0

    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        nonlocal now
        now += 1
        running.append(now)
        await asyncio.sleep(0)
        now -= 1
        return reply(prompt, max_tokens)

    plan = [(Turn((n,), 1),) * 2 for n in range(9)]
    replies = asyncio.run(so_many_at_a_time(ask, plan, 3))
    assert max(running) == 3 and len(replies) == 18


def test_a_turn_contains_all_that_was_said() -> None:
    prompts: list[list[int]] = []

    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        prompts.append(list(prompt))
        return reply(prompt, max_tokens)

    plan = [(Turn((1, 2), 2), Turn((3,), 1))]
    asyncio.run(so_many_at_a_time(ask, plan, 1))
    assert prompts == [[1, 2], [1, 2, 7, 7, 3]]


# ------------------------------------------------------------------------- traffic


def prompts_of(plan: Sequence[Conversation]) -> list[list[int]]:
    """What is asked, if answers come from a source that never repeats."""
    fresh, found = iter(range(10**6, 10**8)), []
    for conversation in plan:
        said: list[int] = []
        for turn in conversation:
            said = [*said, *turn.tokens]
            found.append(said)
            said = [*said, *(next(fresh) for _ in range(turn.answer))]
    return found


def shared_share(prompts: Sequence[Sequence[int]]) -> float:
    """The share of tokens that an earlier prompt began with, answers left out."""
    seen: set[tuple[int, ...]] = set()
    shared = 0
    for prompt in prompts:
        prefix = 0
        while prefix < len(prompt) and tuple(prompt[: prefix + 1]) in seen:
            prefix += 1
        shared += prefix
        seen |= {tuple(prompt[: n + 1]) for n in range(len(prompt))}
    return shared / sum(map(len, prompts))


@pytest.mark.parametrize("name", PLANS)
def test_plans_share_at_least_half_or_nothing(name: str) -> None:
    plan = Cell(name, 2, POISSON).conversations(random.Random(3), 20, 0.2)
    share = shared_share(prompts_of(plan))
    # Chats share their answers too, which this does not count.
    assert share == 0 if name == "nothing shared" else share > 0.5, share


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_seeded_and_rounds_and_cells_share_nothing(name: str) -> None:
    def first(cell: Cell, seed: int) -> Conversation:
        return cell.conversations(random.Random(seed), 8, 1.0)[0]

    cell = Cell(name, 2, POISSON)
    assert first(cell, 0) == first(cell, 0)
    others = [first(cell, 1), first(cell.closed, 0), first(Cell(name, 4, POISSON), 0)]
    for other in others:
        assert other[0].tokens[:8] != first(cell, 0)[0].tokens[:8]


def test_answers_differ_in_length() -> None:
    plan = Cell("document", 2, POISSON).conversations(random.Random(0), 200, 1.0)
    lengths = [conversation[0].answer for conversation in plan]
    shortest, longest = ANSWERS
    assert shortest <= min(lengths) < 20 and 110 < max(lengths) <= longest
    assert statistics.median(lengths) < (shortest + longest) / 2


@pytest.mark.parametrize("requests", [1, 4, 20, 21])
def test_chats_have_whole_numbers_of_turns(requests: int) -> None:
    plan = PLANS["chats"](random.Random(0), requests, 1.0)
    assert {len(chat) for chat in plan} == {TURNS}
    assert requests <= TURNS * len(plan) < requests + TURNS


def test_cells_have_names_that_lead_back() -> None:
    found = cells(list(PLANS), (2, 4), (POISSON, CLOSED))
    assert len({cell.name for cell in found}) == len(found) == 4 * len(PLANS)
    assert [Cell.named(cell.name) for cell in found] == found


# ------------------------------------------------------------------------ what is told


def test_requests_that_run_are_counted_on_average() -> None:
    async def slow(prompt: Sequence[int], max_tokens: int) -> Reply:
        await asyncio.sleep(0.02)
        return reply(prompt, max_tokens)

    observed = Observed(Cell("document", 3, CLOSED).workload(9, 0.01, 0.0))
    asyncio.run(observed.run(slow, random.Random(0)))
    told = observed.summary()
    assert told["requests"] == 9
    assert told["running"] == pytest.approx(3, rel=0.3)
    assert told["request_ms_p50"] >= 20


def test_passes_are_summed_by_kind() -> None:
    passes = [
        Pass(0.0, 0.01, 0.10, prefill_tokens=100, prefills=1, decodes=0),
        Pass(0.05, 0.06, 0.15, prefill_tokens=50, prefills=2, decodes=3),
        Pass(0.20, 0.21, 0.23, prefill_tokens=0, prefills=0, decodes=4),
    ]
    told = of_passes(passes)
    assert told["prefill"] == {
        "passes": 2,
        "tokens": 153,
        "launch_s": 0.02,
        "busy_s": 0.15,
        "launch_ms_p50": 10.0,
        "result_ms_p50": 100.0,
    }
    assert told["decode"]["passes"] == 1 and told["decode"]["tokens"] == 4
    assert told["decode"]["busy_s"] == 0.03
    assert of_passes([])["decode"]["result_ms_p50"] == 0


# -------------------------------------------------------------------------- tables


def one_round(seed: int, ms: float, prefills: int = 4) -> dict[str, Any]:
    """What an engine tells of a cell."""
    kind = {
        "tokens": 40,
        "busy_s": 1.0,
        "launch_s": 0.1,
        "launch_ms_p50": 1.0,
        "result_ms_p50": 2.0,
    }
    return {
        "seed": seed,
        "prompt_tokens": 200,
        "cached_tokens": 100,
        "ttft_ms_p50": ms,
        "ttft_ms_p95": 2 * ms,
        "request_ms_mean": 3 * ms,
        "running": 2.0,
        "requests": 4,
        "wall_s": 1.0,
        "failed": 0,
        "passes": {
            "prefill": kind | {"passes": prefills},
            "decode": kind | {"passes": 8},
        },
    }


def sides(**found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results of one cell."""
    return {
        name.replace("_", " "): {"workloads": {"cell": list(rounds)}}
        for name, rounds in found.items()
    }


def test_ratios_are_of_rounds_with_the_same_contents() -> None:
    ours = [one_round(0, 10), one_round(2, 90)]
    theirs = [one_round(2, 100), one_round(0, 40), one_round(1, 1)]
    value = table.COMPARED["TTFT p50"]
    assert table.ratio(ours, theirs, value) == pytest.approx((0.25 + 0.9) / 2)
    assert table.ratio(ours, [one_round(5, 1)], value) is None


def test_the_best_stock_setting_is_found_for_each_number() -> None:
    results = sides(
        stock_a=[one_round(0, 10, prefills=9)], stock_b=[one_round(0, 20, prefills=5)]
    ) | {PLUGIN + "fixed": {"workloads": {"cell": [one_round(0, 1, prefills=1)]}}}
    ttft, passes = table.COMPARED["TTFT p50"], table.COMPARED["prefill passes"]
    assert table.best_stock(results, "cell", ttft) == "stock a"
    assert table.best_stock(results, "cell", passes) == "stock b"
    assert table.best_stock({}, "cell", ttft) is None


def test_the_table_has_ratios_to_stock_and_to_fixed_pools() -> None:
    results = sides(stock=[one_round(0, 40)]) | {
        PLUGIN + "elastic": {"workloads": {"cell": [one_round(0, 20, prefills=2)]}},
        PLUGIN + "fixed": {"workloads": {"cell": [one_round(0, 25)]}},
        "lost": {"failed": True},
        "dead": {"workloads": {}, "died in": "cell"},
    }
    text = table.table(results)
    rows = [line for line in text.splitlines() if line.startswith("| cell | plugin")]
    elastic = rows[-2].strip("| ").split(" | ")
    # TTFT p50, p95, request, wall, all passes (10 of 12), prefill passes (2 of 4).
    assert elastic[2:8] == ["0.50x", "0.50x", "0.50x", "1.00x", "0.83x", "0.50x"]
    assert elastic[8:12] == ["0.80x", "0.80x", "0.80x", "1.00x"]
    assert "lost: its engine did not start." in text
    assert "dead: its engine died in `cell`." in text


def test_quartiles_are_given_where_there_are_enough_rounds() -> None:
    assert table.spread([1, 2, 9], 0) == "2"
    assert table.spread([1, 2, 3, 4, 5], 1) == "3.0 (2.0-4.0)"
