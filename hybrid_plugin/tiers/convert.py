# SPDX-License-Identifier: Apache-2.0
"""Rows of one layout as rows of another: the same elements at other places."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybrid_plugin.tiers.element_types import Change, Words, change, word_type
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.row_layout import TOKEN, Axis, Field, RowLayout

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Moves rows of one layout into rows of another.

    Nothing is moved that the target does not name: padding stays as it is.  Opaque rows
    move as they are.
    """

    source: RowLayout
    target: RowLayout
    _fields: tuple[tuple[Field, Field, Change], ...]

    @property
    def is_copy(self) -> bool:
        """Whether rows are equal in both, so that a copy of them does."""
        return self.source == self.target

    def pages(self, source: Bytes, target: Bytes, start: int, end: int) -> None:
        """Move the KV of tokens `start` to `end` of a sequence.

        Other tokens of the target's pages are left as they are.

        Args:
            source: `[pages, row bytes]`, from the page of token `start` on.
            target: likewise, in the target's pages.
            start: the first token.
            end: behind the last token.

        Raises:
            ValueError: if there are too few rows, or they have another size.
        """
        if self.source.opaque:
            target[:] = source
            return
        _check(self.source, source, start, end)
        _check(self.target, target, start, end)
        size = self.source.tokens
        first, last = -(-start // size), end // size
        if size != self.target.tokens or first >= last:
            self._tokens(source, target, start, end)
            return
        # Pages that are alike and full move as they are, which is much faster.
        before, behind = first - start // size, last - start // size
        self._tokens(source, target, start, first * size)
        self._rows(source[before:behind], target[before:behind])
        self._tokens(source[behind:], target[behind:], last * size, end)

    def state(self, source: Bytes, target: Bytes) -> None:
        """Move one state.

        Args:
            source: `[row bytes]`.
            target: `[row bytes]`.

        Raises:
            ValueError: if they have another size.
        """
        if self.source.opaque:
            target[:] = source
            return
        _check(self.source, source[None])
        _check(self.target, target[None])
        self._rows(source[None], target[None])

    def _rows(self, source: Bytes, target: Bytes) -> None:
        """Move whole rows that are alike, with one copy where types are equal."""
        for old, new, changed in self._fields:
            values = _reordered(_view(source, old), _ordered(old), _ordered(new))
            _view(target, new)[...] = changed(values)

    def _tokens(self, source: Bytes, target: Bytes, start: int, end: int) -> None:
        """Move one token after the other, from the pages of the first one on."""
        positions = np.arange(start, end)
        read = positions // self.source.tokens - start // self.source.tokens
        write = positions // self.target.tokens - start // self.target.tokens
        for old, new, changed in self._fields:
            values = changed(_view(source, old)[read, *_index(old, positions)])
            values = _reordered(values, _inner(old), _inner(new))
            _view(target, new)[write, *_index(new, positions)] = values


def conversion(
    source: RowLayout, target: RowLayout, narrow: bool = False
) -> Conversion | Failure:
    """How rows of one layout become rows of another; a failure where they cannot.

    Args:
        source: of the rows that there are.
        target: of the rows that are wanted.
        narrow: whether elements may be rounded to a smaller type.
    """
    if source.opaque and source == target:
        return Conversion(source, target, ())
    if source.opaque or target.opaque:
        return _refused(f"opaque rows {source.opaque!r} and {target.opaque!r}")
    if bool(source.tokens) != bool(target.tokens):
        return _refused("pages and states")
    there = {field.name: field for field in source.fields}
    wanted = {field.name for field in target.fields}
    if there.keys() != wanted:
        differing = sorted(there.keys() ^ wanted)
        return _refused(f"only one of them has {', '.join(differing[:4])}")
    pairs = []
    for new in target.fields:
        old = there[new.name]
        changed = change(old.dtype, new.dtype, narrow)
        if changed is None:
            return _refused(f"{new.name} is {old.dtype}, not {new.dtype}")
        if _shape(old) != _shape(new):
            return _refused(f"{new.name} is {_shape(old)}, not {_shape(new)}")
        pairs.append((old, new, changed))
    return Conversion(source, target, tuple(pairs))


def _refused(why: str) -> Failure:
    return Failure(Reason.LAYOUT, why)


def _shape(field: Field) -> dict[str, int]:
    """Elements along each axis other than the tokens."""
    return {name: field.size_of(name) for name in _names(_inner(field))}


def _inner(field: Field) -> list[Axis]:
    return [axis for axis in field.axes if axis.name != TOKEN]


def _names(axes: Iterable[Axis]) -> list[str]:
    return list(dict.fromkeys(axis.name for axis in axes))


def _check(layout: RowLayout, rows: Bytes, start: int = 0, end: int = 0) -> None:
    """Demand rows of this layout, enough for tokens `start` to `end`."""
    if rows.dtype != np.uint8 or rows.shape[1:] != (layout.row_bytes,):
        raise ValueError(f"rows of {layout.row_bytes} bytes, not {rows.shape}")
    if layout.tokens:
        needed = -(-end // layout.tokens) - start // layout.tokens
        if len(rows) < needed:
            raise ValueError(f"{len(rows)} rows do not hold tokens {start} to {end}")


def _ordered(field: Field) -> list[Axis]:
    """The axes in the order of a view: tokens first."""
    return sorted(field.axes, key=lambda axis: axis.name != TOKEN)  # stable


def _view(rows: Bytes, field: Field) -> Words:
    """`[rows, *pieces of the token axis, *other pieces]` of a field."""
    kind = word_type(field.dtype)
    axes = _ordered(field)
    bounded = rows[:, field.offset : field.end]
    bytewise = np.lib.stride_tricks.as_strided(
        bounded,
        shape=(len(rows), *(axis.size for axis in axes), kind.itemsize),
        strides=(rows.strides[0], *(axis.stride for axis in axes), rows.strides[1]),
    )
    return bytewise.view(kind)[..., 0]


def _index(
    field: Field, positions: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], ...]:
    """Where tokens are in their pages: split up among the pieces of their axis."""
    pieces = [axis.size for axis in field.axes if axis.name == TOKEN]
    return np.unravel_index(positions % math.prod(pieces), pieces)


def _reordered(values: Words, old: list[Axis], new: list[Axis]) -> Words:
    """`[rows, *axes of old]` as `[rows, *axes of new]`."""
    names = _names(new)
    by_name = sorted(range(len(old)), key=lambda i: names.index(old[i].name))
    values = values.transpose(0, *(1 + i for i in by_name))
    grouped = sorted(range(len(new)), key=lambda i: names.index(new[i].name))
    values = values.reshape(len(values), *(new[i].size for i in grouped))
    return values.transpose(0, *(1 + int(i) for i in np.argsort(grouped)))
