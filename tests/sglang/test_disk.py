# SPDX-License-Identifier: Apache-2.0
"""Requests whose prefix is in files, and what the scheduler does meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.runtime_context import get_context

from hybrid_plugin.config import DiskOptions
from hybrid_plugin.core.commands import Await, Discard, Fetch, Load, Pool, Write
from hybrid_plugin.engine.disk import Disk
from hybrid_plugin.engine.outer_side import OuterSide
from hybrid_plugin.engine.rank_files import RanksOnDisk
from hybrid_plugin.engine.session_desk import Serving
from hybrid_plugin.sglang import outer_steps
from hybrid_plugin.sglang.outer_steps import OuterSteps, greatest_of_all_ranks
from hybrid_plugin.sglang.outer_tiers import TextOnly, of_all_ranks
from hybrid_plugin.tiers.agreement import Lost, Outcome
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.row_layout import RowLayout
from tests.sglang.fakes import PAGE, request
from tests.sglang.test_host_memory import LENGTH, HostBench, kinds

VOCABULARY = 1_000_000
IDENTITY = Identity("weights", "0" * 64, ("0 state", "1 full attention"), "bfloat16")
LAYOUTS = Layouts(
    {Pool.KV: RowLayout(64, PAGE, opaque="pages")}, RowLayout(256, 0, opaque="slots")
)


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


class FakeFiles:
    """A rank's files, whose writes and fetches are done when the test says so."""

    def __init__(self) -> None:
        self.done: list[Outcome] = []
        self.settled = 0
        self.waited: list[float] = []
        self.updates = 0

    def settle(self) -> list[Outcome]:
        self.settled += 1
        done, self.done = self.done, []
        return done

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)

    def weights_changed(self) -> None:
        self.updates += 1


class DiskBench(HostBench):
    """With files behind the host memory, whose bytes nobody has."""

    def __init__(self, folder: Path, **sizes: int) -> None:
        super().__init__(**sizes)
        self.files: Any = FakeFiles()
        self.disk = Disk(
            DiskOptions(str(folder), 1 << 20),
            RanksOnDisk(IDENTITY, {IDENTITY.rank_name: LAYOUTS}, 1e6),
            Serving("model", "SGLang"),
            make=lambda *args: TextOnly(*args, vocabulary=VOCABULARY),
        )
        outer = OuterSide(self.core, disk=self.disk)
        self.cache._outer = OuterSteps(self.core, self.files, outer, "mark")

    def finish_writes(self) -> int:
        """Let everything be written; returns how many files that makes."""
        count = 0
        self.cache.idle()
        while writes := [one for one in self.take() if isinstance(one, Write)]:
            count += len(writes)
            self.files.done += [Outcome(one.ticket, None, 1, 0.1) for one in writes]
            self.cache.plan_waits(self.scheduler.waiting_queue)
            self.cache.idle()
        return count

    def wait_for_fetch(self, rid: str = "again", token: int = 8) -> Req:
        """A request whose prefix is on its way to the host."""
        again = request(rid, [*range(LENGTH), 7, token])
        self.queue(again)
        assert self.step() == []
        return again

    def fetches(self) -> list[Fetch]:
        return [one for one in self.take() if isinstance(one, Fetch)]

    def end(self, fetch: Fetch, lost: Lost | None = None) -> None:
        self.files.done.append(Outcome(fetch.ticket, lost, 1, 0.1))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[DiskBench]:
    """The prompt of `LENGTH` tokens from 0 on is in a file, and nowhere else."""
    bench = DiskBench(tmp_path / "disk")
    bench.serve("one", 0)
    assert bench.finish_writes() == 1
    bench.forget()
    bench.finish_writes()
    assert bench.core.host is not None
    bench.core.host.clear()
    yield bench
    bench.disk.close()


def test_a_request_waits_until_its_prefix_was_read(bench: DiskBench) -> None:
    bench.keep_busy()
    again = bench.wait_for_fetch()
    (fetch,) = bench.fetches()
    assert fetch.source == "disk" and len(fetch.rows[-1].tokens) == LENGTH
    bench.clock.now += LENGTH / 2
    assert bench.step() == [] and not bench.take(), "it goes on"
    bench.end(fetch)
    assert bench.step() == [] and set(kinds(bench.take())) == {Load}
    bench.clock.now += 1000
    assert bench.step() == ["again"] and again.prefix_len == LENGTH
    assert Await in kinds(bench.take())
    bench.assert_conserved()
    assert bench.disk.tier.stats.hit_tokens == LENGTH


def test_it_waits_no_longer_than_computing_takes(bench: DiskBench) -> None:
    bench.keep_busy()
    again = bench.wait_for_fetch()
    (fetch,) = bench.fetches()
    # A second for each token, for which the one that runs would wait as well.
    bench.clock.now += 2 * (LENGTH + 1)
    assert bench.step() == ["again"] and again.prefix_len == 0
    bench.end(fetch)
    bench.step()
    bench.assert_conserved()


def test_where_nothing_runs_it_is_ordered_and_awaited_all_the_same(
    bench: DiskBench,
) -> None:
    again = bench.wait_for_fetch()
    bench.files.waited.clear()
    bench.cache.idle()
    (fetch,) = [one for one in bench.ran if isinstance(one, Fetch)]
    assert bench.files.waited == [outer_steps.WAIT_SECONDS]
    bench.end(fetch)
    assert bench.step() == ["again"], "the stream waits for the load"
    assert again.prefix_len == LENGTH


def test_a_prefix_that_cannot_be_read_is_computed(bench: DiskBench) -> None:
    bench.keep_busy()
    again = bench.wait_for_fetch()
    (fetch,) = bench.fetches()
    bench.end(fetch, Lost(0, Failure(Reason.CORRUPT)))
    assert bench.step() == ["again"] and again.prefix_len == 0
    assert [one.keys for one in bench.take() if isinstance(one, Discard)] == [
        (fetch.rows[0].key,)
    ]
    assert bench.disk.tier.stats.load_failures == {Reason.CORRUPT: 1}
    bench.assert_conserved()


def test_others_overtake_it(bench: DiskBench) -> None:
    bench.keep_busy()
    bench.wait_for_fetch()
    (fetch,) = bench.fetches()
    other = request("other", range(500, 508))
    bench.queue(other)
    assert bench.step() == ["other"]
    bench.finish(other)
    bench.end(fetch)
    bench.queue(request("late", range(600, 608)))
    assert bench.step() == [], "it is restored now, which takes the device's memory"
    bench.clock.now += 1000
    assert bench.step() == ["again", "late"]
    bench.assert_conserved()


def test_it_keeps_nobody_from_a_row(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path / "disk", rows=3)
    bench.serve("one", 0)
    bench.finish_writes()
    bench.forget()
    bench.finish_writes()
    assert bench.core.host is not None
    bench.core.host.clear()
    bench.keep_busy()
    bench.wait_for_fetch()
    bench.queue(request("other", range(500, 508)))
    assert bench.step() == ["other"], "one row is left"
    bench.disk.close()


def test_those_with_the_same_prefix_wait_for_one_fetch(bench: DiskBench) -> None:
    bench.keep_busy()
    bench.wait_for_fetch()
    bench.wait_for_fetch("too", 9)
    (fetch,) = bench.fetches()
    bench.end(fetch)
    bench.step()
    bench.clock.now += 1000
    assert bench.step() == ["again", "too"]


def test_a_request_is_aborted_while_its_prefix_is_read(bench: DiskBench) -> None:
    bench.keep_busy()
    bench.wait_for_fetch()
    (fetch,) = bench.fetches()
    bench.scheduler.abort_request(AbortReq(rid="again"))
    assert bench.cache.front_door.waiting == 0
    bench.end(fetch)
    bench.step()
    bench.assert_conserved()
    bench.queue(request("late", [*range(LENGTH), 9]))
    bench.step()
    assert set(kinds(bench.take())) == {Load}, "the host has it"


def test_a_flush_forgets_what_is_read(bench: DiskBench) -> None:
    bench.wait_for_fetch()
    bench.cache.idle()
    (fetch,) = [one for one in bench.ran if isinstance(one, Fetch)]
    bench.scheduler.abort_request(AbortReq(rid="again"))
    bench.take()
    bench.cache.reset()
    assert any(isinstance(one, Discard) for one in bench.take())
    bench.end(fetch)
    bench.cache.plan_waits([])
    assert bench.core.host is not None
    levels = bench.core.host.levels().values()
    assert all(level.used == level.cached == 0 for level in levels)
    again = request("late", [*range(LENGTH), 9])
    bench.queue(again)
    assert bench.step() == ["late"] and again.prefix_len == 0


def test_every_round_asks_for_what_is_done(bench: DiskBench) -> None:
    before = bench.files.settled
    bench.cache.plan_waits([])
    bench.step()
    assert bench.files.settled == before + 2


def test_a_scheduler_sleeps_only_when_nothing_is_out(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path / "disk")
    assert bench.cache.may_sleep
    bench.serve("one", 0)
    bench.cache.idle()
    (write,) = [one for one in bench.ran if isinstance(one, Write)]
    assert not bench.cache.may_sleep
    assert bench.files.waited == [outer_steps.WAIT_SECONDS]
    bench.files.done.append(Outcome(write.ticket, None, 1, 0.1))
    bench.cache.plan_waits([])
    assert bench.cache.may_sleep
    bench.cache.idle()
    assert len(bench.files.waited) == 1
    bench.disk.close()


def test_a_write_that_fails_is_a_miss_later(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path / "disk")
    bench.serve("one", 0)
    bench.cache.idle()
    (write,) = [one for one in bench.ran if isinstance(one, Write)]
    lost = Lost(0, Failure(Reason.DISK_FULL))
    bench.files.done.append(Outcome(write.ticket, lost, 0, 0.1))
    bench.cache.plan_waits([])
    assert bench.core.host is not None
    assert all(level.used == 0 for level in bench.core.host.levels().values())
    stats = bench.disk.tier.stats
    assert stats.store_failures == {Reason.DISK_FULL: 1} and not stats.stores
    bench.disk.close()


def test_other_weights_have_other_files(bench: DiskBench) -> None:
    bench.cache.weights_change()
    assert bench.files.updates == 1
    tokens = array("q", range(LENGTH))
    assert not bench.disk.tier.find((None, None), tokens, LENGTH)
    first = bench.disk.tier._fingerprint
    bench.cache.weights_change()
    assert bench.disk.tier._fingerprint != first


def test_ranks_give_other_weights_one_name(tmp_path: Path) -> None:
    """The name is random, and all of them have it from the start."""
    found = []
    for rank in range(2):
        bench = DiskBench(tmp_path / str(rank))
        bench.cache.weights_change()
        found.append(bench.disk.tier._fingerprint)
        bench.disk.close()
    assert found[0] == found[1] != IDENTITY.fingerprint()


def test_images_are_not_kept_in_files(tmp_path: Path) -> None:
    """Their text before is, if something ends there."""
    bench = DiskBench(tmp_path / "disk")
    tokens = array("q", [*range(PAGE), VOCABULARY, *range(PAGE)])
    tier = bench.disk.tier
    assert tier.begin_store(None, tokens, 0, 1024) is None
    assert tier.begin_store(None, tokens[:PAGE], 0, 1024) is not None
    bench.disk.close()


def test_one_rank_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(tp_size=1, tp_rank=0)
    monkeypatch.setattr(outer_steps, "get_parallel", lambda: alone)
    monkeypatch.setattr("hybrid_plugin.sglang.outer_tiers.get_parallel", lambda: alone)
    assert greatest_of_all_ranks([1, 0, 1 << 61]) == [1, 0, 1 << 61]
    assert of_all_ranks("mine") == ["mine"]
