# SPDX-License-Identifier: Apache-2.0
"""Admissions: whether a sequence finds room, and how it gets its hit.

Everything that others have a claim to is counted before anything changes: pages that
sequences in the middle of their prompts have reserved, window pages that live sequences
may still need, memory that cached content is worth more in, and what drafts hold.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from hybrid_plugin.core.commands import Copy, Pool, PoolId, Zero
from hybrid_plugin.core.drafts import Drafts
from hybrid_plugin.core.memory.cache_memory import Allocation, CacheMemory
from hybrid_plugin.core.memory.fragmentation import FragmentationRelief
from hybrid_plugin.core.memory.reservations import Reservations
from hybrid_plugin.core.memory.window_tables import WindowDemand, WindowTable
from hybrid_plugin.core.misses import missed_tokens
from hybrid_plugin.core.policy.concurrency import ConcurrencyTradeoff
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.sequence import Admission, LiveSequence, LookUp
from hybrid_plugin.core.tiers.lower import LowerTiers
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.promise import Promise
from hybrid_plugin.core.tree.radix import Match
from hybrid_plugin.core.tree.snapshot import SnapshotKind

NO_MATCH = Match(0, None, array("i"), None, 0)
"""The hit of a sequence that shares nothing."""


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a sequence is admitted; see `HybridCache.admit`."""

    num_tokens: int
    reserve_tokens: int = 0
    watermark_pages: int = 0
    window_demand: WindowDemand | None = None
    cacheable: bool = True
    resumed: bool = False
    counted: bool = True


@dataclass(frozen=True, slots=True)
class _Size:
    """Pages that a sequence takes beyond what it shares."""

    now: int
    in_all: int
    """Those that it has reserved included."""
    promised: int
    """That others have reserved, and so must be left."""


class Admissions:
    """Starts the sequences of one cache."""

    def __init__(
        self,
        memory: CacheMemory,
        sequences: dict[str, LiveSequence],
        reservations: Reservations,
        policy: SnapshotPolicy,
        *,
        concurrency: ConcurrencyTradeoff,
        fragmentation: FragmentationRelief,
        drafts: Drafts,
        lower: LowerTiers,
    ) -> None:
        """Watch over a cache.

        Args:
            memory: pools and tree.
            sequences: that are live, by name; those that are admitted are added.
            reservations: theirs.
            policy: learns where prompts part.
            concurrency: says when cached content is worth more than one more sequence.
            fragmentation: may hold sequences back.
            drafts: hold memory, and give it back where a sequence finds none.
            lower: tiers that may have brought a hit.
        """
        self._memory = memory
        self._enqueue = memory.enqueue
        self._tree = memory.tree
        self._sequences = sequences
        self._reservations = reservations
        self._policy = policy
        self._concurrency = concurrency
        self._fragmentation = fragmentation
        self._drafts = drafts
        self._lower = lower

    def admit(self, seq_id: str, found: LookUp, terms: Terms) -> Admission | None:
        """Start a sequence; see `HybridCache.admit`."""
        self._check(seq_id, found, terms)
        stats = self._memory.stats
        if self._fragmentation.holds_back:
            stats.refusals += 1
            return None
        match = found.match
        cacheable = terms.cacheable and not self._fragmentation.begins
        # A sequence in the middle of its prompt has reserved the rest of its pages.
        size = self._size(match, terms)
        most = size.in_all + len(match.pages)
        kept = self._drafts.kept_pages(found.length, most)
        self._memory.share(match)
        if not self._finds_room(match, terms, size, kept):
            self._memory.unshare(match)
            stats.refusals += 1
            if match.length and not self._sequences:
                self._lower.end_restores()
                self._fragmentation.refused_hit()
            return None
        counts = terms.counted and not terms.resumed
        if counts:
            stats.computed_tokens.update(missed_tokens(self._tree, found))
        if terms.counted:
            self._tree.begin_admission()
            self._memory.promises.pace.admitted()
            self._learn_divergence(found)
        held, origin = self._hold(match), found.origin
        restored, brought = (
            self._lower.take_restored(match) if terms.counted else (0, ("", 0))
        )
        room = self._obtain(match, size, kept)
        self._restore(match, room)
        tables = self._window_tables(match, room)
        if terms.counted:
            stats.record_hit(found.length, match.length, resumed=terms.resumed)
            self._lower.note_use(found, restored, brought, counts=counts)
        pages = match.pages + room.fresh
        self._sequences[seq_id] = LiveSequence(
            namespace=found.namespace,
            pages=pages,
            slot=room.slot,
            hit=match.length,
            planned=dict(found.planned),
            prompt_length=found.length,
            locked=self._settle(held, room, terms),
            cacheable=cacheable,
            origin=origin,
            prompt=found.tokens,
            computed=match.length,
            last_snapshot=match.length,
            reserved=most,
            windows=tables,
            window_demand=terms.window_demand,
            is_last_turn=found.ttl == 0,
            promise=_promise_of(found) if cacheable else None,
            admitted_at=self._tree.clock,
        )
        source, fetched = brought
        return Admission(
            pages[:],
            room.slot,
            match.length,
            from_host=restored - fetched,
            fetched=fetched,
            fetched_from=source,
        )

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self._tree.page_size)

    def room_for_restore(
        self, wanted: Mapping[PoolId, int], others: int
    ) -> Mapping[PoolId, int] | None:
        """What must be free for a restore; None if an admission must not have it.

        Args:
            wanted: ids that the restore and the sequence behind it take, by pool.
            others: pages that must be left for sequences behind other restores.
        """
        memory = self._memory
        kept = self._drafts.kept_pages(0, memory.pages.capacity)
        left = memory.with_pages(wanted, kept)
        for pool in memory.page_pools:
            left[pool] += self._reservations.promised(pool)
        left[Pool.KV] += others
        if not memory.broker.fits(left) or self._must_wait(left, wanted):
            return None
        return left

    # ------------------------------------------------------------------- room

    def _check(self, seq_id: str, found: LookUp, terms: Terms) -> None:
        if seq_id in self._sequences:
            raise ValueError(f"sequence {seq_id!r} is live already")
        if found.version != self._tree.version:
            raise ValueError("the look-up is older than the tree")
        hit = found.match.length
        if terms.num_tokens <= hit:
            raise ValueError(
                f"{terms.num_tokens} tokens are no more than the {hit} hit"
            )

    def _size(self, match: Match, terms: Terms) -> _Size:
        shared = len(match.pages)
        most = self.pages_for(max(terms.num_tokens, terms.reserve_tokens))
        return _Size(
            now=self.pages_for(terms.num_tokens) - shared,
            in_all=most - shared,
            promised=self._reservations.promised(),
        )

    def _finds_room(self, match: Match, terms: Terms, size: _Size, kept: int) -> bool:
        """Whether a sequence whose hit is shared gets the rest; drafts hear if not.

        Args:
            match: its hit.
            terms: of its admission.
            size: pages that it takes.
            kept: pages that drafts keep.
        """
        memory = self._memory
        wanted = memory.wanted(
            pages=size.in_all + terms.watermark_pages + size.promised,
            window_pages=self._reservations.window_wants(size.now, terms.window_demand),
            slots=1,
            sequences=len(self._sequences) + 1,
        )
        taken = {**wanted, Pool.KV: size.in_all}
        if not self._must_wait(wanted, taken) and self._has_room(
            match, memory.with_pages(wanted, kept)
        ):
            return True
        self._drafts.refused(match, wanted, taken)
        return False

    def _must_wait(
        self, wanted: Mapping[PoolId, int], taken: Mapping[PoolId, int]
    ) -> bool:
        """Whether a sequence leaves memory to cached content that is worth more.

        Args:
            wanted: ids by pool that must be free.
            taken: those of them that the sequence takes.
        """
        lost = self._memory.price(wanted, taken)
        return lost > 0 and self._concurrency.should_wait(lost, len(self._sequences))

    def _has_room(self, match: Match, wanted: Mapping[PoolId, int]) -> bool:
        """Whether an admission gets what it wants, if restores make way for it.

        Those that began last do, which sequences behind it wait for, and none does if
        that would not be enough.
        """
        memory = self._memory
        if memory.has_room(match, wanted):
            return True
        restoring = self._lower.restoring_ids()
        if not restoring or not memory.has_room(match, wanted, returned=restoring):
            return False
        while self._lower.end_last():
            if memory.has_room(match, wanted):
                return True
        return False

    def _obtain(self, match: Match, size: _Size, kept: int) -> Allocation:
        windows = [size.now] * len(self._memory.windows)
        wanted = self._memory.wanted
        sequences = len(self._sequences) + 1
        ahead = None
        if size.in_all > size.now:
            ahead = wanted(size.in_all + size.promised, windows, 1, sequences)
        now = wanted(size.now, windows, 1, sequences)
        return self._memory.obtain(match, now=now, ahead=ahead, left=kept)

    # -------------------------------------------------------------------- hit

    def _hold(self, match: Match) -> Node | None:
        """Keep what is matched while room is made; returns the node it ends at."""
        if match.node is None:
            return None
        if not self._tree.needs_snapshots:
            node = self._tree.cut(match.node, match.length)
            self._tree.lock(node)
            return node
        self._tree.lock(match.node)
        self._tree.lock_state(match.node)
        return match.node

    def _restore(self, match: Match, room: Allocation) -> None:
        """Order the copies that make the slot and tail pages the sequence's."""
        if room.taken_over:
            return
        enqueue, needs_slot = self._enqueue, self._memory.slots.needed
        snapshot = match.node.snapshot if match.node is not None else None
        if snapshot is None:
            if needs_slot:
                enqueue(Zero(Pool.STATE, room.slot))
            return
        if match.tail_page is not None:
            enqueue(Copy(Pool.KV, match.tail_page, room.fresh[0]))
            for index, (own, fresh) in enumerate(
                zip(snapshot.windows, room.windows, strict=True)
            ):
                enqueue(Copy(Pool.window(index), own[-1], fresh[0]))
        if needs_slot:
            enqueue(Copy(Pool.STATE, snapshot.slot, room.slot))

    def _settle(self, node: Node | None, room: Allocation, terms: Terms) -> Node | None:
        """Swap the hold of admission for the lock a live sequence keeps.

        Copies run before anything that could overwrite their source, so only
        the shared pages need a lock: the path without a tail.
        """
        if node is None or not self._tree.needs_snapshots:
            return node
        kept = node.parent if node.is_tail else node
        assert kept is not None, "a tail has a parent"
        self._tree.lock(kept)
        self._tree.unlock_state(node)
        if terms.counted:
            self._memory.note_use(node, resumed=terms.resumed)
        self._tree.unlock(node)
        if room.taken_over:  # the slot is the sequence's now
            evicted = self._tree.detach_snapshot(node)
            self._memory.promises.evicted(node, evicted.snapshot)
            self._memory.pages.drop(evicted.pages)
            self._memory.drop_windows(evicted.snapshot)
        if kept.parent is None:  # before the first page there is nothing to lock
            self._tree.unlock(kept)
            return None
        return kept

    def _window_tables(self, match: Match, room: Allocation) -> tuple[WindowTable, ...]:
        memory = self._memory
        groups = zip(
            memory.windows, memory.hit_windows(match), room.windows, strict=True
        )
        return tuple(
            [
                WindowTable.resumed(
                    before + fresh, memory.live(group, match.length).start
                )
                for group, before, fresh in groups
            ]
        )

    def _learn_divergence(self, found: LookUp) -> None:
        """Learn where the sequence parts from those before it.

        A conversation that goes on where its last turn ended does not part.
        """
        match = found.match
        parts = match.kv_length > match.length
        if not parts and (not match.length or found.origin is SnapshotKind.TURN_END):
            return
        self._policy.divergences.observe(found.length - match.kv_length)


def _promise_of(found: LookUp) -> Promise | None:
    return Promise(found.ttl, frozenset(found.named)) if found.ttl else None
