# SPDX-License-Identifier: Apache-2.0
"""RG-LRU and Mamba-1 on a GPU, against their references in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hybrid_kernels import rg_lru, selective_scan

BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def lru_inputs(rows: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    names = ("x", "input_gate", "recurrence_gate")
    inputs = {name: torch.randn(*rows, 300).to(dtype) for name in names}
    return {**inputs, "rate": -8 * torch.rand(300)}


def scan_inputs(rows: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "x": torch.randn(*rows, 300).to(dtype),
        "dt": (torch.randn(*rows, 300) - 2).to(dtype),
        "a": -torch.rand(300, 16) * 4,
        "b": torch.randn(*rows, 16).to(dtype),
        "c": torch.randn(*rows, 16).to(dtype),
        "skip": torch.randn(300),
        "gate": torch.randn(*rows, 300).to(dtype),
        "bias": torch.randn(300),
    }


CASES = [(rg_lru, lru_inputs, (300,)), (selective_scan, scan_inputs, (300, 16))]
IDS = ["rg_lru", "selective_scan"]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.cpu().double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


def there(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() for name, value in values.items()}


@pytest.mark.parametrize(("module", "make", "item"), CASES, ids=IDS)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_prefill_is_close_to_the_reference(
    module: Any, make: Callable[..., Any], item: tuple[int, ...], dtype: torch.dtype
) -> None:
    lengths = [1, 63, 0, 300]
    inputs = make((sum(lengths),), dtype)
    table = torch.full((4, 4), -1)
    table[3, 3] = 5
    rest = {
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "slots": torch.tensor([2, 0, 1, 3]),
        "boundary_slots": table,
        "has_initial": torch.tensor([True, False, True, True]),
    }
    pool = torch.randn(6, *item)
    gpu_pool = pool.cuda()
    # The reference's own output is float32: only ours is rounded.
    wide = torch.empty_like(inputs["x"], dtype=torch.float32)
    module.prefill(**inputs, **rest, pool=pool, out=wide)
    out = torch.full_like(inputs["x"], float("nan"), device="cuda")
    module.prefill(**there(inputs), **there(rest), pool=gpu_pool, out=out)
    assert error(out, wide) < BOUNDS[dtype]
    assert error(gpu_pool, pool) < 1e-5


@pytest.mark.parametrize(("module", "make", "item"), CASES, ids=IDS)
def test_captured_verify_gives_the_bits_of_replayed_updates(
    module: Any, make: Callable[..., Any], item: tuple[int, ...]
) -> None:
    inputs = there(make((3, 5), torch.bfloat16))
    tree = torch.tensor([[-1, 0, 0, 1, -1]], device="cuda").repeat(3, 1)
    slots = torch.full((3,), -1, device="cuda")
    drafts = torch.full((3, 5), -1, device="cuda")
    pool = torch.randn(20, *item, device="cuda").bfloat16()
    out = torch.empty_like(inputs["x"])
    tables = {"slots": slots, "draft_slots": drafts, "parents": tree}

    def work() -> None:
        module.verify(**inputs, **tables, pool=pool, out=out)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    slots.copy_(torch.arange(3))
    drafts.copy_(torch.arange(3, 18).view(3, 5))
    before = pool.clone()
    graph.replay()
    for draft in range(5):
        path, node = [], draft
        while node >= 0:
            path.insert(0, node)
            node = int(tree[0, node])
        states = before[:3].clone()
        for node in path:
            step = {
                name: value[:, node] if value.shape[:2] == (3, 5) else value
                for name, value in inputs.items()
            }
            y = module.update(**step, pool=states, slots=slots)
        assert torch.equal(out[:, draft], y)
        assert torch.equal(pool[drafts[:, draft]], states)
