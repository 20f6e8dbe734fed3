# SPDX-License-Identifier: Apache-2.0
"""What is there at the start: of all ranks, in one order, and nothing else."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers.bundle import Bundle
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.index import Entry
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.shelf import SUFFIX, BundleShelf
from hybrid_plugin.tiers.stock import Stock, TierFolder
from tests.tiers.one_rank import Made
from tests.tiers.support import IDENTITY, Unsynced, as_tokens, bundle, layouts

OWN = layouts()
RANKS = tuple(replace(IDENTITY, tensor_ranks=2, tensor_rank=rank) for rank in (0, 1))
LAYOUTS = {rank.rank_name: OWN for rank in RANKS}
TOKENS = as_tokens(*range(100, 140))


class TwoRanks:
    """Two ranks' shelves, and one who decides for both."""

    def __init__(self, path: Path, budget: int, disk: Unsynced) -> None:
        self.folder = TierFolder(path, LAYOUTS, files=disk)
        self.entries = self.folder.entries()
        self.tier = DiskTier(self.entries, budget, RANKS[0], LAYOUTS, 1e9)
        self.folder.discard(self.tier.trim())
        self.shelves = [
            BundleShelf(path, rank, OWN, files=Unsynced()) for rank in LAYOUTS
        ]

    def store(self, made: Made, ranks: tuple[int, ...] = (0, 1)) -> str | None:
        """Have some ranks write a bundle; returns its key, if the tier takes it."""
        begun = self.tier.begin_store(
            made.namespace, made.tokens, made.start, made.size
        )
        if begun is None:
            return None
        for shelf in self.shelves:
            shelf.discard(begun.discard)
        for rank in ranks:
            written = self.shelves[rank].write(
                Bundle(begun.key, made.tokens, made.start, made.pages, made.state)
            )
            assert isinstance(written, Manifest)
        if len(ranks) == len(self.shelves):
            self.tier.stored(begun.key, 1.0)
        return begun.key

    def ends(self) -> list[int]:
        return [one.end for one in self.tier.find(None, TOKENS, len(TOKENS))]


@contextmanager
def opened(
    path: Path, budget: int = 1 << 20, disk: Unsynced | None = None
) -> Iterator[TwoRanks]:
    made = TwoRanks(path, budget, disk or Unsynced())
    try:
        yield made
    finally:
        made.folder.close()


def files(path: Path) -> list[tuple[str, str]]:
    return sorted((f.parent.name, f.stem[:4]) for f in path.glob("*/*" + SUFFIX))


def test_a_bundle_is_there_if_every_rank_has_its_part(tmp_path: Path) -> None:
    with opened(tmp_path) as ranks:
        ranks.store(bundle(OWN, None, TOKENS[:6]))
        ranks.store(bundle(OWN, None, TOKENS[:9], 6))
        assert ranks.ends() == [6, 9]
        ranks.store(bundle(OWN, None, TOKENS[:12], 9), ranks=(1,))
        ranks.store(bundle(OWN, "other", TOKENS[:9]), ranks=(0,))
        used = ranks.tier.used_bytes
        size = sum(f.stat().st_size for f in tmp_path.glob("*/*" + SUFFIX))
        assert size < used, "one of two parts is lacking twice"
        assert len(files(tmp_path)) == 6
    with opened(tmp_path) as ranks:
        assert ranks.ends() == [6, 9]
        assert len(files(tmp_path)) == 4
        size = sum(f.stat().st_size for f in tmp_path.glob("*/*" + SUFFIX))
        assert ranks.tier.used_bytes == size


def test_the_size_is_for_all_ranks_together(tmp_path: Path) -> None:
    with opened(tmp_path) as ranks:
        ranks.store(bundle(OWN, None, TOKENS[:6]))
        one = ranks.tier.used_bytes
        ranks.store(bundle(OWN, None, TOKENS[:9], 6))
    budget = one * 3 // 2
    with opened(tmp_path, budget) as ranks:
        assert ranks.ends() == [6]
        assert len(files(tmp_path)) == 2
        ranks.store(bundle(OWN, "other", TOKENS[:6]))
        assert sum(f.stat().st_size for f in tmp_path.glob("*/*" + SUFFIX)) <= budget


def test_parts_of_other_bundles_make_none(tmp_path: Path) -> None:
    with opened(tmp_path) as ranks:
        ranks.store(bundle(OWN, None, TOKENS[:6]))
        key = ranks.store(bundle(OWN, None, TOKENS[:9], 6))
        assert key is not None
        # The second rank's part begins elsewhere, behind another parent.
        made = bundle(OWN, None, TOKENS[:9])
        other = key.split(".")
        other[1] = ""
        ranks.shelves[1].write(
            Bundle(".".join(other), made.tokens, 0, made.pages, made.state)
        )
    with opened(tmp_path) as ranks:
        assert ranks.ends() == [6]
        assert len(files(tmp_path)) == 2


def test_ranks_that_decide_for_themselves_agree(tmp_path: Path) -> None:
    with opened(tmp_path) as ranks:
        for end, start in ((6, 0), (9, 6), (12, 9)):
            ranks.store(bundle(OWN, None, TOKENS[:end], start))
        ranks.store(bundle(OWN, "other", TOKENS[:6]))
    (tmp_path / RANKS[0].rank_name / files(tmp_path)[0][1]).touch()
    lost = next((tmp_path / RANKS[1].rank_name).glob("*" + SUFFIX))
    lost.unlink()
    own = [
        TierFolder(tmp_path, {rank.rank_name: OWN}, files=Unsynced()) for rank in RANKS
    ]
    stocks: list[Stock] = []
    for folder in own:

        def note(stock: Stock) -> list[Stock]:
            stocks.append(stock)
            return [stock]

        folder._remove_all_but = lambda keys: None  # type: ignore[method-assign]
        folder.entries(note)
        del folder._remove_all_but
    found = [folder.entries(lambda _: stocks) for folder in own]
    assert found[0] == found[1]
    assert len(found[0]) == 3
    assert len(files(tmp_path)) == 6
    assert all(isinstance(entry, Entry) and entry.is_usable for entry in found[0])
    for folder in own:
        folder.close()
    with opened(tmp_path) as ranks:
        assert ranks.entries == found[0]


class Busy(Unsynced):
    """Opens no bundle of a rank."""

    def __init__(self, rank: str) -> None:
        self.rank = rank

    def open(self, path: Path) -> int:
        if path.parent.name == self.rank:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().open(path)


@pytest.mark.parametrize("rank", LAYOUTS)
def test_what_cannot_be_read_now_is_found_later(tmp_path: Path, rank: str) -> None:
    with opened(tmp_path) as ranks:
        ranks.store(bundle(OWN, None, TOKENS[:6]))
        ranks.store(bundle(OWN, None, TOKENS[:9], 6))
        used = ranks.tier.used_bytes
    before = files(tmp_path)
    with opened(tmp_path, disk=Busy(rank)) as ranks:
        assert ranks.tier.count == 2 and ranks.ends() == []
        assert 0.8 * used < ranks.tier.used_bytes <= used, "it counts"
        assert ranks.tier.pinned_bytes == 0
    assert files(tmp_path) == before
    with opened(tmp_path) as ranks:
        assert ranks.ends() == [6, 9]


def test_what_cannot_be_read_makes_room_and_is_stored_anew(tmp_path: Path) -> None:
    with opened(tmp_path) as ranks:
        for name in "abc":
            ranks.store(bundle(OWN, name, TOKENS[:6]))
        room = ranks.tier.used_bytes + 100
    with opened(tmp_path, room, disk=Busy(RANKS[1].rank_name)) as ranks:
        pinned = ranks.tier._index.get(next(iter(ranks.tier._index._entries)))
        assert pinned is not None
        ranks.tier.pin([pinned.name.key])
        assert ranks.store(bundle(OWN, "d", TOKENS[:6])) is not None
        assert ranks.tier.used_bytes <= room
        assert ranks.tier.get(pinned.name.key) is pinned, "a session keeps it"
        stored = [
            name
            for name in "abc"
            if ranks.store(bundle(OWN, name, TOKENS[:6])) is not None
        ]
        assert len(stored) == 2, "but the pinned one, which would be lost"
        assert ranks.tier.used_bytes <= room


def test_the_last_used_on_any_rank_goes_last(tmp_path: Path) -> None:
    with opened(tmp_path) as ranks:
        keys = [ranks.store(bundle(OWN, str(n), TOKENS[:6])) for n in range(3)]
        one = ranks.tier.used_bytes // 3
        oldest = keys[0]
        assert oldest is not None
        ranks.shelves[1]._touch(ranks.shelves[1].place(oldest.split(".")[0]))
    with opened(tmp_path, one) as ranks:
        assert ranks.tier.find("0", TOKENS, 20)
        assert not ranks.tier.find("1", TOKENS, 20)
        assert not ranks.tier.find("2", TOKENS, 20)


def test_one_that_cannot_be_opened_lets_the_others_go(tmp_path: Path) -> None:
    second = TierFolder(tmp_path, {RANKS[1].rank_name: OWN})
    with pytest.raises(ConfigError, match="in use by another process"):
        TierFolder(tmp_path, LAYOUTS)
    TierFolder(tmp_path, {RANKS[0].rank_name: OWN}).close()
    second.close()
    TierFolder(tmp_path, LAYOUTS).close()


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    class Broken(Unsynced):
        def names(self, folder: Path) -> list[str]:
            raise OSError(5, "Input/output error")

    with pytest.raises(ConfigError, match="cannot hold bundles: Input/output error"):
        TierFolder(tmp_path, LAYOUTS, files=Broken())
    TierFolder(tmp_path, LAYOUTS).close()
