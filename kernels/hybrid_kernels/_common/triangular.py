# SPDX-License-Identifier: Apache-2.0
"""Inverse of the unit lower triangular system of one chunk, in registers."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def below(SIZE: tl.constexpr, shift):
    """``[SIZE, SIZE]``: rows of every second block of ``2**shift``, columns of the
    block before it."""
    row = tl.arange(0, SIZE)[:, None] >> shift
    column = tl.arange(0, SIZE)[None, :] >> shift
    return (row == column + 1) & (row % 2 == 1)


@triton.jit
def invert(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + lower)^-1`` for a strictly lower triangular ``[64, 64]`` tile.

    Pairs of diagonal blocks are joined, from 1 by 1 upwards, by
    ``[[P, 0], [R, Q]]^-1 = [[P', 0], [-Q' R P', Q']]``. Unlike the product of powers
    of `lower` this stays accurate when keys repeat, and unlike forward substitution
    it is all matrix products.
    """
    tl.static_assert(SIZE == 64, "blocks of 2 to 32 are joined")
    index = tl.arange(0, SIZE)
    result = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    result -= tl.where(below(SIZE, 0), lower, 0.0)
    for shift in range(1, 6):
        middle = tl.where(below(SIZE, shift), lower, 0.0)
        middle = tl.dot(middle, result, input_precision=PRECISION)
        result -= tl.dot(result, middle, input_precision=PRECISION)
    return result
