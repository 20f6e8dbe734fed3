# SPDX-License-Identifier: Apache-2.0
"""HybridCache: everything an adapter may ask of the cache, in one object.

The life of a sequence, in the calls an adapter makes:

    look_up -> (split_at) -> admit -> advance -> grow -> ... -> finish

Nothing here fails under memory pressure: a call that cannot be served returns
None and has changed nothing.  Device work is queued as commands, in order;
`drain_commands` hands them to the ranks with the next step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from hybrid_plugin.core.commands import Command, Copy, Pool, Zero
from hybrid_plugin.core.pool import PagePool, SlotPool
from hybrid_plugin.core.radix import Evicted, MambaRadixCache, Match, Node, Tokens
from hybrid_plugin.core.snapshots import SnapshotPolicy
from hybrid_plugin.core.stats import CacheStats


@dataclass(frozen=True, slots=True)
class LookUp:
    """What a sequence that is not admitted yet can expect."""

    length: int
    """Tokens of the sequence."""
    namespace: Hashable
    match: Match
    stops: tuple[int, ...]
    """Positions at which its prefill should pause for a snapshot."""
    version: int
    """Of the tree, when this was looked up."""


@dataclass(slots=True)
class LiveSequence:
    """A live sequence and what it owns."""

    namespace: Hashable
    pages: list[int]
    slot: int
    hit: int
    stops: tuple[int, ...]
    prompt_length: int
    locked: Node | None
    cacheable: bool
    in_tree: int = 0
    """Tokens of it that were inserted into the tree so far."""
    origin: Node | None = None
    """The node it resumed from."""
    last_snapshot: int = 0
    """Tokens of it at the last position worth a snapshot."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What a sequence got on admission."""

    pages: tuple[int, ...]
    slot: int
    hit: int


@dataclass(slots=True)
class HybridCache:
    """Pages, slots, tree and snapshots of one model replica."""

    pages: PagePool
    slots: SlotPool
    page_size: int
    policy: SnapshotPolicy
    stats: CacheStats = field(default_factory=CacheStats)
    tree: MambaRadixCache = field(init=False)
    _sequences: dict[str, LiveSequence] = field(init=False, default_factory=dict)
    _commands: list[Command] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.tree = MambaRadixCache(self.page_size)

    # ----------------------------------------------------------------- look up

    def look_up(
        self, tokens: Tokens, namespace: Hashable = None, limit: int | None = None
    ) -> LookUp:
        """Find the hit of a new sequence; changes nothing.

        Args:
            tokens: all its tokens.
            namespace: what besides tokens must be equal.
            limit: restore at most this many tokens; never all of them, because
                an engine must compute one to go on.
        """
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        match = self.tree.match(namespace, tokens, limit=most)
        stops = self.policy.prefill_stops(
            length=len(tokens), hit=match.length, kv_length=match.kv_length
        )
        return LookUp(len(tokens), namespace, match, stops, self.tree.version)

    def bypass(self, tokens: Tokens, namespace: Hashable = None) -> LookUp:
        """Stand in for `look_up` where a request must not be served from cache.

        Unless it is admitted with `cacheable=False`, what it computes enters
        the tree all the same: under `namespace`.
        """
        match = Match(0, None, (), None, 0)
        return LookUp(len(tokens), namespace, match, (), self.tree.version)

    def is_current(self, found: LookUp) -> bool:
        """Whether a new look-up would give the same."""
        return found.version == self.tree.version

    def split_at(
        self, stops: tuple[int, ...], start: int, end: int, length: int
    ) -> int:
        """Return where a prefill chunk from `start` to `end` should end.

        Args:
            stops: snapshot positions of the sequence.
            start: its first token in the chunk.
            end: where the chunk would end for want of the engine's budget.
            length: tokens of the sequence; at its end nothing is cut short.
        """
        stop = next((stop for stop in stops if start < stop < end), None)
        if stop is not None:
            return stop
        return end if end >= length else self.policy.chunk_end(start, end)

    def stops_of(self, seq_id: str) -> tuple[int, ...]:
        """Snapshot positions of the live sequence's prefill."""
        return self._sequences[seq_id].stops

    # --------------------------------------------------------------- admission

    def admit(
        self,
        seq_id: str,
        found: LookUp,
        *,
        cover: int,
        reserve: int = 0,
        spare: int = 0,
        cacheable: bool = True,
        resumed: bool = False,
    ) -> Admission | None:
        """Start a sequence: give it pages for `cover` tokens, and a state slot.

        Args:
            seq_id: name of the sequence; it must not be live.
            found: a current look-up.
            cover: tokens to have pages for now.
            reserve: tokens that must fit, though pages for them come later.
            spare: pages that must be left over.
            cacheable: whether its KV and states may enter the tree.
            resumed: whether it ran before, so that its hit counts apart.

        Returns:
            None if there is no room, with nothing changed.
        """
        if seq_id in self._sequences:
            raise ValueError(f"sequence {seq_id!r} is live already")
        if not self.is_current(found):
            raise ValueError("the look-up is older than the tree")
        match = found.match
        if cover <= match.length:
            raise ValueError(f"{cover} tokens are no more than the {match.length} hit")
        needed = self._pages_for(max(cover, reserve)) - len(match.pages) + spare
        if not self._has_room(match, needed):
            self.stats.refusals += 1
            return None
        self._hold(match)
        slot, fresh = self._obtain(match, self._pages_for(cover) - len(match.pages))
        self._restore(match, slot, fresh)
        self.stats.record_hit(found.length, match.length, resumed=resumed)
        pages = [*match.pages, *fresh]
        self._sequences[seq_id] = LiveSequence(
            namespace=found.namespace,
            pages=pages,
            slot=slot,
            hit=match.length,
            stops=found.stops,
            prompt_length=found.length,
            locked=self._settle(match, slot),
            cacheable=cacheable,
            origin=match.node,
            last_snapshot=match.length,
        )
        return Admission(tuple(pages), slot, match.length)

    def grow(self, seq_id: str, cover: int) -> list[int] | None:
        """Give a live sequence pages for `cover` tokens in all.

        Returns:
            The new pages, or None if there is no room, with nothing changed.
        """
        sequence = self._sequences[seq_id]
        count = self._pages_for(cover) - len(sequence.pages)
        if count > self.pages.free + self.pages.reclaimable:
            self.stats.refusals += 1
            return None
        enough = self._evict_until_free(count)
        assert enough, "reclaimable pages belong to evictable nodes"
        fresh = self.pages.allocate(max(count, 0))
        sequence.pages += fresh
        return fresh

    def advance(self, seq_id: str, tokens: Sequence[int], computed: int) -> None:
        """Note that a step was scheduled which takes a sequence to `computed`.

        Call it after the step's commands were drained: a snapshot taken here
        is a copy that must run behind that step.

        Args:
            seq_id: a live sequence.
            tokens: all its tokens known so far.
            computed: tokens its KV and state cover once the step has run.
        """
        sequence = self._sequences[seq_id]
        if sequence.in_tree >= sequence.prompt_length:
            return
        if computed in sequence.stops or (
            computed < sequence.prompt_length
            and self.policy.keeps_chunk_end(computed, sequence.last_snapshot)
        ):
            self._take_snapshot(sequence, tokens, computed)
            sequence.last_snapshot = computed
        if computed >= sequence.prompt_length:
            if sequence.cacheable and sequence.prompt_length >= self.page_size:
                self._insert_pages(sequence, tokens, sequence.prompt_length)
            sequence.in_tree = sequence.prompt_length
            sequence.stops = ()

    def finish(self, seq_id: str, tokens: Sequence[int], computed: int) -> None:
        """End a sequence, finished, aborted or preempted alike.

        Its KV enters the tree, and its slot too, as the snapshot of `computed`
        tokens: nothing is copied.

        Args:
            seq_id: a live sequence.
            tokens: all its tokens that are known.
            computed: tokens its KV and state cover, with every step that was
                scheduled.  Where that is more than are known (a step in flight
                has consumed a token nobody has seen), the state is worthless.
        """
        sequence = self._sequences.pop(seq_id)
        donated = False
        if sequence.cacheable and computed > 0:
            known = tuple(tokens[:computed])
            donated = self._donate(sequence, known, exact=len(known) == computed)
        self.pages.release(sequence.pages)
        if not donated:
            self.slots.free_running(sequence.slot)
        if sequence.locked is not None:
            self.tree.unlock(sequence.locked)

    def flush(self) -> bool:
        """Forget everything cached.

        Returns:
            False, with nothing changed, while a sequence is live.
        """
        if self._sequences:
            return False
        for evicted in self.tree.clear():
            self._take_back(evicted)
        return True

    def drain_commands(self) -> list[Command]:
        """Take the commands to run before the next forward pass."""
        commands, self._commands = self._commands, []
        return commands

    # ------------------------------------------------------------- inspection

    def is_live(self, seq_id: str) -> bool:
        """Whether the sequence was admitted and has not finished."""
        return seq_id in self._sequences

    def is_prefilling(self, seq_id: str) -> bool:
        """Whether `advance` still has something to do for a live sequence."""
        sequence = self._sequences[seq_id]
        return sequence.in_tree < sequence.prompt_length

    def sequence(self, seq_id: str) -> LiveSequence:
        """The record of a live sequence; read it, do not change it."""
        return self._sequences[seq_id]

    @property
    def live(self) -> int:
        """Number of live sequences."""
        return len(self._sequences)

    def levels(self) -> dict[str, int]:
        """How full the pools are: pages and slots used, cached and free."""
        return {
            "pages_used": self.pages.in_use,
            "pages_cached": self.pages.reclaimable,
            "pages_free": self.pages.free,
            "slots_used": self.slots.running,
            "slots_cached": self.slots.snapshots,
            "slots_free": self.slots.free,
        }

    # ---------------------------------------------------------------- internal

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _has_room(self, match: Match, pages: int) -> bool:
        """Whether a sequence with this hit can get `pages` more, and a slot.

        Cached pages that it will share cannot make room for it.  What else was
        matched, the snapshot and the tail page, can: see `_obtain`.
        """
        shared = sum(self.pages.references(page)[0] == 0 for page in match.pages)
        return pages <= self.pages.free + self.pages.reclaimable - shared and (
            self.slots.free > 0 or any(self.tree.snapshot_counts())
        )

    def _hold(self, match: Match) -> None:
        """Keep what is matched while room is made."""
        if match.node is not None:
            self.pages.share(match.pages)
            self.tree.lock(match.node)
            self.tree.lock_state(match.node)

    def _obtain(self, match: Match, count: int) -> tuple[int, list[int]]:
        """A slot and `count` pages, at the price of cached ones if need be.

        The last resort is the matched snapshot itself: its slot and tail page
        become the sequence's own, without a copy (see `_settle`).
        """
        if self._evict_until_free(count) and (
            self.slots.free or self._evict_snapshot()
        ):
            return self.slots.allocate_running(), self.pages.allocate(count)
        assert match.node is not None, "there is room without a hit, or none at all"
        assert match.node.snapshot is not None, "a locked snapshot is never evicted"
        self.slots.take_over(match.node.snapshot)
        tail = [] if match.tail_page is None else [match.tail_page]
        self.pages.share(tail)
        fresh = self.pages.allocate(count - len(tail))
        return match.node.snapshot, [*tail, *fresh]

    def _restore(self, match: Match, slot: int, fresh: list[int]) -> None:
        """Order the copies that make `slot` and the tail page the sequence's."""
        if match.node is None:
            self._commands.append(Zero(Pool.STATE, slot))
            return
        assert match.node.snapshot is not None, "a locked snapshot is never evicted"
        if match.node.snapshot == slot:  # taken over, with its tail page
            return
        if match.tail_page is not None:
            self._commands.append(Copy(Pool.KV, match.tail_page, fresh[0]))
        self._commands.append(Copy(Pool.STATE, match.node.snapshot, slot))

    def _settle(self, match: Match, slot: int) -> Node | None:
        """Swap the hold of admission for the lock a live sequence keeps.

        Copies run before anything that could overwrite their source, so only
        the shared pages need a lock: the path without a tail.
        """
        node = match.node
        if node is None:
            return None
        kept = node.parent if node.is_tail else node
        assert kept is not None, "a tail has a parent"
        self.tree.lock(kept)
        self.tree.unlock_state(node)
        self.tree.use_snapshot(node)
        self.tree.unlock(node)
        if node.snapshot == slot:  # taken over: the tree has no state there now
            self.pages.drop(self.tree.detach_snapshot(node).pages)
        return kept

    def _evict_until_free(self, count: int) -> bool:
        """Evict KV until `count` pages are free; False if they never will be."""
        while self.pages.free < count:
            evicted = self.tree.evict_kv()
            if evicted is None:
                return False
            self._take_back(evicted)
        return True

    def _take_back(self, evicted: Evicted) -> None:
        self.pages.drop(evicted.pages)
        self.stats.pages_evicted += len(evicted.pages)
        if evicted.slot is not None:
            self.slots.free_snapshot(evicted.slot)
            self.stats.snapshots_evicted += 1

    def _evict_snapshot(self) -> bool:
        """Free the slot of the snapshot that is worth least, if there is one."""
        used = self.policy.evicts_used(*self.tree.snapshot_counts())
        node = self.tree.oldest_snapshot(used=used)
        if node is None:
            return False
        self._take_back(self.tree.detach_snapshot(node))
        return True

    def _supersede(self, origin: Node | None) -> None:
        """Let the last turn's end go first, now that this turn's end is there.

        Not so where others resumed there too, or where it was planned: a branch
        point serves the next sequence as well.
        """
        if origin is not None and origin.is_turn_end and origin.hits == 1:
            self.tree.demote_snapshot(origin)

    def _insert_pages(
        self, sequence: LiveSequence, tokens: Sequence[int], length: int
    ) -> Node:
        """Put the whole pages of the first `length` tokens into the tree."""
        count = length // self.page_size
        node, taken = self.tree.insert(
            sequence.namespace,
            tuple(tokens[: count * self.page_size]),
            sequence.pages[:count],
        )
        self.pages.adopt(taken)
        self._keep(sequence, node, len(taken) * self.page_size)
        return node

    def _keep(self, sequence: LiveSequence, node: Node, gained: int) -> None:
        """Move the sequence's lock to `node`, now that the tree gained its tokens.

        Evicting pages that a sequence uses would free nothing.  Where the tree
        had some of them from another sequence already, the lock stays: what is
        locked must be in use, or `PagePool.reclaimable` promises too much.
        """
        before = sequence.locked
        if gained and node.end - gained == (before.end if before is not None else 0):
            self.tree.lock(node)
            if before is not None:
                self.tree.unlock(before)
            sequence.locked = node

    def _take_snapshot(
        self, sequence: LiveSequence, tokens: Sequence[int], length: int
    ) -> None:
        """Copy the running state into the tree, if a slot can be had for it."""
        if not sequence.cacheable:
            return
        node = self._insert_pages(sequence, tokens, length)
        if node.snapshot is not None:
            self.tree.touch_snapshot(node)
            return
        if not self.slots.free and not self._evict_snapshot():
            return
        slot = self.slots.allocate_snapshot()
        self.tree.attach_snapshot(node, slot)
        self._commands.append(Copy(Pool.STATE, sequence.slot, slot))
        self.stats.snapshots_taken += 1

    def _donate(self, sequence: LiveSequence, tokens: Tokens, *, exact: bool) -> bool:
        """Put an ending sequence into the tree; returns whether its slot stays."""
        if not exact and len(tokens) < self.page_size:
            return False
        node = self._insert_pages(sequence, tokens, len(tokens))
        if not exact:
            return False
        rest = tokens[node.end :]
        if rest:
            page = sequence.pages[node.end // self.page_size]
            node, taken = self.tree.insert_tail(node, rest, page)
            if taken:
                self.pages.adopt([page])
        if node.snapshot is not None:
            self.tree.touch_snapshot(node)
            return False
        self.slots.donate(sequence.slot)
        self.tree.attach_snapshot(node, sequence.slot, is_turn_end=True)
        self._supersede(sequence.origin)
        self.stats.snapshots_taken += 1
        return True
