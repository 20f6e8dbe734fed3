# SPDX-License-Identifier: Apache-2.0
"""What the disk's books say, without a disk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_plugin.core.tiers.outer_tier import OuterTier, Storing
from hybrid_plugin.tiers.describe import describe, file_bytes, frame_bytes
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.keys import BundleName
from tests.tiers.support import IDENTITY, WINDOW, as_tokens, layouts

OWN = layouts(windows=True)
RANKS = {"rank-0-of-2": OWN, "rank-1-of-2": OWN}
SIZE = 500
FILES = 2 * (4096 + SIZE + 8 * 10)
"""Bytes of a bundle of ten tokens on both ranks."""
TOKENS = as_tokens(*range(100))


def tier(bundles: int = 10) -> DiskTier:
    return DiskTier([], bundles * FILES, IDENTITY, RANKS, 1e9)


def begin(
    own: OuterTier, end: int, start: int = 0, namespace: object = None
) -> Storing | None:
    return own.begin_store(namespace, TOKENS[:end], start, SIZE)


def store(own: OuterTier, end: int, start: int = 0, namespace: object = None) -> str:
    begun = begin(own, end, start, namespace)
    assert begun is not None
    own.stored(begun.key, None)
    return begun.key


def ends(own: OuterTier, namespace: object = None) -> list[int]:
    return [one.end for one in own.find(namespace, TOKENS, len(TOKENS))]


def test_it_is_what_the_core_asks_for() -> None:
    own: OuterTier = tier()
    assert (own.name, own.keeps_bundles, own.used_bytes) == ("disk", True, 0)


def test_what_is_being_stored_counts_and_is_not_found() -> None:
    own = tier()
    begun = begin(own, 10)
    assert begun is not None
    assert (ends(own), own.used_bytes, own.count) == ([], FILES, 1)
    assert begin(own, 10) is None, "twice"
    assert begin(own, 20, 10) is None, "behind what is not there yet"
    own.stored(begun.key, 0.5)
    assert ends(own) == [10]
    assert begin(own, 10) is None, "it is there"


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 17))
def test_a_file_is_never_larger_than_was_counted(start: int, tokens: int) -> None:
    end, digest = start + tokens, "a" * 64
    name = BundleName(digest, digest if start else "", digest, digest)
    pages = {"kv": start, "window0": max(end - WINDOW, 0)}
    manifest = describe(name, start, end, pages, "rank-0-of-2", OWN)
    rows = manifest.data_bytes - 8 * tokens
    counted = frame_bytes(name, start, end, "rank-0-of-2", OWN)
    assert file_bytes(manifest) <= counted + rows <= file_bytes(manifest) + 4096


@pytest.mark.parametrize("namespace", [3, ("a", 3), frozenset("a")])
def test_what_has_no_name_is_neither_stored_nor_found(namespace: object) -> None:
    own = tier()
    assert begin(own, 10, namespace=namespace) is None
    assert ends(own, namespace) == [] and own.used_bytes == 0


def test_room_is_made_by_what_was_not_used_for_the_longest_time() -> None:
    own = tier(3)
    keys = [store(own, 10, namespace=name) for name in "abc"]
    own.find("a", TOKENS, 50)  # asking is no use
    own.fetched([keys[1]], SIZE, None)
    begun = begin(own, 10, namespace="d")
    assert begun is not None and begun.discard == (keys[0],)
    begun = begin(own, 10, namespace="e")
    assert begun is not None and begun.discard == (keys[2],)
    assert [ends(own, name) for name in "abcde"] == [[], [10], [], [], []]
    assert own.used_bytes == 3 * FILES


def test_what_is_being_stored_and_what_comes_before_it_stay() -> None:
    own = tier(3)
    store(own, 10)
    assert begin(own, 20, 10) is not None
    begun = begin(own, 10, namespace="b")
    assert begun is not None and begun.discard == ()
    assert begin(own, 10, namespace="c") is None, "there is nothing that may go"
    assert ends(own) == [10]


def test_what_cannot_be_read_is_gone_unless_it_is_in_order() -> None:
    own = tier()
    key, other = store(own, 10), store(own, 10, namespace="b")
    version = own.version
    assert own.fetch_failed(key, Reason.CORRUPT) == (key,)
    assert (ends(own), own.count) == ([], 1) and own.version > version
    assert own.fetch_failed(key, Reason.CORRUPT) == (), "it is gone already"
    assert own.fetch_failed(other, Reason.LAYOUT) == ()
    assert (ends(own, "b"), own.count) == ([], 1)
    begun = begin(own, 10)
    assert begun is not None
    assert own.fetch_failed(key, Reason.MISSING) == (), "that was the one before"
    own.stored(begun.key, None)
    assert ends(own) == [10]


def test_what_was_not_written_leaves_nothing() -> None:
    own = tier()
    begun = begin(own, 10)
    assert begun is not None
    assert own.store_failed(begun.key, "the disk is full") == (begun.key,)
    assert (ends(own), own.used_bytes) == ([], 0)
    assert begin(own, 10) is not None


def test_a_flush_spares_what_is_being_written_until_it_is_over() -> None:
    own = tier()
    key = store(own, 10)
    begun = begin(own, 20, 10)
    assert begun is not None
    assert own.clear() == (key,)
    assert (ends(own), own.used_bytes) == ([], 2 * (4096 + SIZE + 80))
    assert own.store_failed(begun.key, "flushed") == (begun.key,)
    assert own.used_bytes == 0


def test_other_weights_find_nothing_and_share_the_room() -> None:
    own = tier(2)
    key = store(own, 10)
    version = own.version
    own.renew("1")
    assert ends(own) == [] and own.version > version
    assert own.clear() == (), "no restart of the other weights should miss them"
    store(own, 10)
    assert ends(own) == [10]
    begun = begin(own, 20, 10)
    assert begun is not None and begun.discard == (key,)


def test_less_room_than_before_is_made_at_the_start() -> None:
    own = tier()
    store(own, 10)
    last = store(own, 20, 10)
    smaller = DiskTier(list(own._index.oldest()), FILES, IDENTITY, RANKS, 1e9)
    assert smaller.trim() == (last,)
    assert ends(smaller) == [10]
