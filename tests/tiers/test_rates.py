# SPDX-License-Identifier: Apache-2.0
"""How fast a folder is: what is timed, and that nothing stays."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers import rates
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.files import Buffers
from tests.tiers.support import IDENTITY, Unsynced, as_tokens, layouts

SIZE = 1 << 16


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(Unsynced):
    """Takes a second to write, two to sync and four to read."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.forgotten: list[int] = []

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        self.clock.now += 1
        return super().write(file, buffers, offset)

    def sync(self, file: int) -> None:
        self.clock.now += 2

    def forget(self, file: int) -> None:
        self.forgotten.append(file)

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        assert self.forgotten, "what the system keeps in memory would be read"
        self.clock.now += 4
        return super().read(file, buffers, offset)


def test_writes_until_the_disk_has_it_and_reads_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(rates, "time", clock)
    found = rates.measure(tmp_path, Slow(clock), SIZE)
    assert found == rates.DiskRates(SIZE / 3, SIZE / 4)
    assert not list(tmp_path.iterdir())


def test_the_real_thing(tmp_path: Path) -> None:
    found = rates.measure(tmp_path, size=SIZE)
    assert found.write_bytes_per_second > 0 and found.read_bytes_per_second > 0
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_nearly_full_is_measured_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one is that evictable bundles fill, which are looked at afterwards."""
    written: list[int] = []

    class NearlyFull(Unsynced):
        def write(self, file: int, buffers: Buffers, offset: int) -> int:
            count = sum(map(len, buffers))
            written.append(count)
            if count > SIZE // 4:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(file, buffers, offset)

    monkeypatch.setattr(rates, "LEAST", SIZE // 4)
    assert rates.measure(tmp_path, NearlyFull(), SIZE).read_bytes_per_second > 0
    assert written == [SIZE, SIZE // 2, SIZE // 4]
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(rates, "LEAST", SIZE // 2)
    with pytest.raises(ConfigError, match="MiB: No space left on device"):
        rates.measure(tmp_path, NearlyFull(), SIZE)


def test_a_full_disk_is_an_error_and_keeps_nothing(tmp_path: Path) -> None:
    class Full(Unsynced):
        def write(self, file: int, buffers: Buffers, offset: int) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="MiB: No space left on device"):
        rates.measure(tmp_path, Full(), SIZE)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_server_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "rate.unfinished").write_bytes(b"old")
    rates.measure(tmp_path, size=SIZE)


def test_the_tier_takes_the_rate_of_its_last_transfers() -> None:
    tier = DiskTier([], 1 << 20, IDENTITY, {IDENTITY.rank_name: layouts()}, 100.0)
    assert tier.read_bytes_per_second == 100
    begun = tier.begin_store(None, as_tokens(1, 2), 0, 64)
    assert begun is not None
    tier.stored(begun.key, 1.0)
    tier.fetched([begun.key], 500, None)
    assert tier.read_bytes_per_second == 100
    tier.fetched([begun.key], 500, 1.0)
    assert tier.read_bytes_per_second == 300
    for _ in range(16):
        tier.fetched([begun.key], 3000, 2.0)
    assert tier.read_bytes_per_second == 1500
