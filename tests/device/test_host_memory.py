# SPDX-License-Identifier: Apache-2.0
"""Blocks, rows, slabs and the buffer behind them."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.core.commands import Await, Load, Store
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.device.host import locked_memory
from hybrid_plugin.device.host.blocks import HostBlocks
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.device.host.locked_memory import LockedMemory
from hybrid_plugin.device.host.ring import RingSizes, StagingRing, rings_for
from hybrid_plugin.device.host.rows import HostRows, Run
from hybrid_plugin.device.host.slabs import slabs

CPU = torch.device("cpu")


def rows(blocks: int = 4, per: int = 3, row_bytes: int = 5) -> HostRows:
    memory = torch.arange(blocks * 16, dtype=torch.int8)
    return HostRows("host.kv", HostBlocks(memory, 16), row_bytes, per)


def test_rows_behind_each_other_are_one_run_unless_a_block_ends() -> None:
    found = rows()
    found.map([2, 1])
    assert list(found.runs([0, 1, 2, 3, 4, 7, 8])) == [
        Run(first=0, count=3, block=0, start=0),
        Run(first=3, count=2, block=2, start=0),
        Run(first=5, count=2, block=1, start=5),
    ]
    assert list(found.runs([1, 0])) == [Run(0, 1, 0, 5), Run(1, 1, 0, 0)]
    assert list(found.runs([])) == []
    assert found.blocks_of([0, 1, 8, 3]) == {0, 1, 2}


def test_a_run_of_slabs_ends_with_the_last_row() -> None:
    found = rows()
    found.map([1])
    run = next(found.runs([4, 5]))
    assert found.part(run, 1, 3).tolist() == list(range(22, 30))


def test_blocks_that_went_to_another_granule() -> None:
    found = rows(blocks=2)
    found.map([1])
    with pytest.raises(MemoryError):
        found.map([2])
    found.unmap([1])
    found.map([2])
    assert found.blocks_of([6]) == {1}
    for call in (lambda: found.unmap([1]), lambda: found.check([0, 3])):
        with pytest.raises(ValueError, match="no memory"):
            call()


@pytest.mark.parametrize(("per", "row_bytes"), [(0, 5), (4, 5), (1, 17), (3, 0)])
def test_rows_that_are_no_block(per: int, row_bytes: int) -> None:
    with pytest.raises(ValueError, match="are no block of 16"):
        rows(per=per, row_bytes=row_bytes)


@given(
    widths=st.lists(st.integers(0, 900), min_size=1, max_size=6).filter(any),
    padding=st.integers(0, 40),
    piece=st.sampled_from([256, 512, 1024, 2048]),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_rows_of_any_size_come_back_whole(
    widths: list[int], padding: int, piece: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randint(-128, 128, (9, width), generator=generator).to(torch.int8)
        for width in widths
    ]
    expected = [part.clone() for part in parts]
    row = sum(widths) + padding
    plan = HostPlan({"kv": row}, 3 * row + 1, 3)
    copies = HostCopies({"kv": parts}, plan, rings=RingSizes(piece, 1, 1))
    rng = random.Random(seed)
    sources = rng.sample(range(9), 2)
    stored = rng.sample(range(1, 3), 2)
    copies.run(Store("kv", tuple(sources), tuple(stored)))
    targets = rng.sample(range(9), 2)
    copies.run(Load("kv", tuple(stored), tuple(targets), 1))
    copies.run(Await(1))
    for part, twin in zip(parts, expected, strict=True):
        twin[targets] = twin[sources]
        assert torch.equal(part, twin)


def test_slabs_fill_pieces_evenly_at_aligned_places() -> None:
    rings = [StagingRing(2, 1024, CPU) for _ in range(2)]
    parts = [torch.zeros(4, 1500, dtype=torch.int8) for _ in range(2)]
    cut = slabs(parts, 3100, *rings)
    assert [(slab.start, slab.size, slab.rows) for slab in cut] == [
        (0, 1024, 1),
        (1024, 1024, 1),
        (2048, 952, 1),
    ]
    assert [[part.shape for part in slab.gathers[0].of] for slab in cut] == [
        [(4, 1024)],
        [(4, 476), (4, 548)],
        [(4, 952)],
    ]
    (small,) = slabs([part[:, :150] for part in parts], 310, *rings)
    assert (small.start, small.size, small.rows) == (0, 300, 3)
    assert len(small.gathers) == len(small.scatters) == 2


@pytest.mark.parametrize(("pieces", "size"), [(0, 256), (1, 0), (1, 300)])
def test_rings_of_nothing(pieces: int, size: int) -> None:
    with pytest.raises(ValueError, match="are no ring"):
        StagingRing(pieces, size, CPU)


def test_rings_take_what_they_say() -> None:
    sizes = rings_for(torch.device("cuda"))
    assert sizes.bytes == (sizes.store_pieces + sizes.load_pieces) * sizes.piece_bytes
    assert rings_for(CPU).bytes < sizes.bytes


def test_a_buffer_takes_what_it_says_and_gives_it_back() -> None:
    size = (64 << 20) + 4096
    before = addresses()
    buffer = LockedMemory(size, CPU)
    assert buffer.memory.shape == (size,) and buffer.memory.dtype == torch.int8
    buffer.memory.fill_(3)
    taken = addresses() - before
    assert size <= taken < size + (8 << 20)
    buffer.close()
    assert addresses() - before < 8 << 20
    with pytest.raises(RuntimeError, match="given back"):
        _ = buffer.memory


def addresses() -> int:
    """Bytes of addresses that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_copies_let_go_of_their_memory() -> None:
    before = addresses()
    parts = [torch.zeros(4, 1 << 20, dtype=torch.int8)]
    copies = HostCopies({"kv": parts}, HostPlan({"kv": 1 << 20}, 1 << 20, 64))
    assert addresses() - before >= 64 << 20
    copies.close()
    assert addresses() - before < 24 << 20
    with pytest.raises(RuntimeError):
        copies.run(Store("kv", (1,), (0,)))


def test_a_buffer_that_the_system_does_not_have() -> None:
    with pytest.raises(MemoryError, match="bytes of host memory"):
        LockedMemory(1 << 50, CPU)


class Runtime:
    """As much of CUDA's runtime as locks memory."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.calls: list[tuple[int, ...]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append((address, size, flags))
        return self.error

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return {2: "out of memory"}[error]

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append((address,))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(0)
    monkeypatch.setattr(locked_memory, "_runtime", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return made


def test_memory_that_a_gpu_copies_is_locked_until_it_is_given_back(
    runtime: Runtime,
) -> None:
    buffer = LockedMemory(5 << 20, torch.device("cuda", 0))
    address = buffer.memory.data_ptr()
    assert runtime.calls == [(address, 5 << 20, 0)]
    buffer.close()
    buffer.close()
    assert runtime.calls[1:] == [(address,)]


def test_memory_that_nobody_closes_is_unlocked_as_well(runtime: Runtime) -> None:
    buffer = LockedMemory(5 << 20, torch.device("cuda", 0))
    address = buffer.memory.data_ptr()
    del buffer
    assert runtime.calls[1:] == [(address,)]


def test_memory_that_cannot_be_locked_is_refused(runtime: Runtime) -> None:
    runtime.error = 2
    before = addresses()
    with pytest.raises(MemoryError, match=r"67108864 bytes .* locked: out of"):
        LockedMemory(64 << 20, torch.device("cuda", 0))
    assert addresses() - before < 8 << 20, "it was given back"
