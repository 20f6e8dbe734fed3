# SPDX-License-Identifier: Apache-2.0
"""Long passes of a gated delta net, divided between our kernels and FlashInfer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hybrid_plugin.core.commands import most_boundaries, table_columns
from hybrid_plugin.mixers import flashinfer_rule, gated_delta_net
from hybrid_plugin.mixers.gated_delta_net import Weights
from hybrid_plugin.mixers.long_prefill import divide, takes
from hybrid_plugin.mixers.prefills import Prefills
from tests.kernels.common import cu_seqlens, relative_error

SIZE, TAPS = 128, 4
BOUND = 1.5e-2
"""Of either library in bfloat16; a state of another token is off by more than 0.5."""
HEADS = {"Qwen3-Next": (16, 32), "Qwen3.5": (16, 64), "an eighth of it": (2, 8)}


@dataclass(frozen=True)
class Row:
    """A sequence of a pass."""

    start: int
    length: int
    columns: tuple[int, ...] = ()
    """Of `boundary_slots`, in which it has one."""


PASSES: dict[str, tuple[Row, ...]] = {
    "cold": (Row(0, 8192, (126,)),),
    "cold, several states": (Row(0, 5000, (15, 31, 77)),),
    "cold, the last multiple is the end": (Row(0, 1024, (15,)),),
    "goes on in a chunk": (Row(100, 3000, (0, 20, 45)),),
    "goes on at a multiple": (Row(4096, 1111, (0, 16)),),
    "several": (
        Row(0, 1024, (14,)),
        Row(64, 2000, (29,)),
        Row(33, 700, (0, 5, 10)),
        Row(7, 1),
        Row(0, 0),
        Row(0, 130, (0, 1)),
        Row(10, 54, (0,)),
        *[Row(64 * n, 300 + n, (n % 4,)) for n in range(8)],
    ),
}


@pytest.fixture
def function() -> Callable[..., Any]:
    found = flashinfer_rule.find()
    if found is None:
        pytest.skip("no FlashInfer that keeps states")
    return found


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def prefills_of(rows: Sequence[Row]) -> Prefills:
    """Slot `n` is row `n`'s; those behind are for what is kept."""
    width = table_columns(most_boundaries(max(row.length for row in rows)))
    table = torch.full((len(rows), width), -1, dtype=torch.int32)
    slot = len(rows)
    for index, row in enumerate(rows):
        for column in row.columns:
            table[index, column] = slot
            slot += 1
    starts = torch.tensor([row.start for row in rows], dtype=torch.int32)
    return Prefills(
        cu_seqlens=cu_seqlens([row.length for row in rows], "cuda"),
        slots=torch.arange(len(rows), dtype=torch.int32).cuda(),
        has_initial=(starts > 0).cuda(),
        offsets=(starts % 64).cuda(),
        boundary_slots=table.cuda(),
    )


def layer_of(keys: int, values: int) -> tuple[Weights, int]:
    channels = (2 * keys + values) * SIZE
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weights = Weights(
        convolution=torch.randn((channels, TAPS), **half) / 2,
        bias=None,
        activation="silu",
        A=-torch.rand(values, device="cuda") * 0.1,
        dt_bias=torch.randn(values, **half),
        key_heads=keys,
    )
    return weights, channels


@pytest.mark.parametrize("rows", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_states_and_outputs_are_ours(
    function: Callable[..., Any],
    heads: tuple[int, int],
    rows: tuple[Row, ...],
    state: torch.dtype,
) -> None:
    keys, values = heads
    weights, channels = layer_of(keys, values)
    slots = len(rows) + sum(len(row.columns) for row in rows)
    total = sum(row.length for row in rows)
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    mixed = torch.randn((total, channels), **half)
    a, b = torch.randn((total, values), **half), torch.randn((total, values), **half)
    conv = torch.full((slots, channels, TAPS - 1), torch.nan, **half)
    states = torch.full((slots, values, SIZE, SIZE), torch.nan, **half).to(state)
    for index, row in enumerate(rows):
        if row.start:
            conv[index], states[index] = 1, torch.randn(values, SIZE, SIZE)
    pools = [(conv.clone(), states.clone()) for _ in range(3)]

    prefills = prefills_of(rows)
    expected = gated_delta_net.prefill(weights, prefills, mixed, a, b, *pools[0])

    starts, lengths = [row.start for row in rows], [row.length for row in rows]
    columns = {column for row in rows for column in row.columns}

    def divided(pool: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        long = divide(function, prefills, starts, lengths, columns)
        assert long is not None and takes(long, mixed, pool[1])
        part = replace(prefills, long=long)
        return gated_delta_net.prefill(weights, part, mixed, a, b, *pool)

    divided(pools[1])  # what is compiled first makes the host wait
    with no_waiting():
        got = divided(pools[2])
    assert relative_error(got, expected) < BOUND
    assert torch.equal(pools[2][0].isnan(), pools[0][0].isnan())
    assert torch.equal(pools[2][0].nan_to_num(), pools[0][0].nan_to_num())
    for slot in range(slots):
        if slot < len(rows) and not rows[slot].length:
            continue
        assert relative_error(pools[2][1][slot], pools[0][1][slot]) < BOUND, slot
