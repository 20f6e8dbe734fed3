# SPDX-License-Identifier: Apache-2.0
"""A small model: its layouts, and the bytes that its tokens must have.

The bytes of a token depend on all tokens before it, as those of a real model do, so
whatever comes back under wrong tokens differs.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.bundle import Layouts, PageBytes
from hybrid_plugin.tiers.bundle import pages_of as place_of
from hybrid_plugin.tiers.files import Files
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.row_layout import Axis, Field, RowLayout
from tests.tiers.one_rank import Found, Made, OneRank

Bytes = npt.NDArray[np.uint8]

TOKEN_BYTES, STATE_BYTES, WINDOW = 8, 24, 10
HEADS = 2


class Unsynced(Files):
    """Does not wait for the disk: no test here pulls the plug of a real one."""

    def sync(self, file: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


IDENTITY = Identity(
    weights="tiny", config="0" * 64, layers=("0 full", "1 mamba"), kv_dtype="uint8"
)


def page_layout(page: int, *, heads_first: bool = False, padding: int = 0) -> RowLayout:
    """Pages of one layer with two heads, in either order."""
    per_head = TOKEN_BYTES // HEADS
    if heads_first:
        axes = (
            Axis("head", HEADS, page * per_head),
            Axis("token", page, per_head),
            Axis("dim", per_head, 1),
        )
    else:
        axes = (
            Axis("token", page, TOKEN_BYTES),
            Axis("head", HEADS, per_head),
            Axis("dim", per_head, 1),
        )
    field = Field("0.key", "uint8", padding, axes)
    return RowLayout(page * TOKEN_BYTES + padding, page, (field,))


STATE = RowLayout(
    STATE_BYTES, 0, (Field("1.state", "uint8", 0, (Axis("dim", STATE_BYTES, 1),)),)
)


def layouts(page: int = 4, *, windows: bool = False, **kinds: object) -> Layouts:
    """Of a process with pages of so many tokens."""
    layout = page_layout(page, **kinds)  # type: ignore[arg-type]
    pages = {"kv": layout, "window0": layout} if windows else {"kv": layout}
    return Layouts(pages, STATE)


def as_tokens(*values: int) -> Tokens:
    return array("q", values)


def content(pool: str, namespace: Hashable, tokens: Tokens, end: int) -> bytes:
    """What a pool must hold for token `end - 1`."""
    size = STATE_BYTES if pool == "state" else TOKEN_BYTES
    text = repr((pool, namespace, list(tokens[:end]))).encode()
    return blake2b(text, digest_size=size).digest()


def token_rows(
    pool: str, namespace: Hashable, tokens: Tokens, start: int, end: int
) -> Bytes:
    """`[tokens, TOKEN_BYTES]` of tokens `start` to `end`."""
    joined = b"".join(
        content(pool, namespace, tokens, i + 1) for i in range(start, end)
    )
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, TOKEN_BYTES)


def view(rows: Bytes, layout: RowLayout) -> Bytes:
    """`[tokens, TOKEN_BYTES]` of rows, written without the code under test."""
    (field,) = layout.fields
    inner = rows[:, field.offset :]
    if field.axes[0].name == "token":
        return inner.reshape(-1, TOKEN_BYTES)
    by_head = inner.reshape(len(rows), HEADS, layout.tokens, -1)
    return by_head.transpose(0, 2, 1, 3).reshape(-1, TOKEN_BYTES)


def pages_of(
    pool: str,
    namespace: Hashable,
    tokens: Tokens,
    start: int,
    layout: RowLayout,
    rubbish: int = 0xEE,
) -> Bytes:
    """The pages from that of `start` to the end of the tokens."""
    size = layout.tokens
    first, end = start // size, len(tokens)
    count = -(-end // size) - first
    tokenwise = np.full((count * size, TOKEN_BYTES), rubbish, dtype=np.uint8)
    begin = first * size
    tokenwise[: end - begin] = token_rows(pool, namespace, tokens, begin, end)
    (field,) = layout.fields
    rows = np.full((count, layout.row_bytes), rubbish, dtype=np.uint8)
    pages = tokenwise.reshape(count, size, HEADS, -1)
    if field.axes[0].name == "head":
        pages = pages.transpose(0, 2, 1, 3)
    rows[:, field.offset :] = pages.reshape(count, -1)
    return rows


def bundle(own: Layouts, namespace: Hashable, tokens: Tokens, start: int = 0) -> Made:
    """What a model would store."""
    pages = {}
    for pool, layout in own.pages.items():
        begin = start if pool == "kv" else max(len(tokens) - WINDOW, 0)
        rows = pages_of(pool, namespace, tokens, begin, layout)
        pages[pool] = PageBytes(begin, list(rows))
    state = np.frombuffer(
        content("state", namespace, tokens, len(tokens)), dtype=np.uint8
    )
    return Made(namespace, tokens, start, pages, state if own.state else None)


def store_path(
    folder: OneRank, own: Layouts, namespace: Hashable, tokens: Tokens, *ends: int
) -> list[object]:
    """Store bundles that end at `ends`, one behind the other."""
    return [
        folder.store(bundle(own, namespace, tokens[:end], start))
        for start, end in pairwise((0, *ends))
    ]


def load_path(
    folder: OneRank, own: Layouts, tokens: Tokens, found: Found
) -> tuple[dict[str, Bytes], Bytes] | object:
    """What a process gets: the whole pages of each pool, and the state; or a failure.

    Pages are counted from the start of the sequence.
    """
    pools = {
        pool: np.zeros((-(-found.end // layout.tokens), layout.row_bytes), np.uint8)
        for pool, layout in own.pages.items()
    }
    state = np.zeros(STATE_BYTES, np.uint8)
    pages = []
    for one in found.path:
        starts = {"kv": one.start}
        if one is found.path[-1]:
            windows = own.pages.keys() - {"kv"}
            starts |= dict.fromkeys(windows, max(one.end - WINDOW, 0))
        pages.append(
            {
                pool: _page_bytes(start, one.end, pools[pool], own.pages[pool].tokens)
                for pool, start in starts.items()
            }
        )
    failure = folder.load(found.path, tokens, pages, state)
    return failure or (pools, state)


def _page_bytes(start: int, end: int, rows: Bytes, size: int) -> PageBytes:
    """Pages of a sequence, partly in one piece."""
    place = place_of(start, end, size)
    own = rows[place.first : place.first + place.count]
    return PageBytes(start, [own[:2], *own[2:]])


def check_loaded(
    loaded: object, own: Layouts, namespace: Hashable, tokens: Tokens, end: int
) -> None:
    """Demand exactly the bytes that the model has for these tokens."""
    assert isinstance(loaded, tuple), loaded
    pools, state = loaded
    assert state.tobytes() == content("state", namespace, tokens, end)
    for pool, layout in own.pages.items():
        begin = 0 if pool == "kv" else max(end - WINDOW, 0)
        got = view(pools[pool], layout)[begin:end]
        assert np.array_equal(got, token_rows(pool, namespace, tokens, begin, end))
