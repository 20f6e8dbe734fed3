# SPDX-License-Identifier: Apache-2.0
"""The matrix memory against the paper's equations, and what its stabiliser is for."""

from __future__ import annotations

import pytest
import torch

from hybrid_plugin.mixers import mlstm
from hybrid_plugin.mixers.prefills import Prefills

HEADS, KEYS, VALUES, SLOTS = 3, 2, 5, 6
EPS = 1e-6
WEIGHTS = mlstm.Weights(EPS)
Tokens = tuple[torch.Tensor, ...]


def tokens(count: int, largest_gate: float = 8.0) -> Tokens:
    """Queries, keys, values and gates, before their functions."""
    torch.manual_seed(count)
    q, k = torch.randn(2, count, HEADS, KEYS)
    v = torch.randn(count, HEADS, VALUES)
    gates = largest_gate * (2 * torch.rand(2, count, HEADS) - 1)
    return q, k, v, gates[0], gates[1] + largest_gate / 2


def pool() -> torch.Tensor:
    """Slots apart from each other, full of NaN."""
    shape = mlstm.state_shape(HEADS, KEYS, VALUES)
    return torch.full((SLOTS, 2, *shape), torch.nan)[:, 1]


def described(lengths: list[int], slots: list[int], computed: list[int]) -> Prefills:
    before = torch.tensor(computed)
    sums = torch.tensor([0, *lengths]).cumsum(0).int()
    offsets = (before % 64).int()
    return Prefills(sums, torch.tensor(slots), before > 0, offsets)


def defined(given: Tokens) -> torch.Tensor:
    """``h`` by equations 19 to 23, unstabilised, float64."""
    q, k, v, log_input, forget = (x.double() for x in given)
    q = q * KEYS**-0.5
    memory = q.new_zeros(HEADS, VALUES, KEYS)
    normaliser, m = q.new_zeros(HEADS, KEYS), q.new_zeros(HEADS)
    outs = []
    for t in range(len(q)):
        keep, flow = forget[t].sigmoid(), log_input[t].exp()
        m = torch.maximum(m + keep.log(), log_input[t])
        added = v[t][:, :, None] * k[t][:, None, :]
        memory = keep[:, None, None] * memory + flow[:, None, None] * added
        normaliser = keep[:, None] * normaliser + flow[:, None] * k[t]
        least = (normaliser * q[t]).sum(-1).abs().clamp(min=1) + EPS * m.exp()
        outs.append((memory @ q[t][:, :, None])[..., 0] / least[:, None])
    return torch.stack(outs)


@pytest.mark.parametrize("largest_gate", [1.0, 15.0])
def test_prefills_and_steps_are_the_definition(largest_gate: float) -> None:
    first, second = tokens(150, largest_gate), tokens(70, largest_gate)
    states = pool()
    packed = tuple(torch.cat([a[:140], b]) for a, b in zip(first, second, strict=True))
    prefills = described([140, 0, 70], [4, 5, -1], [0, 0, 0])
    found = mlstm.prefill(WEIGHTS, prefills, *packed, states)
    steps = [
        mlstm.decode(
            WEIGHTS,
            torch.tensor([-1, 4]),
            *(torch.stack([x[0], x[t]]) for x in first),
            states,
        )[1]
        for t in range(140, 150)
    ]
    found = torch.cat([found[:140], torch.stack(steps), found[140:]])
    expected = torch.cat([defined(first), defined(second)])
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    assert states[[0, 1, 2, 3]].isnan().all()
    assert not states[5, : HEADS * (VALUES + 1)].any(), "an empty sequence is fresh"


def test_bits_do_not_depend_on_splits_at_boundaries() -> None:
    given = tokens(230)
    whole, split = pool(), pool()
    table = torch.tensor([[1, -1, 3, 5]])
    prefills = described([230], [0], [0])
    prefills = Prefills(
        prefills.cu_seqlens,
        prefills.slots,
        prefills.has_initial,
        prefills.offsets,
        table,
    )
    expected = mlstm.prefill(WEIGHTS, prefills, *given, whole)
    parts = []
    for start, end, source in ((0, 64, None), (64, 192, 1), (192, 230, 3)):
        if source is not None:
            assert torch.equal(split[0].nan_to_num(), whole[source].nan_to_num())
        part = described([end - start], [0], [start])
        parts.append(
            mlstm.prefill(WEIGHTS, part, *(x[start:end] for x in given), split)
        )
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(split[0].nan_to_num(), whole[0].nan_to_num())
    assert whole[5].isnan().all(), "the prompt ends before that boundary"
