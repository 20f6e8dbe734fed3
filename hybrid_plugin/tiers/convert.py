# SPDX-License-Identifier: Apache-2.0
"""Rows of one layout as rows of another: the same elements at other places."""

from __future__ import annotations

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
        positions = np.arange(start, end)
        read = _places(positions, self.source, source)
        write = _places(positions, self.target, target)
        for old, new, changed in self._fields:
            values = changed(_view(source, old)[_index(old, read)])
            _view(target, new)[_index(new, write)] = _reordered(values, old, new)

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
        rows, written = source[None], target[None]
        _check(self.source, rows)
        _check(self.target, written)
        for old, new, changed in self._fields:
            # Views, as far as types are equal: states are large, and copied once.
            values = _reordered(_view(rows, old), old, new)
            _view(written, new)[...] = changed(values)


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


Places = tuple[npt.NDArray[np.int64], ...]
"""Row, and index in it, of each token."""


def _places(positions: npt.NDArray[np.int64], layout: RowLayout, rows: Bytes) -> Places:
    _check(layout, rows)
    if not len(positions):
        return positions, positions
    row = positions // layout.tokens - positions[0] // layout.tokens
    if row[-1] >= len(rows):
        raise ValueError(f"{len(rows)} rows do not hold {len(positions)} tokens")
    return row, positions % layout.tokens


def _check(layout: RowLayout, rows: Bytes) -> None:
    if rows.dtype != np.uint8 or rows.shape[1:] != (layout.row_bytes,):
        raise ValueError(f"rows of {layout.row_bytes} bytes, not {rows.shape}")


def _view(rows: Bytes, field: Field) -> Words:
    """`[rows, *pieces of the token axis, *other pieces]` of a field."""
    kind = word_type(field.dtype)
    axes = sorted(field.axes, key=lambda axis: axis.name != TOKEN)  # stable
    bounded = rows[:, field.offset : field.end]
    bytewise = np.lib.stride_tricks.as_strided(
        bounded,
        shape=(len(rows), *(axis.size for axis in axes), kind.itemsize),
        strides=(rows.strides[0], *(axis.stride for axis in axes), rows.strides[1]),
    )
    return bytewise.view(kind)[..., 0]


def _index(field: Field, places: Places) -> Places:
    """Where tokens are in a view: their index split up among the axis' pieces."""
    pieces = [axis.size for axis in field.axes if axis.name == TOKEN]
    return (places[0], *np.unravel_index(places[1], pieces))


def _reordered(values: Words, old: Field, new: Field) -> Words:
    """`[tokens, *pieces of old]` as `[tokens, *pieces of new]`."""
    names = _names(_inner(new))
    by_name = sorted(
        range(len(_inner(old))), key=lambda i: names.index(_inner(old)[i].name)
    )
    values = values.transpose(0, *(1 + i for i in by_name))
    target = _inner(new)
    grouped = sorted(range(len(target)), key=lambda i: names.index(target[i].name))
    values = values.reshape(len(values), *(target[i].size for i in grouped))
    return values.transpose(0, *(1 + int(i) for i in np.argsort(grouped)))
