# SPDX-License-Identifier: Apache-2.0
"""What no policy can exceed."""

from __future__ import annotations

from hybrid_plugin.tools.simulate.agentic import AgenticStream
from hybrid_plugin.tools.simulate.bound import PageTrace, bound_hit_tokens
from tests.simulate.traces import request, simulate, tokens


class TestBound:
    def bound(self, *prompts: tuple[int, int], pages: int, slots: int | None) -> int:
        trace = PageTrace.of([request(tokens(*p)) for p in prompts], 4)
        return bound_hit_tokens(trace, pages=pages, slots=slots)

    def test_belady_on_pages(self) -> None:
        """a b c a b with room for two pages of one: keep a, then b."""
        prompts = ((0, 5), (100, 105), (200, 205), (0, 5), (100, 105))
        assert self.bound(*prompts, pages=2, slots=None) == 8
        assert self.bound(*prompts, pages=1, slots=None) == 4
        assert self.bound(*prompts, pages=0, slots=None) == 0

    def test_slot_time(self) -> None:
        """Two prompts that return after three requests: one slot serves one."""
        prompts = ((0, 41), (100, 141), (200, 241), (0, 41), (100, 141))
        spare = 5 * 3 + 1  # for hits inside a page, and rounding
        assert self.bound(*prompts, pages=1000, slots=9) == 80 + spare - 1
        # 5 requests of slot-time: 3 for one prompt, and 2/3 of the other's.
        assert self.bound(*prompts, pages=1000, slots=1) == int(40 + 80 / 3) + spare

    def test_no_policy_exceeds_it(self) -> None:
        for seed, pages, slots in ((0, 4000, 12), (1, 9000, 60), (2, 20_000, 30)):
            requests = AgenticStream(requests=250, sessions_at_once=12).generate(seed)
            trace = PageTrace.of(requests, 16)
            bound = bound_hit_tokens(trace, pages=pages, slots=slots, first=50)
            for kind in (slots, None):
                outcome = simulate(
                    requests, pages, kind, page_size=16, first_measured=50
                )
                ceiling = bound_hit_tokens(trace, pages=pages, slots=kind, first=50)
                assert 0 < outcome.hit_tokens <= ceiling
            assert bound < sum(trace.lengths[50:])

    def test_the_gap(self) -> None:
        outcome = simulate([request(tokens(0, 9))] * 3, pages=100)
        assert outcome.gap is None
        outcome.bound_hit_tokens = 32
        assert outcome.gap == 0.5
        assert "50.0 % of them were missed" in outcome.as_text()
