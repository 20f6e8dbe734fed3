# SPDX-License-Identifier: Apache-2.0
"""A store in memory that drops, tears, flips, forgets and does not answer."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from pathlib import Path

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.shelf import BundleShelf
from hybrid_plugin.tiers.store.directory import ROOT, Directory
from hybrid_plugin.tiers.store.files import StoreFiles
from hybrid_plugin.tiers.store.tier import StoreTier
from tests.tiers.one_rank import OneRank

PIECE = 1000


class FailingStore:
    """What `ObjectStore` asks for, with faults at random."""

    def __init__(self, seed: int = 0, faults: float = 0.0) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults = faults
        self.is_silent = False
        self.is_full = False
        self._random = random.Random(seed)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        self._answer()
        return [self.objects.get(name) for name in names]

    def put(self, name: str, content: bytes | memoryview) -> None:
        self._answer()
        if self.is_full:
            raise OSError(errno.ENOSPC, "as the test asks")
        if not self._is_faulty():  # or it is dropped
            self.objects[name] = bytes(content)

    def remove(self, names: Sequence[str]) -> None:
        self._answer()
        for name in names:
            self.objects.pop(name, None)

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._answer()
        return [name in self.objects for name in names]

    def close(self) -> None:
        pass

    def _is_faulty(self) -> bool:
        return self._random.random() < self.faults

    def _answer(self) -> None:
        if self.is_silent or self._is_faulty():
            raise OSError(errno.EIO, "as the test asks")

    # ------------------------------------------------------------ what tests do

    def harm(self) -> None:
        """Do something to an object."""
        if not self.objects:
            return
        rng = self._random
        name = rng.choice(sorted(self.objects))
        content = bytearray(self.objects[name])
        place = rng.randrange(max(len(content), 1))
        match rng.randrange(4):
            case 0:
                del self.objects[name]
            case 1:
                self.objects[name] = bytes(content[:place])
            case 2 if content:
                content[place] ^= 1 << rng.randrange(8)
                self.objects[name] = bytes(content)
            case _:
                other = rng.choice(sorted(self.objects))
                self.objects[name] = self.objects[other]


class Member(OneRank):
    """One server with one rank, without threads."""

    def __init__(
        self,
        objects: FailingStore,
        identity: Identity,
        layouts: Layouts,
        most: int = 100,
    ) -> None:
        rank = identity.rank_name
        self.layouts = layouts
        self.objects = objects
        self.shelf = BundleShelf(
            Path(ROOT), rank, layouts, files=StoreFiles(objects, PIECE)
        )
        self.tier = StoreTier(  # type: ignore[assignment]
            identity, {rank: layouts}, 1e9, most=most
        )
        self.directory = Directory(objects, [rank])

    @property
    def known(self) -> StoreTier:
        """The tier by its own type."""
        assert isinstance(self.tier, StoreTier)
        return self.tier

    def settle(self) -> None:
        """Have directories list what is new, as the thread for this does."""
        news, self.known.news = self.known.news, []
        for entry, is_there in news:
            try:
                if is_there:
                    self.directory.add(entry)
                else:
                    self.directory.drop(entry.name)
            except OSError:
                pass

    def look(self, namespace: str | None, tokens: Tokens) -> None:
        """Learn what is there."""
        try:
            found = self.directory.look(self.known.fingerprint, namespace, tokens)
        except OSError:
            return
        self.known.learn(found)

    def close(self) -> None:
        pass
