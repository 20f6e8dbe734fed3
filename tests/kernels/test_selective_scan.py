# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hybrid_kernels import selective_scan
from hybrid_kernels.selective_scan import reference

from .common import assert_near, cu_seqlens, spread_pool

LENGTHS = [1, 63, 0, 257, 2]
TREE = torch.tensor([[-1, 0, 0, 1, -1], [-1, -1, 1, 2, 3]])
TOKENS = ("x", "dt", "b", "c", "gate")


def make(*rows: int, channels: int, depth: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(*rows, channels),
        "dt": torch.randn(*rows, channels) - 2,
        "a": -torch.rand(channels, depth) * 4,
        "b": torch.randn(*rows, depth),
        "c": torch.randn(*rows, depth),
        "skip": torch.randn(channels),
        "gate": torch.randn(*rows, channels),
        "bias": torch.randn(channels),
    }


def part(inputs: dict[str, torch.Tensor], index: object) -> dict[str, torch.Tensor]:
    """The inputs of some tokens."""
    return {name: x[index] if name in TOKENS else x for name, x in inputs.items()}


def define(
    inputs: dict[str, torch.Tensor], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, token by token, float64, as the paper writes it."""
    x, dt, a, b, c, skip, gate, bias = (tensor.double() for tensor in inputs.values())
    time = torch.log1p((dt + bias).exp())
    state, out = state.double(), torch.zeros_like(x)
    for t in range(len(x)):
        state = (time[t][:, None] * a).exp() * state
        state = state + torch.outer(time[t] * x[t], b[t])
        out[t] = state @ c[t] + skip * x[t]
    return out * gate / (1 + (-gate).exp()), state


@pytest.mark.parametrize(("channels", "depth"), [(60, 16), (33, 5)])
def test_reference_prefill_is_the_definition(channels: int, depth: int) -> None:
    inputs = make(sum(LENGTHS) + 2, channels=channels, depth=depth)
    pool = spread_pool(8, channels, depth)
    before = pool.clone()
    slots = torch.tensor([3, 0, 5, -1, 6])
    initial = torch.tensor([True, False, True, True, True])
    table = torch.full((5, 4), -1)
    table[3, 1], table[1, 1] = 7, 1
    out = selective_scan.prefill(
        **inputs,
        cu_seqlens=cu_seqlens(LENGTHS),
        pool=pool,
        slots=slots,
        has_initial=initial,
        boundary_slots=table,
    )
    expected, start = before.double(), 0
    for row, length in enumerate(LENGTHS):
        slot = int(slots[row])
        fresh = slot < 0 or not bool(initial[row])
        state = torch.zeros(channels, depth) if fresh else before[slot]
        mine = part(inputs, slice(start, start + length))
        y, final = define(mine, state)
        assert_near(f"out {row}", out[start : start + length], y, 1e-5)
        if slot >= 0:
            expected[slot] = final
        if row == 3:
            expected[7] = define(part(mine, slice(128)), state)[1]
        start += length
    for slot in range(8):
        assert_near(f"slot {slot}", pool[slot], expected[slot], 1e-5)


def test_prefill_equals_transformers() -> None:
    mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    inputs = make(40, channels=12, depth=4)
    turned = {n: x.T[None] if n in TOKENS else x for n, x in inputs.items()}
    expected, state = mamba.mamba_selective_scan(
        turned["x"],
        turned["dt"],
        inputs["a"],
        turned["b"],
        turned["c"],
        inputs["skip"],
        z=turned["gate"],
        delta_bias=inputs["bias"],
        delta_softplus=True,
        return_last_state=True,
    )
    pool = torch.zeros(1, 12, 4)
    out = selective_scan.prefill(
        **inputs, cu_seqlens=cu_seqlens([40]), pool=pool, slots=torch.tensor([0])
    )
    assert_near("out", out, expected[0].T, 1e-5)
    assert_near("state", pool, state, 1e-5)


@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_verify_equals_replayed_updates(parents: torch.Tensor | None) -> None:
    inputs = make(2, 5, channels=12, depth=4)
    pool = torch.randn(14, 12, 4).to(torch.bfloat16)
    before = pool.clone()
    slots, drafts = torch.tensor([0, 1]), torch.arange(2, 12).view(2, 5)
    out = selective_scan.verify(
        **inputs, pool=pool, slots=slots, draft_slots=drafts, parents=parents
    )
    for row in range(2):
        for draft in range(5):
            path, node = [], draft
            while node >= 0:
                path.insert(0, node)
                node = node - 1 if parents is None else int(parents[row, node])
            state = before[slots[row]][None].clone()
            for node in path:
                mine = {
                    n: x[row, node][None] if n in TOKENS else x
                    for n, x in inputs.items()
                }
                y = selective_scan.update(**mine, pool=state, slots=torch.tensor([0]))
            assert_near("out", out[row, draft], y[0], 1e-6)
            assert_near("state", pool[drafts[row, draft]], state[0], 1e-6)
    assert torch.equal(pool[:2], before[:2])


@pytest.mark.parametrize("extras", [True, False], ids=["extras", "bare"])
def test_triton_prefill_equals_reference(device: str, extras: bool) -> None:
    from hybrid_kernels.selective_scan import triton

    lengths = [1, 5, 0, 130]
    inputs = make(sum(lengths), channels=40, depth=5)
    if not extras:
        inputs |= {"skip": None, "gate": None, "bias": None}
    pool = spread_pool(8, 40, 5, device=device)
    other = pool.clone().cpu()
    slots = torch.tensor([3, 0, 5, -1])
    initial = torch.tensor([True, False, True, True])
    table = torch.full((4, 2), -1)
    table[3, 0], table[1, 0] = 7, 1
    there = {n: None if x is None else x.to(device) for n, x in inputs.items()}
    tables = [slots, initial, table]
    out, expected = (torch.empty_like(inputs["x"], device=d) for d in (device, "cpu"))
    triton.prefill(
        reference.Inputs(**there),
        cu_seqlens(lengths, device),
        pool,
        *(x.to(device) for x in tables),
        False,
        out,
    )
    here = reference.Inputs(**inputs)
    reference.prefill(here, cu_seqlens(lengths), other, *tables, False, expected)
    assert_near("out", out, expected, 1e-5)
    assert_near("pool", pool, other, 1e-5)


@pytest.mark.parametrize("extras", [True, False], ids=["extras", "bare"])
@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_triton_steps_equal_reference(
    device: str, parents: torch.Tensor | None, extras: bool
) -> None:
    from hybrid_kernels.selective_scan import triton

    inputs = make(2, 5, channels=40, depth=16)
    if not extras:
        inputs |= {"skip": None, "gate": None, "bias": None}
    pool = spread_pool(16, 40, 16, device=device)
    other = pool.clone().cpu()
    there = {n: None if x is None else x.to(device) for n, x in inputs.items()}
    tables = [torch.tensor([0, 1]), torch.arange(2, 12).view(2, 5), parents]
    out, expected = (torch.empty_like(inputs["x"], device=d) for d in (device, "cpu"))
    triton.steps(
        reference.Inputs(**there),
        pool,
        *(None if x is None else x.to(device) for x in tables),
        out,
    )
    reference.steps(reference.Inputs(**inputs), other, *tables, expected)
    assert_near("out", out, expected, 1e-5)
    assert_near("pool", pool, other, 1e-5)


def test_wrong_arguments_are_refused() -> None:
    good = {
        **make(3, channels=8, depth=4),
        "pool": torch.zeros(4, 8, 4),
        "slots": torch.arange(3),
    }
    selective_scan.update(**good)
    for name, wrong in (
        ("dt", good["dt"][:2]),
        ("a", good["a"][:2]),
        ("b", good["b"][:, :2]),
        ("gate", good["gate"][:, :2]),
        ("pool", good["pool"][:, :2]),
    ):
        with pytest.raises(ValueError):
            selective_scan.update(**{**good, name: wrong})
