# SPDX-License-Identifier: Apache-2.0
"""Norms of the parts of a row on a GPU: definition, bits and capture."""

from __future__ import annotations

import pytest
import torch
from hybrid_kernels import part_norm

from tests.kernels.common import assert_near
from tests.kernels.test_gated_norm import BOUNDS, EPS, HALF
from tests.kernels.test_part_norm import define

SIZES = (1, 3, 64, 511, 8192)


def drawn(tokens: int) -> tuple[torch.Tensor, part_norm.Three]:
    """Rows of Jamba-mini's projection, and weights."""
    x = torch.randn(tokens, 288, device="cuda").to(HALF)
    first, second, third = (
        torch.randn(n, device="cuda").to(HALF) for n in (256, 16, 16)
    )
    return x, (first, second, third)


@pytest.mark.parametrize("tokens", SIZES)
def test_parts_are_those_of_the_definition_with_the_bits_of_one_row(
    tokens: int,
) -> None:
    x, weights = drawn(tokens)
    found = part_norm.rms_norms(x, weights, EPS)
    alone = part_norm.rms_norms(x[-1:], weights, EPS)
    wanted = define(x, weights)
    for one, other, last in zip(found, wanted, alone, strict=True):
        assert_near("part", one, other, 2 * BOUNDS[HALF])
        assert torch.equal(one[-1:], last)


def test_a_captured_norm_replays_other_rows() -> None:
    x, weights = drawn(32)
    part_norm.rms_norms(x, weights, EPS)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = part_norm.rms_norms(x, weights, EPS)
    x.copy_(torch.randn_like(x))
    graph.replay()
    for one, other in zip(found, part_norm.rms_norms(x, weights, EPS), strict=True):
        assert torch.equal(one, other)
