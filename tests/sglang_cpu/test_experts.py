# SPDX-License-Identifier: Apache-2.0
"""Experts of other ranks are left to them: together ranks compute what one does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers.moe.topk import StandardTopKOutput

from hybrid_plugin.sglang_cpu import experts, kernels
from hybrid_plugin.upstream.hookpoints import resolve

EXPERTS, WIDTH, INNER = 6, 8, 5
CONFIG = SimpleNamespace(
    apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None
)


def layer(first: int, end: int) -> Any:
    """That has some of the experts, and knows how many there are."""
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=generator)
    w2 = torch.randn(EXPERTS, WIDTH, INNER, generator=generator)
    return SimpleNamespace(
        num_experts=EXPERTS, w13_weight=w13[first:end], w2_weight=w2[first:end]
    )


@pytest.fixture
def compute() -> Any:
    """SGLang's function, as the platform changes it; twice is as once."""
    experts.leave_experts_to_their_rank(kernels.replace)
    changed = getattr(*resolve(experts.COMPUTES_EXPERTS))
    experts.leave_experts_to_their_rank(kernels.replace)
    assert getattr(*resolve(experts.COMPUTES_EXPERTS)) is changed

    def compute(first: int, end: int, x: Any, ids: Any, weights: Any) -> Any:
        own = (ids >= first) & (ids < end)
        local = torch.where(own, ids - first, -1)
        chosen = StandardTopKOutput(weights, local, torch.empty(0))
        return changed(layer(first, end), x, chosen, CONFIG)

    return compute


@pytest.mark.parametrize("cut", [1, 3])
def test_ranks_add_up_to_one(compute: Any, cut: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, WIDTH)
    # Also tokens with both experts on one rank, and with none there.
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(20)])
    weights = torch.rand(20, 2)
    whole = compute(0, EXPERTS, x, ids, weights)
    parts = compute(0, cut, x, ids, weights) + compute(cut, EXPERTS, x, ids, weights)
    torch.testing.assert_close(parts, whole)


def test_a_rank_without_any_of_a_step_s_experts_adds_nothing(compute: Any) -> None:
    x, ids = torch.randn(3, WIDTH), torch.tensor([[4, 5]] * 3)
    found = compute(0, 4, x, ids, torch.rand(3, 2))
    assert torch.equal(found, torch.zeros(3, WIDTH))
