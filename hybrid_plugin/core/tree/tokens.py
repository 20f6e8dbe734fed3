# SPDX-License-Identifier: Apache-2.0
"""Token ids and page ids as arrays of machine integers.

An array compares and copies like memory, an order of magnitude faster than a
tuple of Python integers, and takes eight bytes a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

Tokens: TypeAlias = "array[int]"
"""Type code `q`: ids of 64 bits, negative ones for multimodal content."""

Pages: TypeAlias = "array[int]"
"""Type code `i`: ids of pages."""


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """The same ids as an array; an array of ids itself comes back as it is."""
    if isinstance(tokens, array) and tokens.typecode == "q":
        return tokens
    return array("q", tokens)


def as_pages(pages: Sequence[int]) -> Pages:
    """The same ids as an array; an array of ids itself comes back as it is."""
    if isinstance(pages, array) and pages.typecode == "i":
        return pages
    return array("i", pages)


def common_units(left: Tokens, right: Tokens, unit: int) -> int:
    """How many units of `unit` tokens both begin with alike.

    Halves the part in question until it is one unit, so that all comparing is
    done by whole slices: linear in the tokens, without a loop over them.
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
