# SPDX-License-Identifier: Apache-2.0
"""Norms of the parts of a row: definition, reference and kernel."""

from __future__ import annotations

import pytest
import torch
from hybrid_kernels import part_norm

from .common import assert_near
from .test_gated_norm import BOUNDS, EPS, HALF, draw, types

widths = pytest.mark.parametrize("widths", [(256, 16, 16), (5, 1, 3), (16, 16, 160)])


def define(x: torch.Tensor, weights: part_norm.Three) -> list[torch.Tensor]:
    """In float64, part by part."""
    parts = torch.split(x.double().cpu(), [len(one) for one in weights], dim=-1)
    return [
        part / (part.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double().cpu()
        for part, weight in zip(parts, weights, strict=True)
    ]


def weights_of(widths: tuple[int, int, int], device: str) -> part_norm.Three:
    first, second, third = (
        draw(width, dtype=torch.float32, device=device) for width in widths
    )
    return first, second, third


@widths
@types
def test_parts_are_those_of_the_definition(
    backend: str, widths: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Parts differ in size, so that none is normalised with another."""
    scales = torch.repeat_interleave(
        torch.tensor([1.0, 30.0, 0.1]), torch.tensor(widths)
    )
    x = draw(5, sum(widths), dtype=dtype, device=backend) * scales.to(backend, dtype)
    weights = weights_of(widths, backend)
    before = x.clone()
    found = part_norm.rms_norms(x, weights, EPS)
    assert torch.equal(x, before)
    for one, wanted, width in zip(found, define(x, weights), widths, strict=True):
        assert one.shape == (5, width) and one.is_contiguous() and one.dtype == dtype
        assert_near("part", one, wanted, 2 * BOUNDS[dtype])


@widths
def test_rows_may_lie_in_a_wider_tensor_of_nan(
    backend: str, widths: tuple[int, int, int]
) -> None:
    x = draw(4, sum(widths), dtype=HALF, device=backend)
    weights = weights_of(widths, backend)
    room = torch.full((6, sum(widths) + 16), torch.nan, dtype=HALF, device=backend)
    room[1:-1, 8:-8] = x
    found = part_norm.rms_norms(room[1:-1, 8:-8], weights, EPS)
    wanted = part_norm.rms_norms(x, weights, EPS)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=0.0)


def test_rows_have_the_same_bits_in_any_batch(backend: str) -> None:
    x = draw(70, 288, dtype=HALF, device=backend)
    weights = weights_of((256, 16, 16), backend)
    every = part_norm.rms_norms(x, weights, EPS)
    for rows in (slice(1), slice(3, 7), slice(69, 70)):
        alone = part_norm.rms_norms(x[rows], weights, EPS)
        assert all(
            torch.equal(one, all_[rows]) for one, all_ in zip(alone, every, strict=True)
        )


def test_no_tokens_are_no_work(backend: str) -> None:
    x = draw(0, 12, dtype=HALF, device=backend)
    found = part_norm.rms_norms(x, weights_of((4, 4, 4), backend), EPS)
    assert [one.shape for one in found] == [(0, 4)] * 3


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3, 4), "x has 3 dimensions"),
        (torch.zeros(2, 11), "x has shape"),
        (torch.zeros(2, 24)[:, ::2], "x has strides"),
        (torch.zeros(2, 12, dtype=torch.int32), "x is torch.int32"),
    ],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        part_norm.rms_norms(x, weights_of((4, 4, 4), "cpu"), EPS)
