# SPDX-License-Identifier: Apache-2.0
"""Sessions beside bundles: written, found at the start, and kept by the book."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers.bundle import Bundle
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.keys import BundleName, namespace_digest
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.saved_session import MAX_FILE, SavedSession
from hybrid_plugin.tiers.session_book import SessionBook
from hybrid_plugin.tiers.shelf import RECORD, BundleShelf
from hybrid_plugin.tiers.stock import TierFolder
from tests.tiers.memory_files import MemoryFiles, PowerLossError
from tests.tiers.support import IDENTITY, Unsynced, as_tokens, bundle, layouts

OWN = layouts()
RANKS = tuple(replace(IDENTITY, tensor_ranks=2, tensor_rank=rank) for rank in (0, 1))
LAYOUTS = {rank.rank_name: OWN for rank in RANKS}
TOKENS = as_tokens(*range(100, 140))
OTHER = replace(RANKS[0], config="1" * 64)
"""Another model."""


class Server:
    """Two ranks and one who decides, from a start to an end."""

    def __init__(
        self, path: Path, budget: int = 1 << 20, identity: Identity = RANKS[0]
    ) -> None:
        self.folder = TierFolder(path, LAYOUTS, files=Unsynced())
        try:
            entries, sessions = self.folder.entries(), self.folder.sessions()
            self.tier = DiskTier(entries, budget, identity, LAYOUTS, 1e9)
            self.book = SessionBook(self.tier, sessions, len(LAYOUTS))
        except BaseException:
            self.folder.close()
            raise
        self.folder.discard(self.tier.trim())
        self.shelves = [
            BundleShelf(path, rank, OWN, files=Unsynced()) for rank in LAYOUTS
        ]

    def store(self, end: int, start: int = 0) -> bool:
        """Have both ranks write a bundle of the sequence."""
        made = bundle(OWN, None, TOKENS[:end], start)
        begun = self.tier.begin_store(None, made.tokens, start, made.size)
        if begun is None:
            return False
        for shelf in self.shelves:
            shelf.discard(begun.discard)
            written = shelf.write(
                Bundle(begun.key, made.tokens, start, made.pages, made.state)
            )
            assert isinstance(written, Manifest)
        self.tier.stored(begun.key, None)
        return True

    def session(self, end: int, name: str = "tea", created: int = 1) -> SavedSession:
        """A session of what is stored."""
        entries = self.tier.path(None, TOKENS[:end])
        assert entries, "it is not there"
        return SavedSession(
            name=name,
            fingerprint=self.tier.fingerprint,
            namespace=namespace_digest(None).hex(),
            tokens=TOKENS[:end],
            keys=tuple(entry.name.key for entry in entries),
            size=sum(entry.file_bytes for entry in entries),
            created=created,
            model="model",
            engine="engine",
        )

    def save(self, session: SavedSession) -> bool:
        """What a save does when its bundles are there."""
        discard = self.book.begin(session)
        if discard is None:
            return False
        for shelf in self.shelves:
            shelf.discard(discard)
            assert shelf.record(session.key, session.as_text()) is None
        self.book.enter(session)
        return True

    def ends(self) -> list[int]:
        return [one.end for one in self.tier.find(None, TOKENS, len(TOKENS))]

    def names(self) -> list[str]:
        return [session.name for session in self.book]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Server]]:
    """Starts servers on one folder, one after the other."""
    running: list[Server] = []

    def started(*args: object, **more: object) -> Server:
        while running:
            running.pop().folder.close()
        running.append(Server(tmp_path, *args, **more))  # type: ignore[arg-type]
        return running[-1]

    yield started  # type: ignore[misc]
    for server in running:
        server.folder.close()


def files(path: Path, suffix: str) -> list[Path]:
    return sorted(path.glob("*/*" + suffix))


def saved(server: Server, end: int = 20) -> SavedSession:
    """A session of two bundles."""
    assert server.store(10) and server.store(end, 10)
    session = server.session(end)
    assert server.save(session)
    return session


def test_a_session_is_kept_over_a_restart(tmp_path: Path, start: type[Server]) -> None:
    session = saved(start())
    mode = {stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path, RECORD)}
    assert mode == {0o600} and len(files(tmp_path, RECORD)) == 2
    server = start()
    assert list(server.book) == [session] and server.book.get("tea") == session
    assert server.book.on_disk(session) == 20 and server.ends() == [10, 20]
    assert server.tier.pinned_bytes == server.tier.used_bytes


def test_files_of_sessions_count(tmp_path: Path, start: type[Server]) -> None:
    for server in (start(), start()):
        if not len(server.book):
            saved(server)
        size = sum(path.stat().st_size for path in tmp_path.glob("rank-*/*.*n*"))
        assert server.tier.used_bytes == size


def test_what_a_session_keeps_is_not_evicted_after_a_restart(
    start: type[Server],
) -> None:
    server = start()
    session = saved(server)
    small = server.tier.used_bytes + 100
    server = start(small)
    assert server.ends() == [10, 20]
    assert not server.store(30, 20)
    assert server.book.on_disk(session) == 20


def test_sessions_that_do_not_fit_any_more_are_told_of(start: type[Server]) -> None:
    server = start()
    saved(server)
    used = server.tier.used_bytes
    with pytest.raises(
        ConfigError, match=r"saved sessions keep .* more than disk.size"
    ):
        start(used - 1)
    assert start(used).names() == ["tea"]


def test_a_file_of_a_session_that_does_not_fit_is_refused(start: type[Server]) -> None:
    server = start()
    assert server.store(10)
    server.tier._budget = server.tier.used_bytes + 10
    session = server.session(10)
    server.tier.pin(session.keys)
    assert not server.save(session) and not server.names()
    server.tier.unpin(session.keys)
    assert server.tier.pinned_bytes == 0


def test_a_name_that_is_used_again_stands_for_what_came_last(
    tmp_path: Path, start: type[Server]
) -> None:
    server = start()
    first = saved(server)
    assert server.store(30, 20)
    second = server.session(30, created=2)
    assert server.save(second)
    assert list(server.book) == [second] and len(files(tmp_path, RECORD)) == 2
    assert server.book.remove(first.key) != (), "it is the same name"
    assert server.tier.pinned_bytes == 0


def test_models_share_a_folder_and_no_names(start: type[Server]) -> None:
    first = saved(start())
    server = start(identity=OTHER)
    assert server.book.get("tea") is None and not server.book.is_own(first)
    assert server.ends() == []
    assert server.store(15)
    second = server.session(15, created=2)
    assert server.save(second)
    assert list(server.book) == [first, second]
    budget = server.tier.used_bytes
    server = start(budget)
    assert list(server.book) == [first, second]
    assert not server.store(30), "the other model's files are kept"
    assert server.book.get("tea") == first


def test_a_session_that_is_removed_leaves_what_others_need(
    tmp_path: Path, start: type[Server]
) -> None:
    server = start()
    session = saved(server)
    assert server.save(server.session(10, "ten"))
    gone = server.book.remove(session.key)
    assert [BundleName.from_text(key).key for key in gone] == [session.keys[1]]
    assert server.ends() == [10] and server.names() == ["ten"]
    assert server.book.remove(session.key) == ()
    for shelf in server.shelves:
        assert shelf.record(session.key, None) is None
        assert shelf.record(session.key, None) is None, "it is gone already"
        shelf.discard(gone)
    assert start().names() == ["ten"] and len(files(tmp_path, RECORD)) == 2


def test_a_session_whose_bundle_is_gone_says_so(
    tmp_path: Path, start: type[Server]
) -> None:
    session = saved(start())
    for path in tmp_path.glob(f"*/{session.keys[1]}*"):
        path.unlink()
    server = start()
    assert server.names() == ["tea"] and server.book.on_disk(session) == 10
    for path in tmp_path.glob(f"*/{session.keys[0]}*"):
        path.unlink()
    server = start()
    assert (
        server.book.on_disk(session)
        == 0
        == server.tier.pinned_bytes - (2 * len(session.as_text()))
    )


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other name", "one rank"])
def test_a_damaged_session_is_none(
    tmp_path: Path,
    start: type[Server],
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    session = saved(start())
    start().folder.close()
    path = files(tmp_path, RECORD)[1]
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[50] ^= 4
        path.write_bytes(content)
    elif damage == "cut":
        os.truncate(path, 100)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "other name":
        path.rename(path.with_name("a" * 64 + RECORD))
    else:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        server = start()
    assert not server.names() and not files(tmp_path, RECORD)
    assert ("no session in" in caplog.text) == (damage != "one rank")
    assert server.ends() == [10, 20], "its bundles are cached as others"
    assert server.tier.pinned_bytes == 0
    assert session.key


def test_ranks_that_have_different_sessions_of_a_name_have_none(
    tmp_path: Path, start: type[Server]
) -> None:
    server = start()
    session = saved(server)
    other = replace(session, created=9)
    assert server.shelves[1].record(session.key, other.as_text()) is None
    assert not start().names() and not files(tmp_path, RECORD)


def test_what_cannot_be_read_now_stays(tmp_path: Path) -> None:
    disk = MemoryFiles(1 << 20)
    rank, layout = IDENTITY.rank_name, {IDENTITY.rank_name: OWN}
    shelf = BundleShelf(tmp_path, rank, OWN, files=disk)
    session = replace_keys(IDENTITY)
    assert shelf.record(session.key, session.as_text()) is None
    folder = TierFolder(tmp_path, layout, files=disk)
    disk.faults.calls_until_failure, disk.faults.error = 0, errno.EIO
    assert folder.sessions() == [] and len(disk.paths()) == 1
    assert folder.sessions() == [session]
    folder.close()


def replace_keys(identity: Identity) -> SavedSession:
    """A session without bundles."""
    return SavedSession(
        "tea", identity.fingerprint(), "a" * 64, TOKENS, ("b" * 64,), 1, 1, "", ""
    )


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    folder = TierFolder(tmp_path, {IDENTITY.rank_name: OWN}, files=Unsynced())
    path = tmp_path / IDENTITY.rank_name / ("a" * 64 + RECORD)
    with path.open("wb") as file:
        file.truncate(MAX_FILE + 1)
    assert folder.sessions() == [] and not path.exists()
    folder.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = TierFolder(tmp_path / "own", {IDENTITY.rank_name: OWN}, files=Unsynced())
    session = replace_keys(IDENTITY)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(session.as_text())
    (tmp_path / "own" / IDENTITY.rank_name / (session.key + RECORD)).symlink_to(
        elsewhere
    )
    assert folder.sessions() == [] and elsewhere.exists()
    folder.close()


@pytest.mark.parametrize("calls", range(5))
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_file_system_that_fails_leaves_the_old_or_the_new(
    tmp_path: Path, calls: int, error: int
) -> None:
    disk = MemoryFiles(1 << 20)
    layout = {IDENTITY.rank_name: OWN}
    shelf = BundleShelf(tmp_path, IDENTITY.rank_name, OWN, files=disk)
    old, new = replace_keys(IDENTITY), replace(replace_keys(IDENTITY), created=2)
    assert shelf.record(old.key, old.as_text()) is None
    disk.faults.calls_until_failure, disk.faults.error = calls, error
    failed = shelf.record(new.key, new.as_text())
    assert isinstance(failed, Failure)
    full = error == errno.ENOSPC
    assert failed.reason == (Reason.DISK_FULL if full else Reason.IO)
    disk.faults.calls_until_failure = None
    folder = TierFolder(tmp_path, layout, files=disk)
    assert folder.sessions() in ([old], [new])
    assert len(disk.paths()) == 1, "nothing is left in part"
    folder.close()


@pytest.mark.parametrize("calls", range(5))
@pytest.mark.parametrize("seed", range(6))
def test_a_loss_of_power_leaves_the_old_or_the_new(
    tmp_path: Path, calls: int, seed: int
) -> None:
    disk = MemoryFiles(1 << 20, seed)
    shelf = BundleShelf(tmp_path, IDENTITY.rank_name, OWN, files=disk)
    old, new = replace_keys(IDENTITY), replace(replace_keys(IDENTITY), created=2)
    assert shelf.record(old.key, old.as_text()) is None
    disk.die_at = calls
    with pytest.raises(PowerLossError):
        shelf.record(new.key, new.as_text())
    disk.lose_power()
    folder = TierFolder(tmp_path, {IDENTITY.rank_name: OWN}, files=disk)
    assert folder.sessions() in ([old], [new])
    folder.close()
