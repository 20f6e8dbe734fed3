# SPDX-License-Identifier: Apache-2.0
"""A folder on a file system that fails, and what must hold whatever happens to it."""

from __future__ import annotations

import errno
import random
from pathlib import Path

from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.shelf import SUFFIX
from tests.tiers.memory_files import MemoryFiles, PowerLossError
from tests.tiers.one_rank import OneRank
from tests.tiers.support import (
    IDENTITY,
    as_tokens,
    bundle,
    check_loaded,
    layouts,
    load_path,
)

BUDGET = 40_000
"""About nine bundles."""
LAYOUTS = (layouts(4), layouts(3, heads_first=True))
NAMESPACES = (None, "a", ("adapter", "a"))
REASONS_TO_MISS = {
    Reason.MISSING,
    Reason.IO,
    Reason.TORN,
    Reason.MALFORMED,
    Reason.VERSION,
    Reason.CORRUPT,
    Reason.REPLACED,
}


class FailingTier:
    """Stores and loads sequences of few different tokens, so that many are alike."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.files = MemoryFiles(capacity=2 * BUDGET, seed=seed)
        self._path = path
        self.own: Layouts = LAYOUTS[0]
        self.harmed = False
        """Whether anything went wrong since all of it was checked."""
        self.resized = False
        """Whether files have not the sizes any more that they had at the start."""
        self.loaded = self.missed = self.stored = 0
        self.folder = self._opened()

    def _opened(self) -> OneRank:
        return OneRank(self._path, BUDGET, IDENTITY, self.own, files=self.files)

    def reopen(self, layout: int) -> None:
        """Restart in good order, with other pages perhaps."""
        self._restart(layout)

    def _restart(self, layout: int) -> None:
        self.folder.close()
        self.files.faults.calls_until_failure = self.files.die_at = None
        self.resized = False
        self.own = LAYOUTS[layout]
        self.folder = self._opened()
        assert not [p for p in self.files.paths() if p.suffix not in (SUFFIX, ".txt")]

    def lose_power(self, layout: int) -> None:
        """Restart after a loss of power."""
        self.harmed = True
        self.files.lose_power()
        self._restart(layout)

    def store(self, namespace: int, digits: list[int], start: int) -> None:
        """Store a bundle; the power may go meanwhile."""
        tokens = as_tokens(*digits)
        start = min(start, len(tokens) - 1)
        made = bundle(self.own, NAMESPACES[namespace], tokens, start)
        try:
            result = self.folder.store(made)
        except PowerLossError:
            self.lose_power(0)
            return
        self.stored += isinstance(result, Manifest)
        assert self.harmed or not isinstance(result, Failure), result
        if isinstance(result, Manifest) and not self.harmed:
            found = self.folder.find(NAMESPACES[namespace], tokens, len(tokens))
            assert found is not None and found.end == len(tokens)

    def load(self, namespace: int, digits: list[int]) -> None:
        """Look up and load: the exact bytes, or a miss that does not come again."""
        tokens = as_tokens(*digits)
        found = self.folder.find(NAMESPACES[namespace], tokens)
        if found is None:
            return
        assert found.end < len(tokens)
        try:
            loaded = load_path(self.folder, self.own, tokens, found)
        except PowerLossError:
            self.lose_power(0)
            return
        if isinstance(loaded, Failure):
            self.missed += 1
            assert self.harmed, loaded
            assert loaded.reason in REASONS_TO_MISS, loaded
            if self.files.faults.calls_until_failure is None:
                again = self.folder.find(NAMESPACES[namespace], tokens)
                assert again is None or again.path != found.path
            return
        self.loaded += 1
        check_loaded(loaded, self.own, NAMESPACES[namespace], tokens, found.end)

    def flip(self, choice: int, bit: int) -> None:
        """Flip a bit somewhere on the disk."""
        if self.files.paths():
            paths = self.files.paths()
            content = self.files.content(paths[choice % len(paths)])
            if content:
                self.harmed = True
                content[bit // 8 % len(content)] ^= 1 << bit % 8

    def tear(self, choice: int, length: int) -> None:
        """Cut a file, or remove it."""
        if self.files.paths():
            self.harmed = True
            paths = self.files.paths()
            path = paths[choice % len(paths)]
            content = self.files.content(path)
            del content[length % (len(content) + 1) :]

    def exchange(self, one: int, other: int) -> None:
        """Swap the contents of two files, as somebody who tidies up might."""
        paths = self.files.paths()
        if len(paths) > 1:
            self.harmed = self.resized = True
            a, b = paths[one % len(paths)], paths[other % len(paths)]
            first, second = self.files.content(a), self.files.content(b)
            first[:], second[:] = bytes(second), bytes(first)

    def fail(self, calls: int, error: int) -> None:
        """Have a later call fail."""
        self.harmed = True
        self.files.faults.calls_until_failure = calls
        self.files.faults.error = error

    def die(self, calls: int) -> None:
        """Have the power go at a later call."""
        self.files.die_at = calls

    def fill(self, room: int) -> None:
        """Have others fill the disk, or free it."""
        self.harmed = True
        self.files.capacity = self.files.used + room

    def check(self) -> None:
        """What always holds."""
        assert self.folder.used_bytes <= BUDGET
        bundles = [path for path in self.files.paths() if path.suffix == SUFFIX]
        size = sum(len(self.files.content(path)) for path in bundles)
        assert self.resized or size <= BUDGET
        if not self.harmed:
            assert len(bundles) == self.folder.count

    def close(self) -> None:
        """Let go of the folder."""
        self.folder.close()


def random_digits(rng: random.Random, lengths: tuple[int, ...]) -> list[int]:
    """A sequence that shares its beginning with many others."""
    length = rng.choice(lengths)
    fork = rng.choice([4, 11, 256])
    digit = rng.randint(0, 1)
    return [i % 7 + (digit if i >= fork else 0) for i in range(length)]


def random_traffic(
    tier: FailingTier, rng: random.Random, steps: int, harm: bool
) -> None:
    """A little of everything, with what is harmless more often, or that alone."""
    for _ in range(steps):
        match rng.randint(0 if harm else 11, 59):
            case 0 | 1:
                tier.flip(rng.randint(0, 99), rng.randint(0, 1 << 20))
            case 2:
                tier.tear(rng.randint(0, 99), rng.randint(0, 1 << 14))
            case 3:
                tier.exchange(rng.randint(0, 99), rng.randint(0, 99))
            case 4 | 5:
                error = rng.choice([errno.EIO, errno.ENOSPC, errno.EACCES])
                tier.fail(rng.randint(0, 9), error)
            case 6 | 7:
                tier.die(rng.randint(0, 9))
            case 8:
                tier.lose_power(rng.randint(0, 1))
            case 9:
                tier.fill(rng.choice([0, 3000, 20_000]))
            case 10:
                tier.fill(2 * BUDGET)
            case 11 | 12:
                tier.reopen(rng.randint(0, 1))
            case 13 | 14:
                tier.files.faults.short = bool(rng.randint(0, 1))
            case number if number < 40:
                tier.load(rng.randint(0, 1), random_digits(rng, (300,)))
            case _:
                digits = random_digits(rng, (5, 9, 12, 255, 257))
                start = rng.choice([0, 0, 5, 9, 12])
                tier.store(rng.randint(0, 1), digits, start)
        tier.check()
