# SPDX-License-Identifier: Apache-2.0
"""Hits, evictions and peaks of small traces, by hand."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.memory.attention_windows import SlidingWindow
from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.tools.simulate.agentic import AgenticStream
from hybrid_plugin.tools.simulate.capacity import Capacity
from hybrid_plugin.tools.simulate.outcome import Outcome
from hybrid_plugin.tools.simulate.policies import POLICIES
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.simulation import Simulation
from tests.core.support import NO_SNAPSHOTS
from tests.simulate.traces import request, simulate, tokens


class TestKvOnly:
    def test_hits_are_whole_pages_and_never_all(self) -> None:
        requests = [request(tokens(0, length)) for length in (10, 10, 8)]
        outcome = simulate(requests, pages=100)
        assert outcome.hit_tokens == 0 + 8 + 4
        assert (outcome.queried_tokens, outcome.recomputed_tokens) == (28, 16)
        assert outcome.hit_rate == 12 / 28

    def test_the_least_recently_used_goes_first(self) -> None:
        a, b, c = (request(tokens(n, n + 9)) for n in (0, 100, 200))
        # Two pages of each are kept, and each needs three while it is served.
        outcome = simulate([a, b, a, c, a, b], pages=6, policy="lru")
        # c takes one page of b, then a hits, then b has lost its second page.
        assert outcome.hit_tokens == 8 + 8 + 4
        assert outcome.page_evictions == outcome.evictions == 2

    def test_answers_are_found_again(self) -> None:
        first = request(tokens(0, 8), answer=9)
        goes_on = request(first.make() + first.answer)
        assert simulate([first, goes_on], pages=100).hit_tokens == 16

    def test_namespaces_share_nothing(self) -> None:
        same = tokens(0, 9)
        requests = [request(same, namespace=name) for name in ("a", "b", "a")]
        assert simulate(requests, pages=100).hit_tokens == 8

    def test_only_later_requests_are_measured(self) -> None:
        requests = [request(tokens(0, 9))] * 4
        outcome = simulate(requests, pages=100, first_measured=2)
        assert (outcome.requests, outcome.measured_requests) == (4, 2)
        assert (outcome.queried_tokens, outcome.hit_tokens) == (18, 16)

    def test_what_never_fits(self) -> None:
        lengths = (100, 6, 6)
        outcome = simulate([request(tokens(0, n)) for n in lengths], pages=3, chunk=8)
        assert outcome.too_long == 1
        assert outcome.hit_tokens == 4  # nothing was computed of the first

    def test_an_answer_that_does_not_fit_ends_early(self) -> None:
        requests = [request(tokens(0, 8), answer=100)] * 2
        outcome = simulate(requests, pages=3)
        assert (outcome.too_long, outcome.hit_tokens) == (0, 4)

    def test_sequences_live_at_once_hold_their_pages(self) -> None:
        requests = [request(tokens(n, n + 8)) for n in (0, 100, 200)]
        outcome = simulate(requests, pages=4, concurrency=2)
        assert (outcome.too_long, outcome.peak_pages) == (0, 4)
        assert outcome.page_evictions == 2


class TestStates:
    def test_a_turn_is_resumed_at_its_end(self) -> None:
        first = request(tokens(0, 7), answer=4)
        goes_on = request(first.make() + first.answer + tokens(100, 103))
        outcome = simulate([first, goes_on], pages=100, slots=9)
        # The last token generated was never computed.
        assert outcome.hit_tokens == 7 + 3
        assert outcome.snapshots_taken == 2

    def test_without_a_snapshot_there_is_no_hit(self) -> None:
        requests = [request(tokens(0, 40) + tokens(n, n + 5)) for n in (100, 200)]
        assert simulate(requests, pages=100).hit_tokens == 40
        assert simulate(requests, pages=100, slots=9).hit_tokens == 0

    def test_slots_run_out(self) -> None:
        requests = [request(tokens(n, n + 6)) for n in range(0, 900, 100)]
        outcome = simulate([*requests, *requests], pages=100, slots=3)
        assert outcome.peak_snapshots == 2  # beside the one that runs
        left = outcome.series.snapshots[-1]
        assert left == 3  # with that of the last request
        assert outcome.snapshot_evictions == outcome.snapshots_taken - left

    def test_evictions_of_pages_and_snapshots_add_up(self) -> None:
        requests = AgenticStream(requests=100, sessions_at_once=4).generate(0)
        outcome = simulate(requests, pages=3000, slots=10, page_size=16)
        assert outcome.evictions == outcome.page_evictions + outcome.snapshot_evictions
        assert outcome.page_evictions and outcome.snapshot_evictions
        assert outcome.as_dict()["evictions"] == outcome.evictions


class TestBytes:
    LAYOUT = CacheLayout(
        page_size=16,
        attention=(
            AttentionGroup(("a",), 1600),
            AttentionGroup(("w",), 160, SlidingWindow(64)),
        ),
        states=(StateGroup(("s",), 2560),),
        slot_alignment=1,
    )

    def capacity(self, budget: int) -> Capacity:
        return Capacity.of_layout(self.LAYOUT, budget, [request(tokens(0, 400))], 128)

    def test_a_budget_is_divided_without_the_reserved_ids(self) -> None:
        capacity = self.capacity(1_000_000)
        sizes = self.LAYOUT.split(1_000_000, max_model_len=400, chunk=128)
        assert capacity.pages == sizes.pages - 1
        assert capacity.slots == sizes.slots - 1
        assert capacity.windows == ((SlidingWindow(64), sizes.windows[0] - 1),)

    def test_windows_and_states_are_simulated_too(self) -> None:
        turns = [request(tokens(0, 200 + 40 * n)) for n in range(5)]
        policy = Simulation(self.capacity(1_000_000), _plain(16))
        outcome = policy.run(turns)
        # Every prompt resumes at the end of the one before.
        assert outcome.hit_tokens == 200 + 240 + 280 + 320
        assert outcome.peak_memory_bytes is not None
        assert 23 * 1600 < outcome.peak_memory_bytes <= 1_000_000

    def test_too_little(self) -> None:
        with pytest.raises(ConfigError, match="cannot hold one sequence of 400 tokens"):
            self.capacity(10_000)
        with pytest.raises(ConfigError, match="KV pool of 0 pages"):
            Capacity(16, 0, None)
        with pytest.raises(ConfigError, match="state pool of 0 slots"):
            Capacity(16, 5, 0)

    def test_no_limit_for_a_trace_that_is_too_long(self) -> None:
        endless = Request(2 << 30, lambda: tokens(0, 1))
        with pytest.raises(ConfigError, match="Room for all 2147483648 tokens"):
            Capacity.unbounded([endless], 16, states=False)

    def test_without_a_limit_nothing_is_evicted(self) -> None:
        requests = AgenticStream(requests=80).generate(1)
        capacity = Capacity.unbounded(requests, 16, states=True)
        assert Simulation(capacity, _plain(16)).run(requests).evictions == 0


class TestDivision:
    """Prompts that need slots, then prompts that need pages, in 42 MiB."""

    MIB = 2**20
    LAYOUT = CacheLayout(
        page_size=16,
        attention=(AttentionGroup(("a",), MIB // 16),),
        states=(StateGroup(("s",), 2 * MIB),),
    )
    SHORT = tuple(request(tokens(1000 * n, 1000 * n + 32)) for n in range(1, 15))
    LONG = tuple(request(tokens(10**6 * n, 10**6 * n + 1600)) for n in range(1, 4))

    def capacity(self, **options: Any) -> Capacity:
        return Capacity.of_layout(
            self.LAYOUT,
            42 * self.MIB,
            self.requests(),
            2048,
            options=HybridConfig(**options),
        )

    def requests(self) -> list[Request]:
        """Every prompt of a kind, then all of them again with 8 tokens more."""
        return [
            request(prompt.make() + array("q", [7] * more))
            for kind in (self.SHORT, self.LONG)
            for more in (0, 8)
            for prompt in kind
        ]

    def run(self, **options: Any) -> Outcome:
        """Without snapshots at chunk ends."""
        policy = SnapshotPolicy(16, chunk_end_min_tokens=NO_SNAPSHOTS)
        return Simulation(self.capacity(**options), policy).run(self.requests())

    def test_the_ratio_divides_the_budget(self) -> None:
        few, many = (self.capacity(state_memory_ratio=r) for r in (0.3, 0.9))
        # 0.3 x 42 MiB are 6 slots of 2 MiB, the rest 480 pages of 64 KiB.
        assert (few.pages, few.slots) == (480 - 1, 6 - 1)
        # 18 slots would leave less than the 101 pages of the longest and one more.
        assert (many.pages, many.slots) == (128 - 1, 17 - 1)

    def test_elastic_pools_may_have_all_of_it(self) -> None:
        capacity = self.capacity()
        # 21 blocks of 2 MiB; one is behind holes.
        assert (capacity.pages, capacity.slots) == (20 * 32 - 1, 20 - 1)

    def test_few_slots_serve_long_prompts_only(self) -> None:
        outcome = self.run(state_memory_ratio=0.3)
        # The long ones hit before their last page.
        assert outcome.hit_tokens == 3 * 1584
        assert outcome.memory_moves is None

    def test_many_slots_serve_short_prompts_only(self) -> None:
        outcome = self.run(state_memory_ratio=0.9)
        assert outcome.hit_tokens == 14 * 32

    def test_elastic_pools_serve_both(self) -> None:
        outcome = self.run(elastic=True)
        assert outcome.hit_tokens == 14 * 32 + 3 * 1600
        assert outcome.memory_moves
        assert "granules moved" in outcome.as_text()
        assert self.run().hit_tokens == outcome.hit_tokens  # as in an engine

    def test_moves_stay_within_the_budget(self) -> None:
        peak = self.run(elastic=True).peak_memory_bytes
        assert peak is not None and peak <= 40 * self.MIB

    def test_a_budget_given_in_the_options_counts(self) -> None:
        half = self.capacity(gpu_memory_budget=22 * self.MIB)
        assert (half.pages, half.slots) == (10 * 32 - 1, 10 - 1)

    def test_what_cannot_be_elastic(self) -> None:
        asked, open_to_it = HybridConfig(elastic=True), HybridConfig()
        alone = replace(self.LAYOUT, states=())
        with pytest.raises(ConfigError, match="layers with full attention"):
            Capacity.of_layout(alone, 10**8, self.SHORT, 128, options=asked)
        found = Capacity.of_layout(alone, 10**8, self.SHORT, 128, options=open_to_it)
        assert found.elastic is None
        # There is one pool, which has all the memory.
        states = replace(self.LAYOUT, attention=())
        found = Capacity.of_layout(states, 10**8, self.SHORT, 128, options=asked)
        assert found.elastic is None
        with pytest.raises(ConfigError, match="Elastic pools do not fit"):
            Capacity.of_layout(self.LAYOUT, 8 << 20, self.LONG, 128, options=asked)
        with pytest.raises(ConfigError, match="less than two blocks of 2097152 bytes"):
            Capacity.of_layout(self.LAYOUT, 3 << 20, self.SHORT, 128, options=asked)
        with pytest.raises(ConfigError, match="cannot hold one sequence of 32 tokens"):
            Capacity.of_layout(self.LAYOUT, 1, self.SHORT, 128, options=open_to_it)


def _plain(page_size: int) -> SnapshotPolicy:
    return HybridConfig().snapshot_policy(page_size)


class TestPolicy:
    def test_it_knows_the_bytes_of_a_token_and_of_a_snapshot(self) -> None:
        capacity = TestBytes().capacity(1_000_000)
        # A page of 1600 bytes; a slot of 2560, and 5 pages of 160 in the window.
        assert capacity.token_bytes == 1600 / 16
        assert capacity.slot_bytes == 2560 + 5 * 160
        unknown = Capacity(16, 10, 5)
        assert (unknown.token_bytes, unknown.slot_bytes) == (1.0, 0.0)

    def test_every_run_starts_with_policies_that_have_learned_nothing(self) -> None:
        requests = AgenticStream(requests=150).generate(1)
        simulation = Simulation(Capacity(16, 4000, 40), _plain(16))
        one, two = simulation.run(requests), simulation.run(requests)
        assert one.evictions and one.hit_tokens == two.hit_tokens

    def test_policies_differ(self) -> None:
        requests = AgenticStream(requests=300).generate(1)
        hits = {
            simulate(requests, 8000, 60, page_size=16, policy=name).hit_tokens
            for name in POLICIES
        }
        assert len(hits) == len(POLICIES) == 2
