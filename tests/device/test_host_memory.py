# SPDX-License-Identifier: Apache-2.0
"""Blocks, rows, slabs and the buffer behind them."""

from __future__ import annotations

import os
import random
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

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
from hybrid_plugin.device.host.ranges import CopyRanges, Ranges, copier_for
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


def test_a_run_begins_where_its_first_row_is() -> None:
    memory = torch.zeros(64, dtype=torch.int8)
    found = HostRows("host.kv", HostBlocks(memory, 16), 5, 3)
    found.map([1])
    run = next(found.runs([4, 5]))
    assert found.address(run) == memory.data_ptr() + 16 + 5


def test_neighbours_on_both_sides_are_one_range() -> None:
    found = Ranges()
    for to, of, size in [(8, 100, 4), (12, 104, 4), (16, 0, 2), (30, 2, 2)]:
        found.add(to, of, size)
    assert found == Ranges([8, 16, 30], [100, 0, 2], [8, 2, 2])
    assert found.reversed() == Ranges([100, 0, 2], [8, 16, 30], [8, 2, 2])


class Driver:
    """As much of CUDA's driver as copies ranges."""

    class CUresult:
        CUDA_SUCCESS = 0

    class CUmemcpyAttributes:
        srcAccessOrder = flags = 0  # noqa: N815

    class CUmemcpySrcAccessOrder:
        CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1

    class CUmemcpyFlags:
        CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1

    CUdeviceptr = int

    def __init__(self, version: int, error: int = 0) -> None:
        self.version, self.error = version, error
        self.calls: list[tuple[object, ...]] = []

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.version

    def cuMemcpyBatchAsync(self, *arguments: object) -> tuple[int]:  # noqa: N802
        self.calls.append(arguments)
        return (self.error,)

    def cuMemcpyAsync(self, *arguments: object) -> tuple[int]:  # noqa: N802
        self.calls.append(arguments)
        return (self.error,)


def copier(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> CopyRanges:
    package = ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, package)
    stream = SimpleNamespace(cuda_stream=17)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return copier_for(torch.device("cuda", 0))


def test_a_gpu_copies_all_ranges_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(12080)
    copier(driver, monkeypatch)(Ranges([1, 2], [3, 4], [5, 6]))
    ((to, of, sizes, count, attributes, which, kinds, stream),) = driver.calls
    assert (to, of, sizes, count) == ([1, 2], [3, 4], [5, 6], 2)
    assert (which, kinds, stream) == ([0], 1, 17)
    (one,) = attributes  # type: ignore[misc]
    assert (one.srcAccessOrder, one.flags) == (1, 1)


def test_an_older_driver_gets_a_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(12070)
    copier(driver, monkeypatch)(Ranges([1, 2], [3, 4], [5, 6]))
    assert driver.calls == [(1, 3, 5, 17), (2, 4, 6, 17)]


@pytest.mark.parametrize("version", [12070, 12080])
def test_a_copy_that_fails_is_an_error(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copier(Driver(version, error=700), monkeypatch)
    with pytest.raises(RuntimeError, match="host memory failed: 700"):
        copy(Ranges([1], [2], [3]))


def test_a_gpu_without_the_bindings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RuntimeError, match="pip install cuda-bindings"):
        copier_for(torch.device("cuda", 0))


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
