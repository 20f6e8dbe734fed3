# SPDX-License-Identifier: Apache-2.0
"""What is pinned stays: no room is made of it, and a flush only hides it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.index import BundleIndex, Entry
from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.pins import Pins
from tests.tiers.support import IDENTITY
from tests.tiers.test_disk import FILES, RANKS, SIZE, TOKENS, begin, ends, store, tier


def keys(own: DiskTier, namespace: object = None) -> list[str]:
    """Of the files of what is found."""
    found = own.find(namespace, TOKENS, len(TOKENS))
    return [BundleName.from_text(one.key).key for one in found]


def pinned(bundles: int, own: DiskTier | None = None) -> tuple[DiskTier, list[str]]:
    """A tier that pins a path of two bundles, and the keys of their files."""
    own = own or tier(bundles)
    store(own, 10)
    store(own, 20, 10)
    found = keys(own)
    own.pin(found)
    return own, found


def test_nothing_makes_room_for_itself_by_what_is_pinned() -> None:
    own, _ = pinned(3)
    store(own, 10, namespace="b")
    begun = begin(own, 10, namespace="c")  # goes before what is older, and pinned
    assert begun is not None and len(begun.discard) == 1
    assert (ends(own), ends(own, "b")) == ([10, 20], [])
    assert own.used_bytes <= own.budget


def test_what_does_not_fit_beside_pins_is_refused() -> None:
    own, _ = pinned(2)
    assert begin(own, 10, namespace="b") is None
    assert begin(own, 30, 20) is None
    assert ends(own) == [10, 20]


def test_pinned_bytes_are_those_of_files_that_are_there() -> None:
    own, found = pinned(5)
    assert own.pinned_bytes == own.used_bytes
    own.pin([*found, "f" * 64])
    assert own.pinned_bytes == own.used_bytes, "once, and nothing for what is missing"
    own.unpin([*found, "f" * 64])
    assert own.pinned_bytes == own.used_bytes
    own.unpin(found)
    assert own.pinned_bytes == 0
    assert own.fetch_failed(store(own, 10, namespace="b"), Reason.CORRUPT)


def test_what_is_not_pinned_any_more_goes_as_any_other() -> None:
    own, found = pinned(2)
    own.unpin(found)
    begun = begin(own, 10, namespace="b")
    assert begun is not None and len(begun.discard) == 1
    assert ends(own) == [10]


def test_what_is_pinned_twice_stays_until_both_are_gone() -> None:
    own, found = pinned(2)
    own.pin(found[:1])
    own.unpin(found)
    begun = begin(own, 10, namespace="b")
    assert begun is not None and ends(own) == [10]
    assert begin(own, 10, namespace="c") is None


def test_what_comes_before_something_pinned_stays_too() -> None:
    own, found = pinned(2)
    own.unpin(found[:1])
    assert begin(own, 10, namespace="b") is None


def test_a_flush_hides_what_is_pinned_until_it_is_revealed() -> None:
    own, found = pinned(5)
    other = store(own, 10, namespace="b")
    size, version = own.pinned_bytes, own.version
    assert own.clear() == (other,)
    assert ends(own) == [] and own.version > version
    assert (own.pinned_bytes, own.count) == (size, 2)
    assert begin(own, 20) is None, "nothing takes its place"
    version = own.version
    own.reveal(found)
    assert ends(own) == [10, 20] and own.version > version
    own.reveal(found)
    assert ends(own) == [10, 20]


def test_what_a_flush_hid_is_nobodys_when_the_pins_are_gone() -> None:
    own, found = pinned(2)
    own.clear()
    own.unpin(found)
    own.reveal(found)
    assert ends(own) == []
    begun = begin(own, 20)
    assert begun is not None


def test_what_cannot_be_read_is_not_revealed() -> None:
    own, found = pinned(5)
    last = own.find(None, TOKENS, 50)[-1]
    assert own.fetch_failed(last.key, Reason.LAYOUT) == ()
    own.reveal(found)
    assert ends(own) == [10]
    assert begin(own, 20, 10) is None, "another engine can still read it"


def test_a_gap_in_what_is_pinned_is_closed_by_what_comes() -> None:
    own, _ = pinned(5)
    first = own.find(None, TOKENS, 50)[0]
    assert own.fetch_failed(first.key, Reason.CORRUPT) == (first.key,)
    assert ends(own) == []
    begun = begin(own, 20)
    assert begun is not None and len(begun.discard) == 1
    own.stored(begun.key, None)
    assert ends(own) == [20] and own.pinned_bytes == own.used_bytes


def test_room_can_be_reserved_for_what_else_lies_there() -> None:
    own, _ = pinned(3)
    other = store(own, 10, namespace="b")
    used = own.used_bytes
    assert own.reserve(own.budget - used) == ()
    assert own.reserve(FILES + 1) is None and own.used_bytes == own.budget
    assert own.reserve(FILES) == (other,)
    assert own.used_bytes == own.budget
    assert own.reserve(-FILES) == () and own.used_bytes == own.budget - FILES


def test_a_path_is_dropped_as_far_as_nothing_needs_it() -> None:
    own, found = pinned(9)
    own.unpin(found)
    branch = store(own, 15, 10, namespace=None)
    gone = own.drop(found)
    assert [BundleName.from_text(key).key for key in gone] == found[1:]
    assert ends(own) == [10, 15]
    own.pin(found[:1])
    branched = [*found[:1], BundleName.from_text(branch).key]
    assert len(own.drop(branched)) == 1, "what is pinned stays"
    own.unpin(found[:1])
    assert len(own.drop(found)) == 1 and own.used_bytes == 0


def test_nothing_is_dropped_that_is_being_continued() -> None:
    own, found = pinned(9)
    own.unpin(found)
    assert begin(own, 30, 20) is not None
    assert own.drop(found) == []


def test_the_path_of_a_sequence_ends_with_it() -> None:
    own, found = pinned(9)
    assert [entry.name.key for entry in own.path(None, TOKENS[:20])] == found
    assert own.path(None, TOKENS[:21]) == () == own.path("b", TOKENS[:20])


def test_less_room_than_before_is_made_of_what_is_not_pinned() -> None:
    own, found = pinned(9)
    other = store(own, 10, namespace="b")
    smaller = DiskTier(list(own._index.oldest()), 2 * FILES, IDENTITY, RANKS, 1e9)
    smaller.pin(found)
    assert smaller.trim() == (other,)
    assert ends(smaller) == [10, 20]
    assert SIZE < FILES


def test_what_could_not_be_read_now_stays_if_it_is_pinned() -> None:
    own, found = pinned(9)
    other = store(own, 10, namespace="b")
    text = own.find(None, TOKENS, 20)[1].key
    assert own.fetch_failed(text, Reason.IO) == ()
    assert (ends(own), own.get(found[1]) is not None) == ([10], True)
    assert begin(own, 20, 10) is None, "it would be lost"
    assert own.fetch_failed(other, Reason.IO) == (other,)
    own.pin([BundleName.from_text(store(own, 10, namespace="b")).key])
    assert own.fetch_failed(other, Reason.CORRUPT) == (other,)


KEYS = "abcdef"
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "pin", "unpin"]),
        st.sampled_from(KEYS),
        st.sampled_from(["", *KEYS]),
        st.integers(1, 9),
    ),
    max_size=30,
)


@given(changes=CHANGES)
def test_what_is_kept_is_what_is_pinned_and_what_comes_before(changes: list) -> None:  # type: ignore[type-arg]
    """Whatever comes and goes, in whatever order; a bundle may get another parent."""
    index = BundleIndex()
    pins = Pins(index)
    held: list[str] = []
    for what, key, parent, size in changes:
        if what == "add" and parent < key:
            name = BundleName("f" * 64, key, parent, "0" * 64)
            index.add(Entry(name, 0, 10, size, True))
        elif what == "remove":
            index.remove(key)
        elif what == "pin":
            pins.pin([key])
            held.append(key)
        elif what == "unpin" and key in held:
            pins.unpin([key])
            held.remove(key)
        expected = {}
        for one in held:
            entry = index.get(one)
            while entry is not None:
                expected[entry.name.key] = entry.file_bytes
                entry = index.get(entry.name.parent)
        assert all((one in pins.kept) >= (one in expected) for one in KEYS)
        assert {one for one in pins.kept if index.get(one)} == expected.keys()  # type: ignore[attr-defined]
        assert pins.kept_bytes == sum(expected.values())
        assert all(pins[one] == held.count(one) for one in KEYS)
