# SPDX-License-Identifier: Apache-2.0
"""Kernels of Qwen4-Exp in PyTorch, beside definitions."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.qsa.kernel import qsa_sparse_attention_reference

from hybrid_plugin.sglang_cpu import compressed_keys, gates, projections


def test_keys_are_packed_sequence_by_sequence() -> None:
    keys = torch.arange(12.0).view(12, 1, 1)
    table = torch.tensor([[8, 9, 10, 11, 24, 25, 26, 27], [40, 41, 42, 43, 0, 0, 0, 0]])
    found = compressed_keys.packed(keys, table, torch.tensor([0, 2, 3]), 3, 2, 4)
    assert found.flatten().tolist() == [2, 6, 10]
    none = compressed_keys.packed(keys, table, torch.tensor([0, 0, 0]), 0, 0, 4)
    assert none.shape == (0, 1, 1)


def test_a_query_attends_to_its_tokens_alone() -> None:
    torch.manual_seed(0)
    queries, kept = torch.randn(70, 4, 8), torch.randn(2, 40, 2, 8)
    slots = torch.randint(0, 40, (70, 6))
    slots[torch.rand(70, 6) < 0.3] = -1
    slots[5] = -1
    given = (queries, kept[0], kept[1], slots)
    found = compressed_keys.attend(*given, 0.5)
    torch.testing.assert_close(found, qsa_sparse_attention_reference(*given, 0.5))
    assert not found[5].any()
    changed = kept.clone()
    changed[:, slots[0].max()] = 9
    moved = compressed_keys.attend(queries, changed[0], changed[1], slots, 0.5)
    assert not torch.equal(found[0], moved[0])


def test_projections_in_order_are_taken_apart() -> None:
    """Two key heads of three channels, four value heads of five."""
    sizes = (6, 6, 20, 20)
    parts = [torch.randn(7, size) for size in sizes]
    b, a = torch.randn(2, 7, 4)
    found = projections.split_in_order(
        torch.cat(parts, 1), torch.cat([b, a], 1), 2, 4, 3, 5
    )
    assert torch.equal(found[0], torch.cat(parts[:3], 1))
    assert torch.equal(found[1], parts[3].view(7, 4, 5))
    assert torch.equal(found[2], b) and torch.equal(found[3], a)


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_norm_comes_before_the_gate(activation: str) -> None:
    x, gate, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    given = {"eps": 1e-5, "is_rms_norm": True, "activation": activation}
    found = gates.norm_then_gate(x, weight, None, gate, **given)
    normal = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight
    opened = gate.sigmoid() * (1 if activation == "sigmoid" else gate)
    torch.testing.assert_close(found, normal * opened)
    alone = gates.norm_then_gate(x, weight, None, **given)
    torch.testing.assert_close(alone, normal)


def test_other_norms_are_refused() -> None:
    x, weight = torch.randn(3, 8), torch.ones(8)
    with pytest.raises(NotImplementedError, match="mean"):
        gates.norm_then_gate(x, weight, None)
    with pytest.raises(NotImplementedError, match="group_size"):
        gates.norm_then_gate(x, weight, None, is_rms_norm=True, group_size=4)
