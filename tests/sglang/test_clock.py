# SPDX-License-Identifier: Apache-2.0
"""The time that SGLang's ranks agree on, and TTLs by it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.scheduler_components import request_receiver
from sglang.srt.managers.scheduler_components.request_receiver import (
    SchedulerRequestReceiver,
)
from sglang.srt.runtime_context import get_context

from hybrid_plugin.sglang.clock import RankClock
from tests.sglang.fakes import Bench, request


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


class Ranks:
    """Three ranks, whose own clocks are apart; the first one receives requests."""

    def __init__(self) -> None:
        self.now = [100.0, 7.0, 90000.0]
        self.clocks = [RankClock(lambda rank=rank: self.now[rank]) for rank in range(3)]
        self.sent: list[int] = []

    def step(self, requests: list[Any], seconds: float = 0.0) -> list[list[Any]]:
        """Each rank receives requests; returns what each one got."""
        self.now = [now + seconds for now in self.now]
        wire: list[bytes] = []

        def broadcast(own: list[Any] | None, local: Any) -> list[Any]:
            if own is not None:
                wire.append(pickle.dumps([*own, *local]))
                self.sent.append(len(local))
            received: list[Any] = pickle.loads(wire[0])
            return received

        return [
            clock.broadcast(broadcast, None if rank else requests, [])
            for rank, clock in enumerate(self.clocks)
        ]

    @property
    def times(self) -> list[float]:
        return [clock() for clock in self.clocks]


def test_all_ranks_have_the_time_of_the_first() -> None:
    ranks = Ranks()
    assert ranks.times == [0.0] * 3
    assert ranks.step(["a"]) == [["a"]] * 3
    assert ranks.times == [100.0] * 3
    assert ranks.step(["b", "c"], 5.5) == [["b", "c"]] * 3
    assert ranks.times == [105.5] * 3


def test_without_requests_the_time_is_sent_once_in_a_second() -> None:
    ranks = Ranks()
    for _ in range(8):
        ranks.step([], 0.25)
    assert ranks.sent == [1, 0, 0, 0, 1, 0, 0, 0]
    assert ranks.times == [101.25] * 3
    ranks.step(["a"], 0.25)
    assert ranks.times == [102.25] * 3


def test_where_somebody_waits_the_time_is_sent_each_time() -> None:
    ranks = Ranks()
    ranks.clocks[0].is_fine = True
    for _ in range(4):
        ranks.step([], 0.25)
    ranks.clocks[0].is_fine = False
    ranks.step([], 0.25)
    assert ranks.sent == [1, 1, 1, 1, 0]
    assert ranks.times == [101.0] * 3


def test_all_ranks_have_what_the_first_measured() -> None:
    ranks = Ranks()
    for rank, clock in enumerate(ranks.clocks):
        clock.measured = lambda rank=rank: 0.5 + rank
    assert [clock.token_seconds for clock in ranks.clocks] == [None] * 3
    ranks.step(["a"])
    assert [clock.token_seconds for clock in ranks.clocks] == [0.5] * 3


def test_it_does_not_run_backwards() -> None:
    ranks = Ranks()
    ranks.step([])
    ranks.clocks[0]._sent = None
    ranks.step([], -50.0)
    assert ranks.times == [100.0] * 3


def test_sglang_broadcasts_where_the_hook_is() -> None:
    """What the receiver does between the broadcast and the scheduler sees no stamp."""
    text = inspect.getsource(SchedulerRequestReceiver.recv_requests)
    assert text.count("self._broadcast_reqs_across_ranks(") == 1
    for later in ("unwrap_pickle_wrapper(", "_apply_mm_receiver("):
        assert text.index("_broadcast_reqs_across_ranks(") < text.index(later)


def test_ranks_with_a_queue_of_their_own_have_a_time_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With data-parallel attention, the first of all ranks alone sends what is none of
    the new requests."""
    parallel = SimpleNamespace(
        attn_dp_enabled=True,
        attn_tp_rank=0,
        attn_cp_rank=0,
        enable_dp_attention_local_control_broadcast=False,
        tp_size=2,
        tp_group=SimpleNamespace(rank=1, cpu_group=None, ranks=[0, 1]),
    )
    experts = SimpleNamespace(moe=SimpleNamespace(is_ep_scale_joiner=False))
    for name, function in (
        ("get_parallel", lambda: parallel),
        ("get_exec", lambda: experts),
        ("attn_cp_tp_broadcast_pyobj", lambda requests: requests),
        ("broadcast_pyobj", lambda *_, **__: ["of the first rank"]),
    ):
        monkeypatch.setattr(request_receiver, name, function)
    receiver = SchedulerRequestReceiver.__new__(SchedulerRequestReceiver)
    clock = RankClock(lambda: 40.0)
    send = receiver._broadcast_reqs_across_ranks
    assert clock.broadcast(send, ["lost"], []) == ["of the first rank"]
    assert clock() == 40.0


def promised(bench: Bench) -> list[int]:
    return sorted(
        node.end
        for node in bench.core.tree.nodes()
        if node.snapshot is not None and node.snapshot.promise
    )


def run(bench: Bench, rid: str, first: int, hint: dict[str, Any]) -> Any:
    req = request(rid, range(first, first + 10), custom_params=hint)
    bench.queue(req)
    assert bench.step() == [rid]
    while req.extend_end < 10:
        assert bench.step() == [rid]
    return req


def test_a_ttl_by_the_common_time() -> None:
    bench = Bench()
    one = run(bench, "one", 0, {"hybrid_ttl": 20, "hybrid_keep": [4]})
    bench.clock.now = 50.0
    bench.finish(one)
    assert promised(bench) == [4, 10]
    bench.clock.now = 69.0
    two = run(bench, "two", 500, {"hybrid_ttl": 0})
    assert promised(bench) == [4, 10]
    bench.clock.now = 70.0
    bench.finish(two)
    assert promised(bench) == []
    bench.step()
    bench.assert_idle()


def test_a_turn_that_nobody_continues_leaves_no_state() -> None:
    bench = Bench()
    bench.finish(run(bench, "one", 0, {"hybrid_ttl": 0}))
    assert bench.core.slots.snapshots == 0
    bench.finish(run(bench, "two", 500, {}))
    assert bench.core.slots.snapshots == 1
    bench.step()
    bench.assert_idle()
