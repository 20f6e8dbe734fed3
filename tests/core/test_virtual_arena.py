# SPDX-License-Identifier: Apache-2.0
"""Memory that comes and goes, on the host: budget, reuse, addresses, resident size."""

from __future__ import annotations

import faulthandler
import mmap
import os
import random
import signal
import sys

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hybrid_plugin.device.host_arena import HostArena
from hybrid_plugin.device.virtual_arena import AddressRange, ByteRange, Refusal
from tests.core.profiles import machine_settings
from tests.core.resident import resident

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="HostArena needs Linux's madvise"
)

PAGE = mmap.PAGESIZE
BLOCK = 64 << 10
HUGE = 2 << 20


class Refusing(HostArena):
    """A system in which another process may take memory."""

    left = 1 << 30
    """Blocks that can still be had."""
    attachable = 1 << 30
    """Runs that can still be mapped."""

    def _create(self, blocks: int) -> tuple[int, str]:
        count = min(blocks, self.left)
        self.left -= count
        return count, "" if count == blocks else "another process took it"

    def _destroy(self, blocks: int) -> None:
        self.left += blocks

    def _attach(self, address: int, size: int) -> str | None:
        if not self.attachable:
            return "the driver says no"
        self.attachable -= 1
        return super()._attach(address, size)


def blocks(place: AddressRange, *numbers: int, size: int = BLOCK) -> list[ByteRange]:
    return [ByteRange(place, i * size, (i + 1) * size) for i in numbers]


def dies_writing(memory: torch.Tensor, byte: int) -> bool:
    """Whether writing to a byte ends a process with an access violation."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        memory[byte] = 1
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV


# ------------------------------------------------------------------- the budget


def test_nothing_is_mapped_beyond_the_budget() -> None:
    arena = HostArena(5 * BLOCK, BLOCK)
    place = arena.reserve(8 * BLOCK)
    assert arena.usable == 4 * BLOCK, "one block is set aside"
    assert arena.map(blocks(place, 0, 1, 2)) is None
    refusal = arena.map(blocks(place, 4, 5))
    assert refusal == Refusal(2 * BLOCK, f"{3 * BLOCK} of {4 * BLOCK} are mapped")
    assert str(refusal).startswith(f"{2 * BLOCK} bytes of cache memory were refused")
    assert arena.mapped == 3 * BLOCK
    assert arena.map(blocks(place, 7)) is None


def test_a_block_that_moves_creates_nothing() -> None:
    arena = HostArena(5 * BLOCK, BLOCK)
    pages, states = arena.reserve(4 * BLOCK), arena.reserve(4 * BLOCK)
    assert arena.map(blocks(pages, 0, 1, 2, 3)) is None
    for turn in range(10):
        source, target = (pages, states) if turn % 2 == 0 else (states, pages)
        arena.unmap(blocks(source, 0, 1, 2, 3))
        assert arena.mapped == 0 and arena.held == 4 * BLOCK
        assert arena.map(blocks(target, 3, 1, 2, 0)) is None
        assert arena.mapped == arena.held == arena.created == 4 * BLOCK


def test_addresses_stay() -> None:
    arena = HostArena(3 * BLOCK, BLOCK)
    place = arena.reserve(4 * BLOCK)
    view = place.memory[BLOCK : 2 * BLOCK]
    address = view.data_ptr()
    for value in (1, 2):
        assert arena.map(blocks(place, 1)) is None
        view.fill_(value)
        assert place.memory.data_ptr() + BLOCK == view.data_ptr() == address
        assert place.memory[BLOCK] == value
        arena.unmap(blocks(place, 1))


def test_held_memory_is_there_whatever_others_take() -> None:
    arena = Refusing(9 * BLOCK, BLOCK)
    place = arena.reserve(8 * BLOCK)
    assert arena.hold(6 * BLOCK) is None
    arena.left = 0
    assert arena.map(blocks(place, *range(6))) is None
    refusal = arena.map(blocks(place, 6))
    assert refusal == Refusal(BLOCK, "another process took it")
    assert arena.mapped == arena.held == 6 * BLOCK


def test_a_refused_hold_changes_nothing_unless_a_part_will_do() -> None:
    arena = Refusing(9 * BLOCK, BLOCK)
    arena.left = 3
    assert arena.hold(8 * BLOCK) == Refusal(8 * BLOCK, "another process took it")
    assert (arena.held, arena.left) == (0, 3)
    refusal = arena.hold(8 * BLOCK, partly=True)
    assert refusal == Refusal(8 * BLOCK, "another process took it")
    assert (arena.held, arena.created) == (3 * BLOCK, 3 * BLOCK)
    assert arena.hold(3 * BLOCK) is None


def test_no_more_than_the_budget_is_held() -> None:
    arena = Refusing(5 * BLOCK, BLOCK)
    reason = f"the budget has {4 * BLOCK} left"
    assert arena.hold(5 * BLOCK) == Refusal(5 * BLOCK, reason)
    assert arena.hold(7 * BLOCK, partly=True) == Refusal(7 * BLOCK, reason)
    assert arena.held == 4 * BLOCK


def test_a_mapping_that_fails_half_way_is_undone() -> None:
    arena = Refusing(9 * BLOCK, BLOCK)
    place = arena.reserve(8 * BLOCK)
    arena.attachable = 2
    refusal = arena.map(blocks(place, 0, 2, 4))
    assert refusal == Refusal(3 * BLOCK, "the driver says no")
    assert arena.mapped == 0 and not any(place.backed)
    arena.attachable = 3
    assert arena.map(blocks(place, 0, 2, 4)) is None


def test_a_lower_budget_gives_memory_back() -> None:
    arena = Refusing(9 * BLOCK, BLOCK)
    arena.left = 8
    place = arena.reserve(8 * BLOCK)
    assert arena.hold(8 * BLOCK) is None
    assert arena.map(blocks(place, 0, 1)) is None
    arena.lower(5 * BLOCK)
    assert (arena.usable, arena.held, arena.left) == (5 * BLOCK, 5 * BLOCK, 3)
    assert arena.map(blocks(place, *range(2, 6))) == Refusal(
        4 * BLOCK, f"{2 * BLOCK} of {5 * BLOCK} are mapped"
    )
    for usable in (BLOCK, 6 * BLOCK):
        with pytest.raises(ValueError, match="are not between"):
            arena.lower(usable)


def test_idle_memory_goes_back_to_the_system() -> None:
    arena = Refusing(9 * BLOCK, BLOCK)
    arena.left = 4
    place = arena.reserve(8 * BLOCK)
    assert arena.map(blocks(place, 0, 1, 2, 3)) is None
    arena.unmap(blocks(place, 1, 2))
    assert arena.trim() == 2 * BLOCK
    assert (arena.held, arena.left) == (2 * BLOCK, 2)
    assert arena.map(blocks(place, 6)) is None


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("block", [BLOCK, HUGE], ids=["64 KiB", "2 MiB"])
def test_resident_memory_follows_what_is_mapped(block: int) -> None:
    arena = HostArena(9 * block, block)
    place = arena.reserve(32 * block)
    assert resident(place) == 0
    assert arena.map(blocks(place, 1, 2, 3, 7, 30, size=block)) is None
    for block_memory in place.memory.view(32, block)[[1]], place.memory:
        assert int(block_memory.sum()) == 0
    for i in (1, 2, 3, 7, 30):
        place.memory[i * block : (i + 1) * block].fill_(1)
    assert resident(place) == 5 * block
    arena.unmap(blocks(place, 2, 30, size=block))
    assert resident(place) == 3 * block
    arena.unmap(blocks(place, 1, 3, 7, size=block))
    assert resident(place) == 0


def test_a_hole_reads_as_zeros_and_takes_no_memory() -> None:
    arena = HostArena(3 * BLOCK, BLOCK)
    place = arena.reserve(64 * BLOCK)
    assert not place.memory.any()
    assert resident(place) == 0


def test_writing_to_a_hole_is_a_fault() -> None:
    arena = HostArena(3 * BLOCK, BLOCK)
    place = arena.reserve(4 * BLOCK)
    assert arena.map(blocks(place, 1)) is None
    assert dies_writing(place.memory, 0)
    assert dies_writing(place.memory, 2 * BLOCK)
    assert not dies_writing(place.memory, BLOCK)
    assert not dies_writing(place.memory, 2 * BLOCK - 1)
    arena.unmap(blocks(place, 1))
    assert dies_writing(place.memory, BLOCK)


def test_mapped_blocks_are_zero_whatever_they_held() -> None:
    arena = HostArena(3 * BLOCK, BLOCK)
    place, other = arena.reserve(4 * BLOCK), arena.reserve(4 * BLOCK)
    assert arena.map(blocks(place, 0, 1)) is None
    place.memory[: 2 * BLOCK].fill_(7)
    arena.unmap(blocks(place, 0, 1))
    assert arena.map([*blocks(place, 1), *blocks(other, 3)]) is None
    assert not place.memory.any() and not other.memory.any()


def test_closing_gives_everything_back() -> None:
    arena = Refusing(9 * BLOCK, BLOCK)
    before = arena.left
    place = arena.reserve(8 * BLOCK)
    assert arena.map(blocks(place, 0, 3, 4)) is None
    place.memory[:BLOCK].fill_(1)
    arena.close()
    assert (arena.mapped, arena.held, arena.left) == (0, 0, before)


# ------------------------------------------------------------------------ misuse


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="less than two blocks"):
        HostArena(2 * BLOCK - 1, BLOCK)
    with pytest.raises(ValueError, match="no multiple of the system's pages"):
        HostArena(1 << 20, 1000)
    with pytest.raises(ValueError, match="no whole number of blocks"):
        HostArena(1 << 20, BLOCK).reserve(BLOCK + 1)


def test_spans_that_do_not_fit() -> None:
    arena = HostArena(9 * BLOCK, BLOCK)
    place = arena.reserve(4 * BLOCK)
    for start, stop in ((0, 5 * BLOCK), (-BLOCK, BLOCK), (BLOCK, 0), (0, BLOCK - 1)):
        with pytest.raises(ValueError, match="no whole blocks"):
            arena.map([ByteRange(place, start, stop)])
    with pytest.raises(ValueError, match="comes twice"):
        arena.map([*blocks(place, 1), ByteRange(place, 0, 2 * BLOCK)])
    assert arena.map(blocks(place, 1)) is None
    with pytest.raises(ValueError, match="are not holes"):
        arena.map([ByteRange(place, 0, 2 * BLOCK)])
    with pytest.raises(ValueError, match="are not mapped"):
        arena.unmap([ByteRange(place, 0, 2 * BLOCK)])
    assert arena.mapped == BLOCK


# ---------------------------------------------------------------------- machine


class ArenaMachine(RuleBasedStateMachine):
    """Random moves between three ranges, on a system that may refuse."""

    @initialize(budget=st.integers(2, 12), left=st.integers(0, 14))
    def start(self, budget: int, left: int) -> None:
        self.arena = Refusing(budget * PAGE, PAGE)
        self.arena.left = left
        self.places = [self.arena.reserve(8 * PAGE) for _ in range(3)]
        self.content: dict[tuple[int, int], int] = {}
        """Byte that each mapped block was filled with."""
        self.total = left

    def _spans(self, chosen: set[tuple[int, int]]) -> list[ByteRange]:
        return [
            s for which, i in chosen for s in blocks(self.places[which], i, size=PAGE)
        ]

    def _block(self, which: int, i: int) -> np.ndarray:
        memory: np.ndarray = self.places[which].memory.numpy()
        return memory[i * PAGE : (i + 1) * PAGE]

    @rule(
        chosen=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=6),
        attachable=st.integers(0, 8),
    )
    def map(self, chosen: set[tuple[int, int]], attachable: int) -> None:
        chosen -= set(self.content)
        before = self.arena.mapped, self.arena.created
        self.arena.attachable = attachable
        refusal = self.arena.map(self._spans(chosen))
        if refusal is not None:
            assert self.arena.mapped == before[0]
            return
        for which, i in chosen:
            value = random.Random(f"{which}/{i}/{len(self.content)}").randint(1, 100)
            memory = self._block(which, i)
            assert not memory.any()
            memory[:] = value
            self.content[which, i] = value

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        mapped = st.sets(st.sampled_from(sorted(self.content)), max_size=6)
        chosen = data.draw(mapped)
        held = self.arena.held
        self.arena.unmap(self._spans(chosen))
        assert self.arena.held == held
        for key in chosen:
            del self.content[key]

    @rule(size=st.integers(0, 14), partly=st.booleans())
    def hold(self, size: int, partly: bool) -> None:
        before = self.arena.held
        refusal = self.arena.hold(size * PAGE, partly=partly)
        if refusal is None:
            assert self.arena.held == max(before, size * PAGE)
        elif not partly:
            assert self.arena.held == before

    @rule()
    def trim(self) -> None:
        self.arena.trim()
        assert self.arena.held == self.arena.mapped

    @invariant()
    def the_books_agree_with_the_memory(self) -> None:
        arena = self.arena
        assert arena.mapped == len(self.content) * PAGE
        assert arena.mapped <= arena.held <= arena.usable < arena.budget
        assert arena.held // PAGE + arena.left == self.total
        for which, place in enumerate(self.places):
            for i, backed in enumerate(place.backed):
                value = self.content.get((which, i), 0)
                assert bool(backed) == bool(value)
                assert (self._block(which, i) == value).all()

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()
            assert self.arena.left == self.total


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(machine_settings(), max_examples=100)
