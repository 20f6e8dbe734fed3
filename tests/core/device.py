# SPDX-License-Identifier: Apache-2.0
"""Fake device memory that knows what every byte of it should be.

The content of a KV cell, and of a state, is the number of the token prefix it
was computed from.  A forward pass checks all it reads, so any stale, lost or
foreign content fails at the first step that would use it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Command, Copy, Pool, Zero
from hybrid_plugin.core.node import Node

GARBAGE = -1
ZEROED = 0
"""What cleared memory holds: the number of the empty prefix too."""


class ContentError(AssertionError):
    """The memory does not hold what a forward pass was promised."""


@dataclass(slots=True)
class Prefixes:
    """Numbers token prefixes; equal numbers mean equal prefixes."""

    _numbers: dict[tuple[int, Hashable, int], int] = field(default_factory=dict)

    def extend(self, prefix: int, namespace: Hashable, token: int) -> int:
        """The number of `prefix` with one more token."""
        key = (prefix, namespace, token)
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def history(self, namespace: Hashable, tokens: Iterable[int]) -> list[int]:
        """Numbers of the prefixes of every length, the empty one first."""
        numbers = [ZEROED]
        for token in tokens:
            numbers.append(self.extend(numbers[-1], namespace, token))
        return numbers


@dataclass(frozen=True, slots=True)
class Forward:
    """One sequence's part of a forward pass: tokens `start` to `end`."""

    table: tuple[int, ...]
    """Its pages."""
    slot: int
    history: Sequence[int]
    """Number of the prefix of every length, see `Prefixes.history`."""
    start: int
    end: int

    def pages(self, page_size: int) -> set[int]:
        """Pages that it reads or writes."""
        return set(self.table[: -(-self.end // page_size)])

    def written_pages(self, page_size: int) -> set[int]:
        """Pages that it writes."""
        return set(self.table[self.start // page_size : -(-self.end // page_size)])


class FakeDevice:
    """Pages and slots as lists; runs commands and forward passes."""

    def __init__(self, pages: int, slots: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = [[GARBAGE] * page_size for _ in range(pages)]
        self.slots = [GARBAGE] * slots

    def clone(self) -> FakeDevice:
        """A copy to try commands on."""
        twin = FakeDevice(0, 0, self.page_size)
        twin.pages = [list(cells) for cells in self.pages]
        twin.slots = list(self.slots)
        return twin

    def run(self, commands: Iterable[Command]) -> None:
        """Execute commands in order."""
        for command in commands:
            match command:
                case Zero(Pool.STATE, index):
                    self._store(index, ZEROED)
                case Copy(Pool.STATE, source, destination):
                    self._store(destination, self.slots[source])
                case Copy(Pool.KV, source, destination):
                    self._require(destination != 0, "page 0 is nobody's")
                    self.pages[destination] = list(self.pages[source])
                case _:
                    raise ContentError(f"{command} is not used by the core")

    def forward(self, batch: Sequence[Forward]) -> None:
        """Execute one step of several sequences, which must not disturb each other."""
        self._check_apart(batch)
        for part in batch:
            self._check(part)
        for part in batch:
            self._write(part)

    def check_tree(self, cache: HybridCache, prefixes: Prefixes) -> None:
        """Check all that the tree offers, as it is once queued commands ran."""
        twin = self.clone()
        twin.run(cache._commands)
        for namespace, root in cache.tree._roots.items():
            pending: list[tuple[Node, int]] = [(root, ZEROED)]
            while pending:
                node, prefix = pending.pop()
                end = twin._check_node(node, namespace, prefix, prefixes)
                below = [*node.children.values(), *node.tails.values()]
                pending += [(child, end) for child in below]

    # ---------------------------------------------------------------- internal

    def _store(self, slot: int, content: int) -> None:
        self._require(slot != 0, "slot 0 is nobody's")
        self.slots[slot] = content

    def _check_apart(self, batch: Sequence[Forward]) -> None:
        touched: dict[int, int] = {}
        for part in batch:
            for page in part.pages(self.page_size):
                touched[page] = touched.get(page, 0) + 1
        for part in batch:
            for page in part.written_pages(self.page_size):
                self._require(touched[page] == 1, f"written page {page} is shared")
        slots = [part.slot for part in batch]
        self._require(len(set(slots)) == len(slots), f"a slot is shared: {slots}")

    def _check(self, part: Forward) -> None:
        state = self.slots[part.slot]
        expected = part.history[part.start]
        self._require(
            state == expected,
            f"slot {part.slot} holds {state}, not {expected} ({part.start} tokens)",
        )
        size = self.page_size
        for first in range(0, part.start, size):
            wanted = list(part.history[first + 1 : min(first + size, part.start) + 1])
            page = part.table[first // size]
            cells = self.pages[page][: len(wanted)]
            self._require(cells == wanted, f"page {page} holds {cells}, not {wanted}")

    def _write(self, part: Forward) -> None:
        for position in range(part.start, part.end):
            page = part.table[position // self.page_size]
            self._require(page != 0, "page 0 is nobody's")
            self.pages[page][position % self.page_size] = part.history[position + 1]
        self._store(part.slot, part.history[part.end])

    def _check_node(
        self, node: Node, namespace: Hashable, prefix: int, prefixes: Prefixes
    ) -> int:
        for position, token in enumerate(node.tokens):
            prefix = prefixes.extend(prefix, namespace, token)
            page = node.pages[position // self.page_size]
            cell = self.pages[page][position % self.page_size]
            self._require(
                cell == prefix,
                f"the tree offers page {page} for {node.end} tokens, but cell "
                f"{position % self.page_size} holds {cell}, not {prefix}",
            )
        if node.snapshot is not None:
            slot = node.snapshot.slot
            state = self.slots[slot]
            self._require(
                state == prefix,
                f"the tree offers slot {slot} for {node.end} tokens, but it "
                f"holds {state}, not {prefix}",
            )
        return prefix

    @staticmethod
    def _require(condition: bool, message: str) -> None:
        if not condition:
            raise ContentError(message)
