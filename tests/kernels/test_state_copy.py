# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from hybrid_kernels import state_copy
from hybrid_kernels.state_copy import reference

ITEMS = [(3,), (60, 3), (2, 5, 7), (4, 64, 65)]


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "reference":
        return reference
    request.getfixturevalue("device")
    from hybrid_kernels.state_copy import triton

    return triton


@pytest.fixture
def where(request: pytest.FixtureRequest, backend: ModuleType) -> str:
    if backend is reference:
        return "cpu"
    return str(request.getfixturevalue("device"))


def make_pool(
    slot_dim: int, slots: int, item: tuple[int, ...], dtype: torch.dtype, where: str
) -> torch.Tensor:
    shape = (slots, *item) if slot_dim == 0 else (3, slots, *item)
    return torch.randn(shape).mul(50).to(dtype).to(where)


def row(pool: torch.Tensor, slot_dim: int, index: int) -> torch.Tensor:
    return pool.select(slot_dim, index)


@pytest.mark.parametrize("item", ITEMS, ids=str)
@pytest.mark.parametrize("slot_dim", [0, 1], ids=["slot_major", "layer_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_copy_and_zero_touch_only_the_named_slots(
    backend: ModuleType,
    where: str,
    item: tuple[int, ...],
    slot_dim: int,
    dtype: torch.dtype,
) -> None:
    pool = make_pool(slot_dim, 9, item, dtype, where)
    before = pool.clone()
    sources = torch.tensor([4, 4, -1, 7, 8], device=where)
    targets = torch.tensor([0, 2, 3, -1, 6], device=where)
    backend.copy(pool, targets, pool, sources, slot_dim)
    backend.zero(pool, torch.tensor([1, -1], dtype=torch.int32, device=where), slot_dim)
    origin = {0: 4, 2: 4, 6: 8}
    for slot in range(9):
        expected = row(before, slot_dim, origin.get(slot, slot))
        if slot == 1:
            expected = torch.zeros_like(expected)
        assert torch.equal(row(pool, slot_dim, slot), expected), slot


@pytest.mark.parametrize("slot_dim", [0, 1], ids=["slot_major", "layer_major"])
def test_gather_then_scatter_is_identity(
    backend: ModuleType, where: str, slot_dim: int
) -> None:
    pool = make_pool(slot_dim, 6, (5, 3), torch.float32, where)
    slots = torch.tensor([5, 0, -1, 3], device=where)
    packed = make_pool(slot_dim, 4, (5, 3), torch.float32, where)
    padding = row(packed, slot_dim, 2).clone()
    backend.copy(packed, None, pool, slots, slot_dim)
    assert torch.equal(row(packed, slot_dim, 2), padding)
    other = torch.zeros_like(pool)
    backend.copy(other, slots, packed, None, slot_dim)
    for slot in range(6):
        expected = row(pool, slot_dim, slot)
        if slot not in (5, 0, 3):
            expected = torch.zeros_like(expected)
        assert torch.equal(row(other, slot_dim, slot), expected), slot


@pytest.mark.parametrize("slot_dim", [0, 1], ids=["slot_major", "layer_major"])
def test_no_rows_are_none(backend: ModuleType, where: str, slot_dim: int) -> None:
    pool = make_pool(slot_dim, 6, (5, 3), torch.float32, where)
    before, slots = pool.clone(), torch.tensor([], dtype=torch.int32, device=where)
    shape = [*pool.shape]
    shape[slot_dim] = 0
    none = torch.empty(shape, device=where)
    backend.copy(none, None, pool, slots, slot_dim)
    backend.copy(pool, slots, none, None, slot_dim)
    assert torch.equal(pool, before)


def test_transposed_items_and_wide_slots(backend: ModuleType, where: str) -> None:
    """The convolution state of an engine: ``[S, dim, width]``, width slowest."""
    room = torch.randn(5, 4, 3, 8, device=where)
    pool = room[:, 1].transpose(1, 2)
    before = room.clone()
    backend.copy(
        pool, torch.tensor([0], device=where), pool, torch.tensor([4], device=where), 0
    )
    assert torch.equal(room[0, 1], before[4, 1])
    room[0, 1] = before[0, 1]
    assert torch.equal(room, before)


def uneven_parts(where: str, kind: str) -> list[torch.Tensor]:
    """A pool of nine slots in tensors that agree in nothing else."""
    bytes_ = torch.randint(-99, 99, (9, 3 * 4160), device=where, dtype=torch.int8)
    states = torch.randn(2, 9, 5, 7, device=where)
    if kind == "odd":
        wide = torch.randint(-9, 9, (9, 70), device=where, dtype=torch.int8)
        return [bytes_[:, :3], wide[:, 5:44], *states]
    if kind == "halves":
        return [bytes_[:, 2:6], *states.to(torch.bfloat16)]
    if kind == "transposed":
        return [states[0].transpose(1, 2), bytes_[:, :64]]
    big = torch.randn(9, 3, 4100, device=where)
    return [bytes_[:, 32:96], big[:, 1], bytes_[:, 4160:8320]]


@pytest.mark.parametrize("kind", ["aligned", "halves", "odd", "transposed"])
def test_parts_move_together_and_nothing_else_does(
    backend: ModuleType, where: str, kind: str
) -> None:
    parts = uneven_parts(where, kind)
    sources = torch.tensor([4, 4, -1, 7, 8], device=where)
    targets = torch.tensor([0, 2, 3, -1, 6], dtype=torch.int32, device=where)
    slots = torch.tensor([1, -1], device=where)
    twins = copy.deepcopy(parts)
    for twin in twins:
        for source, target in ((4, 0), (4, 2), (8, 6)):
            twin[target] = twin[source]
        twin[1] = 0
    described = parts if backend is reference else backend.block_table(parts)
    backend.copy_parts(described, targets, sources)
    backend.zero_parts(described, slots)
    for part, twin in zip(parts, twins, strict=True):
        assert torch.equal(all_of(part), all_of(twin))


def test_more_rows_than_one_grid_has_programs_for(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    from hybrid_kernels.state_copy import triton

    monkeypatch.setattr(triton, "_PROGRAMS", 5)
    pool = torch.arange(40.0, device=device)[:, None].repeat(1, 5000)
    blocks = triton.block_table([pool])
    triton.copy_parts(
        blocks,
        torch.arange(20, 40, device=device),
        torch.arange(20, device=device),
    )
    triton.zero_parts(blocks, torch.arange(7, device=device))
    expected = [0.0] * 7 + [float(i) for i in range(7, 20)] + list(range(20))
    assert pool[:, 4999].tolist() == expected


def test_parts_by_the_public_calls(on_triton: Callable[[], Any], device: str) -> None:
    parts = uneven_parts(device, "odd")
    twins = copy.deepcopy(parts)
    lists = torch.tensor([[4, 8], [0, 6]], device=device)
    for pool, where in ((parts, on_triton()), (twins, nullcontext())):
        with where:
            described = state_copy.Parts(pool)
            state_copy.fork_parts(described, lists[0], lists[1])
            state_copy.zero_parts(described, lists[0, :1])
    for part, twin in zip(parts, twins, strict=True):
        assert torch.equal(part, twin)
        assert not part[4].any() and torch.equal(part[6], part[8])


@pytest.mark.parametrize("late", [0, 1], ids=["in step", "out of step"])
@pytest.mark.parametrize("kind", ["aligned", "halves", "odd", "transposed"])
def test_slots_move_between_two_pools(
    backend: ModuleType, where: str, kind: str, late: int
) -> None:
    parts = uneven_parts(where, kind)
    others = [other_pool(part, late) for part in parts]
    expected = copy.deepcopy((parts, others))
    away = torch.tensor([5, 0, -1, 2, 1], device=where)
    slots = torch.tensor([8, 3, 4, -1, 0], dtype=torch.int32, device=where)
    back = torch.tensor([2, 7], device=where)
    there: Any = (others, parts)
    home: Any = (parts, others)
    if backend is not reference:
        there, home = backend.table_pair(*there), backend.table_pair(*home)
    backend.transfer_parts(*there, away, slots)
    backend.transfer_parts(*home, back, away[:2])
    for part, other in zip(*expected, strict=True):
        other[5], other[0], other[1] = part[8].clone(), part[3].clone(), part[0].clone()
        part[2], part[7] = other[5].clone(), other[0].clone()
    found, wanted = (*parts, *others), (*expected[0], *expected[1])
    for one, twin in zip(found, wanted, strict=True):
        assert torch.equal(all_of(one), all_of(twin))


def other_pool(part: torch.Tensor, late: int) -> torch.Tensor:
    """Six slots like a part's; rows of bytes start `late` bytes too late for words."""
    if part.ndim > 2:
        return torch.zeros_like(part[:6])
    room = torch.zeros(6, part.shape[1] + late, dtype=part.dtype, device=part.device)
    return room[:, late:]


@pytest.mark.parametrize("late", [0, 1])
def test_pairs_by_the_public_calls(
    on_triton: Callable[[], Any], device: str, late: int
) -> None:
    parts = uneven_parts(device, "odd")
    pools = [[other_pool(part, late) for part in parts] for _ in range(2)]
    lists = torch.tensor([[4, 8], [0, 5]], device=device)
    for pool, where in zip(pools, (on_triton(), nullcontext()), strict=True):
        with where:
            pair = state_copy.PartsPair(pool, parts)
            state_copy.transfer_parts(pair, lists[1], lists[0])
    for part, one, other in zip(parts, *pools, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one[5], part[8]) and not one[1:5].any()


def all_of(view: torch.Tensor) -> torch.Tensor:
    """The memory that a view is of, beside it too."""
    whole = torch.empty(0, dtype=torch.uint8, device=view.device)
    return whole.set_(view.untyped_storage())


def test_promote_copies_the_accepted_slot(backend: ModuleType, where: str) -> None:
    pool = make_pool(0, 12, (7, 3), torch.float32, where)
    before = pool.clone()
    table = torch.tensor(
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [-1, -1, -1, -1]], device=where
    )
    accepted = torch.tensor([3, 0, 1, 2], dtype=torch.int32, device=where)
    backend.promote(pool, table, accepted, 0)
    origin = {0: 3, 8: 9}
    for slot in range(12):
        assert torch.equal(pool[slot], before[origin.get(slot, slot)]), slot


def test_promote_swap_exchanges_indices(backend: ModuleType, where: str) -> None:
    table = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]], device=where)
    backend.promote_swap(table, torch.tensor([2, 0, 1], device=where))
    assert table.tolist() == [[2, 1, 0], [3, 4, 5], [7, 6, 8]]


def test_public_calls_agree_with_indexing() -> None:
    pool = torch.randn(3, 6, 4)
    slots = torch.tensor([5, 1])
    packed = torch.empty(3, 2, 4)
    state_copy.gather(packed, pool, slots, slot_dim=1)
    assert torch.equal(packed, pool[:, slots])
    other = torch.zeros_like(pool)
    state_copy.scatter(other, slots, packed, slot_dim=1)
    assert torch.equal(other[:, slots], pool[:, slots])
    state_copy.fork(other, slots, torch.tensor([0, 2]), slot_dim=1)
    assert torch.equal(other[:, [0, 2]], pool[:, slots])
    state_copy.zero(other, slots, slot_dim=1)
    assert not other[:, slots].any()


@pytest.mark.parametrize(
    "call",
    [
        lambda pool, slots: state_copy.zero(pool, slots.float()),
        lambda pool, slots: state_copy.zero(pool, slots, slot_dim=2),
        lambda pool, slots: state_copy.gather(pool[:2].double(), pool, slots),
        lambda pool, slots: state_copy.gather(pool[:3], pool, slots),
        lambda pool, slots: state_copy.scatter(pool, slots, pool[:2, :1]),
        lambda pool, slots: state_copy.fork(pool, slots, slots[:1]),
        lambda pool, slots: state_copy.promote(pool, slots[None], slots),
        lambda pool, slots: state_copy.Parts([]),
        lambda pool, slots: state_copy.Parts([pool[0]]),
        lambda pool, slots: state_copy.fork_parts(
            state_copy.Parts([pool]), slots, slots[:1]
        ),
        lambda pool, slots: state_copy.PartsPair([], []),
        lambda pool, slots: state_copy.PartsPair([pool], [pool.clone(), pool]),
        lambda pool, slots: state_copy.PartsPair([pool], [pool[:, :2]]),
        lambda pool, slots: state_copy.PartsPair([pool], [pool.double()]),
        lambda pool, slots: state_copy.transfer_parts(
            state_copy.PartsPair([pool], [pool.clone()]), slots, slots[:1]
        ),
        lambda pool, slots: state_copy.zero_parts(
            state_copy.Parts([pool]), slots.float()
        ),
    ],
)
def test_wrong_arguments_are_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError):
        call(torch.zeros(4, 3), torch.tensor([0, 1]))


def test_triton_refuses_items_with_holes(device: str) -> None:
    from hybrid_kernels.state_copy import triton

    pool = torch.zeros(4, 6, device=device)[:, ::2]
    with pytest.raises(ValueError, match="not dense"):
        triton.zero(pool, torch.tensor([0], device=device), 0)
