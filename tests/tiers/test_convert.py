# SPDX-License-Identifier: Apache-2.0
"""Rows move between layouts element by element, and nothing else moves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.tiers.convert import Conversion, conversion
from hybrid_plugin.tiers.element_types import change, word_type
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.fields import convolution, dense
from hybrid_plugin.tiers.row_layout import ITEM_BYTES, TOKEN, Axis, Field, RowLayout

Bytes = npt.NDArray[np.uint8]

RUBBISH = 0xA5


@st.composite
def placed(
    draw: st.DrawFn, name: str, dtype: str, sizes: dict[str, int], offset: int
) -> Field:
    """A field whose axes lie in any order, in pieces, and with gaps."""
    pieces: list[tuple[str, int]] = []
    for axis, size in sizes.items():
        factor = draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
        pieces += [(axis, factor), (axis, size // factor)]
    order = draw(st.permutations(range(len(pieces))))
    steps, step = {}, ITEM_BYTES[dtype]
    for index in order:
        step *= draw(st.sampled_from([1, 1, 1, 2]))
        steps[index] = step
        step *= pieces[index][1]
    axes = tuple(Axis(*piece, steps[i]) for i, piece in enumerate(pieces))
    # Pieces of one axis keep their order, whatever else comes between them.
    return Field(name, dtype, offset + draw(st.integers(0, 5)), axes)


@st.composite
def layouts(
    draw: st.DrawFn, kinds: dict[str, tuple[str, dict[str, int]]], tokens: int
) -> RowLayout:
    fields: list[Field] = []
    end = 0
    for name in draw(st.permutations(sorted(kinds))):
        dtype, sizes = kinds[name]
        named = {TOKEN: tokens, **sizes} if tokens else sizes
        fields.append(draw(placed(name, dtype, named, end)))
        end = fields[-1].end
    return RowLayout(end + draw(st.integers(0, 7)), tokens, tuple(fields))


KINDS = st.dictionaries(
    st.sampled_from(["0.key", "0.value", "4.latent"]),
    st.tuples(
        st.sampled_from(sorted(ITEM_BYTES)),
        st.dictionaries(
            st.sampled_from(["head", "dim", "tap"]), st.integers(1, 6), max_size=3
        ),
    ),
    min_size=1,
)


def byte_places(field: Field, index: dict[str, int]) -> list[int]:
    """Where an element is in a row, found one piece at a time."""
    place = field.offset
    for name, value in index.items():
        for axis in reversed([axis for axis in field.axes if axis.name == name]):
            value, piece = divmod(value, axis.size)
            place += piece * axis.stride
    return list(range(place, place + ITEM_BYTES[field.dtype]))


def indices(sizes: dict[str, int]) -> list[dict[str, int]]:
    return [
        dict(zip(sizes, np.unravel_index(flat, tuple(sizes.values())), strict=True))
        for flat in range(math.prod(sizes.values()))
    ]


def moved_one_by_one(
    source: RowLayout, target: RowLayout, rows: Bytes, out: Bytes, start: int, end: int
) -> None:
    """The same as `Conversion.pages`, without any array arithmetic."""
    into = {field.name: field for field in target.fields}
    for old in source.fields:
        names = dict.fromkeys(a.name for a in old.axes if a.name != TOKEN)
        for index in indices({name: old.size_of(name) for name in names}):
            for token in range(start, end):
                read, at = divmod(token, source.tokens)
                write, to = divmod(token, target.tokens)
                out[
                    write - start // target.tokens,
                    byte_places(into[old.name], {TOKEN: to, **index}),
                ] = rows[
                    read - start // source.tokens,
                    byte_places(old, {TOKEN: at, **index}),
                ]


def ready(source: RowLayout, target: RowLayout, narrow: bool = False) -> Conversion:
    made = conversion(source, target, narrow)
    assert isinstance(made, Conversion), made
    return made


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_every_element_of_a_page_finds_its_place(data: st.DataObject) -> None:
    kinds = data.draw(KINDS)
    size = data.draw(st.integers(1, 6))
    source = data.draw(layouts(kinds, size))
    target = data.draw(layouts(kinds, data.draw(st.integers(1, 6) | st.just(size))))
    start = data.draw(st.integers(0, 13))
    end = data.draw(st.integers(start + 1, start + 15))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    count = -(-end // source.tokens) - start // source.tokens
    rows = rng.integers(0, 256, (count, source.row_bytes), dtype=np.uint8)
    count = -(-end // target.tokens) - start // target.tokens
    got = np.full((count, target.row_bytes), RUBBISH, dtype=np.uint8)
    wanted = got.copy()
    made = ready(source, target)
    made.pages(rows, got, start, end)
    moved_one_by_one(source, target, rows, wanted, start, end)
    assert np.array_equal(got, wanted)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_every_element_of_a_state_finds_its_place(data: st.DataObject) -> None:
    kinds = data.draw(KINDS)
    source, target = data.draw(layouts(kinds, 0)), data.draw(layouts(kinds, 0))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    row = rng.integers(0, 256, source.row_bytes, dtype=np.uint8)
    got = np.full(target.row_bytes, RUBBISH, dtype=np.uint8)
    wanted = got.copy()
    made = ready(source, target)
    made.state(row, got)
    into = {field.name: field for field in target.fields}
    for old in source.fields:
        for index in indices({axis.name: old.size_of(axis.name) for axis in old.axes}):
            wanted[byte_places(into[old.name], index)] = row[byte_places(old, index)]
    assert np.array_equal(got, wanted)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_layouts_survive_their_text(data: st.DataObject) -> None:
    layout = data.draw(layouts(data.draw(KINDS), data.draw(st.integers(0, 4))))
    read = RowLayout.from_text(layout.text)
    assert read == layout
    assert read.text == layout.text


def test_the_committed_columns_of_a_wide_convolution_move() -> None:
    wide = RowLayout(
        6 * 5 * 2,
        0,
        (
            convolution(
                "4", "bfloat16", 0, channels=5, taps=3, columns=6, channels_first=False
            ),
        ),
    )
    narrow = RowLayout(
        3 * 5 * 2,
        0,
        (convolution("4", "bfloat16", 0, channels=5, taps=3, channels_first=True),),
    )
    values = np.arange(30, dtype=np.uint16).reshape(6, 5)
    out = np.zeros(30, dtype=np.uint8)
    ready(wide, narrow).state(values.view(np.uint8).reshape(-1), out)
    assert np.array_equal(out.view(np.uint16).reshape(5, 3), values[:3].T)
    back = np.full(60, RUBBISH, dtype=np.uint8)
    ready(narrow, wide).state(out, back)
    assert np.array_equal(back.view(np.uint16).reshape(6, 5)[:3], values[:3])
    assert set(back[30:]) == {RUBBISH}


STATE = RowLayout(32, 0, (dense("4.state", "float32", 0, (("a", 2), ("b", 4))),))
PAGE = RowLayout(32, 4, (dense("4.key", "float32", 0, ((TOKEN, 4), ("dim", 2))),))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (STATE, RowLayout(32, 0, opaque="amx")),
        (RowLayout(32, 0, opaque="a"), RowLayout(32, 0, opaque="b")),
        (STATE, replace(STATE, fields=(replace(STATE.fields[0], name="5.state"),))),
        (
            STATE,
            RowLayout(32, 0, (dense("4.state", "float32", 0, (("a", 4), ("b", 2))),)),
        ),
        (STATE, RowLayout(32, 0, (dense("4.state", "float32", 0, (("a", 8),)),))),
        (
            STATE,
            RowLayout(16, 0, (dense("4.state", "bfloat16", 0, (("a", 2), ("b", 4))),)),
        ),
        (STATE, PAGE),
    ],
)
def test_what_means_something_else_is_refused(
    source: RowLayout, target: RowLayout
) -> None:
    for one, other in ((source, target), (target, source)):
        made = conversion(one, other)
        if one.fields and one.fields[0].dtype == "bfloat16":
            assert isinstance(made, Conversion)  # widening is exact
        else:
            assert isinstance(made, Failure) and made.reason is Reason.LAYOUT


def test_opaque_rows_of_one_kind_are_copied() -> None:
    layout = RowLayout(32, 4, opaque="vllm amx bfloat16")
    made = ready(layout, RowLayout(32, 4, opaque="vllm amx bfloat16"))
    assert made.is_copy
    rows, got = (
        np.arange(64, dtype=np.uint8).reshape(2, 32),
        np.zeros((2, 32), np.uint8),
    )
    made.pages(rows, got, 2, 7)
    assert np.array_equal(got, rows)
    made.state(rows[0], got[1])
    assert np.array_equal(got[1], rows[0])
    assert isinstance(conversion(layout, replace(layout, tokens=8)), Failure)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: RowLayout(31, 0, STATE.fields),
        lambda: RowLayout(32, 2, PAGE.fields),
        lambda: RowLayout(32, 0, PAGE.fields),
        lambda: RowLayout(32, 4, STATE.fields),
        lambda: RowLayout(0, 0, opaque="a"),
        lambda: RowLayout(32, 0),
        lambda: RowLayout(32, 0, STATE.fields, "both"),
        lambda: RowLayout(64, 0, STATE.fields * 2),
        lambda: RowLayout(32, 0, (dense("a", "float32", -4, (("a", 1),)),)),
        lambda: RowLayout(32, 0, (Field("a", "float32", 8, (Axis("a", 2, -4),)),)),
        lambda: RowLayout(32, 0, (Field("a", "float32", 0, (Axis("a", 0, 4),)),)),
        lambda: RowLayout(32, 0, (Field("a", "int7", 0, ()),)),
        lambda: RowLayout(99, 0, (Field("a", "uint8", 0, (Axis("a", 1, 1),) * 17),)),
    ],
)
def test_layouts_that_reach_beyond_their_rows_are_none(broken: object) -> None:
    with pytest.raises((ValueError, KeyError)):
        broken()  # type: ignore[operator]


def test_rows_of_another_size_are_an_error() -> None:
    other = RowLayout(40, 4, (dense("4.key", "float32", 8, ((TOKEN, 4), ("dim", 2))),))
    made = ready(PAGE, other)
    with pytest.raises(ValueError, match="do not hold"):
        made.pages(np.zeros((1, 32), np.uint8), np.zeros((1, 40), np.uint8), 2, 6)
    with pytest.raises(ValueError, match="rows of 40 bytes"):
        made.pages(np.zeros((2, 32), np.uint8), np.zeros((2, 32), np.uint8), 2, 6)


# ------------------------------------------------------------------ element types


def floats(dtype: str) -> npt.NDArray[np.unsignedinteger]:
    """All values of two bytes; of four bytes all those near two-byte ones, and more."""
    if ITEM_BYTES[dtype] == 2:
        return np.arange(1 << 16, dtype=np.uint16)
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    lower = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    halves = np.float16(np.arange(1 << 12)).astype(np.float32).view(np.uint32)
    near = np.concatenate([halves + np.uint32(d) for d in (0, 0xFFF, 0x1000, 0x1001)])
    return np.concatenate([*(upper | np.uint32(low) for low in lower), near])


def by_torch(
    words: npt.NDArray[np.unsignedinteger], source: str, target: str
) -> torch.Tensor:
    signed = words.view({2: np.int16, 4: np.int32}[words.itemsize])
    return (
        torch.from_numpy(signed.copy())
        .view(getattr(torch, source))
        .to(getattr(torch, target))
    )


@pytest.mark.parametrize("small", ["bfloat16", "float16"])
@pytest.mark.parametrize("widen", [True, False])
def test_element_types_change_as_in_pytorch(small: str, widen: bool) -> None:
    source, target = (small, "float32") if widen else ("float32", small)
    words = floats(source)
    move = change(source, target, narrow=not widen)
    assert move is not None
    got = move(words)
    assert got.dtype == word_type(target)
    wanted = by_torch(words, source, target)
    signed = got.view({2: np.int16, 4: np.int32}[got.itemsize])
    read = torch.from_numpy(signed.copy()).view(getattr(torch, target))
    assert torch.equal(read.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(read[numbers], wanted[numbers])
    assert torch.equal(read[numbers].signbit(), wanted[numbers].signbit())


def test_nothing_is_rounded_without_leave() -> None:
    assert change("float32", "bfloat16", narrow=False) is None
    assert change("float16", "bfloat16", narrow=True) is None
    assert change("bfloat16", "float16", narrow=True) is None
    assert change("float8_e4m3fn", "bfloat16", narrow=True) is None
