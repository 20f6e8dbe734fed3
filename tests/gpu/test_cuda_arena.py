# SPDX-License-Identifier: Apache-2.0
"""CUDA's virtual memory behind tensors: budget, reuse, holes, graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_plugin.device import cuda_arena
from hybrid_plugin.device.arena import ElasticArena
from hybrid_plugin.device.cuda_arena import CudaArena
from hybrid_plugin.device.virtual_arena import AddressRange, ByteRange

if not cuda_arena.is_available():
    pytest.skip("needs a CUDA device and cuda-bindings", allow_module_level=True)

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda", 0)
BLOCK = 2 << 20
MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[CudaArena]:
    """64 MiB, all of it held."""
    made = CudaArena(64 * MIB, DEVICE)
    assert made.hold(made.usable) is None
    yield made
    made.close()


def used() -> int:
    """Bytes of the device that are taken, by the driver's own count."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free


def blocks(place: AddressRange, *numbers: int) -> list[ByteRange]:
    return [ByteRange(place, i * BLOCK, (i + 1) * BLOCK) for i in numbers]


def test_the_driver_counts_the_budget_and_no_more() -> None:
    # The driver loads a kernel when it first runs, into memory that it counts too.
    torch.empty(1, dtype=torch.int8, device=DEVICE).fill_(1)
    before = used()
    arena = CudaArena(1 << 30, DEVICE)
    assert arena.block_bytes == BLOCK
    places = [arena.reserve(4 << 30) for _ in range(2)]
    assert used() - before <= 4 * MIB, "addresses cost nothing but tables"
    assert arena.hold(arena.usable) is None
    held = used() - before
    assert 0 <= held - arena.budget <= 8 * MIB
    for turn in range(6):
        place = places[turn % 2]
        spans = [ByteRange(place, 0, arena.usable)]
        assert arena.map(spans) is None
        place.memory[: arena.usable].fill_(turn)
        assert used() - before == held
        arena.unmap(spans)
        assert used() - before == held
    assert arena.created == arena.usable, "moving created nothing"
    arena.close()
    assert used() - before <= 2 * MIB
    for _ in range(64):  # where the engine plans other pools, it is given back unused
        unused = CudaArena(4 * BLOCK, DEVICE)
        unused.close()
        unused.close()
    assert used() - before <= 2 * MIB


def test_addresses_stay_and_content_is_the_blocks(arena: CudaArena) -> None:
    place = arena.reserve(32 * MIB)
    view = place.memory[BLOCK : 3 * BLOCK]
    for value in (1, 2):
        assert arena.map([ByteRange(place, BLOCK, 3 * BLOCK)]) is None
        view.fill_(value)
        assert bool((view == value).all())
        assert view.data_ptr() == place.address + BLOCK
        arena.unmap([ByteRange(place, BLOCK, 3 * BLOCK)])


def test_holes_can_be_read_everywhere(arena: CudaArena) -> None:
    place = arena.reserve(256 * MIB)
    assert arena.map(blocks(place, 3, 64)) is None
    place.memory[3 * BLOCK : 4 * BLOCK].fill_(5)
    total = int(place.memory.sum(dtype=torch.int64))
    arena.unmap(blocks(place, 3))
    assert int(place.memory[: 64 * BLOCK].sum(dtype=torch.int64)) != total
    torch.cuda.synchronize()


def test_a_scattered_pool_is_whole(arena: CudaArena) -> None:
    place, other = arena.reserve(64 * MIB), arena.reserve(64 * MIB)
    assert arena.map(blocks(place, *range(0, 30, 2))) is None
    for i in range(0, 30, 2):
        place.memory[i * BLOCK : (i + 1) * BLOCK].fill_(i)
    arena.unmap(blocks(place, *range(0, 30, 4)))
    assert arena.map(blocks(other, *range(8))) is None
    other.memory[: 8 * BLOCK].fill_(99)
    for i in range(2, 30, 4):
        block = place.memory[i * BLOCK : (i + 1) * BLOCK]
        assert bool((block == i).all()), i


def test_rows_come_back_cleared(arena: CudaArena) -> None:
    place = arena.reserve(2 * 8 * BLOCK)
    layers = place.memory.view(2, 32, BLOCK // 4)
    pool = ElasticArena(list(layers), place, arena, 4)
    assert pool.map([0, 3]) is None
    layers[:, 12:16].fill_(7)
    pool.unmap([3])
    assert pool.map([5, 3, 6]) is None
    torch.cuda.synchronize()
    assert not layers[:, 12:16].any() and not layers[:, 20:28].any()


def test_a_captured_graph_works_on_memory_that_moved(arena: CudaArena) -> None:
    place = arena.reserve(32 * MIB)
    rows = place.memory.view(16, BLOCK)
    index = torch.tensor([1], device=DEVICE)
    assert arena.map(blocks(place, 1)) is None

    def work() -> None:
        rows.index_add_(0, index, torch.ones(1, BLOCK, dtype=torch.int8, device=DEVICE))

    rows[1].zero_()
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for row in (1, 9, 4):
        arena.unmap(
            [s for s in blocks(place, *range(16)) if place.backed[s.start // BLOCK]]
        )
        assert arena.map(blocks(place, row)) is None
        rows[row].fill_(row)
        index.fill_(row)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((rows[row] == row + 1).all())


def test_unmapping_waits_for_the_work_that_uses_the_memory(arena: CudaArena) -> None:
    place, other = arena.reserve(32 * MIB), arena.reserve(32 * MIB)
    assert arena.map(blocks(place, *range(8))) is None
    region = place.memory[: 8 * BLOCK]
    kept = torch.empty_like(region)
    region.fill_(3)
    torch.cuda._sleep(200_000_000)  # cycles: the copy is still to come
    kept.copy_(region)
    arena.unmap(blocks(place, *range(8)))
    assert arena.map(blocks(other, *range(8))) is None
    other.memory[: 8 * BLOCK].fill_(9)
    torch.cuda.synchronize()
    assert bool((kept == 3).all())


def test_memory_that_others_took_is_refused() -> None:
    free, _ = torch.cuda.mem_get_info(DEVICE)
    arena = CudaArena(2 * free, DEVICE)
    refusal = arena.hold(arena.usable, partly=True)
    assert refusal is not None and "OUT_OF_MEMORY" in refusal.reason
    assert free // 2 < arena.held <= free
    place = arena.reserve(2 * arena.held // BLOCK * BLOCK)
    half = arena.held // 2 // BLOCK * BLOCK
    assert arena.map([ByteRange(place, 0, half)]) is None
    refusal = arena.map([ByteRange(place, half, place.size)])
    assert refusal is not None
    place.memory[: 16 * MIB].fill_(1)
    torch.cuda.synchronize()
    arena.close()


WRITES_TO_A_HOLE = """
import torch
from hybrid_plugin.device.cuda_arena import CudaArena
arena = CudaArena(64 << 20, torch.device("cuda", 0))
place = arena.reserve(64 << 20)
print("read", int(place.memory[:1024].to(torch.int64).abs().sum()) >= 0)
place.memory[5] = 1
torch.cuda.synchronize()
print("written")
"""


def test_a_write_to_a_hole_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITES_TO_A_HOLE],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert "read True" in done.stdout
    assert "written" not in done.stdout
    assert done.returncode != 0
