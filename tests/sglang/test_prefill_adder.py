# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefill admission on the core: who is admitted, and where chunks end."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.runtime_context import get_context

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.sglang.parking import parked_first
from hybrid_plugin.sglang.scheduling import more_rows
from tests.sglang.fakes import Bench, pausing, request


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


def test_a_chunk_ends_at_a_snapshot_position_and_at_the_budget() -> None:
    bench = Bench()
    req = pausing("a", range(30), at=12)
    bench.queue(req)
    ends = []
    while not ends or ends[-1] < 30:
        bench.step(chunk=8)
        ends.append(req.extend_end)
    assert ends == [8, 12, 20, 28, 30]
    assert bench.scheduler.chunked_req is None


def test_where_a_chunk_ends_is_the_cores_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    asked = []

    def chunk_end(core: HybridCache, *chunk: Any) -> int:
        asked.append(chunk)
        return 12

    monkeypatch.setattr(HybridCache, "chunk_end", chunk_end)
    req = pausing("a", range(30), at=12)
    bench.queue(req)
    bench.step(chunk=16)
    assert asked == [((12,), 0, 16, 30)]
    assert req.extend_end == 12


def test_a_request_without_room_leaves_everything_as_it_was() -> None:
    bench = Bench(pages=10)
    bench.park(pausing("parked", range(20), at=8))
    levels = bench.core.levels()
    bench.adder = bench.new_adder()
    assert bench.add(request("big", range(100, 130))) is AddReqResult.NO_TOKEN
    assert bench.core.levels() == levels
    assert bench.adder.can_run_list == []


def test_a_request_without_a_row_waits() -> None:
    bench = Bench(rows=2)
    bench.park(pausing("parked", range(20), at=8))
    bench.adder = bench.new_adder()
    assert bench.add(request("other", range(100, 110))) is AddReqResult.OTHER
    assert bench.core.live == 1


def test_parked_requests_count_among_the_rows_a_pass_may_use() -> None:
    bench = Bench(rows=2)
    parked = pausing("parked", range(20), at=8)
    bench.park(parked)
    assert more_rows(0, bench.cache.num_parked, 2) == 1
    bench.adder = bench.new_adder()
    bench.add(parked)  # SGLang counts it from here on, as one of the pass
    assert more_rows(1, bench.cache.num_parked, 2) == 1


def test_who_may_not_prefill_in_this_pass_leaves_everything_as_it_was() -> None:
    """`--enable-prefill-delayer` says so; what was matched stays, and counts once."""
    bench = Bench(slots=3)
    one = request("one", range(100, 110))
    bench.queue(one)
    bench.step()
    bench.finish(one)
    bench.scheduler.last_batch = None
    bench.queue(request("busy", range(500, 520)))
    bench.step()
    two = request("two", [*range(100, 110), 1, 2, 3])
    bench.adder = bench.new_adder()
    allowed = iter([False, False, True])
    bench.adder.prefill_delayer_single_pass = SimpleNamespace(
        negotiate_should_allow_prefill=lambda **_: next(allowed)
    )
    bench.adder.running_batch = SimpleNamespace(batch_size=lambda: 1)
    for _ in range(2):
        before = bench.core.levels(), bench.core.stats.hit_tokens
        two.init_next_round_input(bench.cache)
        assert two.prefix_len == 10
        verdict = bench.adder.add_one_req(two, False, truncation_align_size=None)
        assert verdict is AddReqResult.OTHER
        assert (bench.core.levels(), bench.core.stats.hit_tokens) == before
    two.init_next_round_input(bench.cache)
    assert two.prefix_len == 10, "it was not taken over, and given back"


def test_a_parked_request_goes_on_where_nobody_may_begin() -> None:
    """As SGLang's own unfinished prompt does: it holds memory meanwhile."""
    bench = Bench()
    parked = pausing("parked", range(20), at=8)
    bench.park(parked)
    bench.adder = bench.new_adder()
    bench.adder.prefill_delayer_single_pass = SimpleNamespace(
        negotiate_should_allow_prefill=lambda **_: False
    )
    bench.adder.running_batch = SimpleNamespace(batch_size=lambda: 1)
    bench.add(parked)
    bench.add(request("new", range(100, 110)))
    assert bench.adder.can_run_list == [parked]


def test_a_parked_request_goes_on_before_one_that_waits_for_its_pages() -> None:
    bench = Bench(pages=10)
    parked = pausing("parked", range(20), at=8)
    bench.park(parked)
    bench.scheduler.last_batch = None
    # A higher priority puts it ahead; there is no room for it until `parked` ends.
    bench.scheduler.waiting_queue.insert(0, request("urgent", range(100, 120)))
    assert bench.step() == ["parked"]
    bench.finish(parked)
    assert bench.step() == ["urgent"]


def test_parked_first_keeps_the_order_otherwise() -> None:
    bench = Bench()
    bench.park(pausing("parked", range(20), at=8))
    first, second = request("first", range(4)), request("second", range(4))
    queue = [first, second, *bench.scheduler.waiting_queue]
    parked_first(queue, bench.cache)
    assert [req.rid for req in queue] == ["parked", "first", "second"]


def test_what_a_request_computed_itself_is_no_hit() -> None:
    bench = Bench()
    first = pausing("first", range(30), at=12)
    bench.queue(first)
    hits = []
    while not hits or first.extend_end < 30:
        bench.step(chunk=8)
        adder = bench.adder
        hits.append((adder.log_hit_tokens, adder.log_device_hit_tokens))
    assert hits == [(0, 0)] * 5
    assert first.extend_end == 30
    bench.finish(first)

    second = request("second", [*range(12), *range(50, 70)])
    bench.queue(second)
    hits = []
    while not hits or second.extend_end < 32:
        bench.step(chunk=8)
        adder = bench.adder
        hits.append((adder.log_hit_tokens, adder.log_device_hit_tokens))
    assert hits == [(12, 12), (0, 0), (0, 0)]


@pytest.mark.parametrize("mode, end", [(True, 30), ("last", 12), (False, 12)])
def test_hidden_states_of_a_prompt_are_not_cut_by_a_pause(
    mode: bool | str, end: int
) -> None:
    # SGLang returns the rows of a prompt's last chunk.
    bench = Bench()
    req = pausing("a", range(30), at=12, return_hidden_states=mode)
    bench.queue(req)
    bench.step()
    assert req.extend_end == end
