# SPDX-License-Identifier: Apache-2.0
"""Inverse of the unit lower triangular system of one chunk, in registers."""
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
def join(lower, solved, SIZE: tl.constexpr, shift, PRECISION: tl.constexpr):
    """Inverse blocks of ``2**(shift + 1)`` from `solved`, those of half the size:
    ``[[P, 0], [R, Q]]^-1 = [[P', 0], [-Q' R P', Q']]``."""
    middle = tl.where(below(SIZE, shift), lower, 0.0)
    middle = tl.dot(middle, solved, input_precision=PRECISION)
    return solved - tl.dot(solved, middle, input_precision=PRECISION)


@triton.jit
def invert_blocks(
    lower, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr
):
    """`invert` of a tile with nothing outside its diagonal blocks of ``2**LEVELS``."""
    index = tl.arange(0, SIZE)
    result = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    result -= tl.where(below(SIZE, 0), lower, 0.0)
    for shift in range(1, LEVELS):
        result = join(lower, result, SIZE, shift, PRECISION)
    return result


@triton.jit
def invert(lower, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + lower)^-1`` for a strictly lower triangular tile of side ``2**LEVELS``.

    Diagonal blocks are joined, from 1 by 1 upwards. Unlike the product of powers of
    `lower` this stays accurate when keys repeat, and unlike forward substitution it
    is all matrix products.
    """
    tl.static_assert(SIZE == 1 << LEVELS, "blocks of 1 to SIZE / 2 are joined")
    return invert_blocks(lower, SIZE, LEVELS, PRECISION)
