# SPDX-License-Identifier: Apache-2.0
"""What only the convolution has; `test_layers` tests the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hybrid_kernels import causal_conv1d

from .common import assert_near, cu_seqlens
from .layers import convolution

LENGTHS = [1, 63, 0, 257, 2]
Switch = Callable[[], AbstractContextManager[None]]


def test_other_layouts_plain_output_and_padding(device: str, on_triton: Switch) -> None:
    """Tokens contiguous, states with channels apart, no bias, no activation."""
    total = sum(LENGTHS)
    x = torch.randn(140, total + 37).T
    weight, pool = torch.randn(140, 4), torch.randn(6, 140, 3)
    slots = torch.tensor([3, 0, 5, -1, 2])
    expected_pool = pool.clone()
    tables = {"activation": None, "out": torch.full((140, total + 37), torch.nan).T}
    expected = causal_conv1d.prefill(
        x, weight, None, cu_seqlens(LENGTHS), expected_pool, slots, **tables
    )
    assert not expected[total:].any()
    start = 0
    for length, slot in zip(LENGTHS, slots.tolist(), strict=True):
        line = torch.cat([pool[slot] * (slot >= 0), x[start : start + length].T], 1)
        taps = [line[:, tap : tap + length] * weight[:, tap, None] for tap in range(4)]
        got = expected[start : start + length]
        assert_near("reference", got, torch.stack(taps).sum(0).T, 1e-6)
        start += length
    pool, out = pool.to(device), tables["out"].to(device).fill_(torch.nan)
    with on_triton():
        causal_conv1d.prefill(
            x.to(device),
            weight.to(device),
            None,
            cu_seqlens(LENGTHS, device),
            pool,
            slots.to(device),
            out=out,
        )
    assert_near("out", out, expected, 1e-6)
    assert torch.equal(pool.cpu(), expected_pool)


@pytest.mark.parametrize("every", [3, 16, 50])
def test_boundaries_anywhere(device: str, on_triton: Switch, every: int) -> None:
    inputs = convolution(20, 4).make(120)
    lengths, slots = [70, 50], torch.tensor([0, 1])
    table = torch.full((2, 40), -1)
    table[0, 1], table[1, 0], table[0, 70 // every - 1] = 2, 3, 4
    pool = torch.randn(5, 20, 3)
    other, starts = pool.clone(), [0, 70]
    with on_triton():
        pool = pool.to(device)
        causal_conv1d.prefill(
            **{name: x.to(device) for name, x in inputs.items()},
            cu_seqlens=cu_seqlens(lengths, device),
            pool=pool,
            slots=slots.to(device),
            boundary_slots=table.to(device),
            boundary_every=every,
        )
    causal_conv1d.prefill(
        **inputs,
        cu_seqlens=cu_seqlens(lengths),
        pool=other,
        slots=slots,
        boundary_slots=table,
        boundary_every=every,
    )
    assert torch.equal(pool.cpu(), other)
    for row, column in ((0, 1), (1, 0)):
        end = starts[row] + every * (column + 1)
        if every * (column + 1) <= lengths[row]:
            state = inputs["x"][end - 3 : end].T
            assert torch.equal(other[table[row, column]], state)


def test_boundaries_too_close_are_refused() -> None:
    inputs, pool = convolution(20, 4).make(3), torch.zeros(2, 20, 3)
    tables = {"cu_seqlens": cu_seqlens([3]), "slots": torch.tensor([0])}
    with pytest.raises(ValueError, match="boundary_every"):
        causal_conv1d.prefill(**inputs, **tables, pool=pool, boundary_every=2)
    inputs["weight"] = torch.zeros(20, 6)
    with pytest.raises(ValueError, match="taps"):
        causal_conv1d.update(**inputs, pool=torch.zeros(2, 20, 5), slots=ZERO)
    inputs["weight"] = torch.zeros(20, 4)
    with pytest.raises(ValueError, match="activation"):
        causal_conv1d.update(
            **inputs, pool=pool, slots=torch.arange(3), activation="gelu"
        )


ZERO = torch.zeros(3, dtype=torch.int32)
