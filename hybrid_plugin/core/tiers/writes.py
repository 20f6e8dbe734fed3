# SPDX-License-Identifier: Apache-2.0
"""Writes: bundles of the host that go to an outer tier.

All that the host stores is noted, and written oldest first.  A note keeps nothing: what
the host evicts before its turn is skipped, and missed later.  A bundle that is being
written is in use until all ranks have reported.  Whoever needs one bundle written asks
for it (`ask`), keeps it on the host, and hears what became of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hybrid_plugin.core.commands import BundleRows, Discard, PageRows, Pool, Write
from hybrid_plugin.core.tiers.host_tier import HostSource, HostTier
from hybrid_plugin.core.tiers.outer_tier import OuterTier
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.snapshot import Snapshot

MOST_WRITES: Final = 2
"""Bundles that are written at once: one is, and one waits, so that the storage never
does.  Only their rows are in use."""
FLUSHED: Final = "everything was flushed meanwhile"
"""Why a bundle is not kept that was written."""
NO_ROOM: Final = "it does not fit"
"""Why a bundle is not written: the outer tier does not take it."""


@dataclass(slots=True, eq=False)
class Asked:
    """A bundle that somebody waits for."""

    is_over: bool = False
    """Whether it is there, or this write will not bring it there."""
    reason: str = ""
    """Why not."""

    def end(self, reason: str = "") -> None:
        """Note what became of it."""
        self.is_over, self.reason = True, reason


@dataclass(slots=True, eq=False)
class Writing:
    """One bundle on its way to the outer tier."""

    key: str
    source: HostSource
    size: int
    """Bytes of the rows."""
    is_flushed: bool = False
    """Whether nobody may find it when it is over."""

    def is_on_path_to(self, node: Node) -> bool:
        """Whether the path to a node of the host's tree leads through it."""
        own = self.source.node
        one: Node | None = node
        while one is not None and one is not own:
            beside = own.is_tail and one.parent is own.parent
            if beside and one.tokens[: len(own.tokens)] == own.tokens:
                return True
            one = one.parent
        return one is own


class Writes:
    """All writes of one cache."""

    def __init__(
        self, host: HostTier, tier: OuterTier, new_ticket: Callable[[], int]
    ) -> None:
        """Begin with none.

        Args:
            host: where bundles are noted as they are stored.
            tier: where to.
            new_ticket: numbers writes, and what else is reported.
        """
        self._host = host
        self._tier = tier
        self._new_ticket = new_ticket
        self._noted: dict[Node, Snapshot] = {}
        """Oldest first."""
        self._alive = 0
        """Notes that were left when those of evicted bundles were removed last."""
        self._is_settled = True
        """Whether no note can begin before another one comes, or a write is over."""
        self.running: dict[int, Writing] = {}
        """By ticket."""
        self._asked: dict[Node, Asked] = {}
        host.tell(self.note)

    @property
    def waiting(self) -> int:
        """Bundles that are to be written, if the host keeps them until then."""
        return len(self._noted)

    def note(self, node: Node) -> None:
        """Have a bundle of the host written."""
        assert node.snapshot is not None, "a bundle has a state"
        self._noted.pop(node, None)
        self._noted[node] = node.snapshot
        self._is_settled = False
        if len(self._noted) > 2 * self._alive + MOST_WRITES:
            self._noted = {
                one: snapshot
                for one, snapshot in self._noted.items()
                if one.snapshot is snapshot
            }
            self._alive = len(self._noted)

    def ask(self, node: Node) -> Asked:
        """Have a bundle of the host written before all others, if it is not there.

        Args:
            node: of the bundle; whoever asks holds it until that is over.
        """
        assert node.snapshot is not None, "a bundle has a state"
        asked = self._asked.setdefault(node, Asked())
        if all(one.source.node is not node for one in self.running.values()):
            self._noted.pop(node, None)
            self._noted = {node: node.snapshot, **self._noted}
            self._is_settled = False
        return asked

    # ------------------------------------------------------------------ begin

    def begin(self) -> None:
        """Begin the writes that may run now.

        A bundle behind one that is being written waits for its outcome, because it
        begins where the longest one ends that is there.
        """
        while not self._is_settled and self._has_room():
            node = self._next()
            if node is None:
                self._is_settled = True
            else:
                self._begin(node)

    def _has_room(self) -> bool:
        ahead = self.running.values()
        return len(ahead) < MOST_WRITES and not any(one.is_flushed for one in ahead)

    def _next(self) -> Node | None:
        """Take the first note that need not wait, and forget those of evicted bundles
        before it."""
        evicted, found = [], None
        for node, snapshot in self._noted.items():
            if node.snapshot is not snapshot:
                evicted.append(node)
            elif not any(one.is_on_path_to(node) for one in self.running.values()):
                found = node
                break
        for node in evicted if found is None else (*evicted, found):
            del self._noted[node]
        return found

    def _begin(self, node: Node) -> None:
        namespace, tokens, _ = self._host.tree.path_of(node)
        before = self._tier.find(namespace, tokens, len(tokens))
        start = before[-1].end if before else 0
        if start == len(tokens):
            self._answer(node)
            return
        source = self._host.hold_bundle(node, start)
        size = self._host.bytes_of(source)
        storing = self._tier.begin_store(namespace, tokens, start, size)
        if storing is None:
            self._host.let_go(source)
            self._tier.stats.stores_refused += 1
            self._answer(node, NO_ROOM)
            return
        ticket, host = self._new_ticket(), self._host
        self.running[ticket] = Writing(storing.key, source, size)
        if storing.discard:
            host.send(Discard(tuple(storing.discard)))
        pages = {Pool.KV: PageRows(start, tuple(source.pages))}
        pages |= host.window_rows(len(tokens), source.windows)
        state = host.state_row(source.slot)
        rows = BundleRows(storing.key, namespace, tokens, start, pages, state)
        host.send(Write(ticket, rows))

    # -------------------------------------------------------------------- end

    def succeeded(self, ticket: int, seconds: float | None) -> Sequence[str]:
        """Have the outer tier find a bundle; returns keys to discard."""
        writing = self._end(ticket)
        if writing.is_flushed:
            return self._tier.store_failed(writing.key, FLUSHED)
        self._tier.stored(writing.key, seconds)
        self._answer(writing.source.node)
        self._tier.stats.stores += 1
        self._tier.stats.stored_bytes += writing.size
        return ()

    def failed(self, ticket: int, reason: str) -> Sequence[str]:
        """Have the outer tier forget a bundle; returns keys to discard."""
        self._tier.stats.store_failures[reason] += 1
        writing = self._end(ticket)
        self._answer(writing.source.node, reason)
        return self._tier.store_failed(writing.key, reason)

    def flush(self) -> None:
        """Write nothing that is noted, and have nobody find what is being written.

        Whoever asked for a bundle holds it no more.
        """
        self._noted.clear()
        for node in list(self._asked):
            self._answer(node, FLUSHED)
        for writing in self.running.values():
            if not writing.is_flushed:
                self._host.disown(writing.source)
                writing.is_flushed = True

    def _end(self, ticket: int) -> Writing:
        writing = self.running.pop(ticket)
        self._is_settled = False
        if writing.is_flushed:
            self._host.free(writing.source)
        else:
            self._host.let_go(writing.source)
        return writing

    def _answer(self, node: Node, reason: str = "") -> None:
        asked = self._asked.pop(node, None)
        if asked is not None:
            asked.end(reason)
