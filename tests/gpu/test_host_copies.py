# SPDX-License-Identifier: Apache-2.0
"""Stores and loads on CUDA's streams, with delays wherever they may hide a race."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hybrid_plugin.core.commands import Await, Load, Map, Pool, Store, Unmap
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.device import cuda_arena
from hybrid_plugin.device.arena import Arena, ElasticArena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.device.host.locked_memory import LockedMemory
from hybrid_plugin.device.host.queues import CudaQueues, Mark, Queue
from tests.device.traffic import WAITS, Traffic

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20
LONG = 20_000_000
"""Cycles that a stream sleeps: about ten milliseconds."""


class Deaf:
    """A queue that ignores the marks of another."""

    def __init__(
        self, name: str, queue: Queue, ignored: tuple[str, str] | None
    ) -> None:
        self.name = name
        self._queue = queue
        self._ignored = ignored

    def issue(self, work: Callable[[], object]) -> None:
        self._queue.issue(work)

    def upload(self, ids: torch.Tensor) -> torch.Tensor:
        return self._queue.upload(ids)

    def record(self, *, timed: bool = False) -> Mark:
        return self.name, self._queue.record(timed=timed)

    def wait(self, mark: Mark) -> None:
        if (self.name, mark[0]) != self._ignored:
            self._queue.wait(mark[1])

    def seconds_between(self, before: Mark, after: Mark) -> float | None:
        return self._queue.seconds_between(before[1], after[1])


class DeafQueues:
    """CUDA's streams, one of which may ignore another."""

    def __init__(self, ignored: tuple[str, str] | None) -> None:
        self._queues = CudaQueues(DEVICE)
        self._ignored = ignored
        self.stores: Queue = Deaf("stores", self._queues.stores, ignored)
        self.loads: Queue = Deaf("loads", self._queues.loads, ignored)
        self.scatters: Queue = Deaf("scatters", self._queues.scatters, ignored)

    def model(self) -> Queue:
        return Deaf("model", self._queues.model(), self._ignored)

    def finish(self) -> None:
        self._queues.finish()

    def copies_over(self) -> Callable[[], None]:
        return self._queues.copies_over()


def wrong_rows(seed: int, ignored: tuple[str, str] | None = None) -> list[str]:
    """What the model finds wrong where streams sleep at random."""
    rng = random.Random(seed)
    queues = DeafQueues(ignored)

    def sleep() -> None:
        queue = rng.choice(
            [queues.model(), queues.stores, queues.loads, queues.scatters]
        )
        if rng.random() < 0.4:
            cycles = rng.choice([20_000, 10_000_000])
            queue.issue(lambda: torch.cuda._sleep(cycles))

    traffic = Traffic(rng, queues, sleep, "cuda")
    for _ in range(150):
        traffic.step()
    traffic.finish()
    traffic.copies.close()
    return traffic.wrong


@pytest.mark.parametrize("seed", range(20))
def test_the_model_finds_what_commands_say(seed: int) -> None:
    assert wrong_rows(seed) == []


@pytest.mark.parametrize("wait", WAITS, ids="-".join)
def test_each_wait_is_needed(wait: tuple[str, str]) -> None:
    assert any(wrong_rows(seed, wait) for seed in range(20))


def slots(count: int = 6, size: int = 24 * MIB) -> tuple[HostCopies, torch.Tensor]:
    """Slots that are larger than a piece of a ring."""
    rows = torch.empty(count, size, dtype=torch.int8, device=DEVICE)
    for i in range(count):
        rows[i] = i
    plan = HostPlan({Pool.STATE: size}, size, count)
    copies = HostCopies({Pool.STATE: [rows]}, plan)
    copies.run(Map("host.state", tuple(range(1, count))))
    torch.cuda.synchronize()
    return copies, rows


def asleep(queue: Queue, cycles: int = LONG) -> None:
    queue.issue(lambda: torch.cuda._sleep(cycles))


def test_for_how_long_the_model_waits_for_a_load_is_measured() -> None:
    copies, _ = slots()
    copies.run(Store(Pool.STATE, (1,), (3,)))
    torch.cuda.synchronize()
    before = copies.wait_seconds
    asleep(copies._queues.loads)
    copies.run(Load(Pool.STATE, (3,), (5,), 1))
    copies.run(Await(1))
    torch.cuda.synchronize()
    assert copies.wait_seconds > before + 1e-3
    copies.close()


def test_the_source_may_be_rewritten_at_once() -> None:
    copies, rows = slots()
    asleep(copies._queues.model())
    asleep(copies._queues.stores, 2 * LONG)
    copies.run(Store(Pool.STATE, (1, 2), (3, 4)))
    rows[1:3].fill_(99)
    copies.run(Load(Pool.STATE, (3, 4), (5, 0), 1))
    copies.run(Await(1))
    assert bool((rows[5] == 1).all()) and bool((rows[0] == 2).all())
    copies.close()


def test_neither_the_host_nor_the_model_waits_for_a_load() -> None:
    copies, rows = slots()
    copies.run(Store(Pool.STATE, (1,), (1,)))
    torch.cuda.synchronize()
    asleep(copies._queues.loads, 20 * LONG)
    before = torch.cuda.Event()
    copies.run(Load(Pool.STATE, (1,), (4,), 1))
    rows[2].fill_(7)
    before.record()
    before.synchronize()
    assert not copies._tickets[1].query(), "the load sleeps"
    copies.run(Await(1))
    after = torch.cuda.Event()
    after.record()
    assert not after.query(), "the model's stream waits, and the host does not"
    assert bool((rows[4] == 1).all())
    copies.close()


def test_a_load_writes_when_the_model_has_come_to_it() -> None:
    copies, rows = slots()
    copies.run(Store(Pool.STATE, (1,), (1,)))
    torch.cuda.synchronize()
    kept = torch.empty_like(rows[4])
    asleep(copies._queues.model(), 3 * LONG)
    kept.copy_(rows[4])
    copies.run(Load(Pool.STATE, (1,), (4,), 1))
    copies.run(Await(1))
    assert bool((kept == 4).all()) and bool((rows[4] == 1).all())
    copies.close()


def test_the_host_memory_is_locked_and_given_back() -> None:
    buffer = LockedMemory(64 * MIB, DEVICE)
    assert buffer.memory.is_pinned()
    twin = torch.randint(-99, 99, (64 * MIB,), dtype=torch.int8, device=DEVICE)
    buffer.memory.copy_(twin, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(buffer.memory.to(DEVICE), twin)
    buffer.close()
    buffer.close()


def test_memory_that_nobody_closes_is_not_locked_for_ever() -> None:
    for _ in range(20):  # the system gives the same addresses again
        buffer = LockedMemory(MIB, DEVICE)
        assert buffer.memory.is_pinned()
        del buffer


def test_bandwidth_is_measured() -> None:
    copies, rows = slots(4)
    found = copies.measure()
    assert found.store_bytes_per_second > 0 and found.load_bytes_per_second > 0
    for i in range(4):
        assert bool((rows[i] == i).all())
    copies.close()


def test_pools_beyond_two_gibibytes() -> None:
    """Offsets of rows, of layers far apart, do not fit into 32 bits."""
    room = torch.empty(2, 5000, MIB, dtype=torch.int8, device=DEVICE)
    room[:, 4998:] = 5
    plan = HostPlan({Pool.KV: 2 * MIB}, 8 * MIB, 3)
    copies = HostCopies({Pool.KV: list(room)}, plan)
    copies.run(Map("host.kv", (1,)))
    copies.run(Store(Pool.KV, (4998, 4999), (5, 3)))
    copies.run(Load(Pool.KV, (3, 5), (1, 4000), 1))
    copies.run(Await(1))
    assert bool((room[:, [1, 4000]] == 5).all())
    copies.close()


@pytest.fixture
def elastic() -> Iterator[tuple[Executor, ElasticArena]]:
    """Pages of two layers in mapped memory, two MiB of each layer in a granule."""
    if not cuda_arena.is_available():
        pytest.skip("needs cuda-bindings")
    memory = cuda_arena.CudaArena(64 * MIB, DEVICE)
    block = memory.block_bytes
    place = memory.reserve(2 * 8 * block)
    layers = place.memory.view(2, 32, block // 4)
    arena = ElasticArena(list(layers), place, memory, 4)
    executor = Executor({Pool.KV: arena})
    executor.attach_host(HostPlan({Pool.KV: block // 2}, 2 * block, 6))
    yield executor, arena
    assert executor.host is not None
    executor.host.close()
    memory.close()


def test_pages_of_elastic_pools(elastic: tuple[Executor, ElasticArena]) -> None:
    """A granule may lose its memory right behind a store from it."""
    executor, arena = elastic
    executor.run([Map(Pool.KV, (0, 1, 3)), Map("host.kv", (1, 2))])
    for i in range(4, 8):
        for part in arena.parts:
            part[i] = i
    executor.run(
        [
            Store(Pool.KV, (4, 5, 6, 7), (9, 1, 2, 4)),
            Unmap(Pool.KV, (1,)),
            Map(Pool.KV, (2,)),
            Load(Pool.KV, (9, 1, 2, 4), (11, 8, 12, 3), 1),
            Unmap("host.kv", (1,)),
            Map("host.kv", (3,)),
            Store(Pool.KV, (13, 13), (12, 13)),
            Await(1),
        ]
    )
    for index, value in ((11, 4), (8, 5), (12, 6), (3, 7)):
        for part in arena.parts:
            assert bool((part[index] == value).all())


def test_pages_and_slots_of_one_ticket() -> None:
    pages = torch.arange(64, device=DEVICE).to(torch.int8)
    layers = [pages[:, None].expand(64, 4096).contiguous() for _ in range(24)]
    rows = torch.arange(4, device=DEVICE).to(torch.int8)
    states = rows[:, None].expand(4, 20 * MIB).contiguous()
    executor = Executor({Pool.KV: Arena(layers), Pool.STATE: Arena([states])})
    plan = HostPlan({Pool.KV: 24 * 4096, Pool.STATE: 20 * MIB}, 20 * MIB, 4)
    host = executor.attach_host(plan)
    sources, stored = tuple(range(1, 31)), tuple(range(1, 31))
    executor.run([Store(Pool.KV, sources, stored), Map("host.state", (1,))])
    executor.run([Store(Pool.STATE, (2,), (1,))])
    targets = tuple(range(33, 63))
    executor.run([Load(Pool.KV, stored, targets, 9), Load(Pool.STATE, (1,), (3,), 9)])
    executor.run([Await(9)])
    for layer in layers:
        assert torch.equal(layer[33:63], layer[1:31])
    assert torch.equal(states[3], states[2])
    host.close()


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_of_the_host_waits_for_stores() -> None:
    copies, _ = slots()
    asleep(queues_of(copies).model(), 5 * LONG)
    copies.run(Store(Pool.STATE, (3,), (2,)))
    over = copies.copies_over()
    (view,) = copies.views("host.state", [2])
    assert not view.any(), "nothing would have to be waited for"
    in_a_thread(over)
    assert (view == 3).all()
    del view
    copies.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_thread_of_the_host_waits_for_loads(waits: bool) -> None:
    copies, rows = slots()
    copies.run(Store(Pool.STATE, (3,), (2,)))
    torch.cuda.synchronize()
    asleep(queues_of(copies).loads, 5 * LONG)
    copies.run(Load(Pool.STATE, (2,), (5,), 7))
    if waits:
        in_a_thread(copies.copies_over())
    (view,) = copies.views("host.state", [2])
    view[:] = 99
    copies.run(Await(7))
    torch.cuda.synchronize()
    assert bool((rows[5] == 3).all()) == waits
    del view
    copies.close()


def queues_of(copies: HostCopies) -> Any:
    return copies._queues
