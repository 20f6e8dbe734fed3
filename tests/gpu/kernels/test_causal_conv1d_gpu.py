# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hybrid_kernels import causal_conv1d
from torch.nn import functional

BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_prefill_is_close_to_float64(dtype: torch.dtype) -> None:
    lengths = [1, 63, 0, 1000]
    x = torch.randn(sum(lengths), 1000, device="cuda").to(dtype)
    weight = torch.randn(1000, 4, device="cuda").to(dtype)
    pool = torch.randn(6, 3, 1000, device="cuda").to(dtype).transpose(1, 2)
    before = pool.double()
    slots = torch.tensor([3, 0, 2, 5], device="cuda")
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    out = causal_conv1d.prefill(
        x,
        weight,
        None,
        cu,
        pool,
        slots,
        activation="silu",
        out=torch.full_like(x, float("nan")),
    )
    start = 0
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        line = torch.cat([before[slot], x[start : start + length].double().T], dim=1)
        assert torch.equal(pool[slot].double(), line[:, length:])
        if length:
            y = functional.conv1d(line[None], weight.double()[:, None], groups=1000)[0]
            expected = functional.silu(y).T
            error = (out[start : start + length] - expected).norm() / expected.norm()
            assert error < BOUNDS[dtype]
        start += length


def test_captured_update_and_verify_replay_with_new_slots() -> None:
    weight = torch.randn(500, 4, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 3, 500, device="cuda", dtype=torch.bfloat16)
    pool = torch.randn(20, 500, 3, device="cuda", dtype=torch.bfloat16)
    slots = torch.full((4,), -1, device="cuda")
    drafts = torch.full((4, 3), -1, device="cuda")
    parents = torch.tensor([[-1, 0, 0]], device="cuda").repeat(4, 1)
    one, all_three = torch.empty_like(x[:, 0]), torch.empty_like(x)

    def work() -> None:
        causal_conv1d.update(x[:, 0], weight, None, pool, slots, out=one)
        causal_conv1d.verify(
            x, weight, None, pool, slots, drafts, parents=parents, out=all_three
        )

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    slots.copy_(torch.tensor([1, -1, 0, 3]))
    drafts[0], drafts[2] = torch.arange(4, 7), torch.arange(7, 10)
    drafts[3] = torch.arange(10, 13)
    start = pool.clone()
    graph.replay()
    results = pool, one.clone(), all_three.clone()
    pool = start
    work()
    for got, expected in zip(results, (pool, one, all_three), strict=True):
        assert torch.equal(got, expected)
