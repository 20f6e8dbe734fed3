# SPDX-License-Identifier: Apache-2.0
"""Stores and loads, whatever order their queues run in."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterable

import pytest
import torch

from hybrid_plugin.core.commands import (
    Await,
    Command,
    Copy,
    Load,
    Map,
    Pool,
    Store,
    Unmap,
)
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.device.arena import Arena, ElasticArena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.host import bandwidth
from hybrid_plugin.device.host import blocks as blocks_module
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.device.host.queues import AtOnceQueues, Mark, Queue, queues_for
from hybrid_plugin.device.host_arena import HostArena
from tests.core.support import page
from tests.device.later import NAMES, LaterQueues
from tests.device.traffic import PLAN, RINGS, WAITS, Traffic, pools

SEEDS = range(12)
STEPS = 120


def wrong_rows(seed: int, deaf: tuple[str, str] | None = None) -> list[str]:
    """What a model finds wrong whose copies run in an order that the seed decides."""
    rng = random.Random(seed)
    queues = LaterQueues(deaf)
    order = rng.sample(NAMES, len(NAMES))
    traffic = Traffic(
        rng, queues, lambda: queues.run_some(rng, order, rng.randrange(40))
    )
    for _ in range(STEPS):
        traffic.step()
        if rng.random() < 0.1:
            rng.shuffle(order)
    traffic.finish()
    heard = {(name, other) for name in NAMES for other in queues.all[name].heard}
    assert heard - {(name, name) for name in NAMES} == set(WAITS)
    return traffic.wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_the_model_finds_what_commands_say_in_any_order_of_the_queues(
    seed: int,
) -> None:
    assert wrong_rows(seed) == []


@pytest.mark.parametrize("wait", WAITS, ids="-".join)
def test_each_wait_is_needed(wait: tuple[str, str]) -> None:
    assert any(wrong_rows(seed, deaf=wait) for seed in SEEDS)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_at_once(seed: int) -> None:
    traffic = Traffic(random.Random(seed), AtOnceQueues(), lambda: None)
    for _ in range(3 * STEPS):
        traffic.step()
    traffic.finish()
    assert traffic.wrong == []
    assert traffic.host, "rows were stored"


def test_for_how_long_the_model_waits_is_known_once_it_is_over() -> None:
    """A store of nine pages takes three pieces of a ring that has two."""
    queues, memory = LaterQueues(), pools()
    copies = HostCopies(memory, PLAN, rings=RINGS, queues=queues)
    copies.run(Map("host.kv", (1,)))
    copies.run(Store(Pool.KV, tuple(range(1, 10)), tuple(range(20, 29))))
    copies.run(Load(Pool.KV, (20,), (11,), 1))
    assert copies.wait_seconds == 0.0
    queues.finish()
    assert copies.wait_seconds == 1.0
    copies.run(Await(1))
    assert copies.wait_seconds == 1.0
    queues.finish()
    assert copies.wait_seconds == 2.0


def test_where_all_is_done_at_once_nothing_waits() -> None:
    copies = HostCopies(pools(), PLAN, rings=RINGS, queues=AtOnceQueues())
    copies.run(Map("host.kv", (1,)))
    copies.run(Store(Pool.KV, tuple(range(1, 10)), tuple(range(20, 29))))
    copies.run(Load(Pool.KV, (20,), (11,), 1))
    copies.run(Await(1))
    assert copies.wait_seconds == 0.0


ACROSS = (19, 20)
"""Rows of two blocks, which one piece holds."""


def late_rows(early: tuple[int, ...], late: tuple[int, ...], *, load: bool) -> set[int]:
    """Rows that a load gets wrong; the later of two copies runs as early as it may.

    Args:
        early: host rows of the first, among `ACROSS`.
        late: those of the second.
        load: whether the first is the load, and the second a store.
    """
    queues, memory = LaterQueues(), pools()
    copies = HostCopies(memory, PLAN, rings=RINGS, queues=queues)
    pages = [memory[Pool.KV][0][i].clone() for i in range(8)]
    copies.run(Map("host.kv", (1,)))
    copies.run(Store(Pool.KV, (1, 2), ACROSS))
    queues.finish()
    ids = dict(zip(ACROSS, (3, 4), strict=True))
    stored, loaded = (late, early) if load else (early, late)
    store = Store(Pool.KV, tuple(ids[row] for row in stored), stored)
    places = dict(zip(loaded, (5, 6), strict=False))
    fetch = Load(Pool.KV, loaded, tuple(places.values()), 1)
    for command in (fetch, store) if load else (store, fetch):
        copies.run(command)
    before = dict(zip(ACROSS, pages[1:3], strict=True))
    hasty = ("model", "stores") if load else ("loads", "scatters")
    while any(queues.all[name].step() for name in hasty):
        pass
    queues.finish()
    return {
        row
        for row, place in places.items()
        if not torch.equal(
            memory[Pool.KV][0][place],
            before[row] if load or row not in stored else pages[ids[row]],
        )
    }


def _note_the_first(
    marks: list[Mark | None], blocks: Iterable[int], mark: Mark
) -> None:
    marks[min(blocks)] = mark


def _wait_for_the_first(
    marks: list[Mark | None], blocks: Iterable[int], queue: Queue
) -> None:
    mark = marks[min(blocks)]
    if mark is not None:
        queue.wait(mark)


@pytest.mark.parametrize("load", [True, False], ids=["store late", "load late"])
@pytest.mark.parametrize(
    ("name", "broken", "early", "late"),
    [
        ("_note", _note_the_first, ACROSS, (20,)),
        ("_wait", _wait_for_the_first, (20,), ACROSS),
    ],
    ids=["marks", "waits"],
)
def test_every_block_of_a_piece_counts(
    name: str,
    broken: Callable[..., None],
    early: tuple[int, ...],
    late: tuple[int, ...],
    load: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert late_rows(early, late, load=load) == set()
    monkeypatch.setattr(blocks_module, name, broken)
    assert late_rows(early, late, load=load) == {20}


def made(plan: HostPlan = PLAN) -> HostCopies:
    return HostCopies(pools(), plan, rings=RINGS)


def test_wrong_commands() -> None:
    copies = made()
    with pytest.raises(ValueError, match=r"granules \[1\] of host.kv have no"):
        copies.run(Store(Pool.KV, (1,), (20,)))
    with pytest.raises(ValueError, match=r"granule 0 of host.kv has memory already"):
        copies.run(Map("host.kv", (0,)))
    with pytest.raises(ValueError, match=r"granules \[2, 4\] of host.kv have no"):
        copies.run(Load(Pool.KV, (80, 1, 40), (1, 2, 3), 1))
    with pytest.raises(ValueError, match=r"granules \[7\] of host.state have no"):
        copies.run(Copy("host.state", 1, 14))
    copies.run(Store(Pool.KV, (1,), (1,)))
    copies.run(Load(Pool.KV, (1,), (1,), 5))
    copies.run(Await(5))
    with pytest.raises(KeyError):
        copies.run(Await(5))
    with pytest.raises(KeyError):
        copies.run(Store("window1", (1,), (1,)))
    copies.run(Map("host.kv", tuple(range(1, 9))))
    with pytest.raises(MemoryError, match="all 11 blocks"):
        copies.run(Map("host.state", (1,)))


def test_a_plan_that_does_not_fit_the_pools() -> None:
    with pytest.raises(ValueError, match="256 bytes do not fit into rows of 255"):
        made(HostPlan({Pool.KV: 255}, 5200, 4))
    with pytest.raises(ValueError, match="window3"):
        made(HostPlan({Pool.KV: 260, "window3": 8}, 5200, 4))
    with pytest.raises(MemoryError):
        made(HostPlan({Pool.KV: 260, Pool.STATE: 2600}, 5200, 1))


def test_memory_goes_back_once() -> None:
    copies = made()
    copies.close()
    copies.close()


def test_devices_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="'meta' is not known"):
        queues_for(torch.device("meta"))


def test_measuring_bandwidth_leaves_all_pages_as_they_were() -> None:
    memory, before = pools(), pools()
    found = HostCopies(memory, PLAN, rings=RINGS).measure()
    assert found.store_bytes_per_second > 0 and found.load_bytes_per_second > 0
    for pool, parts in memory.items():
        for part, twin in zip(parts, before[pool], strict=True):
            assert torch.equal(part, twin)


def test_bandwidth_counts_the_bytes_of_all_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each command takes a second, and so does a glance at the clock's hands."""
    seconds = itertools.count()
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(seconds))
    ordered: list[Store | Load | Await] = []

    def order(command: Store | Load | Await) -> None:
        ordered.append(command)
        next(seconds)

    found = bandwidth.measure(order, lambda: None, Pool.KV, 4, 600)
    assert found == bandwidth.Bandwidth(2400 / 2, 2400 / 3)
    assert ordered[:3] == [
        Store(Pool.KV, (0, 0, 0, 0), (0, 1, 2, 3)),
        Load(Pool.KV, (0, 1, 2, 3), (0, 0, 0, 0), -1),
        Await(-1),
    ]


BLOCK = 64 << 10


def elastic() -> tuple[ElasticArena, HostArena]:
    """Pages of three layers, four of which fill a block in each."""
    host = HostArena(13 * BLOCK, BLOCK)
    place = host.reserve(3 * 4 * BLOCK)
    layers = place.memory.view(3, 16, BLOCK // 4)
    return ElasticArena(list(layers), place, host, 4), host


def test_pages_of_elastic_pools_come_back_to_other_granules() -> None:
    arena, _ = elastic()
    executor = Executor({Pool.KV: arena})
    executor.attach_host(HostPlan({Pool.KV: 3 * BLOCK // 4}, BLOCK, 4))
    executor.run([Map(Pool.KV, (0, 2))])
    for part in arena.parts:
        part[8], part[9], part[3] = 1, 2, 3
    commands: list[Command] = [
        Map("host.kv", (1, 2)),
        Store(Pool.KV, (8, 9), (2, 1)),
        page(3, 8),
        Unmap(Pool.KV, (2,)),
        Map(Pool.KV, (1,)),
        Load(Pool.KV, (1, 2), (5, 4), 1),
        Await(1),
    ]
    executor.run(commands)
    assert [int(part[5].unique()) for part in arena.parts] == [2, 2, 2]
    assert [int(part[4].unique()) for part in arena.parts] == [1, 1, 1]
    assert executor.moves.calls == 3, "host rows are not moved memory of the device"


def test_commands_travel_between_processes() -> None:
    commands = [Store(Pool.KV, (1,), (2,)), Load(Pool.KV, (2,), (3,), 4), Await(4)]
    assert pickle.loads(pickle.dumps(commands)) == commands


def test_ranks_without_host_memory_refuse_its_commands() -> None:
    executor = Executor({Pool.KV: Arena(pools()[Pool.KV])})
    for command in (
        Store(Pool.KV, (1,), (1,)),
        Load(Pool.KV, (1,), (1,), 1),
        Await(1),
        Map("host.kv", (1,)),
        Copy("host.kv", 1, 2),
    ):
        with pytest.raises(TypeError, match="no host memory"):
            executor.run([command])


def test_parts_that_join_later_would_not_be_stored() -> None:
    executor = Executor({Pool.KV: Arena(pools()[Pool.KV])})
    executor.attach_host(HostPlan({Pool.KV: 260}, 2600, 3))
    with pytest.raises(TypeError, match="has host rows already"):
        executor.join(Pool.KV, [torch.zeros(30, 4, dtype=torch.int8)])
