# SPDX-License-Identifier: Apache-2.0
"""What the core orders of a disk: real files that fail, and rows that copies fill."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.tiers import agreement, bundle_file, keys, transfers
from hybrid_plugin.tiers.agreement import Outcome
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.stock import TierFolder
from tests.core.profiles import SOAK_FACTOR
from tests.core.test_outer_traffic import KINDS, traffic_of
from tests.device.disk_mirror import DiskMirror, disk_cache
from tests.device.later import LaterQueues
from tests.tiers.memory_files import MemoryFiles

SEEDS = range(4 * SOAK_FACTOR)
OPERATIONS = 250
BUDGETS = (30_000, 100_000, 1 << 20)
"""Of a few files, of some, and of all."""


def mirrored(path: Path, kind: str, seed: int) -> DiskMirror:
    """Real rows and files that followed random traffic to its end."""
    rng = random.Random(f"disk/{seed}")
    files = MemoryFiles(1 << 21, seed)
    opened: list[TierFolder] = []
    make: Any = disk_cache(path, files, rng.choice(BUDGETS), opened)
    traffic = traffic_of(kind, seed, (1, 4, 16)[seed % 3], make)
    mirror = DiskMirror(traffic, rng, files, path, trouble=(0.0, 0.2)[seed % 2])
    try:
        for _ in range(OPERATIONS):
            traffic.operate()
        mirror.finish()
    finally:
        opened[0].close()
    return mirror


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_from_the_disk_is_what_the_core_takes_it_to_be(
    tmp_path: Path, kind: str
) -> None:
    mirrors = [mirrored(tmp_path / str(seed), kind, seed) for seed in SEEDS]
    assert [mirror.wrong for mirror in mirrors] == [[] for _ in SEEDS]
    assert sum(mirror.ranks.fetched for mirror in mirrors) > 3
    assert sum(mirror.ranks.failed for mirror in mirrors) > 3


# ------------------------------------------------------- deliberate breakages


def _copies_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LaterQueues, "copies_over", lambda self: lambda: None)


def _checksums_do_not_count(patch: pytest.MonkeyPatch) -> None:
    real = bundle_file.BundleReader.read

    def read(self: Any, name: str, rows: Any) -> Any:
        failure = real(self, name, rows)
        is_flip = failure is not None and failure.reason is Reason.CORRUPT
        return None if is_flip else failure

    patch.setattr(bundle_file.BundleReader, "read", read)


def _namespaces_are_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keys, "namespace_digest", lambda namespace: b"")


def _failures_are_not_told(patch: pytest.MonkeyPatch) -> None:
    real: Any = agreement.agree

    def agree(own: Any, all_reduce: Any) -> list[Outcome]:
        done = real(own, all_reduce)
        return [Outcome(one.ticket, None, one.bytes, one.seconds) for one in done]

    patch.setattr(transfers, "agree", agree)


def _ranks_are_done_at_once(patch: pytest.MonkeyPatch) -> None:
    real = transfers.RankTransfers.settle

    def settle(self: Any, all_reduce: Any) -> Any:
        early = [Outcome(ticket, None, 0, 0.0) for ticket in self._out]
        real(self, all_reduce)
        self._out.clear()
        return early

    patch.setattr(transfers.RankTransfers, "settle", settle)


Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def breakage(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    request.param(monkeypatch)
    yield


@pytest.mark.usefixtures("breakage")
@pytest.mark.parametrize(
    "breakage",
    [
        _copies_are_not_waited_for,
        _checksums_do_not_count,
        _namespaces_are_one,
        _failures_are_not_told,
        _ranks_are_done_at_once,
    ],
    indirect=True,
    ids=lambda each: each.__name__,
)
def test_catches(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, ValueError, KeyError)):
        for seed, kind in itertools.product(range(24), ("fixed", "elastic")):
            assert mirrored(tmp_path / f"{kind} {seed}", kind, seed).wrong == []
