# SPDX-License-Identifier: Apache-2.0
"""What lies where in the bytes of a page or of a state slot.

A row is the bytes of one page, or of one slot, over all layers.  It is described as
strided arrays: for each tensor of each layer its place, its element type, and its axes
with their steps.  That covers every order in which engines keep heads, tokens and
channels, padding between layers, and rows that are wider than what is committed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
"""Element types, by PyTorch's names."""

TOKEN = "token"
"""Name of the axis along which a page's tokens lie."""

MAX_AXES = 16
"""Of one tensor; NumPy takes 32 at most, and conversion adds one."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a tensor within a row.

    Axes of the same name are one axis that lies in pieces, the outer piece first: pages
    that attention kernels divide into blocks have two for their tokens.
    """

    name: str
    size: int
    stride: int
    """Bytes from one index to the next."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of one layer within a row."""

    name: str
    """What it is, equal in all engines: `"3.key"`, `"3.value"`, `"4.conv"`, ..."""
    dtype: str
    """One of `ITEM_BYTES`."""
    offset: int
    """Bytes from the start of the row to its first element."""
    axes: tuple[Axis, ...]

    @property
    def end(self) -> int:
        """Bytes from the start of the row to behind its last element."""
        reach = sum((axis.size - 1) * axis.stride for axis in self.axes)
        return self.offset + reach + ITEM_BYTES[self.dtype]

    def size_of(self, name: str) -> int:
        """Elements along an axis, over all its pieces; 1 if there is none."""
        return math.prod(axis.size for axis in self.axes if axis.name == name)


@dataclass(frozen=True)
class RowLayout:
    """How the bytes of a row are to be read.

    Raises:
        ValueError: for fields that reach beyond the row, or have no meaning.
    """

    row_bytes: int
    tokens: int
    """Tokens of a page; 0 for a state."""
    fields: tuple[Field, ...] = ()
    """None for opaque rows, which are only read as they were written."""
    opaque: str = ""
    """What opaque rows are; rows of equal names are alike."""

    def __post_init__(self) -> None:
        if self.row_bytes < 1 or self.tokens < 0:
            raise ValueError(f"a row of {self.row_bytes} bytes, {self.tokens} tokens")
        if bool(self.fields) == bool(self.opaque):
            raise ValueError("rows have fields, or a name and no fields")
        if len({field.name for field in self.fields}) < len(self.fields):
            raise ValueError("two fields have one name")
        for field in self.fields:
            self._check(field)

    def _check(self, field: Field) -> None:
        if field.dtype not in ITEM_BYTES or len(field.axes) > MAX_AXES:
            raise ValueError(f"{field.name}: {field.dtype}, {len(field.axes)} axes")
        if field.offset < 0 or any(a.size < 1 or a.stride < 1 for a in field.axes):
            raise ValueError(f"{field.name} has axes of no size or a negative step")
        if field.end > self.row_bytes:
            raise ValueError(
                f"{field.name} ends at byte {field.end} of a row of {self.row_bytes}"
            )
        # Without that axis its size reads 1, which a state may have too.
        named = any(axis.name == TOKEN for axis in field.axes)
        if named != bool(self.tokens) or field.size_of(TOKEN) != max(self.tokens, 1):
            raise ValueError(f"{field.name} has not {self.tokens} tokens")

    @cached_property
    def text(self) -> str:
        """JSON, which `from_text` reads."""
        fields = [
            [f.name, f.dtype, f.offset, [[a.name, a.size, a.stride] for a in f.axes]]
            for f in self.fields
        ]
        value = [self.row_bytes, self.tokens, fields, self.opaque]
        return json.dumps(value, separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=256)  # a folder has few, and thousands of files
    def from_text(source: str) -> RowLayout:
        """Read what `text` is.

        Raises:
            ValueError: for anything else.
        """
        try:
            row_bytes, tokens, fields, opaque = json.loads(source)
            return RowLayout(
                row_bytes=integer(row_bytes),
                tokens=integer(tokens),
                fields=tuple(_field(*entry) for entry in fields),
                opaque=text(opaque),
            )
        except (TypeError, RecursionError) as error:
            raise ValueError(f"no layout: {error}") from None


def _field(name: Any, dtype: Any, offset: Any, axes: Sequence[Any]) -> Field:
    read = tuple(Axis(text(n), integer(size), integer(step)) for n, size, step in axes)
    return Field(text(name), text(dtype), integer(offset), read)


def integer(value: Any) -> int:
    """The value, if it is an integer and no truth value.

    Raises:
        ValueError: if it is not.
    """
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} is no integer")
    return value


def text(value: Any) -> str:
    """The value, if it is a string.

    Raises:
        ValueError: if it is not.
    """
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} is no string")
    return value
