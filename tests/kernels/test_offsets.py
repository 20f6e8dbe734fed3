# SPDX-License-Identifier: Apache-2.0
"""Sequences that go on in the middle of a chunk: chunks at absolute positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from .common import assert_near, cu_seqlens, on
from .layers import SMALL, Layer, names

Run = Callable[..., torch.Tensor]
Switch = Callable[[], AbstractContextManager[None]]
pools = pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16], ids=str)
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
EDGES = [
    *[Resumed(2, 63)] * 3,  # two chunks each, as many as that few tokens can lie in
    Resumed(0, 63),
    Resumed(70, 63),
    Resumed(0, 0),
    Resumed(65, 1),
]


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


def on_triton_with(layer: Layer, device: str, switch: Switch) -> Run:
    """`layer.prefill` in Triton, for tensors on the CPU."""

    def run(
        inputs: dict[str, Any], *, pool: torch.Tensor, **tables: Any
    ) -> torch.Tensor:
        states = pool.to(device)
        rounding = {n: tables.pop(n) for n in layer.rounding if n in tables}
        given = on(device, tables)
        with switch():
            out = layer.prefill(on(device, inputs), pool=states, **given, **rounding)
        pool.copy_(states)
        return out.cpu()

    return run


def without_offsets(layer: Layer) -> Run:
    """The operation, broken on purpose."""

    def run(inputs: dict[str, Any], *, offsets: object, **tables: Any) -> torch.Tensor:
        return layer.prefill(inputs, **tables)

    return run


@layers
@settings(max_examples=5, deadline=None)
@given(batch=st.lists(sequences, min_size=1, max_size=3))
@example(batch=EDGES)
def test_reference_prefill_is_the_definition(
    layer: Layer, batch: list[Resumed]
) -> None:
    check(layer, batch, layer.prefill)


@layers
@settings(
    max_examples=1,
    deadline=None,
    # The fixtures hold nothing that an example changes.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batch=st.lists(sequences, min_size=1, max_size=3))
@example(batch=EDGES)
def test_triton_prefill_is_the_definition(
    layer: Layer, device: str, on_triton: Switch, batch: list[Resumed]
) -> None:
    check(layer, batch, on_triton_with(layer, device, on_triton))


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
@pools
def test_reference_splits_at_multiples_of_64_keep_the_bits(
    layer: Layer, pool_dtype: torch.dtype
) -> None:
    split_bits(layer, layer.prefill, pool_dtype)


@layers
@pools
def test_triton_splits_at_multiples_of_64_keep_the_bits(
    layer: Layer, pool_dtype: torch.dtype, device: str, on_triton: Switch
) -> None:
    split_bits(layer, on_triton_with(layer, device, on_triton), pool_dtype)


def split_bits(layer: Layer, prefill: Run, dtype: torch.dtype) -> None:
    """Tokens 96 to 240 of a sequence, at once and split at 128 and 192.

    In multiples of 16: elsewhere PyTorch's sigmoid has other bits in a call's last
    numbers, of which it takes 32 at a time on a CPU with AVX-512.
    """
    # The convolution's states are inputs: exact in their own type only.
    inputs = layer.make(144, dtype=torch.float32 if layer.rounding else dtype)
    pool = layer.states(2, dtype)
    pool[1] = pool[0]
    outs = []
    for slot, bounds in enumerate(([96, 240], [96, 128, 192, 240])):
        parts = [
            prefill(
                layer.part(inputs, slice(start - 96, end - 96)),
                pool=pool,
                cu_seqlens=cu_seqlens([end - start]),
                slots=torch.tensor([slot]),
                offsets=torch.tensor([start % 64]),
                **layer.rounding,
            )
            for start, end in pairwise(bounds)
        ]
        outs.append(torch.cat(parts))
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(pool[1], pool[0])


@layers
@pytest.mark.parametrize("split", [5, 100, 130])
def test_reference_splits_anywhere_keep_the_boundaries(
    layer: Layer, split: int
) -> None:
    split_boundaries(layer, layer.prefill, split)


@layers
def test_triton_splits_anywhere_keep_the_boundaries(
    layer: Layer, device: str, on_triton: Switch
) -> None:
    split_boundaries(layer, on_triton_with(layer, device, on_triton), 100)


def split_boundaries(layer: Layer, prefill: Run, split: int) -> None:
    """A prompt in two calls hands out its states after 64, 128 and 192 tokens.

    Its last bits may differ from those of one call, whose second chunk is not cut.
    """
    inputs, pool = layer.make(195), layer.states(4)
    origin = pool[0].clone()
    done = split // 64
    outs = []
    for start, end, kept in (
        (0, split, [1, 2, 3]),
        (split, 195, [1, 2, 3][done:] + [-1] * done),
    ):
        outs.append(
            prefill(
                layer.part(inputs, slice(start, end)),
                pool=pool,
                cu_seqlens=cu_seqlens([end - start]),
                slots=torch.tensor([0]),
                boundary_slots=torch.tensor([kept]),
                offsets=torch.tensor([start % 64]),
            )
        )
    expected, final = layer.define(inputs, origin)
    assert_near("out", torch.cat(outs), expected, 1e-5)
    assert_near("final", pool[0], final, 1e-5)
    for column in range(3):
        part = layer.part(inputs, slice(64 * (column + 1)))
        state = layer.define(part, origin)[1]
        assert_near(f"boundary {column}", pool[1 + column], state, 1e-5)
