# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hybrid_kernels import rg_lru
from hybrid_kernels.rg_lru import reference

from .common import assert_near, cu_seqlens

LENGTHS = [1, 63, 0, 257, 2]
TREE = torch.tensor([[-1, 0, 0, 1, -1], [-1, -1, 1, 2, 3]])


def make(*rows: int, channels: int) -> dict[str, torch.Tensor]:
    names = ("x", "input_gate", "recurrence_gate")
    inputs = {name: torch.randn(*rows, channels) for name in names}
    return {**inputs, "rate": -8 * torch.rand(channels)}


def define(
    inputs: dict[str, torch.Tensor], state: torch.Tensor, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, token by token, float64, as the paper writes it."""
    x, enter, keep, rate = (tensor.double() for tensor in inputs.values())
    state, outs = state.double(), [x[:0]]
    for t in range(len(x)):
        a = (rate / (1 + (-keep[t]).exp())).exp()
        factor = 1 if fresh and t == 0 else (1 - a**2) ** 0.5
        state = a * state + factor * x[t] / (1 + (-enter[t]).exp())
        outs.append(state[None])
    return torch.cat(outs), state


def test_reference_prefill_is_the_definition() -> None:
    inputs = make(sum(LENGTHS) + 2, channels=60)
    pool = torch.randn(8, 2, 60)[:, 1]
    before = pool.clone()
    slots = torch.tensor([3, 0, 5, -1, 6])
    initial = torch.tensor([True, False, True, True, True])
    table = torch.full((5, 4), -1)
    table[3, 1], table[1, 1] = 7, 1
    out = rg_lru.prefill(
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
        state = torch.zeros(60) if fresh else before[slot]
        mine = {n: x[start : start + length] for n, x in inputs.items() if n != "rate"}
        mine["rate"] = inputs["rate"]
        y, final = define(mine, state, fresh)
        assert_near(f"out {row}", out[start : start + length], y, 1e-6)
        if slot >= 0:
            expected[slot] = final
        if row == 3:
            expected[7] = y[127]
        start += length
    for slot in range(8):
        assert_near(f"slot {slot}", pool[slot], expected[slot], 1e-6)


def test_prefill_equals_transformers() -> None:
    name = "transformers.models.recurrent_gemma.modeling_recurrent_gemma"
    gemma = pytest.importorskip(name)
    config = gemma.RecurrentGemmaConfig(lru_width=32, num_attention_heads=2)
    layer = gemma.RecurrentGemmaRglru(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 20, 32)
    with torch.no_grad():
        expected = layer(x, torch.arange(20)[None])
        heads = x.view(20, 2, 16).transpose(0, 1)
        gates = [
            torch.baddbmm(bias[:, None], heads, weight).transpose(0, 1).reshape(20, 32)
            for bias, weight in (
                (layer.input_gate_bias, layer.input_gate_weight),
                (layer.recurrent_gate_bias, layer.recurrent_gate_weight),
            )
        ]
        rate = -8 * torch.nn.functional.softplus(layer.recurrent_param)
    pool = torch.randn(1, 32)
    out = rg_lru.prefill(
        x[0],
        *gates,
        rate,
        cu_seqlens([20]),
        pool,
        torch.tensor([0]),
        has_initial=torch.tensor([False]),
    )
    assert_near("out", out, expected[0], 1e-5)
    assert_near("state", pool[0], expected[0, -1], 1e-5)


@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_verify_equals_replayed_updates(parents: torch.Tensor | None) -> None:
    inputs = make(2, 5, channels=12)
    pool = torch.randn(14, 12).to(torch.bfloat16)
    before = pool.clone()
    slots, drafts = torch.tensor([0, 1]), torch.arange(2, 12).view(2, 5)
    out = rg_lru.verify(
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
                mine = {n: x[row, node][None] for n, x in inputs.items() if n != "rate"}
                y = rg_lru.update(
                    **mine, rate=inputs["rate"], pool=state, slots=torch.tensor([0])
                )
            # PyTorch's vectorised exp differs in the last bit with the layout.
            assert_near("out", out[row, draft], y[0], 1e-6)
            assert_near("state", pool[drafts[row, draft]], state[0], 1e-6)
    assert torch.equal(pool[:2], before[:2])


def test_triton_prefill_equals_reference(device: str) -> None:
    from hybrid_kernels.rg_lru import triton

    lengths = [1, 63, 0, 130]
    inputs = make(sum(lengths), channels=40)
    pool = torch.randn(8, 2, 40, device=device)[:, 1]
    other = pool.clone().cpu()
    slots = torch.tensor([3, 0, 5, -1])
    initial = torch.tensor([True, False, True, True])
    table = torch.full((4, 2), -1)
    table[3, 0], table[1, 0] = 7, 1
    operands = [*inputs.values(), cu_seqlens(lengths)]
    tables = [slots, initial, table]
    out, expected = (torch.empty_like(inputs["x"], device=d) for d in (device, "cpu"))
    triton.prefill(
        *(x.to(device) for x in operands),
        pool,
        *(x.to(device) for x in tables),
        False,
        out,
    )
    reference.prefill(*operands, other, *tables, False, expected)
    assert_near("out", out, expected, 1e-5)
    assert_near("pool", pool, other, 1e-5)


@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_triton_steps_equal_reference(
    device: str, parents: torch.Tensor | None
) -> None:
    from hybrid_kernels.rg_lru import triton

    inputs = make(2, 5, channels=300)
    pool = torch.randn(16, 300, device=device)
    other = pool.clone().cpu()
    tables = [torch.tensor([0, 1]), torch.arange(2, 12).view(2, 5), parents]
    out, expected = (torch.empty_like(inputs["x"], device=d) for d in (device, "cpu"))
    triton.steps(
        *(x.to(device) for x in inputs.values()),
        pool,
        *(None if x is None else x.to(device) for x in tables),
        out,
    )
    reference.steps(*inputs.values(), other, *tables, expected)
    assert_near("out", out, expected, 1e-5)
    assert_near("pool", pool, other, 1e-5)


def test_wrong_arguments_are_refused() -> None:
    good = {**make(3, channels=8), "pool": torch.zeros(4, 8), "slots": torch.arange(3)}
    rg_lru.update(**good)
    for name, wrong in (
        ("input_gate", good["x"][:2]),
        ("rate", good["rate"][:2]),
        ("pool", good["pool"][:, :2]),
        ("slots", good["slots"][:2]),
    ):
        with pytest.raises(ValueError):
            rg_lru.update(**{**good, name: wrong})
