# SPDX-License-Identifier: Apache-2.0
"""Insertion: what live sequences leave in the tree: pages, snapshots, turn ends.

Content enters the tree when its step is scheduled, before it is computed: what resumes
from it is scheduled later, and runs behind that step.  Copies to the host do not run
behind steps by themselves, so while a pass is planned that writes KV or states of the
tree, the host gets its copies after that pass's commands.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_plugin.core.commands import Command, Copy, Pool, SaveInPass
from hybrid_plugin.core.drafts import Drafts
from hybrid_plugin.core.memory.cache_memory import CacheMemory
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.promises import promise_for
from hybrid_plugin.core.sequence import LiveSequence
from hybrid_plugin.core.tiers.lower import LowerTiers
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.snapshot import Snapshot, SnapshotKind
from hybrid_plugin.core.tree.tokens import Tokens, as_tokens
from hybrid_plugin.core.verification import Ending


class Insertion:
    """Puts into the tree of one cache what its sequences compute."""

    def __init__(
        self,
        memory: CacheMemory,
        policy: SnapshotPolicy,
        drafts: Drafts,
        lower: LowerTiers,
    ) -> None:
        """Begin with nothing that the next pass is to write.

        Args:
            memory: pools and tree.
            policy: where snapshots are taken.
            drafts: knows where the state of a sequence lies that verified some.
            lower: tiers that get what can be resumed.
        """
        self._memory = memory
        self._enqueue = memory.enqueue
        self._tree = memory.tree
        self._slots = memory.slots
        self._policy = policy
        self._promises = memory.promises
        self._drafts = drafts
        self._lower = lower
        self._crosses = False
        """Whether the planned pass writes what the tree has already."""
        self._interior: list[tuple[Node, Snapshot, int, int]] = []
        """Snapshots that the next pass takes: node, snapshot, the sequence's slot, and
        the number of the chunk boundary."""
        self._unstored: list[tuple[Node, Snapshot]] = []
        """Snapshots that the host is to keep once the planned pass has run."""

    # ------------------------------------------------------------ within a prompt

    def cross(self, sequence: LiveSequence, end: int) -> None:
        """Order the snapshots of a pass; see `HybridCache.cross`."""
        if not self._policy.grid or not sequence.is_prefilling:
            return
        inside = self._policy.is_interior
        for position in sequence.planned:
            if sequence.computed < position < end and inside(position):
                self._take_inside(sequence, position)

    def advance(self, sequence: LiveSequence, computed: int) -> None:
        """Insert what a prompt has come to; see `HybridCache.advance`."""
        sequence.computed = computed
        if not sequence.is_prefilling:
            return
        if self._is_snapshot_position(sequence, computed):
            self._take_snapshot(sequence, computed)
            sequence.last_snapshot = computed
        if computed >= sequence.prompt_length:
            if sequence.cacheable and sequence.prompt_length >= self._tree.page_size:
                self._insert_pages(sequence, sequence.prompt, sequence.prompt_length)
            sequence.forget_prompt()

    def _is_snapshot_position(self, sequence: LiveSequence, computed: int) -> bool:
        return computed in sequence.planned or (
            computed < sequence.prompt_length
            and self._policy.keeps_chunk_end(computed, sequence.last_snapshot)
        )

    def _take_snapshot(self, sequence: LiveSequence, length: int) -> None:
        """Copy the running state into the tree, if a slot can be had for it."""
        node = self._new_snapshot(sequence, length)
        if node is None:
            return
        if self._slots.needed:
            copy = Copy(Pool.STATE, sequence.slot, _snapshot(node).slot)
            self._enqueue(copy)
        self._store(node)

    def _take_inside(self, sequence: LiveSequence, position: int) -> None:
        """Have the next pass write a state into the tree, if a slot can be had for it.

        Args:
            sequence: that the pass takes on.
            position: a multiple of the policy's grid, inside what the pass computes.
        """
        self._crosses = True
        node = self._new_snapshot(sequence, position)
        sequence.last_snapshot = position
        if node is None:
            return
        self._store(node)
        if not self._slots.needed:
            return
        grid = self._policy.grid
        boundary = position // grid - sequence.computed // grid - 1
        self._interior.append((node, _snapshot(node), sequence.slot, boundary))
        self._memory.stats.interior_snapshots += 1

    def _new_snapshot(self, sequence: LiveSequence, length: int) -> Node | None:
        """Give the first `length` tokens of a sequence a snapshot without content.

        Returns:
            The node that got it; None if it has one already, or gets none.
        """
        if not sequence.cacheable or not self._tree.needs_snapshots:
            return None
        node = self._insert_pages(sequence, sequence.prompt, length)
        if node.snapshot is not None:
            self._tree.touch_snapshot(node)
            self._store(node)
            return None
        kind = sequence.planned.get(length, SnapshotKind.CHUNK_END)
        planned = Snapshot(0, kind=kind, origin=sequence.origin)
        planned.promise = promise_for(sequence.promise, kind, length)
        if not self._memory.free_snapshot_slot(node, planned):
            return None
        self._attach(node, sequence, self._slots.allocate_snapshot(), kind)
        return node

    # ----------------------------------------------------------- at its end

    def end(
        self, sequence: LiveSequence, tokens: Sequence[int], ending: Ending
    ) -> tuple[Node | None, int | None]:
        """Put an ending sequence into the tree.

        Args:
            sequence: that ends.
            tokens: at least those that count.
            ending: tokens that count, and where the state after them is.

        Returns:
            Where its tokens end in the tree, and the slot of its that stays there.
        """
        self._count_turn_end(ending)
        if self._policy.canonical and ending.length > sequence.prompt_length:
            ending = Ending(sequence.prompt_length, None)
        return self._donate(sequence, tokens, ending)

    def _count_turn_end(self, ending: Ending) -> None:
        if not self._slots.needed or self._policy.canonical:
            return
        if ending.column is None:
            self._memory.stats.turn_ends_missed += 1
        else:
            self._memory.stats.turn_ends_exact += 1

    def _donate(
        self, sequence: LiveSequence, tokens: Sequence[int], ending: Ending
    ) -> tuple[Node | None, int | None]:
        length = ending.length
        resumable = self._tree.needs_snapshots and (
            ending.column is not None or self._holds_windows(sequence, length)
        )
        if self._policy.canonical:
            resumable = resumable and self._policy.is_interior(length)
        if not resumable and length < self._tree.page_size:
            return None, None
        node = self._insert_pages(sequence, tokens, length)
        if not resumable:
            return node, None
        rest: Tokens = as_tokens(tokens[node.end : length])
        if rest:
            page = sequence.pages[node.end // self._tree.page_size]
            node, taken = self._tree.insert_tail(node, rest, page)
            if taken:
                self._memory.pages.adopt((page,))
        if node.snapshot is not None:
            self._tree.touch_snapshot(node)
            self._store(node)
            return node, None
        slot = self._drafts.keep(sequence, ending)
        self._attach(node, sequence, slot, SnapshotKind.TURN_END)
        self._store(node)
        return node, slot

    def _holds_windows(self, sequence: LiveSequence, length: int) -> bool:
        """Whether a sequence without states can be resumed at `length`.

        It can if it still holds the pages that its windows cover there.  Later steps
        only add KV behind `length`; a state they would have overwritten.
        """
        tables = zip(self._memory.windows, sequence.windows, strict=True)
        return not self._slots.needed and all(
            table.first <= self._memory.live(group, length).start
            for group, table in tables
        )

    # ------------------------------------------------- around the pass's commands

    def saves_in_pass(self) -> list[Command]:
        """Take the orders for the snapshots of the pass, behind its other commands.

        Only now: until here a snapshot might have been moved, or evicted for another.
        """
        orders: list[Command] = [
            SaveInPass(Pool.STATE, slot, boundary, snapshot.slot)
            for node, snapshot, slot, boundary in self._interior
            if node.snapshot is snapshot
        ]
        self._interior = []
        return orders

    def after_commands(self) -> None:
        """Have the host keep what the drained commands' pass writes."""
        self._crosses = False
        unstored, self._unstored = self._unstored, []
        for node, snapshot in unstored:
            if node.snapshot is snapshot:
                self._store(node)

    def flush(self) -> None:
        """Forget what was to be stored: the tree is about to be emptied."""
        self._unstored.clear()

    # ---------------------------------------------------------------- internal

    def _insert_pages(
        self, sequence: LiveSequence, tokens: Sequence[int], length: int
    ) -> Node:
        """Put the whole pages of the first `length` tokens into the tree."""
        size = self._tree.page_size
        count = length // size
        after = sequence.locked
        start = sequence.locked_tokens
        if count * size < start:  # it ends before its hit
            after, start = None, 0
        node, taken = self._tree.insert(
            sequence.namespace,
            as_tokens(tokens[start : count * size]),
            sequence.pages[start // size : count],
            after,
        )
        self._memory.pages.adopt(taken)
        self._extend_lock(sequence, node, len(taken) * size)
        return node

    def _extend_lock(self, sequence: LiveSequence, node: Node, gained: int) -> None:
        """Move the sequence's lock to `node`, now that the tree gained its tokens.

        Evicting pages that a sequence uses would free nothing.  Where the tree
        had some of them from another sequence already, the lock stays: what is
        locked must be in use, or `PagePool.reclaimable` promises too much.
        """
        before = sequence.locked
        if gained and node.end - gained == sequence.locked_tokens:
            self._tree.lock(node)
            if before is not None:
                self._tree.unlock(before)
            sequence.locked = node

    def _attach(
        self, node: Node, sequence: LiveSequence, slot: int, kind: SnapshotKind
    ) -> None:
        """Give the node a snapshot with the window pages of its path.

        They are those that `sequence` holds, where the path's KV pages are its own.
        """
        held = []
        for group, table in zip(self._memory.windows, sequence.windows, strict=True):
            live = self._memory.live(group, node.end)
            held.append(table.pages[live.start : live.stop])
        windows = self._memory.settle_windows(node, sequence.pages, held)
        snapshot = Snapshot(slot, windows, kind, sequence.origin)
        self._tree.attach_snapshot(node, snapshot)
        promise = promise_for(sequence.promise, kind, node.end)
        if promise is not None:
            self._promises.give(promise, node)
        self._memory.stats.snapshots_taken += 1

    def _store(self, node: Node) -> None:
        """Have the host keep what can be resumed at a node, after the planned pass."""
        if self._lower.host is None:
            return
        if self._crosses:
            self._unstored.append((node, _snapshot(node)))
        else:
            self._lower.store(node)


def _snapshot(node: Node) -> Snapshot:
    assert node.snapshot is not None
    return node.snapshot
