# SPDX-License-Identifier: Apache-2.0
"""Token ids and page ids as arrays of machine integers.

Arrays are compared and copied as memory, an order of magnitude faster than tuples of
Python integers, and take eight bytes per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

Tokens: TypeAlias = "array[int]"
"""Type code `q`: 64-bit ids, negative for multimodal content."""

Pages: TypeAlias = "array[int]"
"""Type code `i`: page ids."""


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """The ids as an array; an array with the right type code is returned unchanged."""
    if isinstance(tokens, array) and tokens.typecode == "q":
        return tokens
    return array("q", tokens)


def as_pages(pages: Sequence[int]) -> Pages:
    """The ids as an array; an array with the right type code is returned unchanged."""
    if isinstance(pages, array) and pages.typecode == "i":
        return pages
    return array("i", pages)


def common_units(left: Tokens, right: Tokens, unit: int) -> int:
    """Number of units of `unit` tokens in the common prefix.

    Bisects by comparing whole slices: linear in the tokens, without a loop over them.
    """
    equal, most = 0, min(len(left), len(right)) // unit
    if left[: most * unit] == right[: most * unit]:
        return most
    while most - equal > 1:
        middle = (equal + most) // 2
        span = slice(equal * unit, middle * unit)
        if left[span] == right[span]:
            equal = middle
        else:
            most = middle
    return equal
