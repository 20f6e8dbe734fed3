# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hybrid_kernels import lightning_attention
from hybrid_kernels.lightning_attention import reference

from .common import assert_near, cu_seqlens, spread_pool

LENGTHS = [1, 63, 0, 257, 2]
TREE = torch.tensor([[-1, 0, 0, 1, -1], [-1, -1, 1, 2, 3]])


def make(
    rows: tuple[int, ...], heads: int, values: int, depth: int, width: int
) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(*rows, heads, depth),
        "k": torch.randn(*rows, heads, depth) * depth**-0.5,
        "v": torch.randn(*rows, values, width),
        "decay": -torch.rand(values),
    }


def define(
    inputs: dict[str, torch.Tensor], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, token by token, float64."""
    q, k, v, decay = (x.double() for x in inputs.values())
    group = v.shape[1] // q.shape[1]
    state, out = state.double().clone(), torch.zeros_like(v)
    for t in range(len(v)):
        for head in range(v.shape[1]):
            state[head] *= decay[head].exp()
            state[head] += torch.outer(v[t, head], k[t, head // group])
            out[t, head] = state[head] @ q[t, head // group]
    return out, state


@pytest.mark.parametrize(
    ("heads", "values", "depth", "width"), [(1, 1, 60, 64), (2, 4, 64, 60)]
)
def test_reference_prefill_is_the_definition(
    heads: int, values: int, depth: int, width: int
) -> None:
    inputs = make((sum(LENGTHS) + 2,), heads, values, depth, width)
    pool = spread_pool(8, values, width, depth)
    before = pool.clone()
    slots = torch.tensor([3, 0, 5, -1, 6])
    table = torch.full((5, 4), -1)
    table[3, 1] = 7
    out = lightning_attention.prefill(
        **inputs,
        cu_seqlens=cu_seqlens(LENGTHS),
        pool=pool,
        slots=slots,
        boundary_slots=table,
    )
    start = 0
    for row, length in enumerate(LENGTHS):
        slot = int(slots[row])
        state = torch.zeros_like(before[0]) if slot < 0 else before[slot]
        mine = {n: x[start : start + length] for n, x in inputs.items()}
        mine["decay"] = inputs["decay"]
        y, final = define(mine, state)
        assert_near(f"out {row}", out[start : start + length], y, 1e-5)
        if slot >= 0:
            assert_near(f"slot {slot}", pool[slot], final, 1e-5)
        start += length
    assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])


def test_updates_are_the_definition() -> None:
    inputs = make((5,), 2, 4, 24, 20)
    pool = torch.randn(7, 4, 20, 24)
    before = pool.clone()
    slots = torch.tensor([6, -1, 0, 2, 1])
    out = lightning_attention.update(**inputs, pool=pool, slots=slots)
    for row, slot in enumerate(slots.tolist()):
        mine = {n: x[row : row + 1] for n, x in inputs.items()}
        mine["decay"] = inputs["decay"]
        state = torch.zeros_like(before[0]) if slot < 0 else before[slot]
        y, final = define(mine, state)
        assert_near("out", out[row], y[0], 1e-5)
        if slot >= 0:
            assert_near("state", pool[slot], final, 1e-5)


def test_triton_prefill_equals_reference(device: str) -> None:
    from hybrid_kernels.lightning_attention import triton

    lengths = [1, 63, 0, 130]
    inputs = make((sum(lengths),), 2, 4, 24, 20)
    pool = spread_pool(8, 4, 20, 24, device=device)
    other = pool.clone().cpu()
    slots = torch.tensor([3, 0, 5, -1])
    initial = torch.tensor([True, False, True, True])
    table = torch.full((4, 2), -1)
    table[3, 0], table[1, 0] = 7, 1
    operands = [*inputs.values(), cu_seqlens(lengths)]
    tables = [slots, initial, table]
    out, expected = (torch.empty_like(inputs["v"], device=d) for d in (device, "cpu"))
    triton.prefill(
        *(x.to(device) for x in operands),
        pool,
        *(x.to(device) for x in tables),
        False,
        0.5,
        out,
    )
    reference.prefill(*operands, other, *tables, False, 0.5, expected)
    assert_near("out", out, expected, 1e-5)
    for slot in range(8):
        assert_near(f"slot {slot}", pool[slot], other[slot], 1e-5)


@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_triton_steps_equal_reference(
    device: str, parents: torch.Tensor | None
) -> None:
    from hybrid_kernels.lightning_attention import triton

    inputs = make((2, 5), 2, 4, 24, 20)
    pool = spread_pool(16, 4, 20, 24, device=device)
    other = pool.clone().cpu()
    tables = [torch.tensor([0, 1]), torch.arange(2, 12).view(2, 5), parents]
    out, expected = (torch.empty_like(inputs["v"], device=d) for d in (device, "cpu"))
    triton.steps(
        *(x.to(device) for x in inputs.values()),
        pool,
        *(None if x is None else x.to(device) for x in tables),
        0.5,
        out,
    )
    reference.steps(*inputs.values(), other, *tables, 0.5, expected)
    assert_near("out", out, expected, 1e-5)
    assert_near("pool", pool, other, 1e-5)


def test_wrong_arguments_are_refused() -> None:
    good = {
        **make((3,), 2, 4, 16, 8),
        "pool": torch.zeros(4, 4, 8, 16),
        "slots": torch.arange(3),
    }
    lightning_attention.update(**good)
    for name, wrong in (
        ("k", good["k"][:2]),
        ("decay", good["decay"][:2]),
        ("pool", good["pool"][:, :2]),
    ):
        with pytest.raises(ValueError):
            lightning_attention.update(**{**good, name: wrong})
