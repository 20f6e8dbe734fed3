# SPDX-License-Identifier: Apache-2.0
"""Host memory in a simulation: what comes back, when, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.commands import Await, Load, Pool, Zero
from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup
from hybrid_plugin.core.policy.costs import PASS_TOKENS
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.tools.simulate.agentic import AgenticStream
from hybrid_plugin.tools.simulate.arrivals import Pace
from hybrid_plugin.tools.simulate.capacity import Capacity
from hybrid_plugin.tools.simulate.cost_model import CostModel, Costs
from hybrid_plugin.tools.simulate.host_link import HostLink
from hybrid_plugin.tools.simulate.outcome import Outcome
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.simulation import Serving, Simulation
from tests.oneliners import fails_with_one_sentence, run_quietly
from tests.plan.configs import QWEN3_NEXT, write
from tests.simulate.test_command import SMALL, simulate
from tests.simulate.traces import request, tokens

KIB = 1 << 10
LAYOUT = CacheLayout(
    page_size=16,
    attention=(AttentionGroup(("a",), 16 * KIB),),
    states=(StateGroup(("s",), 64 * KIB),),
)
COSTS = Costs(
    pass_s=1.0,
    prefill_pass_s=0.0,
    prefill_token_s=0.25,
    prefill_pair_s=0.0,
    decode_sequence_s=0.5,
    kv_token_s=0.0,
    move_s=0.0,
)
ONE_BY_ONE = Pace(concurrency=1)


def simulation(
    requests: list[Request],
    *,
    device: int = 1 << 20,
    host: int | None = 16 << 20,
    bandwidth: float = 1e9,
    pace: Pace = ONE_BY_ONE,
) -> Simulation:
    """On fixed pools."""
    options = HybridConfig(elastic=False, host_memory=host)
    return Simulation(
        Capacity.of_layout(LAYOUT, device, requests, 512, options=options),
        options.snapshot_policy(16),
        serving=Serving(
            pace, CostModel("m", "n", "by hand", COSTS), chunk=512, max_running=4
        ),
        host_bandwidth=bandwidth,
    )


def run(requests: list[Request], **more: Any) -> Outcome:
    return simulation(requests, **more).run(requests)


def coming_back(others: int = 6) -> list[Request]:
    """A prompt, others, and the prompt with more behind it, all of 480 tokens."""
    first = request(tokens(0, 480), answer=1)
    between = [
        request(tokens(1000 * n, 1000 * n + 480), answer=1)
        for n in range(1, others + 1)
    ]
    return [first, *between, request(tokens(0, 500), answer=1)]


# ------------------------------------------------------------------------ the link

PLAN = HostPlan({Pool.KV: 100, Pool.STATE: 1000}, 1000, 50)


def link(bandwidth: float = 1000.0) -> HostLink:
    return HostLink(PLAN, TransferRates(bandwidth))


def load(count: int, ticket: int, pool: str = Pool.KV) -> Load:
    ids = tuple(range(1, count + 1))
    return Load(pool, ids, ids, ticket)


def test_a_pass_waits_until_its_loads_are_over() -> None:
    """300 and 1000 bytes, by 1000 a second."""
    copies = link()
    copies.take([Zero(Pool.KV, (1,)), load(3, 1), load(1, 1, Pool.STATE)], 10.0)
    assert copies.ready == 0.0
    copies.take([Await(1)], 10.5)
    assert copies.ready == pytest.approx(11.3)


def test_loads_follow_each_other() -> None:
    copies = link()
    copies.take([load(5, 1), load(2, 2)], 10.0)
    copies.take([Await(2)], 10.1)
    assert copies.ready == pytest.approx(10.7)
    copies.take([Await(1), load(1, 3), Await(3)], 20.0)
    assert copies.ready == pytest.approx(20.1)


def test_the_cache_learns_what_prefills_take() -> None:
    rates = TransferRates(1.0)
    copies = HostLink(PLAN, rates)
    copies.measure(0, 5.0)
    assert rates.prefill_seconds_per_token is None
    copies.measure(976, 2000.0)
    assert rates.prefill_seconds_per_token == 2000 / 976, "at most"
    copies.measure(2976, 4000.0)
    assert rates.prefill_seconds_per_token == 4000 / (2976 + PASS_TOKENS)


# ---------------------------------------------------------------------- simulation


def test_what_was_evicted_comes_back() -> None:
    """The device holds 1 MiB, and each prompt has half of that."""
    requests = coming_back()
    alone, found = run(requests, host=None), run(requests)
    assert alone.host is None and alone.hit_tokens == 0
    assert found.host is not None
    assert found.hit_tokens == found.host.stats.hit_tokens == 480
    assert found.host.stats.loads == 1
    assert found.host.stats.loaded_bytes == 480 * KIB + 64 * KIB
    assert found.host.stats.stores == len(requests)


def test_loads_take_their_time_and_no_more() -> None:
    """Nothing else runs: the pass waits for all of the load, 544 KiB."""
    requests = coming_back()
    fast, slow = run(requests, bandwidth=1e12), run(requests, bandwidth=544 * KIB / 3)
    assert fast.times is not None and slow.times is not None
    assert fast.hit_tokens == slow.hit_tokens == 480
    assert slow.times.wall - fast.times.wall == pytest.approx(3.0, rel=1e-3)


def test_what_would_come_back_later_than_it_is_computed_is_computed() -> None:
    requests = coming_back()
    slow = run(requests, bandwidth=544 * KIB / 300)
    assert slow.host is not None and slow.host.stats.loads == 0
    assert slow.hit_tokens == 0
    without = run(requests, host=None)
    assert slow.times == without.times


def test_a_host_that_is_too_small_has_forgotten() -> None:
    small = run(coming_back(12), host=1 << 20)
    assert small.host is not None and small.hit_tokens == 0
    assert small.host.memory_bytes <= 1 << 20


@pytest.mark.parametrize("concurrency", [1, 6, 20])
def test_with_room_for_all_hits_are_those_of_a_large_device(concurrency: int) -> None:
    stream = AgenticStream(
        120, 3, 200, 5, 400, sessions_at_once=20, longest_message=900
    )
    requests = stream.generate(seed=3)
    pace = Pace(concurrency=concurrency)
    longest = max(one.length + len(one.answer) for one in requests)
    device = 4 * (longest * KIB + 128 * KIB)
    small = run(requests, device=device, host=None, pace=pace)
    hosted = run(requests, device=device, host=1 << 30, bandwidth=1e15, pace=pace)
    large = run(requests, device=1 << 30, host=None, pace=pace)
    assert small.hit_tokens < 0.97 * large.hit_tokens
    assert hosted.hit_tokens > 0.99 * large.hit_tokens
    assert hosted.too_long == 0


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 1000),
    concurrency=st.integers(1, 12),
    host=st.sampled_from([1 << 20, 4 << 20, 64 << 20]),
    bandwidth=st.sampled_from([1e5, 1e6, 1e9]),
)
def test_every_request_is_served(
    seed: int, concurrency: int, host: int, bandwidth: float
) -> None:
    stream = AgenticStream(40, 2, 100, 3, 150, sessions_at_once=8, longest_message=300)
    requests = stream.generate(seed)
    longest = max(one.length + len(one.answer) for one in requests)
    simulated = simulation(
        requests,
        device=2 * (longest * KIB + 256 * KIB),
        host=host,
        bandwidth=bandwidth,
        pace=Pace(concurrency=concurrency),
    )
    found, again = simulated.run(requests), simulated.run(requests)
    assert found.too_long == 0 and found.host is not None
    assert found.measured_requests == len(requests)
    stats = found.host.stats
    assert stats.hit_tokens <= min(found.hit_tokens, stats.queried_tokens)
    assert (stats.loaded_bytes > 0) == (stats.loads > 0)
    assert replace(found, seconds=0.0) == replace(again, seconds=0.0)


# ------------------------------------------------------------------------ commands


def model(folder: Path) -> tuple[str, ...]:
    config = write(folder, QWEN3_NEXT)
    return ("--model-config", str(config), "--gpu-memory", "4GB", "--weights", "1GB")


HOST = ("--host-memory", "8GB", "--host-bandwidth", "50")


def test_the_flag_is_the_option(tmp_path: Path) -> None:
    flags = (*model(tmp_path), "--concurrency", "4", *SMALL)
    found = simulate(*flags, *HOST)
    option = json.dumps({"host_memory": "8GB"})
    same = simulate(*flags, "--hybrid-config", option, *HOST[2:])
    assert found["host"] == same["host"]
    assert found["host"]["memory_bytes"] <= 8 * 10**9
    assert found["host"]["stats"]["hit_tokens"] > 0
    assert found["hit_tokens"] > simulate(*flags)["hit_tokens"]


def test_the_text_says_what_came_back(tmp_path: Path) -> None:
    flags = ["simulate", *model(tmp_path), *HOST, *SMALL[:2]]
    status, out, _ = run_quietly(flags)
    assert status == 0
    assert "\nhost memory        7." in out and "tokens that the device lacked\n" in out
    assert "\ncopies " in out


def test_the_bound_counts_the_host_too(tmp_path: Path) -> None:
    flags = (*model(tmp_path), *SMALL, "--bound")
    small, hosted = simulate(*flags), simulate(*flags, *HOST)
    assert hosted["bound_hit_tokens"] >= small["bound_hit_tokens"]
    assert hosted["hit_tokens"] <= hosted["bound_hit_tokens"]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    flags = ("simulate", *model(tmp_path), *SMALL)
    together = "--host-memory and --host-bandwidth go together: "
    fails_with_one_sentence([*flags, *HOST[:2]], together)
    fails_with_one_sentence([*flags, *HOST[2:]], together)
    fails_with_one_sentence(
        [*flags, *HOST[:3], "0"], "--host-bandwidth must be more than 0, got 0."
    )
    fails_with_one_sentence(
        ["simulate", *HOST, *SMALL], "host_memory needs --gpu-memory"
    )
    fails_with_one_sentence(
        [*flags, "--host-memory", "1MB", *HOST[2:]], "host_memory is too little: "
    )
    fails_with_one_sentence(
        [*flags, *HOST, "--kv-only"], "host_memory needs a model with state layers"
    )
    measured = tmp_path / "m.json"
    measured.write_text("{}")
    fails_with_one_sentence(
        [*flags, *HOST, "--calibrate", str(measured)], "--calibrate fits what passes"
    )


def test_plan_recommends_settings_with_host_memory(tmp_path: Path) -> None:
    """Prompts that come back after others have filled the device."""
    lines = [
        json.dumps({"prompt": [chat] * 16 + list(range(turn, 4000)), "answer": [7]})
        for turn in (0, 0)
        for chat in range(12)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    flags = ["plan", *model(tmp_path)[:3], "2GB", *model(tmp_path)[4:]]
    plan = [*flags, "--trace", str(trace)]
    status, out, error = run_quietly([*plan, "--json"])
    assert (status, error) == (0, "")
    without = json.loads(out)["recommended"]
    status, out, error = run_quietly([*plan, *HOST, "--json"])
    assert (status, error) == (0, "")
    found = json.loads(out)["recommended"]
    assert (without["host_memory"], found["host_memory"]) == (None, 8 * 10**9)
    best, alone = (
        max(one["hit_rate"] for one in of["settings"]) for of in (found, without)
    )
    assert best > alone
    assert found["stock"] == without["stock"]
    status, out, _ = run_quietly([*plan, *HOST])
    assert status == 0 and '"host_memory": 8000000000' in out
    fails_with_one_sentence([*plan, *HOST[:2]], "--host-memory and --host-bandwidth")
    fails_with_one_sentence([*flags, *HOST[2:]], "--host-bandwidth says how a trace is")
