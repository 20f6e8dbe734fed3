# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hybrid_kernels import causal_conv1d
from hybrid_kernels.causal_conv1d import reference

from .common import assert_near, cu_seqlens, spread_pool

LENGTHS = [1, 63, 0, 257, 2]


def make(
    channels: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(sum(LENGTHS) + 3, channels).to(dtype)
    weight, bias = torch.randn(channels, width), torch.randn(channels)
    return x, weight.to(dtype), bias.to(dtype)


def define(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    past: torch.Tensor,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, token by token, float64: outputs and the final state."""
    past, rows = past.double(), []
    for token in x.double():
        line = torch.cat([past, token[:, None]], dim=1)
        y = (line * weight.double()).sum(1)
        y = y if bias is None else y + bias.double()
        rows.append(y * torch.sigmoid(y) if silu else y)
        past = line[:, 1:]
    return torch.stack(rows) if rows else x.double(), past


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("silu", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("transposed", [False, True], ids=["nd", "dn"])
def test_reference_prefill_is_the_definition(
    width: int, silu: bool, transposed: bool
) -> None:
    x, weight, bias = make(60, width)
    used = bias if silu else None
    pool = spread_pool(8, 60, width - 1)
    if transposed:
        pool = spread_pool(8, width - 1, 60).transpose(1, 2)
    before = pool.clone()
    slots = torch.tensor([3, 0, 5, -1, 6])
    initial = torch.tensor([True, False, True, True, True])
    table = torch.tensor([[1, 1], [1, 1], [1, 1], [-1, 7], [1, 1]])
    out = causal_conv1d.prefill(
        x,
        weight,
        used,
        cu_seqlens(LENGTHS),
        pool,
        slots,
        has_initial=initial,
        activation="silu" if silu else None,
        boundary_slots=table,
    )
    expected = before.double()
    start = 0
    for row, length in enumerate(LENGTHS):
        slot = int(slots[row])
        fresh = slot < 0 or not initial[row]
        past = torch.zeros(60, width - 1) if fresh else before[slot]
        tokens = x[start : start + length]
        y, final = define(tokens, weight, used, past, silu)
        assert_near(f"out {row}", out[start : start + length], y, 1e-5)
        if slot >= 0:
            expected[slot] = final
        if length >= 128:
            expected[7] = define(tokens[:128], weight, used, past, silu)[1]
        start += length
    assert torch.equal(pool, expected.float())
    assert not out[start:].any()


def test_update_is_prefill_of_one_token() -> None:
    x, weight, bias = make(33, 4)
    x = x[:5]
    pool = torch.randn(6, 33, 3)
    slots = torch.tensor([5, -1, 0, 2, 1])
    other = pool.clone()
    stepped = causal_conv1d.update(x, weight, bias, pool, slots, activation="silu")
    whole = causal_conv1d.prefill(
        x, weight, bias, torch.arange(6), other, slots, activation="silu"
    )
    assert_near("out", stepped, whole, 1e-6)
    assert torch.equal(pool, other)


def test_update_equals_transformers() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, weight, bias = make(64, 4)
    pool = torch.randn(3, 64, 3)
    theirs = pool.clone()
    expected = qwen.causal_conv1d_update(
        x[:3, :, None], theirs, weight, bias, activation="silu"
    )
    out = causal_conv1d.update(
        x[:3], weight, bias, pool, torch.arange(3), activation="silu"
    )
    assert_near("out", out, expected[:, :, 0], 1e-6)
    assert torch.equal(pool, theirs)


TREE = torch.tensor([[-1, 0, 0, 1, -1, 3], [-1, -1, 1, 2, 3, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_verify_equals_replayed_updates(
    dtype: torch.dtype, parents: torch.Tensor | None
) -> None:
    weight, bias = torch.randn(20, 4), torch.randn(20)
    x = torch.randn(2, 6, 20)
    pool = torch.randn(16, 20, 3).to(dtype)
    before = pool.clone()
    slots = torch.tensor([0, 1])
    drafts = torch.arange(2, 14).view(2, 6)
    out = causal_conv1d.verify(x, weight, bias, pool, slots, drafts, parents=parents)
    for row in range(2):
        for draft in range(6):
            path, node = [], draft
            while node >= 0:
                path.insert(0, node)
                node = node - 1 if parents is None else int(parents[row, node])
            state = before[slots[row]][None].clone()
            for node in path:
                y = causal_conv1d.update(
                    x[row, node][None], weight, bias, state, torch.tensor([0])
                )
            assert torch.equal(out[row, draft], y[0])
            assert torch.equal(pool[drafts[row, draft]], state[0])
    assert torch.equal(pool[:2], before[:2])


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("silu", [True, False], ids=["silu", "plain"])
def test_triton_prefill_equals_reference(device: str, width: int, silu: bool) -> None:
    from hybrid_kernels.causal_conv1d import triton

    x, weight, bias = (t.to(device) for t in make(140, width))
    used = bias if silu else None
    pool = spread_pool(8, width - 1, 140, device=device).transpose(1, 2)
    other = pool.clone().cpu()
    slots = torch.tensor([3, 0, 5, -1, 6])
    initial = torch.tensor([True, False, True, True, True])
    table = torch.tensor([[1, 1], [1, 1], [1, 1], [2, 7], [1, 1]])
    out, expected = torch.empty_like(x), torch.empty_like(x).cpu()
    activation = "silu" if silu else None
    triton.prefill(
        x,
        weight,
        used,
        cu_seqlens(LENGTHS, device),
        pool,
        slots.to(device),
        initial.to(device),
        activation,
        table.to(device),
        64,
        out,
    )
    reference.prefill(
        x.cpu(),
        weight.cpu(),
        None if used is None else used.cpu(),
        cu_seqlens(LENGTHS),
        other,
        slots,
        initial,
        activation,
        table,
        64,
        expected,
    )
    assert_near("out", out, expected, 1e-6)
    assert torch.equal(pool.cpu(), other)


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_triton_step_equals_reference(
    device: str, width: int, parents: torch.Tensor | None
) -> None:
    from hybrid_kernels.causal_conv1d import triton

    x = torch.randn(3, 6, 300, device=device)
    weight = torch.randn(300, width, device=device)
    bias = torch.randn(300, device=device)
    # Not bfloat16: the interpreter truncates where the GPU and PyTorch round.
    pool = spread_pool(24, 300, width - 1, dtype=torch.float16, device=device)
    other = pool.clone().cpu()
    slots = torch.tensor([0, 1, -1])
    drafts = torch.cat([torch.arange(2, 14).view(2, 6), torch.full((1, 6), -1)])
    if parents is None:
        drafts[0, 3] = -1
    else:
        parents = torch.cat([parents, torch.full((1, 6), -1)])
    out, expected = torch.empty_like(x), torch.empty_like(x).cpu()
    triton.step(
        x,
        weight,
        bias,
        pool,
        slots.to(device),
        drafts.to(device),
        None if parents is None else parents.to(device),
        "silu",
        out,
    )
    reference.step(
        x.cpu(),
        weight.cpu(),
        bias.cpu(),
        other,
        slots,
        drafts,
        parents,
        "silu",
        expected,
    )
    assert_near("out", out, expected, 1e-6)
    assert torch.equal(pool.cpu(), other)


def test_chain_may_reuse_the_main_slot(device: str) -> None:
    """An engine that reads column `accepted` of the table it then overwrites."""
    from hybrid_kernels.causal_conv1d import triton

    x = torch.randn(1, 3, 8, device=device)
    weight = torch.randn(8, 4, device=device)
    pool = torch.randn(3, 8, 3, device=device)
    expected_pool, expected = pool.clone().cpu(), torch.empty(1, 3, 8)
    slots, table = torch.tensor([1]), torch.tensor([[0, 1, 2]])
    out = torch.empty_like(x)
    triton.step(
        x, weight, None, pool, slots.to(device), table.to(device), None, None, out
    )
    reference.step(
        x.cpu(), weight.cpu(), None, expected_pool, slots, table, None, None, expected
    )
    assert_near("out", out, expected, 1e-6)
    assert torch.equal(pool.cpu(), expected_pool)


def test_wrong_arguments_are_refused() -> None:
    x, weight, bias = make(8, 4)
    pool, slots = torch.zeros(2, 8, 3), torch.zeros(len(x), dtype=torch.int32)
    for wrong in (
        {"weight": weight[:7]},
        {"pool": pool[:, :, :2]},
        {"slots": slots[:2]},
        {"bias": bias[:3]},
        {"activation": "gelu"},
    ):
        arguments = {
            "x": x,
            "weight": weight,
            "bias": bias,
            "pool": pool,
            "slots": slots,
            **wrong,
        }
        with pytest.raises(ValueError):
            causal_conv1d.update(**arguments)
