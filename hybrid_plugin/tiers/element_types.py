# SPDX-License-Identifier: Apache-2.0
"""Element types of states and KV, and which of them turn into which.

NumPy has no bfloat16: elements travel as unsigned integers of their size, and only a
change of type looks at their bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hybrid_plugin.tiers.row_layout import ITEM_BYTES

Words = npt.NDArray[np.unsignedinteger]
"""Elements as the integers whose bits they have."""

Change = Callable[[Words], Words]

_WORDS: dict[int, type[np.unsignedinteger]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
}
_QUIET_NAN = np.uint32(0x0040_0000)


def word_type(dtype: str) -> np.dtype[np.unsignedinteger]:
    """The unsigned integers that hold elements of a type."""
    return np.dtype(_WORDS[ITEM_BYTES[dtype]])


def change(source: str, target: str, narrow: bool) -> Change | None:
    """What turns elements of one type into another; None where nothing may.

    Widening keeps every value.  Narrowing rounds to the nearest value, of two the one
    with the even last bit, as PyTorch does.

    Args:
        source: name of a type.
        target: likewise.
        narrow: whether rounding is allowed.
    """
    if source == target:
        return lambda words: words
    if (source, target) in _WIDENINGS:
        return _WIDENINGS[source, target]
    return _NARROWINGS.get((source, target)) if narrow else None


def _bfloat16_to_float32(words: Words) -> Words:
    return words.astype(np.uint32) << np.uint32(16)


def _float16_to_float32(words: Words) -> Words:
    return words.view(np.float16).astype(np.float32).view(np.uint32)


def _float32_to_bfloat16(words: Words) -> Words:
    bits = words.astype(np.uint32)
    upper = bits >> np.uint32(16)
    # Beyond half, or half of an odd value: up.  An overflow ends at infinity.
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    nan = (bits | _QUIET_NAN) >> np.uint32(16)
    return np.where(is_nan, nan, rounded).astype(np.uint16)


def _float32_to_float16(words: Words) -> Words:
    with np.errstate(over="ignore"):  # to infinity, as PyTorch
        return words.view(np.float32).astype(np.float16).view(np.uint16)


_WIDENINGS: dict[tuple[str, str], Change] = {
    ("bfloat16", "float32"): _bfloat16_to_float32,
    ("float16", "float32"): _float16_to_float32,
}
_NARROWINGS: dict[tuple[str, str], Change] = {
    ("float32", "bfloat16"): _float32_to_bfloat16,
    ("float32", "float16"): _float32_to_float16,
}
