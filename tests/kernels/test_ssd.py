# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hybrid_kernels import ssd
from hybrid_kernels.ssd import reference

from .common import assert_near, cu_seqlens, spread_pool

LENGTHS = [1, 63, 0, 257, 2]
TREE = torch.tensor([[-1, 0, 0, 1, -1], [-1, -1, 1, 2, 3]])
TOKENS = ("x", "dt", "b", "c", "gate")


def make(
    rows: tuple[int, ...], heads: int, groups: int, width: int, depth: int
) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(*rows, heads, width),
        "dt": torch.randn(*rows, heads) - 2,
        "a": -torch.rand(heads) * 4,
        "b": torch.randn(*rows, groups, depth) * depth**-0.5,
        "c": torch.randn(*rows, groups, depth),
        "skip": torch.randn(heads),
        "gate": torch.randn(*rows, heads, width),
        "bias": torch.randn(heads),
    }


def part(inputs: dict[str, torch.Tensor], index: object) -> dict[str, torch.Tensor]:
    """The inputs of some tokens."""
    return {name: x[index] if name in TOKENS else x for name, x in inputs.items()}


def define(
    inputs: dict[str, torch.Tensor], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, token by token, float64, as the paper writes it."""
    wide = {name: x.double() for name, x in inputs.items()}
    x, heads = wide["x"], wide["x"].shape[1]
    b, c = (wide[n].repeat_interleave(heads // wide[n].shape[1], 1) for n in "bc")
    time = torch.log1p((wide["dt"] + wide["bias"]).exp())
    state, out = state.double().clone(), torch.zeros_like(x)
    for t in range(len(x)):
        for h in range(heads):
            state[h] *= (time[t, h] * wide["a"][h]).exp()
            state[h] += time[t, h] * torch.outer(x[t, h], b[t, h])
            out[t, h] = state[h] @ c[t, h] + wide["skip"][h] * x[t, h]
    return out * wide["gate"] * wide["gate"].sigmoid(), state


@pytest.mark.parametrize(
    ("heads", "groups", "width", "depth"),
    [(1, 1, 60, 64), (4, 2, 64, 60), (2, 1, 64, 128), (2, 2, 32, 256)],
)
def test_reference_prefill_is_the_definition(
    heads: int, groups: int, width: int, depth: int
) -> None:
    inputs = make((sum(LENGTHS) + 2,), heads, groups, width, depth)
    pool = spread_pool(8, heads, width, depth)
    before = pool.clone()
    slots = torch.tensor([3, 0, 5, -1, 6])
    initial = torch.tensor([True, False, True, True, True])
    table = torch.full((5, 4), -1)
    table[3, 1], table[1, 1] = 7, 1
    out = ssd.prefill(
        **inputs,
        cu_seqlens=cu_seqlens(LENGTHS),
        pool=pool,
        slots=slots,
        has_initial=initial,
        boundary_slots=table,
    )
    expected = before.double()
    start = 0
    for row, length in enumerate(LENGTHS):
        slot = int(slots[row])
        fresh = slot < 0 or not initial[row]
        state = torch.zeros_like(before[0]) if fresh else before[slot]
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
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    inputs = make((127,), 4, 2, 32, 64)
    pool = torch.randn(1, 4, 32, 64)
    expected, state = mamba2.mamba2_chunk_scan(
        inputs["x"][None],
        inputs["dt"][None],
        inputs["a"],
        inputs["b"][None],
        inputs["c"][None],
        chunk_size=32,
        D=inputs["skip"],
        dt_bias=inputs["bias"],
        initial_states=pool.clone(),
        dt_softplus=True,
        return_final_states=True,
    )
    inputs["gate"] = None
    out = ssd.prefill(
        **inputs, cu_seqlens=cu_seqlens([127]), pool=pool, slots=torch.tensor([0])
    )
    assert_near("out", out, expected[0], 1e-5)
    assert_near("state", pool[0], state[0], 1e-5)


def test_update_equals_transformers() -> None:
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    inputs = make((3,), 4, 2, 32, 64)
    pool = torch.randn(3, 4, 32, 64)
    theirs = pool.clone()
    wide = {name: inputs[name][:, None].expand(4, 32) for name in ("skip", "bias")}
    dt = inputs["dt"][..., None].expand(3, 4, 32)
    expected = mamba2.mamba2_selective_state_update(
        theirs,
        inputs["x"],
        dt,
        inputs["a"][:, None, None].expand(4, 32, 64),
        inputs["b"],
        inputs["c"],
        D=wide["skip"],
        dt_bias=wide["bias"],
        dt_softplus=True,
        z=inputs["gate"],
    )
    out = ssd.update(**inputs, pool=pool, slots=torch.arange(3))
    assert_near("out", out, expected, 1e-5)
    assert_near("state", pool, theirs, 1e-5)


@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_verify_equals_replayed_updates(parents: torch.Tensor | None) -> None:
    inputs = make((2, 5), 2, 1, 12, 8)
    pool = torch.randn(14, 2, 12, 8).to(torch.bfloat16)
    before = pool.clone()
    slots, drafts = torch.tensor([0, 1]), torch.arange(2, 12).view(2, 5)
    out = ssd.verify(
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
                y = ssd.update(**mine, pool=state, slots=torch.tensor([0]))
            assert_near("out", out[row, draft], y[0], 1e-6)
            assert_near("state", pool[drafts[row, draft]], state[0], 1e-6)
    assert torch.equal(pool[:2], before[:2])


@pytest.mark.parametrize("extras", [True, False], ids=["extras", "bare"])
def test_triton_prefill_equals_reference(device: str, extras: bool) -> None:
    from hybrid_kernels.ssd import triton

    lengths = [1, 63, 0, 130]
    inputs = make((sum(lengths),), 4, 2, 20, 40)
    if not extras:
        inputs |= {"skip": None, "gate": None, "bias": None}
    pool = spread_pool(8, 4, 20, 40, device=device)
    other = pool.clone().cpu()
    slots = torch.tensor([3, 0, 5, -1])
    initial = torch.tensor([True, False, True, True])
    table = torch.full((4, 2), -1)
    table[3, 0], table[1, 0] = 7, 1
    names = ("x", "dt", "a", "b", "c", "skip", "gate", "bias")
    operands = [*(inputs[name] for name in names), cu_seqlens(lengths)]
    out, expected = (torch.empty_like(inputs["x"], device=d) for d in (device, "cpu"))
    triton.prefill(
        *(None if x is None else x.to(device) for x in operands),
        pool,
        slots.to(device),
        initial.to(device),
        table.to(device),
        False,
        out,
    )
    reference.prefill(*operands, other, slots, initial, table, False, expected)
    assert_near("out", out, expected, 1e-5)
    for slot in range(8):
        assert_near(f"slot {slot}", pool[slot], other[slot], 1e-5)


@pytest.mark.parametrize("extras", [True, False], ids=["extras", "bare"])
@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_triton_steps_equal_reference(
    device: str, parents: torch.Tensor | None, extras: bool
) -> None:
    from hybrid_kernels.ssd import triton

    inputs = make((3, 5), 4, 2, 20, 24)
    if not extras:
        inputs |= {"skip": None, "gate": None, "bias": None}
    pool = spread_pool(16, 4, 20, 24, dtype=torch.float16, device=device)
    other = pool.clone().cpu()
    slots = torch.tensor([0, 1, -1])
    drafts = torch.cat([torch.arange(2, 12).view(2, 5), torch.full((1, 5), -1)])
    if parents is not None:
        parents = torch.cat([parents, torch.full((1, 5), -1)])
    names = ("x", "dt", "a", "b", "c", "skip", "gate", "bias")
    operands = [inputs[name] for name in names]
    tables = [slots, drafts, parents]
    out, expected = (torch.empty_like(inputs["x"], device=d) for d in (device, "cpu"))
    triton.steps(
        *(None if x is None else x.to(device) for x in operands),
        pool,
        *(None if x is None else x.to(device) for x in tables),
        out,
    )
    reference.steps(*operands, other, *tables, expected)
    # A float16 state may round the other way after a sum in another order.
    assert_near("out", out, expected, 3e-4)
    assert_near("pool", pool, other, 3e-4)


def test_wrong_arguments_are_refused() -> None:
    good = {
        **make((3,), 4, 2, 8, 16),
        "pool": torch.zeros(4, 4, 8, 16),
        "slots": torch.arange(3),
    }
    ssd.update(**good)
    for name, wrong in (
        ("dt", good["dt"][:, :1]),
        ("a", good["a"][:2]),
        ("b", good["b"][..., :8]),
        ("gate", good["gate"][:2]),
        ("pool", good["pool"].mT),
        ("slots", good["slots"].float()),
    ):
        with pytest.raises(ValueError):
            ssd.update(**{**good, name: wrong})
