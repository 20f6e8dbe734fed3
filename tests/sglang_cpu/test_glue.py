# SPDX-License-Identifier: Apache-2.0
"""Tracking copies, fused projections, gated norm and shared expert."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybrid_plugin.sglang_cpu import gates, projections, tracking

SOURCES = torch.tensor([1, 2, 3, 0], dtype=torch.int32)
TARGETS = torch.tensor([5, 6, -1, 7])
MASK = torch.tensor([True, False, True, True])


def pools(*lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(*lead, 8, 3, 2), torch.randn(*lead, 8, 2, 2, 2)


def test_marked_rows_are_copied_and_no_others() -> None:
    for pool, before in zip(copied := pools(), pools(), strict=True):
        tracking.copy_tracked(*copied, SOURCES, MASK, TARGETS, 4)
        before[5], before[7] = before[1], before[0]
        assert torch.equal(pool, before)


def test_rows_beyond_the_batch_do_not_count() -> None:
    copied = pools()
    tracking.copy_tracked(*copied, SOURCES, MASK, TARGETS, 1)
    for pool, before in zip(copied, pools(), strict=True):
        before[5] = before[1]
        assert torch.equal(pool, before)


def test_all_layers_at_once() -> None:
    together, apart = pools(3), pools(3)
    tracking.copy_tracked_all_layers(*together, SOURCES, MASK, TARGETS, 4)
    for layer in range(3):
        one = (apart[0][layer], apart[1][layer])
        tracking.copy_tracked(*one, SOURCES, MASK, TARGETS, 4)
    assert torch.equal(together[0], apart[0]) and torch.equal(together[1], apart[1])


def test_projections_are_sorted_by_head() -> None:
    """Two key heads, each with two value heads; every number names its place."""
    per_head = ["q0", "q1", "k0", "k1", "v0", "v1", "v2", "v3", "z0", "z1", "z2", "z3"]
    names = [f"{head}{name}" for head in "AB" for name in per_head]
    gates_names = [
        f"{head}{name}" for head in "AB" for name in ("b0", "b1", "a0", "a1")
    ]
    number = {name: float(i) for i, name in enumerate([*names, *gates_names])}

    def row(*wanted: str) -> torch.Tensor:
        return torch.tensor([[number[name] for name in wanted]])

    qkv, z, b, a = projections.split_interleaved(
        row(*names), row(*gates_names), 2, 4, 2, 2
    )
    parts = [[n for n in names if n[1] == part] for part in "qkv"]
    assert torch.equal(qkv, row(*parts[0], *parts[1], *parts[2]))
    assert torch.equal(z.flatten(1), row(*(n for n in names if n[1] == "z")))
    assert z.shape == (1, 4, 2)
    assert torch.equal(b, row("Ab0", "Ab1", "Bb0", "Bb1"))
    assert torch.equal(a, row("Aa0", "Aa1", "Ba0", "Ba1"))


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_gated_norm(activation: str) -> None:
    torch.manual_seed(0)
    x, g, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    module = SimpleNamespace(
        hidden_size=8, eps=1e-6, activation=activation, weight=weight
    )
    got = gates.gated_norm(module, x, g)
    normal = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    gate = g.sigmoid() if activation == "sigmoid" else g * g.sigmoid()
    torch.testing.assert_close(got, normal * gate)
    with pytest.raises(NotImplementedError, match="residual"):
        gates.gated_norm(module, x, g, residual=x)


def test_attention_is_gated_in_place_or_not() -> None:
    torch.manual_seed(0)
    output, wide = torch.randn(3, 8), torch.randn(3, 2, 8)
    gate = wide[..., 4:]  # beside the queries, as SGLang's models have it
    expected = output * gate.reshape(3, 8).sigmoid()
    before = output.clone()
    torch.testing.assert_close(gates.gate_output(output, gate), expected)
    assert torch.equal(output, before)
    assert gates.gate_output(output, gate, inplace=True) is output
    torch.testing.assert_close(output, expected)
    with pytest.raises(NotImplementedError, match="8-bit"):
        gates.gate_output(output, gate, quant=True)


def test_shared_expert_is_added_in_place() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8), torch.randn(8)
    shared, routed = torch.randn(5, 8), torch.randn(5, 8)
    expected = routed + torch.sigmoid(hidden @ weight)[:, None] * shared
    gates.add_shared_expert(hidden, weight, shared, routed)
    torch.testing.assert_close(routed, expected)


def test_logits_are_bounded_in_place() -> None:
    logits = torch.tensor([[-100.0, -1.0, 0.0, 3.0, 1e4]])
    expected = 5 * torch.tanh(logits / 5)
    assert gates.soft_cap(logits, 5.0) is logits
    torch.testing.assert_close(logits, expected)
    halves = torch.tensor([[3.0]], dtype=torch.bfloat16)
    assert gates.soft_cap(halves, 5.0).dtype == torch.bfloat16
