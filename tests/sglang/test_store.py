# SPDX-License-Identifier: Apache-2.0
"""Requests of whose prompt a shared store has something."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.runtime_context import get_context

from hybrid_plugin.core.commands import Fetch
from hybrid_plugin.engine.outer_side import OuterSide
from hybrid_plugin.engine.rank_store import RanksInStore
from hybrid_plugin.engine.store import Store
from hybrid_plugin.sglang.outer_steps import OuterSteps
from hybrid_plugin.sglang.outer_tiers import has_images
from hybrid_plugin.tiers.agreement import Lost, Outcome
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.store.tier import StoreTier
from tests.sglang.fakes import request
from tests.sglang.test_disk import FakeFiles
from tests.sglang.test_host_memory import LENGTH, HostBench
from tests.tiers.failing_store import FailingStore, Member
from tests.tiers.support import IDENTITY, bundle, layouts

OWN = layouts()
VOCABULARY = 1_000_000


def is_text(tokens: Any) -> bool:
    return not has_images(tokens, VOCABULARY)


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


class StoreBench(HostBench):
    """With a store to which another server has written the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = FailingStore()
        other = Member(self.objects, IDENTITY, OWN)
        other.store(bundle(OWN, None, array("q", range(LENGTH))))
        other.settle()
        ranks = RanksInStore(IDENTITY, {IDENTITY.rank_name: OWN}, 1e9)
        log = logging.getLogger("hybrid test")
        make = partial(StoreTier, takes=is_text)
        self.store = Store(ranks, self.objects, log, make=make)
        self.store.patience = 20.0
        self.rank: Any = FakeFiles()
        outer = OuterSide(self.core, store=self.store)
        self.cache._outer = OuterSteps(self.core, self.rank, outer, "mark")

    def ask(self) -> Any:
        req = request("d", [*range(LENGTH), 7])
        self.queue(req)
        return req

    def fetches(self) -> list[Fetch]:
        return [one for one in self.take() if isinstance(one, Fetch)]

    def end(self, fetch: Fetch, lost: Lost | None = None) -> None:
        self.rank.done.append(Outcome(fetch.ticket, lost, 1, 0.1))


@pytest.fixture
def bench() -> Iterator[StoreBench]:
    made = StoreBench()
    yield made
    made.store.close()


def test_it_is_fetched(bench: StoreBench) -> None:
    bench.keep_busy()
    req = bench.ask()
    assert bench.step() == []
    (fetch,) = bench.fetches()
    assert fetch.source == "store" and len(fetch.rows[-1].tokens) == LENGTH
    bench.end(fetch)
    bench.step()
    bench.take()
    bench.clock.now += 1000
    assert bench.step() == ["d"] and req.prefix_len == LENGTH
    assert bench.store.tier.stats.hit_tokens == LENGTH
    bench.assert_conserved()


def test_what_is_gone_is_computed(bench: StoreBench) -> None:
    req = bench.ask()
    assert bench.step() == []
    (fetch,) = bench.fetches()
    bench.end(fetch, Lost(0, Failure(Reason.MISSING)))
    assert bench.step() == ["d"] and req.prefix_len == 0
    assert bench.store.tier.stats.load_failures == {Reason.MISSING: 1}
    bench.assert_conserved()


def test_a_request_is_looked_up_once(bench: StoreBench) -> None:
    looked: list[int] = []
    look = bench.store._directory.look

    def noted(*args: Any) -> Any:
        looked.append(1)
        return look(*args)

    bench.store._directory.look = noted  # type: ignore[method-assign]
    bench.keep_busy()
    bench.ask()
    for _ in range(4):
        bench.cache.plan_waits(bench.scheduler.waiting_queue)
    assert looked == [1, 1], "of the one that keeps it busy, too"
    bench.cache.plan_waits([])
    assert not bench.cache._sought


def test_images_are_not_shared(bench: StoreBench) -> None:
    tokens = array("q", [*range(20), VOCABULARY])
    assert bench.store.tier.begin_store(None, tokens, 0, 1) is None
    assert bench.store.tier.begin_store(None, tokens[:20], 0, 1) is not None
