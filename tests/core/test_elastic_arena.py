# SPDX-License-Identifier: Apache-2.0
"""Map and Unmap on real memory: granules of layer-major and slot-major pools."""

from __future__ import annotations

import pickle

import pytest
import torch

from hybrid_plugin.core.commands import Command, Map, Pool, Unmap, Zero
from hybrid_plugin.device.arena import Arena, ElasticArena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.host_arena import HostArena
from tests.core.support import page, state

BLOCK = 64 << 10
PAGE_BYTES = BLOCK // 4
"""Four pages of one layer fill a block."""
LAYERS, PAGES, SLOTS = 3, 16, 8
KV_GRANULE = LAYERS * BLOCK


class Memory:
    """A KV pool of three layers and a pool of slots of two blocks, one budget."""

    def __init__(self, blocks: int) -> None:
        self.host = HostArena((blocks + 1) * BLOCK, BLOCK)
        layer_bytes = PAGES * PAGE_BYTES
        pages = self.host.reserve(LAYERS * layer_bytes)
        slots = self.host.reserve(SLOTS * 2 * BLOCK)
        layers = pages.memory.view(LAYERS, PAGES, PAGE_BYTES)
        self.kv = ElasticArena(list(layers), pages, self.host, 4)
        self.states = ElasticArena([slots.memory.view(SLOTS, -1)], slots, self.host, 1)
        self.executor = Executor({Pool.KV: self.kv, Pool.STATE: self.states})

    def run(self, *commands: Command) -> None:
        self.executor.run(commands)

    def fill(self, arena: Arena, index: int, value: int) -> None:
        for part in arena.parts:
            part[index] = value

    def content(self, arena: Arena, index: int) -> set[int]:
        return {int(v) for part in arena.parts for v in set(part[index].tolist())}


def test_a_granule_has_memory_in_every_layer() -> None:
    memory = Memory(blocks=6)
    memory.run(Map(Pool.KV, (0, 2)))
    assert memory.host.mapped == 2 * KV_GRANULE
    for index in (0, 3, 8, 11):
        memory.fill(memory.kv, index, index + 1)
    assert [memory.content(memory.kv, i) for i in (0, 3, 8, 11)] == [
        {1},
        {4},
        {9},
        {12},
    ]
    memory.run(Unmap(Pool.KV, (2,)))
    assert memory.host.mapped == KV_GRANULE
    assert memory.content(memory.kv, 3) == {4}
    assert memory.content(memory.kv, 8) == {0}, "a hole reads as zeros"


def test_memory_moves_between_the_pools_and_comes_back_cleared() -> None:
    memory = Memory(blocks=6)
    memory.run(Map(Pool.KV, (0, 1)))
    memory.fill(memory.kv, 4, 7)
    created = memory.host.created
    memory.run(Unmap(Pool.KV, (1,)), Map(Pool.STATE, (5,)))
    memory.fill(memory.states, 5, 9)
    memory.run(Unmap(Pool.STATE, (5,)), Map(Pool.KV, (1,)))
    assert memory.content(memory.kv, 4) == {0}
    assert memory.host.created == created


def test_commands_keep_their_order_around_a_move() -> None:
    memory = Memory(blocks=6)
    memory.run(Map(Pool.KV, (0, 1)))
    memory.fill(memory.kv, 5, 3)
    memory.run(page(5, 1), Unmap(Pool.KV, (1,)), Map(Pool.STATE, (1,)))
    assert memory.content(memory.kv, 1) == {3}
    memory.fill(memory.states, 1, 4)
    memory.run(state(1, 1), Zero(Pool.STATE, 1))
    assert memory.content(memory.states, 1) == {0}


def test_memory_beyond_the_budget_is_an_error_of_whoever_ordered_it() -> None:
    memory = Memory(blocks=6)
    memory.run(Map(Pool.KV, (0,)), Map(Pool.STATE, (1,)))
    with pytest.raises(MemoryError, match="bytes of cache memory were refused"):
        memory.run(Map(Pool.STATE, (3,)))
    assert memory.host.mapped == KV_GRANULE + 2 * BLOCK


def test_what_moves_cost_is_counted() -> None:
    memory = Memory(blocks=6)
    memory.run(Map(Pool.KV, (0, 1)), Unmap(Pool.KV, (1,)), Map(Pool.STATE, (1,)))
    moves = memory.executor.moves
    assert (moves.calls, moves.granules) == (3, 4)
    assert moves.bytes == 3 * KV_GRANULE + 2 * BLOCK
    assert moves.seconds > 0


def test_fixed_memory_does_not_move() -> None:
    memory = Memory(blocks=6)
    fixed = Executor({Pool.KV: Arena(memory.kv.parts)})
    with pytest.raises(TypeError, match=r"the memory of pool .kv. is fixed"):
        fixed.run([Map(Pool.KV, (1,))])


def test_a_granule_is_a_whole_number_of_blocks() -> None:
    host = HostArena(8 * BLOCK, BLOCK)
    place = host.reserve(4 * BLOCK)
    rows = place.memory.view(16, -1)
    with pytest.raises(ValueError, match="no whole number of blocks"):
        ElasticArena([rows], place, host, 3)
    with pytest.raises(ValueError, match="no whole number of blocks"):
        ElasticArena([rows[1:]], place, host, 4)


def test_moves_travel_between_processes() -> None:
    commands = [Map(Pool.KV, (1, 2)), Unmap(Pool.STATE, (3,)), state(1, 2)]
    assert pickle.loads(pickle.dumps(commands)) == commands


def test_few_or_large_rows_that_lie_side_by_side_are_copied_plainly() -> None:
    """On a GPU: many packed pages are one launch, a slot is a plain copy."""
    packed, apart, slots = (
        Arena([torch.empty(64, 4096, dtype=torch.int8)]),
        Arena([torch.empty(64, 4096, dtype=torch.int8) for _ in range(2)]),
        Arena([torch.empty(9, 16 << 20, dtype=torch.int8)]),
    )
    assert [packed._is_plain(count) for count in (1, 8, 9, 64)] == [
        True,
        True,
        False,
        False,
    ]
    assert not apart._is_plain(1)
    assert slots._is_plain(9)


def test_released_pools_have_their_memory_back_cleared() -> None:
    memory = Memory(blocks=6)
    memory.run(Map(Pool.KV, (0, 1)))
    memory.fill(memory.kv, 4, 7)
    held = memory.host.held
    assert memory.executor.release() == held > 0
    assert memory.executor.is_released
    assert memory.host.mapped == memory.host.held == 0
    assert memory.executor.release() == 0, "it is released"
    memory.executor.restore()
    assert not memory.executor.is_released
    assert memory.host.mapped == held
    assert memory.content(memory.kv, 4) == {0}
    memory.fill(memory.kv, 7, 3)
    memory.executor.restore()
    assert memory.content(memory.kv, 7) == {3}, "it has its memory"


def test_memory_that_was_held_for_later_is_held_again() -> None:
    """Another process would take it, and the next `Map` would end the engine."""
    memory = Memory(blocks=12)
    assert memory.host.hold(12 * BLOCK) is None
    memory.run(Map(Pool.KV, (0,)))
    assert memory.executor.release() == 12 * BLOCK
    assert memory.host.held == 0
    memory.executor.restore()
    assert (memory.host.held, memory.host.mapped) == (12 * BLOCK, KV_GRANULE)
    created = memory.host.created
    memory.run(Map(Pool.KV, (1, 2)))
    assert memory.host.created == created


def check_refusal_leaves_nothing(memory: Memory) -> None:
    """Check that memory cannot be restored, and that no part of it stays behind."""
    with pytest.raises(MemoryError, match="out of memory"):
        memory.executor.restore()
    assert memory.executor.is_released
    assert memory.host.mapped == memory.host.held == 0


def test_memory_that_cannot_be_held_again_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory(blocks=12)
    assert memory.host.hold(12 * BLOCK) is None
    memory.run(Map(Pool.KV, (0,)))
    memory.executor.release()
    monkeypatch.setattr(memory.host, "_create", lambda blocks: (0, "out of memory"))
    check_refusal_leaves_nothing(memory)
    monkeypatch.undo()
    memory.executor.restore()
    assert memory.host.held == 12 * BLOCK


def test_fixed_pools_are_cleared_too() -> None:
    """An engine may have let go of their memory, and what is there now is anything."""
    rows = torch.full((4, 16), 7, dtype=torch.int8)
    executor = Executor({Pool.KV: Arena([rows])})
    assert executor.release() == 0
    rows.fill_(-1)  # NaN, in most types
    executor.restore()
    assert not rows.any()


def test_commands_wait_for_released_memory() -> None:
    memory = Memory(blocks=6)
    memory.run(Map(Pool.KV, (0,)))
    memory.executor.release()
    memory.run(Unmap(Pool.KV, (0,)), Map(Pool.STATE, (5,)))
    memory.run(Map(Pool.STATE, (2,)), Zero(Pool.STATE, 2))
    assert memory.host.mapped == 0
    memory.executor.restore()
    assert memory.host.mapped == 2 * 2 * BLOCK
    memory.fill(memory.states, 5, 9)
    memory.fill(memory.states, 2, 9)
    memory.executor.release()
    memory.executor.restore()
    assert memory.host.mapped == 2 * 2 * BLOCK


def test_memory_that_is_gone_is_said() -> None:
    memory = Memory(blocks=6)
    memory.run(Map(Pool.KV, (0, 1)))
    memory.executor.release()
    memory.host.lower(KV_GRANULE)
    with pytest.raises(MemoryError):
        memory.executor.restore()
    assert memory.executor.is_released


def test_memory_that_is_gone_for_one_pool_may_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer on the same device may hold some of it still."""
    memory = Memory(blocks=6)
    memory.run(Map(Pool.KV, (0,)), Map(Pool.STATE, (1,)))
    memory.fill(memory.kv, 0, 5)
    held = memory.executor.release()
    taken = memory.host._create
    monkeypatch.setattr(
        memory.host,
        "_create",
        lambda blocks: taken(blocks) if blocks <= LAYERS else (0, "out of memory"),
    )
    for _ in range(2):
        check_refusal_leaves_nothing(memory)
    monkeypatch.undo()
    memory.executor.restore()
    assert memory.host.mapped == held
    assert memory.content(memory.kv, 0) == {0}
    memory.fill(memory.states, 1, 9)
