# SPDX-License-Identifier: Apache-2.0
"""What one rank reads from files, alone and of other layouts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_plugin.tiers import loading, shelf
from hybrid_plugin.tiers.bundle import Bundle, Layouts, PageBytes, pages_of
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.shelf import BundleShelf
from tests.core.profiles import machine_settings
from tests.tiers.one_rank import OneRank
from tests.tiers.support import (
    IDENTITY,
    STATE_BYTES,
    WINDOW,
    Unsynced,
    as_tokens,
    content,
    layouts,
    store_path,
    token_rows,
    view,
)

TOKENS = as_tokens(*range(100, 140))
RUBBISH = 0xAB


def read_alone(
    path: Path, own: Layouts, ends: tuple[int, ...], index: int
) -> tuple[object, dict[str, np.ndarray], np.ndarray]:
    """Read one bundle of a path into memory that holds rubbish."""
    reader = OneRank(path, 1 << 20, IDENTITY, own, files=Unsynced())
    found = reader.find(None, TOKENS)
    assert found is not None and tuple(one.end for one in found.path) == ends
    one = found.path[index]
    pages, arrays = {}, {}
    for pool, layout in own.pages.items():
        start = one.start if pool == "kv" else max(one.end - WINDOW, 0)
        count = pages_of(start, one.end, layout.tokens).count
        arrays[pool] = np.full((count, layout.row_bytes), RUBBISH, np.uint8)
        pages[pool] = PageBytes(start, [arrays[pool][:1], *arrays[pool][1:]])
    state = np.zeros(STATE_BYTES, np.uint8)
    wanted = Bundle(one.key, TOKENS[: one.end], one.start, pages, state)
    lost = reader.shelf.fetch([wanted])
    reader.close()
    return lost, arrays, state


def check_alone(path: Path, own: Layouts, ends: tuple[int, ...], index: int) -> None:
    """Demand all tokens of all pages, from the first one's beginning."""
    lost, arrays, state = read_alone(path, own, ends, index)
    assert lost is None
    end, start = ends[index], (0, *ends)[index]
    assert state.tobytes() == content("state", None, TOKENS, end)
    for pool, layout in own.pages.items():
        if pool == "kv":
            begin = skipped = start // layout.tokens * layout.tokens
        else:
            begin = max(end - WINDOW, 0)
            skipped = begin // layout.tokens * layout.tokens
        got = view(arrays[pool], layout)[begin - skipped : end - skipped]
        assert np.array_equal(got, token_rows(pool, None, TOKENS, begin, end))


@machine_settings(80)
@given(
    st.sampled_from([1, 3, 4, 5, 16]),
    st.sampled_from([1, 3, 4, 5, 16, 64]),
    st.lists(st.integers(1, 39), min_size=1, max_size=5, unique=True).map(sorted),
    st.data(),
)
def test_a_bundle_that_is_read_alone_has_all_of_its_pages(
    written: int, read: int, ends: list[int], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(ends) - 1))
    with tempfile.TemporaryDirectory() as place:
        source = layouts(written, windows=True)
        writer = OneRank(Path(place), 1 << 20, IDENTITY, source, files=Unsynced())
        stored = store_path(writer, source, None, TOKENS, *ends)
        assert all(isinstance(one, Manifest) for one in stored)
        writer.close()
        own = layouts(read, windows=True, heads_first=True)
        check_alone(Path(place), own, tuple(ends), index)


@pytest.fixture
def small_pages(tmp_path: Path) -> Path:
    own = layouts(1)
    writer = OneRank(tmp_path, 1 << 20, IDENTITY, own, files=Unsynced())
    store_path(writer, own, None, TOKENS, 3, 5, 9)
    writer.close()
    return tmp_path


def test_without_the_tokens_of_the_parents_a_page_has_a_gap(
    small_pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = layouts(16)
    check_alone(small_pages, own, (3, 5, 9), 2)
    monkeypatch.setattr(shelf, "gap", lambda *_: None)
    with pytest.raises(AssertionError):
        check_alone(small_pages, own, (3, 5, 9), 2)
    monkeypatch.undo()
    monkeypatch.setattr(loading, "_first_token", lambda position, layout: position)
    with pytest.raises(AssertionError):
        check_alone(small_pages, own, (3, 5, 9), 2)


@pytest.mark.parametrize("harm", [lambda file: file.unlink(), lambda file: flip(file)])
def test_a_parent_that_cannot_be_read_is_a_failure(
    small_pages: Path, harm: object
) -> None:
    own = layouts(16)
    reader = OneRank(small_pages, 1 << 20, IDENTITY, own, files=Unsynced())
    first, _, last = reader.find(None, TOKENS).path  # type: ignore[union-attr]
    file = reader.shelf.place(first.key.split(".")[0])
    harm(file)  # type: ignore[operator]
    rows = np.zeros((1, own.pages["kv"].row_bytes), np.uint8)
    wanted = Bundle(
        last.key, TOKENS[: last.end], last.start, {"kv": PageBytes(last.start, [rows])}
    )
    lost = reader.shelf.fetch([wanted])
    assert lost is not None
    assert lost.failure.reason in (Reason.MISSING, Reason.CORRUPT)
    reader.close()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    file.write_bytes(data)


def test_a_window_may_be_a_part_of_what_is_stored(tmp_path: Path) -> None:
    own = layouts(4, windows=True)
    writer = OneRank(tmp_path, 1 << 20, IDENTITY, own, files=Unsynced())
    store_path(writer, own, None, TOKENS, 33)
    (one,) = writer.find(None, TOKENS).path  # type: ignore[union-attr]
    for start in (33 - WINDOW, 24, 29, 32):
        count = pages_of(start, 33, 4).count
        rows = np.zeros((count, own.pages["window0"].row_bytes), np.uint8)
        pages = {"window0": PageBytes(start, [rows])}
        assert writer.shelf.read(Bundle(one.key, TOKENS[:33], 0, pages)) is None
        skipped = start // 4 * 4
        got = view(rows, own.pages["window0"])[start - skipped : 33 - skipped]
        assert np.array_equal(got, token_rows("window0", None, TOKENS, start, 33))
    pages = {"window0": PageBytes(22, [np.zeros((4, 32), np.uint8)])}
    failure = writer.shelf.read(Bundle(one.key, TOKENS[:33], 0, pages))
    assert failure is not None and failure.reason is Reason.LAYOUT
    writer.close()


def test_nothing_is_written_while_what_went_cannot_be_removed(tmp_path: Path) -> None:
    own = layouts()
    rank = OneRank(tmp_path, 9000, IDENTITY, own, files=Unsynced())
    store_path(rank, own, None, TOKENS, 6, 9)

    class Stuck(Unsynced):
        def remove(self, path: Path) -> None:
            raise PermissionError(13, "Permission denied")

    rank.shelf.files = Stuck()
    other = as_tokens(*range(20))
    assert not isinstance(store_path(rank, own, None, other, 6)[0], Manifest)
    assert len(list(rank.path.glob("*" + shelf.SUFFIX))) == 2
    rank.shelf.files = Unsynced()
    assert isinstance(store_path(rank, own, None, other, 6)[0], Manifest)
    assert len(list(rank.path.glob("*" + shelf.SUFFIX))) == rank.count
    rank.close()


def test_the_shelf_needs_nothing_but_its_folder(tmp_path: Path) -> None:
    """It may be in another process than who decides."""
    own = layouts()
    rank = OneRank(tmp_path, 1 << 20, IDENTITY, own, files=Unsynced())
    store_path(rank, own, None, TOKENS, 6)
    (one,) = rank.find(None, TOKENS).path  # type: ignore[union-attr]
    other = BundleShelf(tmp_path, IDENTITY.rank_name, own)
    rows = np.zeros((2, 32), np.uint8)
    pages = {"kv": PageBytes(0, [rows])}
    assert other.read(Bundle(one.key, TOKENS[:6], 0, pages)) is None
    assert rows.any()
    rank.close()
