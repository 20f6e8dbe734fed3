# SPDX-License-Identifier: Apache-2.0
"""Every state layer's prefill in the shape of a CUDA graph: tables that stay, and
padding in rows and tokens, against passes that are no longer than what they run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from hybrid_plugin.mixers.fixed_prefills import FixedPrefills
from hybrid_plugin.mixers.prefills import Prefills

from .common import cu_seqlens
from .layers import SMALL, Layer, Tensors, names

Switch = Callable[[], AbstractContextManager[None]]
TOKENS, ROWS, SLOTS = 72, 4, 6
PASSES: tuple[tuple[dict[int, tuple[int, int]], dict[tuple[int, int], int]], ...] = (
    ({3: (0, 60), 5: (0, 1)}, {}),
    ({3: (60, 10), 5: (1, 1), 2: (0, 3)}, {(3, 0): 1}),
)
"""Tokens before a pass and in it, by slot; and slots of states inside it, by those of
sequences and numbers of their boundaries."""


@pytest.mark.parametrize("layer", SMALL, ids=names(SMALL))
@pytest.mark.parametrize("triton", [False, True], ids=["reference", "triton"])
def test_padding_changes_nothing_and_writes_nothing(
    layer: Layer, device: str, on_triton: Switch, triton: bool
) -> None:
    """To the bit on Triton; the reference adds up tokens side by side."""
    device = device if triton else "cpu"
    pool = torch.full_like(layer.states(SLOTS, device=device), torch.nan)
    fixed = FixedPrefills(TOKENS, ROWS, torch.device(device))
    tables, other = fixed.prefills, pool.clone()
    for sequences, kept in PASSES:
        prefills = described(sequences, kept, device)
        tokens = int(prefills.cu_seqlens[-1])
        inputs = layer.make(tokens, device=device)
        computed = torch.tensor([start for start, _ in sequences.values()])
        fixed.fill(
            prefills.cu_seqlens.diff(),
            computed.to(device),
            prefills.slots,
            prefills.boundary_slots,
        )
        assert fixed.prefills is tables
        assert fixed.padding.tolist() == [row >= tokens for row in range(TOKENS)]
        with on_triton() if triton else nullcontext():
            expected = layer.prefill(inputs, pool=other, **given(prefills))
            found = layer.prefill(padded(layer, inputs), pool=pool, **given(tables))
        same = {"rtol": 0.0, "atol": 0.0} if triton else {}
        torch.testing.assert_close(found[:tokens], expected, **same)
        torch.testing.assert_close(pool, other, **same, equal_nan=True)
    assert pool[[0, 4]].isnan().all(), "padding has left a state"
    assert not pool[[1, 2, 3, 5]].isnan().any()


def described(
    sequences: dict[int, tuple[int, int]], kept: dict[tuple[int, int], int], device: str
) -> Prefills:
    """A pass of no more than its sequences."""
    starts, lengths = zip(*sequences.values(), strict=True)
    computed, order = torch.tensor(starts), list(sequences)
    table = torch.full((len(order), 2), -1)
    for (slot, boundary), target in kept.items():
        table[order.index(slot), boundary] = target
    return Prefills(
        cu_seqlens(lengths, device),
        torch.tensor(order, device=device),
        (computed > 0).to(device),
        (computed % 64).to(device),
        table.to(device) if kept else None,
    )


def given(prefills: Prefills) -> dict[str, Any]:
    """As every operation takes it."""
    every = ("cu_seqlens", "slots", "has_initial", "boundary_slots", "offsets")
    return {name: getattr(prefills, name) for name in every}


def padded(layer: Layer, inputs: Tensors) -> Tensors:
    """With tokens that nobody may read."""

    def longer(x: torch.Tensor) -> torch.Tensor:
        found = x.new_full((TOKENS, *x.shape[1:]), torch.nan)
        found[: len(x)] = x
        return found

    names = layer.rows()
    return {name: longer(x) if name in names else x for name, x in inputs.items()}
