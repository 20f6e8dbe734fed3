# SPDX-License-Identifier: Apache-2.0
"""A store that servers share: what one writes another reads, or computes."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.shelf import SUFFIX
from hybrid_plugin.tiers.store.directory import MOST, ROOT
from hybrid_plugin.tiers.store.files import StoreFiles
from tests.core.profiles import SOAK_FACTOR
from tests.tiers.failing_store import FailingStore, Member
from tests.tiers.support import (
    IDENTITY,
    as_tokens,
    bundle,
    check_loaded,
    layouts,
    load_path,
    store_path,
)

OWN = layouts()
TOKENS = as_tokens(*range(600))
EPISODES = 30 * SOAK_FACTOR


@pytest.fixture
def store() -> FailingStore:
    return FailingStore()


def member(store: FailingStore, **more: object) -> Member:
    return Member(store, IDENTITY, OWN, **more)  # type: ignore[arg-type]


def wrote(store: FailingStore, *ends: int, namespace: str | None = None) -> Member:
    """A server that has stored a sequence."""
    one = member(store)
    for stored in store_path(one, OWN, namespace, TOKENS, *ends):
        assert isinstance(stored, Manifest)
    one.settle()
    return one


def load(
    one: Member, tokens: Tokens = TOKENS, namespace: str | None = None
) -> int | Failure:
    """Tokens that a server gets, all of them right; or why it gets none."""
    one.look(namespace, tokens)
    found = one.find(namespace, tokens)
    if found is None:
        return 0
    loaded = load_path(one, OWN, tokens, found)
    if isinstance(loaded, Failure):
        return loaded
    check_loaded(loaded, OWN, namespace, tokens, found.end)
    return found.end


def heads(store: FailingStore) -> list[str]:
    return [name for name in store.objects if name.endswith(SUFFIX)]


# --------------------------------------------------------------------- in order


def test_another_server_reads_what_one_wrote(store: FailingStore) -> None:
    wrote(store, 10, 260, 261, 530)
    other = member(store)
    assert load(other) == 530
    assert load(other, TOKENS[:531]) == 530
    assert load(other, TOKENS[:530]) == 261, "one token is computed"
    assert load(other, TOKENS[:200]) == 10
    assert load(other, as_tokens(*range(1, 600))) == 0
    assert load(other, namespace="salt") == 0


def test_a_server_that_goes_on_writes_what_is_new(store: FailingStore) -> None:
    wrote(store, 10, 260)
    other = member(store)
    assert load(other) == 260
    before = len(heads(store))
    assert isinstance(other.store(bundle(OWN, None, TOKENS[:300], 260)), Manifest)
    assert other.store(bundle(OWN, None, TOKENS[:260], 10)) is None, "it is there"
    other.settle()
    assert len(heads(store)) == before + 1
    assert load(member(store)) == 300


def test_what_nobody_looked_up_is_not_found(store: FailingStore) -> None:
    wrote(store, 10)
    assert member(store).find(None, TOKENS) is None


def test_other_weights_and_layouts_are_not_read(store: FailingStore) -> None:
    wrote(store, 10)
    other = Member(store, replace(IDENTITY, weights="other"), OWN)
    assert load(other) == 0
    renewed = member(store)
    renewed.known.renew("1")
    assert load(renewed) == 0
    wider = Member(store, IDENTITY, layouts(page=8))
    wider.look(None, TOKENS)
    found = wider.find(None, TOKENS)
    assert found is not None and found.end == 10
    loaded = load_path(wider, wider.layouts, TOKENS, found)
    check_loaded(loaded, wider.layouts, None, TOKENS, 10)


def test_a_flush_removes_what_the_server_knows_of(store: FailingStore) -> None:
    one = wrote(store, 10, 260)
    wrote(store, 30)
    one.clear()
    one.settle()
    assert one.find(None, TOKENS) is None
    assert len(heads(store)) == 1
    assert load(one) == 30
    assert one.known.used_bytes > 0
    one.clear()
    one.settle()
    pieces = [name for name in store.objects if "piece" in name]
    assert not heads(store) and not pieces and load(member(store)) == 0


def test_no_more_is_remembered_than_allowed(store: FailingStore) -> None:
    one = member(store, most=2)
    other = as_tokens(*range(7, 50))
    assert all(store_path(one, OWN, None, TOKENS, 10, 20))
    assert isinstance(one.store(bundle(OWN, None, other)), Manifest)
    one.settle()
    assert len(one.known._index) == 2 and len(heads(store)) == 3
    found = one.find(None, TOKENS)
    assert found is not None and found.end == 10, "ends go before beginnings"
    assert load(one) == 20, "the store has it still"


def test_a_directory_lists_the_latest(store: FailingStore) -> None:
    one = member(store)
    for last in range(MOST + 3):
        tokens = as_tokens(*range(20), 1000 + last)
        assert isinstance(one.store(bundle(OWN, None, tokens)), Manifest)
    one.settle()
    assert load(member(store), as_tokens(*range(20), 1000, 5)) == 0
    assert load(member(store), as_tokens(*range(20), 1000 + MOST, 5)) == 21


# ----------------------------------------------------------------------- faults


def test_what_the_store_forgot_is_listed_no_more(store: FailingStore) -> None:
    wrote(store, 10, 260)
    (last,) = [name for name in heads(store) if _end(store, name) == max(_ends(store))]
    del store.objects[last]
    assert load(member(store)) == 10, "it is known before anything is fetched"
    other = member(store)
    for name in [name for name in store.objects if "piece" in name]:
        del store.objects[name]
    failure = load(other)
    assert isinstance(failure, Failure) and failure.reason == Reason.MISSING
    other.settle()
    assert load(other) == load(member(store)) == 0


def _end(store: FailingStore, head: str) -> int:
    return int(json.loads(store.objects[head])["bytes"])


def _ends(store: FailingStore) -> list[int]:
    return [_end(store, name) for name in heads(store)]


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_a_flipped_bit_is_computed_and_written_anew(
    store: FailingStore, place: int
) -> None:
    wrote(store, 300)
    pieces = sorted(
        (name for name in store.objects if "piece" in name),
        key=lambda name: int(name.rpartition("/")[2]),
    )
    index = place // 1000 if place >= 0 else len(pieces) - 1
    content = bytearray(store.objects[pieces[index]])
    content[place % 1000 if place >= 0 else -1] ^= 1
    store.objects[pieces[index]] = bytes(content)
    other = member(store)
    assert isinstance(load(other), Failure)
    other.settle()
    assert not heads(store), "nobody else waits for it"
    assert isinstance(other.store(bundle(OWN, None, TOKENS[:300])), Manifest)
    other.settle()
    assert load(member(store)) == 300


def test_a_store_that_is_silent_costs_nothing_but_hits(store: FailingStore) -> None:
    one = wrote(store, 10)
    store.is_silent = True
    assert isinstance(load(one), Failure), "it knew of it"
    assert load(member(store)) == 0
    result = one.store(bundle(OWN, None, TOKENS[:20], 0))
    assert isinstance(result, Failure) and result.reason == Reason.IO
    one.settle()
    store.is_silent = False
    assert load(one) == 10, "the bundle is in order, and is found again"
    assert isinstance(one.store(bundle(OWN, None, TOKENS[:20], 10)), Manifest)


def test_a_store_that_is_full_takes_nothing(store: FailingStore) -> None:
    store.is_full = True
    one = member(store)
    result = one.store(bundle(OWN, None, TOKENS[:20], 0))
    assert isinstance(result, Failure) and result.reason == Reason.DISK_FULL
    assert not store.objects and one.known.used_bytes == 0
    store.is_full = False
    assert isinstance(one.store(bundle(OWN, None, TOKENS[:20], 0)), Manifest)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"format": "hybrid-directory/2", "bundles": []}',
        b'{"format": "hybrid-directory/1", "bundles": 5}',
        b'{"format": "hybrid-directory/1", "bundles": [[]]}',
        b'{"format": "hybrid-directory/1", "bundles": [["a", "", 0, 10, 5]]}',
        b'{"format": "hybrid-directory/1", "bundles": [["%s", "", -1, 10, 5]]}'
        % (b"0" * 64),
    ],
)
def test_a_directory_that_makes_no_sense_is_empty(
    store: FailingStore, content: bytes
) -> None:
    wrote(store, 10)
    (name,) = [
        name
        for name in store.objects
        if name.startswith(f"{ROOT}/{IDENTITY.fingerprint()}")
    ]
    store.objects[name] = content
    assert load(member(store)) == 0


def test_two_writers_of_one_bundle_do_not_mix(store: FailingStore) -> None:
    """Their bits may differ; each file is of one of them."""
    one, other = member(store), member(store)
    assert isinstance(one.store(bundle(OWN, None, TOKENS[:300])), Manifest)
    assert isinstance(other.store(bundle(OWN, None, TOKENS[:300])), Manifest)
    marks = Counter(name.split("/")[1] for name in store.objects if "piece" in name)
    assert len(marks) == 2
    other.settle()
    assert load(member(store)) == 300


# ------------------------------------------------------------------ any of them


def random_tokens(rng: random.Random, length: int) -> Tokens:
    """A sequence that shares its beginning with others."""
    fork, digit = rng.choice((4, 11, 256)), rng.randint(0, 1)
    return as_tokens(*(i % 7 + (digit if i >= fork else 0) for i in range(length)))


def run(seed: int, totals: Counter[str]) -> None:
    rng = random.Random(seed)
    store = FailingStore(seed, faults=rng.choice((0.0, 0.02, 0.2)))
    members = [member(store, most=rng.choice((3, 100))) for _ in range(3)]
    for _ in range(120):
        one, what = rng.choice(members), rng.random()
        namespace = rng.choice((None, "salt"))
        if what < 0.35:
            tokens = random_tokens(rng, rng.choice((5, 9, 12, 255, 257, 300)))
            one.look(namespace, tokens)
            found = one.find(namespace, tokens)
            start = 0 if found is None else found.end
            stored = one.store(bundle(OWN, namespace, tokens, start))
            totals["stored"] += isinstance(stored, Manifest)
        elif what < 0.8:
            loaded = load(one, random_tokens(rng, 301), namespace)
            totals["failed"] += isinstance(loaded, Failure)
            totals["loaded"] += isinstance(loaded, int) and loaded > 0
        elif what < 0.83:
            one.clear()
        elif what < 0.93:
            store.harm()
            totals["harmed"] += 1
        else:
            store.is_silent = rng.random() < 0.3
        if rng.random() < 0.8:
            one.settle()
        assert not one.known._pending
    store.is_silent, store.faults = False, 0.0
    for one in members:
        one.clear()
        one.settle()
        assert one.known.used_bytes == 0


def test_nothing_wrong_is_ever_read() -> None:
    totals: Counter[str] = Counter()
    for seed in range(EPISODES):
        run(seed, totals)
    assert all(totals[name] for name in ("stored", "failed", "loaded", "harmed"))


@pytest.mark.parametrize(
    "head",
    [
        {"mark": "x", "bytes": 1 << 40, "piece": 1},
        {"mark": "x", "bytes": (1 << 20) + 1, "piece": 1},
        {"mark": "x", "bytes": 1 << 41, "piece": 1 << 30},
        {"mark": "x", "bytes": -1, "piece": 8},
        {"mark": "x", "bytes": 8, "piece": 0},
        {"mark": 5, "bytes": 8, "piece": 8},
        [],
    ],
    ids=str,
)
def test_heads_that_make_no_sense_are_removed_alone(
    store: FailingStore, head: object
) -> None:
    """Any member of the store may have written one that names 2^40 pieces."""
    files, path = StoreFiles(store, 64), Path("hybrid-bundle/head")
    store.objects[str(path)] = json.dumps(head).encode()
    with pytest.raises(OSError, match="makes no sense"):
        files.open(path)
    files.remove(path)
    assert not store.objects


def test_all_pieces_of_a_long_file_are_removed(store: FailingStore) -> None:
    files, path = StoreFiles(store, 1), Path("hybrid-bundle/head")
    file = files.create(Path("unfinished"))
    files.write(file, [memoryview(bytes(2500))], 0)
    files.rename(Path("unfinished"), path)
    assert len(store.objects) == 2501
    files.remove(path)
    assert not store.objects
