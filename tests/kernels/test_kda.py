# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hybrid_kernels import kda
from hybrid_kernels.kda import reference
from torch.nn import functional

from .common import assert_near, cu_seqlens, relative_error, spread_pool

LENGTHS = [1, 63, 0, 257, 2]
TREE = torch.tensor([[-1, 0, 0, 1, -1], [-1, -1, 1, 2, 3]])


def make(
    rows: tuple[int, ...], heads: int, values: int, depth: int, width: int
) -> dict[str, torch.Tensor]:
    return {
        "q": functional.normalize(torch.randn(*rows, heads, depth), dim=-1),
        "k": functional.normalize(torch.randn(*rows, heads, depth), dim=-1),
        "v": torch.randn(*rows, values, width),
        "g": -functional.softplus(torch.randn(*rows, values, depth)),
        "beta": torch.rand(*rows, values),
    }


def define(
    inputs: dict[str, torch.Tensor], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, token by token, float64, as the paper writes it."""
    q, k, v, g, beta = (inputs[name].double() for name in ("q", "k", "v", "g", "beta"))
    group = v.shape[1] // q.shape[1]
    state = state.double().clone()
    out = torch.zeros_like(v)
    one = torch.eye(q.shape[-1], dtype=torch.float64)
    for t in range(len(v)):
        for head in range(v.shape[1]):
            key, query = k[t, head // group], q[t, head // group]
            rate = beta[t, head]
            erase = one - rate * torch.outer(key, key)
            state[head] = (g[t, head].exp() * state[head]) @ erase
            state[head] += rate * torch.outer(v[t, head], key)
            out[t, head] = state[head] @ query * q.shape[-1] ** -0.5
    return out, state


@pytest.mark.parametrize(
    ("heads", "values", "depth", "width"),
    [(1, 1, 60, 64), (2, 4, 64, 60), (1, 2, 128, 128), (1, 1, 256, 32)],
)
def test_reference_prefill_is_the_definition(
    heads: int, values: int, depth: int, width: int
) -> None:
    inputs = make((sum(LENGTHS) + 2,), heads, values, depth, width)
    pool = spread_pool(8, values, width, depth)
    before = pool.clone()
    slots = torch.tensor([3, 0, 5, -1, 6])
    initial = torch.tensor([True, False, True, True, True])
    table = torch.full((5, 4), -1)
    table[3, 1], table[1, 1] = 7, 1
    out = kda.prefill(
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
        part = {name: x[start : start + length] for name, x in inputs.items()}
        y, final = define(part, state)
        assert_near(f"out {row}", out[start : start + length], y, 1e-5)
        if slot >= 0:
            expected[slot] = final
        if row == 3:
            part = {name: x[:128] for name, x in part.items()}
            expected[7] = define(part, state)[1]
        start += length
    for slot in range(8):
        assert_near(f"slot {slot}", pool[slot], expected[slot], 1e-5)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_reference_equals_transformers(form: str) -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    inputs = make((127,), 2, 2, 32, 20)
    pool = torch.randn(1, 2, 20, 32)
    expected, state = getattr(kimi, f"{form}_kimi_delta_attention")(
        *(x[None] for x in inputs.values()),
        initial_state=pool.mT.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out = kda.prefill(
        **inputs,
        cu_seqlens=cu_seqlens([127]),
        pool=pool,
        slots=torch.tensor([0]),
        normalise=True,
    )
    assert_near("out", out, expected[0], 1e-5)
    assert_near("state", pool[0], state[0].mT, 1e-5)


def test_updates_are_prefill_token_by_token() -> None:
    inputs = make((5, 3), 2, 4, 24, 20)
    pool = torch.randn(7, 4, 20, 24)
    other = pool.clone()
    slots = torch.tensor([6, -1, 0, 2, 1])
    outs = []
    for t in range(3):
        part = {name: x[:, t] for name, x in inputs.items()}
        outs.append(kda.update(**part, pool=pool, slots=slots))
        other[3] = 0
    flat = {name: x.flatten(0, 1) for name, x in inputs.items()}
    whole = kda.prefill(**flat, cu_seqlens=cu_seqlens([3] * 5), pool=other, slots=slots)
    stepped = torch.stack(outs, 1)
    whole = whole.view_as(stepped)
    keep = slots >= 0
    assert_near("out", stepped[keep], whole[keep], 1e-5)
    assert_near("pool", pool[slots[keep]], other[slots[keep]], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_verify_equals_replayed_updates(
    dtype: torch.dtype, parents: torch.Tensor | None
) -> None:
    inputs = make((2, 5), 1, 2, 12, 8)
    pool = torch.randn(14, 2, 8, 12).to(dtype)
    before = pool.clone()
    slots, drafts = torch.tensor([0, 1]), torch.arange(2, 12).view(2, 5)
    out = kda.verify(
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
                part = {name: x[row, node][None] for name, x in inputs.items()}
                y = kda.update(**part, pool=state, slots=torch.tensor([0]))
            assert_near("out", out[row, draft], y[0], 1e-6)
            assert_near("state", pool[drafts[row, draft]], state[0], 1e-6)
    assert torch.equal(pool[:2], before[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resuming_at_a_boundary_gives_the_same_bits(dtype: torch.dtype) -> None:
    inputs = make((200,), 1, 2, 16, 16)
    pool = torch.randn(4, 2, 16, 16).to(dtype)
    pool[1] = pool[0]
    whole = kda.prefill(
        **inputs,
        cu_seqlens=cu_seqlens([200]),
        pool=pool,
        slots=torch.tensor([0]),
        boundary_slots=torch.tensor([[-1, 2]]),
        round_boundaries=True,
    )
    rest = kda.prefill(
        **{name: x[128:] for name, x in inputs.items()},
        cu_seqlens=cu_seqlens([72]),
        pool=pool,
        slots=torch.tensor([2]),
        round_boundaries=True,
    )
    assert torch.equal(whole[128:], rest)
    assert torch.equal(pool[0], pool[2])


@pytest.mark.parametrize("normalise", [False, True], ids=["plain", "unit"])
@pytest.mark.parametrize(
    ("heads", "values", "depth", "width"), [(1, 2, 32, 20), (1, 1, 60, 64)]
)
def test_triton_prefill_equals_reference(
    device: str, heads: int, values: int, depth: int, width: int, normalise: bool
) -> None:
    from hybrid_kernels.kda import triton

    lengths = [1, 63, 0, 130]
    inputs = make((sum(lengths),), heads, values, depth, width)
    pool = spread_pool(8, values, width, depth, device=device)
    other = pool.clone().cpu()
    slots = torch.tensor([3, 0, 5, -1])
    initial = torch.tensor([True, False, True, True])
    table = torch.full((4, 2), -1)
    table[3, 0], table[1, 0] = 7, 1
    operands = [*inputs.values(), cu_seqlens(lengths)]
    expected = torch.empty_like(inputs["v"])
    out = torch.empty_like(expected, device=device)
    options = (False, 0.5, normalise)
    triton.prefill(
        *(x.to(device) for x in operands),
        pool,
        slots.to(device),
        initial.to(device),
        table.to(device),
        *options,
        out,
    )
    reference.prefill(*operands, other, slots, initial, table, *options, expected)
    assert_near("out", out, expected, 1e-5)
    for slot in range(8):
        assert_near(f"slot {slot}", pool[slot], other[slot], 1e-5)


def test_triton_prefill_stays_accurate_with_equal_keys(device: str) -> None:
    """The chunk's system is worst when all keys agree and nothing decays."""
    from hybrid_kernels.kda import triton

    inputs = make((128,), 1, 1, 16, 16)
    inputs["k"][:] = inputs["k"][0]
    inputs["g"][:], inputs["beta"][:] = 0, 1
    pool = torch.zeros(1, 1, 16, 16, device=device)
    out = torch.empty(128, 1, 16, device=device)
    operands = [x.to(device) for x in [*inputs.values(), cu_seqlens([128])]]
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    triton.prefill(*operands, pool, slots, None, None, False, 16**-0.5, False, out)
    expected, _ = define(inputs, torch.zeros(1, 16, 16))
    assert relative_error(out, expected) < 1e-4


@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_triton_steps_equal_reference(
    device: str, parents: torch.Tensor | None
) -> None:
    from hybrid_kernels.kda import triton

    inputs = make((3, 5), 2, 4, 24, 20)
    pool = spread_pool(16, 4, 20, 24, dtype=torch.float16, device=device)
    other = pool.clone().cpu()
    slots = torch.tensor([0, 1, -1])
    drafts = torch.cat([torch.arange(2, 12).view(2, 5), torch.full((1, 5), -1)])
    if parents is None:
        drafts[0, 3] = -1
    else:
        parents = torch.cat([parents, torch.full((1, 5), -1)])
    operands = [*inputs.values()]
    tables = [slots, drafts, parents]
    out, expected = (torch.empty_like(inputs["v"], device=d) for d in (device, "cpu"))
    triton.steps(
        *(None if x is None else x.to(device) for x in operands),
        pool,
        *(None if x is None else x.to(device) for x in tables),
        0.5,
        True,
        out,
    )
    reference.steps(*operands, other, *tables, 0.5, True, expected)
    # A float16 state may round the other way after a sum in another order.
    assert_near("out", out, expected, 3e-4)
    assert_near("pool", pool, other, 3e-4)
    assert torch.equal(pool[12:].cpu(), other[12:])


def test_wrong_arguments_are_refused() -> None:
    good = {
        **make((3,), 2, 4, 16, 8),
        "pool": torch.zeros(4, 4, 8, 16),
        "slots": torch.arange(3),
    }
    kda.update(**good)
    for name, wrong in (
        ("q", good["q"][:, :1]),
        ("k", good["k"][..., :8]),
        ("v", good["v"][:, :3]),
        ("g", good["g"][:2]),
        ("pool", good["pool"].mT),
        ("slots", good["slots"].float()),
    ):
        with pytest.raises(ValueError):
            kda.update(**{**good, name: wrong})
