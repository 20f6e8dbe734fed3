# SPDX-License-Identifier: Apache-2.0
"""Whatever the disk does, nothing but the right bytes comes back."""

from __future__ import annotations

import errno
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from hybrid_plugin.tiers import bundle_file, disk, index, keys, loading, shelf, stock
from hybrid_plugin.tiers.files import Files
from tests.core.profiles import SOAK_FACTOR, machine_settings
from tests.tiers.failing_tier import BUDGET, FailingTier, random_traffic
from tests.tiers.memory_files import MemoryFiles

DIGITS = st.builds(
    lambda length, fork, digit: [
        i % 7 + (digit if i >= fork else 0) for i in range(length)
    ],
    st.sampled_from([5, 9, 12, 20, 255, 256, 257, 300]),
    st.sampled_from([1, 4, 8, 11, 254, 256]),
    st.integers(0, 1),
)
LAYOUT, NAMESPACE = st.integers(0, 1), st.integers(0, 2)


class FailingDisk(RuleBasedStateMachine):
    """All that `FailingTier` can do, in any order."""

    @initialize()
    def start(self) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.tier = FailingTier(Path(self.place.name))

    @rule(namespace=NAMESPACE, digits=DIGITS, start=st.sampled_from([0, 5, 9, 12, 255]))
    def store(self, namespace: int, digits: list[int], start: int) -> None:
        self.tier.store(namespace, digits, start)

    @rule(namespace=NAMESPACE, digits=DIGITS)
    def load(self, namespace: int, digits: list[int]) -> None:
        self.tier.load(namespace, digits)

    @rule(choice=st.integers(0, 20), bit=st.integers(0, 1 << 18))
    def flip(self, choice: int, bit: int) -> None:
        self.tier.flip(choice, bit)

    @rule(choice=st.integers(0, 20), length=st.integers(0, 1 << 13))
    def tear(self, choice: int, length: int) -> None:
        self.tier.tear(choice, length)

    @rule(one=st.integers(0, 20), other=st.integers(0, 20))
    def exchange(self, one: int, other: int) -> None:
        self.tier.exchange(one, other)

    @rule(
        calls=st.integers(0, 12),
        error=st.sampled_from([errno.EIO, errno.ENOSPC, errno.EACCES]),
    )
    def fail(self, calls: int, error: int) -> None:
        self.tier.fail(calls, error)

    @rule(calls=st.integers(0, 12))
    def die(self, calls: int) -> None:
        self.tier.die(calls)

    @rule(layout=LAYOUT)
    def lose_power(self, layout: int) -> None:
        self.tier.lose_power(layout)

    @rule(layout=LAYOUT)
    def reopen(self, layout: int) -> None:
        self.tier.reopen(layout)

    @rule(room=st.sampled_from([0, 3000, 20_000, 2 * BUDGET]))
    def fill(self, room: int) -> None:
        self.tier.fill(room)

    @rule(short=st.booleans())
    def do_parts(self, short: bool) -> None:
        self.tier.files.faults.short = short

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "tier"):
            self.tier.check()

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            self.place.cleanup()


def test_whatever_the_disk_does() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        FailingDisk, settings=settings(machine_settings(60), stateful_step_count=30)
    )


def run_traffic(path: Path, seeds: range, steps: int = 120) -> tuple[int, int]:
    """Random traffic from each seed; what was loaded and what was missed."""
    loaded = missed = 0
    for seed in seeds:
        tier = FailingTier(path / str(seed), seed)
        try:
            random_traffic(tier, random.Random(seed), steps, harm=seed % 3 > 0)
        finally:
            tier.close()
        loaded, missed = loaded + tier.loaded, missed + tier.missed
    return loaded, missed


def test_random_traffic(tmp_path: Path) -> None:
    loaded, missed = run_traffic(tmp_path, range(10 * SOAK_FACTOR))
    assert loaded > 50 and missed > 20  # both happen


# ------------------------------------------------------- deliberate breakages


def _no_checksum(patch: pytest.MonkeyPatch) -> None:
    real = bundle_file.BundleReader.read

    def read(self: Any, name: str, rows: Any) -> Any:
        failure = real(self, name, rows)
        return None if failure and failure.reason.name == "CORRUPT" else failure

    patch.setattr(bundle_file.BundleReader, "read", read)


def _no_sync(patch: pytest.MonkeyPatch) -> None:
    """Contents that were not synced are found by their checksums: with these gone too,
    nothing is left that finds them."""
    _no_checksum(patch)
    patch.setattr(MemoryFiles, "sync", lambda self, file: None)


def _torn_is_whole(patch: pytest.MonkeyPatch) -> None:
    real = bundle_file.read_all

    def read_all(files: Files, file: int, buffers: Any, offset: int) -> bool:
        real(files, file, buffers, offset)
        return True

    patch.setattr(bundle_file, "read_all", read_all)
    _no_checksum(patch)


def _parts_are_all(patch: pytest.MonkeyPatch) -> None:
    def write_all(files: Files, file: int, buffers: Any, offset: int) -> int:
        for buffer in buffers:
            offset += files.write(file, [buffer], offset)
        return offset

    patch.setattr(bundle_file, "write_all", write_all)


def _any_file_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shelf, "check", lambda reader, bundle, rank: None)


def _no_namespace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keys, "namespace_digest", lambda namespace: b"")


def _no_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk.DiskTier, "_make_room", lambda self, *sizes: ())


def _without_what_comes_before(patch: pytest.MonkeyPatch) -> None:
    def path_to(self: index.BundleIndex, key: str) -> Any:
        entry = self.get(key)
        return None if entry is None or not entry.is_usable else (entry,)

    patch.setattr(index.BundleIndex, "path_to", path_to)


def _other_layouts_as_they_are(patch: pytest.MonkeyPatch) -> None:
    real = loading._load_pages

    def load_pages(reader: Any, run: Any, move: Any, pages: Any) -> Any:
        if not move.is_copy:
            pages.rows[0][:] = np.zeros_like(pages.rows[0])
            return None
        return real(reader, run, move, pages)

    patch.setattr(loading, "_load_pages", load_pages)


def _damaged_files_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk.DiskTier, "fetch_failed", lambda self, key, reason: ())


def _unfinished_files_stay(patch: pytest.MonkeyPatch) -> None:
    for owner in (shelf.BundleShelf, stock.TierFolder):
        real = owner._remove

        def remove(self: Any, path: Path, real: Any = real) -> None:
            if path.suffix != shelf.UNFINISHED:
                real(self, path)

        patch.setattr(owner, "_remove", remove)


def _evicts_only_in_its_books(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shelf.BundleShelf, "discard", lambda self, keys: None)


BREAKAGES = [
    _no_checksum,
    _no_sync,
    _torn_is_whole,
    _parts_are_all,
    _any_file_name,
    _no_namespace,
    _no_budget,
    _without_what_comes_before,
    _other_layouts_as_they_are,
    _damaged_files_stay,
    _unfinished_files_stay,
    _evicts_only_in_its_books,
]


@pytest.fixture
def breakage(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    request.param(monkeypatch)
    yield


@pytest.mark.usefixtures("breakage")
@pytest.mark.parametrize("breakage", BREAKAGES, indirect=True, ids=lambda b: b.__name__)
def test_catches(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError, FileExistsError)):
        run_traffic(tmp_path, range(40))
