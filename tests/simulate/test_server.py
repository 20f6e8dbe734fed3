# SPDX-License-Identifier: Apache-2.0
"""Virtual time by hand, and what passes do with queues and memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.memory.attention_windows import FULL_ATTENTION, SlidingWindow
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.tools.simulate.agentic import AgenticStream
from hybrid_plugin.tools.simulate.arrivals import Pace
from hybrid_plugin.tools.simulate.attention_reach import AttentionReach
from hybrid_plugin.tools.simulate.capacity import Capacity
from hybrid_plugin.tools.simulate.cost_model import Costs, Work
from hybrid_plugin.tools.simulate.job import Job
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.served_cache import PluginCache
from hybrid_plugin.tools.simulate.server import Server
from hybrid_plugin.tools.simulate.serving import serve
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
AT_ONCE = Pace()


def server(
    pages: int = 100, slots: int | None = None, page_size: int = 4, **options: Any
) -> Server:
    capacity = Capacity(page_size, pages, slots)
    rules = HybridConfig().snapshot_policy(page_size)
    cache = capacity.build(rules, LeastRecentlyUsed())
    return Server(PluginCache(cache), COSTS, **options)


def run(engine: Server, requests: Sequence[Request], pace: Pace = AT_ONCE) -> list[Job]:
    """All jobs, in the order of their arrivals."""
    return sorted(serve(engine, requests, pace), key=lambda job: job.number)


def at(arrival: float, prompt: int, answer: int, start: int = 0) -> Request:
    return replace(
        request(tokens(start, start + prompt), answer=answer), arrival=arrival
    )


class TestTime:
    def test_a_prefill_and_two_decodes(self) -> None:
        engine = server(history=[])
        (job,) = run(engine, [at(3.0, 8, 3)])
        prefill = 1 + 2 + 8 * 0.25
        decodes = (1 + 0.5 + 9 * 0.125) + (1 + 0.5 + 10 * 0.125)
        assert (job.arrival, job.admitted) == (3.0, 3.0)
        assert job.first_token == 3 + prefill
        assert job.end == 3 + prefill + decodes == engine.now
        pairs = engine.work.prefill_pairs
        assert engine.work == Work(3, 1, 8, pairs, 2, 9 + 10)
        assert pairs == 8 * 8 / 2

    def test_who_comes_in_a_pass_is_served_after_the_next_one(self) -> None:
        """The first prefill lasts from 0 to 5; then one decode is scheduled already."""
        first, second = run(server(), [at(0.0, 8, 9), at(1.0, 4, 1, start=100)])
        assert first.first_token == 5.0
        assert second.admitted == 5.0 + 1 + 0.5 + 9 * 0.125
        together = 1 + 2 + 4 * 0.25 + 0.5 + 10 * 0.125
        assert second.first_token == second.end == second.admitted + together

    def test_a_prompt_is_computed_in_chunks(self) -> None:
        engine = server(chunk=8)
        (job,) = run(engine, [at(0.0, 20, 1)])
        assert job.steps == 3
        assert engine.now == 3 * (1 + 2) + 20 * 0.25

    def test_one_that_comes_alone_is_served_at_once(self) -> None:
        jobs = run(server(), [at(0.0, 4, 1), at(50.0, 4, 1, start=100)])
        assert [job.admitted for job in jobs] == [0.0, 50.0]

    def test_windows_are_read_by_their_share(self) -> None:
        shares = ((FULL_ATTENTION, 0.25), (SlidingWindow(10), 0.75))
        reach = AttentionReach(shares)
        assert reach.read(4) == 4
        assert reach.read(100) == 0.25 * 100 + 0.75 * 10
        assert reach.pairs(0, 100) < AttentionReach().pairs(0, 100) == 5000
        assert AttentionReach(()).read(9) == AttentionReach(()).pairs(1, 9) == 0


class TestQueue:
    def test_no_more_than_may_run(self) -> None:
        requests = [at(0.0, 4, 2, start=100 * n) for n in range(3)]
        engine = server(max_running=2)
        jobs = run(engine, requests)
        assert engine.peak_running == 2
        assert [job.waited for job in jobs] == [False, False, True]
        assert jobs[2].admitted == jobs[0].end == jobs[1].end

    def test_without_room_the_head_of_the_queue_waits(self) -> None:
        """Six pages: the first two hold five, and the last one could have run."""
        requests = [at(0.0, 12, 2), at(0.0, 8, 8, 100), at(0.0, 8, 2, 200)]
        jobs = run(server(pages=6), [*requests, at(0.0, 4, 1, 300)])
        assert [job.waited for job in jobs] == [False, False, True, False]
        assert jobs[2].admitted >= jobs[0].end
        assert jobs[3].admitted >= jobs[2].admitted

    def test_the_last_one_makes_way_and_goes_on_later(self) -> None:
        """Both grow to five pages, of eight; the second one is preempted once."""
        requests = [at(0.0, 8, 12, 100 * n) for n in range(2)]
        engine = server(pages=8, slots=6)
        first, second = run(engine, requests)
        assert engine.preemptions == 1
        assert (first.generated, second.generated) == (12, 12)
        assert first.end < second.end
        assert first.steps == 1 and second.steps == 2
        # Its 17 tokens were evicted for the first one.
        assert engine.work.prefill_tokens == 8 + 8 + 17

    def test_who_made_way_is_served_before_those_behind(self) -> None:
        """The third one would fit beside the first, but comes after the second."""
        requests = [at(0.0, 8, 12, 100 * n) for n in range(2)]
        engine = server(pages=8, slots=6, max_running=2)
        first, _, third = run(engine, [*requests, at(0.0, 4, 1, 300)])
        assert engine.preemptions == 1
        assert third.admitted >= first.end

    def test_an_answer_without_room_ends_early(self) -> None:
        (job,) = run(server(pages=3), [at(0.0, 8, 100)])
        assert job.end < inf and job.generated == 12 - 8 + 1

    def test_what_never_fits_is_let_go(self) -> None:
        jobs = run(server(pages=3), [at(0.0, 100, 1), at(0.0, 6, 1)])
        assert [job.hit for job in jobs] == [None, 0]
        assert jobs[0].end == inf

    def test_a_prefix_that_another_one_computes_is_waited_for(self) -> None:
        """Without waiting, both compute the whole of it."""
        shared = tokens(0, 400)
        both = [request(shared + tokens(n, n + 40)) for n in (1000, 2000)]
        follow = server(pages=500, slots=9, page_size=16)
        jobs = run(follow, both)
        assert [job.hit for job in jobs] == [0, 400]
        assert follow.work.prefill_tokens == 440 + 40
        alone = Capacity(16, 500, 9).build(
            HybridConfig(in_batch_prefix_min_tokens=0).snapshot_policy(16),
            LeastRecentlyUsed(),
        )
        engine = Server(PluginCache(alone), COSTS)
        assert [job.hit for job in run(engine, both)] == [0, 0]


class TestPace:
    def test_a_turn_comes_its_pause_after_the_answer(self) -> None:
        first = replace(at(2.0, 8, 3), key=7)
        goes_on = replace(at(0.0, 12, 1, 100), after=7, pause=30.0)
        one, two = run(server(), [first, goes_on])
        assert two.arrival == one.end + 30.0 == two.admitted

    def test_so_many_clients(self) -> None:
        requests = [at(0.0, 4, 2, 100 * n) for n in range(5)]
        jobs = run(server(), requests, Pace(concurrency=2))
        assert [job.arrival for job in jobs[:2]] == [0.0, 0.0]
        assert jobs[2].arrival == jobs[3].arrival == jobs[0].end == jobs[1].end
        assert jobs[4].arrival == jobs[2].end

    def test_a_client_with_a_place_sends_when_a_request_is_due(self) -> None:
        """In the middle of a pass, not at its end."""
        requests = [at(0.0, 40, 2), at(1.5, 4, 2, 100)]
        jobs = run(server(), requests, Pace(concurrency=2))
        assert jobs[1].arrival == 1.5

    def test_a_poisson_process(self) -> None:
        requests = [at(5.0, 4, 1, 10 * n) for n in range(2000)]
        engine = server(pages=20_000)
        engine.costs = Costs(1e-6, 0, 0, 0, 0, 0, 0)
        times = [job.arrival for job in run(engine, requests, Pace(rate=4.0, seed=3))]
        assert times == sorted(times)
        assert times[-1] == pytest.approx(2000 / 4, rel=0.1)
        again = run(server(pages=20_000), requests[:9], Pace(rate=4.0, seed=3))
        assert [job.arrival for job in again] == times[:9]


class TestJumps:
    """Passes taken together give what they give one by one."""

    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 999),
        pages=st.integers(40, 400),
        slots=st.none() | st.integers(3, 30),
        concurrency=st.integers(1, 12),
        max_running=st.integers(1, 8),
    )
    def test_one_by_one(
        self,
        seed: int,
        pages: int,
        slots: int | None,
        concurrency: int,
        max_running: int,
    ) -> None:
        stream = AgenticStream(
            requests=25,
            system_tokens=60,
            document_tokens=80,
            message_tokens=20,
            longest_message=90,
            answer_tokens=12,
            sessions_at_once=6,
        )
        requests = stream.generate(seed)
        found = []
        for jumps in (True, False):
            engine = server(
                pages, slots, page_size=8, max_running=max_running, jumps=jumps
            )
            engine.chunk = 128
            jobs = run(engine, requests, Pace(concurrency))
            times = [(job.first_token, job.end) for job in jobs if job.generated]
            found.append(
                (
                    [(job.hit, job.generated, job.steps) for job in jobs],
                    [job.request for job in engine.started],
                    engine.preemptions,
                    pytest.approx(sum(times, ())),
                )
            )
        together, one_by_one = found
        assert together[:3] == one_by_one[:3]
        assert together[3].expected == one_by_one[3]

    def test_they_are_few(self) -> None:
        engines = [server(pages=9000, jumps=jumps, history=[]) for jumps in (0, 1)]
        for engine in engines:
            run(engine, [at(0.0, 8, 1000), at(40.0, 8, 500, 10**6)])
        slow, fast = (len(engine.history or ()) for engine in engines)
        assert slow >= 1000 and fast < 10
        assert engines[0].now == pytest.approx(engines[1].now)


def test_a_job_says_what_an_engine_says_of_a_request() -> None:
    job = Job(replace(at(0.0, 3, 2), snapshot_at=(2,)), 5, 0.0)
    assert (job.seq_id, job.num_tokens, job.hint) == ("5", 3, {"hybrid_keep": [2]})
    job.generated = 1
    assert job.tokens() == tokens(0, 3) + array("q", [10**9 + 3])
    assert not job.has_ended
    assert Job(request(tokens(0, 3)), 1, 0.0).hint == {}


@pytest.mark.parametrize(
    ("ttl", "pause", "hits", "broken"),
    [(None, 90.0, 1, 0), (100.0, 90.0, 1, 0), (80.0, 90.0, 1, 1), (0.0, 90.0, 0, 0)],
)
def test_a_ttl_ends_by_the_virtual_time(
    ttl: float | None, pause: float, hits: int, broken: int
) -> None:
    cache = Capacity(4, 100, 9).build(
        HybridConfig().snapshot_policy(4), LeastRecentlyUsed()
    )
    engine = Server(PluginCache(cache), COSTS)
    first = replace(at(0.0, 8, 4), key=1, ttl=ttl)
    again = first.make() + first.answer + tokens(500, 503)
    second = replace(request(again, answer=2), after=1, pause=pause)
    jobs = run(engine, [first, second])
    assert bool(jobs[1].hit) == hits
    assert cache.stats.promised_hits == (ttl == 100.0)
    assert cache.stats.promises_broken == broken
