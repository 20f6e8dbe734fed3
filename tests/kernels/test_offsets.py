# SPDX-License-Identifier: Apache-2.0
"""Sequences that go on in the middle of a chunk: chunks at absolute positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .common import assert_near, cu_seqlens
from .layers import SMALL, Layer, names

Run = Callable[..., torch.Tensor]
layers = pytest.mark.parametrize("layer", SMALL, ids=names(SMALL))
COLUMNS = 3


@dataclass(frozen=True)
class Resumed:
    """A sequence that goes on, or starts, somewhere in a chunk."""

    length: int
    offset: int
    initial: bool = True
    """Whether it goes on from a state."""
    kept: int = 2**COLUMNS - 1
    """A bit for each boundary column that names a slot."""


sequences = st.builds(
    Resumed,
    st.integers(0, 150),
    st.integers(0, 63),
    st.booleans(),
    st.integers(0, 2**COLUMNS - 1),
)
SHORT = [Resumed(2, 63)] * 4
"""Two chunks each, as many as that few tokens can touch."""


def check(layer: Layer, batch: Sequence[Resumed], run: Run) -> None:
    """Outputs and every slot of a pool against the definition, token by token.

    Slots 0 to `N` are the sequences'; each boundary column has its own.
    """
    count = len(batch)
    inputs = layer.make(sum(each.length for each in batch) + 1)
    pool = layer.states(count * (1 + COLUMNS) + 1)
    table = torch.arange(count, count * (1 + COLUMNS)).view(count, COLUMNS)
    for row, each in enumerate(batch):
        for column in range(COLUMNS):
            if not each.kept >> column & 1:
                table[row, column] = -1
    expected, outs, start = pool.double(), [], 0
    for row, each in enumerate(batch):
        mine = layer.part(inputs, slice(start, start + each.length))
        for column, slot in enumerate(table[row].tolist()):
            end = 64 * (column + 1) - each.offset
            if slot >= 0 and end <= each.length:
                part = layer.part(mine, slice(end))
                expected[slot] = layer.define(part, pool[row], not each.initial)[1]
        out, expected[row] = layer.define(mine, pool[row], not each.initial)
        outs.append(out)
        start += each.length
    got = run(
        inputs,
        pool=pool,
        cu_seqlens=cu_seqlens([each.length for each in batch]),
        slots=torch.arange(count),
        has_initial=torch.tensor([each.initial for each in batch]),
        boundary_slots=table,
        offsets=torch.tensor([each.offset for each in batch], dtype=torch.int32),
    )
    assert_near("out", got[:start], torch.cat(outs), 1e-5)
    for slot in range(len(pool)):
        assert_near(f"slot {slot}", pool[slot], expected[slot], 1e-5)


def without_offsets(layer: Layer) -> Run:
    """The operation, broken on purpose."""

    def run(inputs: dict[str, Any], *, offsets: object, **tables: Any) -> torch.Tensor:
        return layer.prefill(inputs, **tables)

    return run


@layers
@settings(max_examples=5, deadline=None)
@given(batch=st.lists(sequences, min_size=1, max_size=3))
@example(batch=SHORT)
def test_reference_prefill_is_the_definition(
    layer: Layer, batch: list[Resumed]
) -> None:
    check(layer, batch, layer.prefill)


@layers
def test_check_sees_offsets_that_are_ignored(layer: Layer) -> None:
    batch = [Resumed(100, 0), Resumed(100, 40)]
    check(layer, batch, layer.prefill)
    with pytest.raises(AssertionError, match="slot"):
        check(layer, batch, without_offsets(layer))


@layers
@pytest.mark.parametrize("offset", [-1, 64])
def test_reference_refuses_offsets_outside_a_chunk(layer: Layer, offset: int) -> None:
    with pytest.raises(ValueError, match="offsets"):
        check(layer, [Resumed(10, offset)], layer.prefill)


@layers
def test_reference_splits_at_multiples_of_64_keep_the_bits(layer: Layer) -> None:
    """A sequence that goes on at token 100, in one call or in calls split there."""
    split_bits(layer, layer.prefill, "cpu")


def split_bits(layer: Layer, prefill: Run, device: str) -> None:
    """Tokens 100 to 300, at once, split at 128, at 128 and 256, and by 64 + 64."""
    inputs = {name: x.to(device) for name, x in layer.make(200).items()}
    pool = layer.states(4).to(device)
    pool[1:] = pool[0]
    outs = []
    for slot, bounds in enumerate(
        ([100, 300], [100, 128, 300], [100, 128, 256, 300], [100, 192, 300])
    ):
        parts = []
        for start, end in pairwise(bounds):
            parts.append(
                prefill(
                    layer.part(inputs, slice(start - 100, end - 100)),
                    pool=pool,
                    cu_seqlens=cu_seqlens([end - start], device),
                    slots=torch.tensor([slot], device=device),
                    offsets=torch.tensor([start % 64], device=device),
                )
            )
        outs.append(torch.cat(parts))
    for slot in range(1, 4):
        assert torch.equal(outs[slot], outs[0])
        assert torch.equal(pool[slot], pool[0])
