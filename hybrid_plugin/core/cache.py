# SPDX-License-Identifier: Apache-2.0
"""HybridCache: everything an adapter may ask of the cache, in one object.

The life of a sequence, in the calls an adapter makes:

    look_up -> (chunk_end) -> admit -> advance -> grow -> ... -> finish

Nothing here fails under memory pressure: a call that cannot be served returns
None and has changed nothing.  Device work is queued as commands, in order;
`drain_commands` hands them to the ranks with the next step.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hybrid_plugin.core.commands import (
    Command,
    Copy,
    Pool,
    PoolId,
    SaveInPass,
    Zero,
)
from hybrid_plugin.core.drafts import Drafts
from hybrid_plugin.core.memory.broker import FixedBroker, MemoryBroker
from hybrid_plugin.core.memory.cache_memory import Allocation, CacheMemory
from hybrid_plugin.core.memory.fragmentation import FragmentationRelief
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.memory.reclaim import register_pools
from hybrid_plugin.core.memory.scratch import ScratchRows
from hybrid_plugin.core.memory.window_tables import (
    WindowDemand,
    WindowGroup,
    WindowTable,
)
from hybrid_plugin.core.misses import missed_tokens
from hybrid_plugin.core.policy.concurrency import ConcurrencyTradeoff
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.core.policy.in_batch_sharing import Prefill
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.promises import PROMISED_KINDS, Promises
from hybrid_plugin.core.sequence import Admission, LiveSequence, LookUp
from hybrid_plugin.core.stats import CacheStats, PoolLevel
from hybrid_plugin.core.tiers.fetches import Fetching
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.outer import Awaited, OuterTiers, Recording
from hybrid_plugin.core.tiers.outer_tier import OuterTier
from hybrid_plugin.core.tiers.restores import Restore, Restores, TransferRates
from hybrid_plugin.core.tiers.saves import Saving
from hybrid_plugin.core.tree.events import EventLog
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.promise import Promise
from hybrid_plugin.core.tree.radix import MambaRadixCache, Match
from hybrid_plugin.core.tree.snapshot import Snapshot, SnapshotKind
from hybrid_plugin.core.tree.tokens import Pages, Tokens, as_tokens
from hybrid_plugin.core.verification import Ending

__all__ = ["Admission", "HybridCache", "LiveSequence", "LookUp"]


NO_MATCH = Match(0, None, array("i"), None, 0)
"""The hit of a sequence that shares nothing."""


@dataclass(slots=True)
class HybridCache:
    """Pages, slots, tree and snapshots of one model replica.

    Args:
        pages: of the layers with full attention; of none, for a model without.
        slots: of the state layers; `NoSlots()` for a model without.
        page_size: tokens in a page, of every group.
        policy: where snapshots are taken.
        windows: groups of attention layers that look back only so far.
        eviction: what cached content is worth; by default its recency.
        broker: finds free ids in all pools; by default every pool keeps its memory.
        scratch: rows in which the engine verifies drafts, where they share the pools'
            memory.
        host: rows of host memory behind the device's; none by default.
        rates: how fast they are loaded, and how fast prompts are computed; for a host
            tier.
        tiers: what is behind the host, such as a disk, in the order in which they are
            asked; they need a host tier.
    """

    pages: PagePool
    slots: SlotPool
    page_size: int
    policy: SnapshotPolicy
    stats: CacheStats = field(default_factory=CacheStats)
    windows: tuple[WindowGroup, ...] = ()
    eviction: LeastRecentlyUsed | None = None
    broker: MemoryBroker = field(default_factory=FixedBroker)
    records_drafts: bool = False
    """Whether steps that verify record what their tokens do to a state, and what was
    accepted is folded into the slot before the next step's commands."""
    scratch: ScratchRows | None = None
    host: HostTier | None = None
    rates: TransferRates | None = None
    tiers: tuple[OuterTier, ...] = ()
    tree: MambaRadixCache = field(init=False)
    memory: CacheMemory = field(init=False)
    promises: Promises = field(init=False)
    drafts: Drafts = field(init=False)
    fragmentation: FragmentationRelief = field(init=False)
    _restores: Restores | None = field(init=False, default=None)
    _outer: OuterTiers | None = field(init=False, default=None)
    _unstored: list[tuple[Node, Snapshot]] = field(init=False, default_factory=list)
    """Snapshots that the host is to keep once the planned pass has run."""
    _crosses: bool = field(init=False, default=False)
    """Whether the planned pass writes what the tree has already."""
    _sequences: dict[str, LiveSequence] = field(init=False, default_factory=dict)
    _concurrency: ConcurrencyTradeoff = field(
        init=False, default_factory=ConcurrencyTradeoff
    )
    _commands: list[Command] = field(init=False, default_factory=list)
    _interior: list[tuple[Node, Snapshot, int, int]] = field(
        init=False, default_factory=list
    )
    """Snapshots that the next pass takes: node, snapshot, the sequence's slot, and the
    number of the chunk boundary."""

    def __post_init__(self) -> None:
        self.tree = MambaRadixCache(
            self.page_size,
            needs_snapshots=self.slots.needed or bool(self.windows),
            eviction=self.eviction,
        )
        # As many as there could have been: a cache of twice the size had kept them.
        self.tree.remember_evicted(self.pages.capacity * self.page_size)
        self.promises = Promises(self.tree, self.stats)
        self.memory = CacheMemory(
            self.pages,
            self.slots,
            self.windows,
            broker=self.broker,
            tree=self.tree,
            promises=self.promises,
            stats=self.stats,
            enqueue=self.enqueue,
            promised_pages=self.promised_pages,
            scratch=self.scratch,
        )
        register_pools(self.memory)
        self.fragmentation = FragmentationRelief(self.memory, self._sequences)
        self.drafts = Drafts(
            self.memory,
            self._sequences,
            self._concurrency,
            self.stats,
            recorded=self.records_drafts,
        )
        if self.host is not None:
            if self.rates is None or not self.tree.needs_snapshots:
                raise ValueError(
                    "a host tier needs measured rates, and a model with state layers "
                    "or attention windows"
                )
            self.host.send_to(self.enqueue)
            self._restores = Restores(self.memory, self.host, self.rates)
        if self.tiers:
            self.use_tiers(self.tiers)

    def use_tiers(self, tiers: Sequence[OuterTier]) -> None:
        """Have outer tiers behind the host, where they can be built only now.

        Args:
            tiers: in the order in which they are asked.

        Raises:
            ValueError: without a host tier, if there are some already, or for tiers
                that cannot go together.
        """
        if self.host is None or self.rates is None or self._outer is not None:
            raise ValueError("outer tiers need a host tier, and come once")
        self.tiers = tuple(tiers)
        self._outer = OuterTiers(self.host, self.tiers, self.rates)

    def report_to(self, events: EventLog) -> None:
        """Have what can be resumed, and what cannot any more, noted in `events`.

        Raises:
            ValueError: if something is cached already.
        """
        if next(self.tree.nodes(), None) is not None:
            raise ValueError("events do not tell what was cached before")
        self.tree.events = events

    # ----------------------------------------------------------------- look up

    def look_up(
        self,
        tokens: Sequence[int],
        namespace: Hashable = None,
        limit: int | None = None,
        *,
        snapshot_at: Sequence[int] = (),
        ttl: float | None = None,
    ) -> LookUp:
        """Find the hit of a new sequence; changes nothing.

        Args:
            tokens: all its tokens; an `array` of type code `q` is not copied.
            namespace: what besides tokens must be equal.
            limit: restore at most this many tokens; never all of them, because
                an engine must compute one to go on.
            snapshot_at: positions at which the application asks for a snapshot.
            ttl: seconds after its end within which the application promises that it
                is continued; 0 if nobody will continue it.
        """
        ids, length = as_tokens(tokens), len(tokens)
        # One token is left to compute; two where one alone would be a decode step.
        most = max(length - (2 if self.policy.canonical else 1), 0)
        if limit is not None:
            most = min(limit, most)
        match = self.tree.match(namespace, ids, limit=most)
        find = partial(LookUp, length, namespace, match, version=self.tree.version)
        if not self.tree.needs_snapshots:
            return find(planned={}, tokens=ids, ttl=ttl, limit=most)
        repays = self.tree.eviction.repays_pass
        planned = self.policy.snapshot_positions_of(
            ids,
            hit=match.length,
            kv_length=match.kv_length,
            snapshot_at=snapshot_at,
            repays=partial(repays, origin=match.origin, running=self.live),
            useless=(SnapshotKind.PROMPT_END,) if ttl == 0 else (),
        )
        step = self.policy.step
        named = tuple([position // step * step for position in snapshot_at])
        return find(planned=planned, tokens=ids, ttl=ttl, named=named, limit=most)

    def bypass(
        self,
        tokens: Sequence[int],
        namespace: Hashable = None,
        *,
        ttl: float | None = None,
    ) -> LookUp:
        """Stand in for `look_up` where a request must not be served from cache.

        Unless it is admitted with `cacheable=False`, what it computes enters
        the tree all the same: under `namespace`.
        """
        ids = as_tokens(tokens)
        return LookUp(
            len(tokens),
            namespace,
            NO_MATCH,
            {},
            self.tree.version,
            ids,
            ttl,
            may_hit=False,
        )

    def is_current(self, found: LookUp) -> bool:
        """Whether a new look-up would give the same."""
        return found.version == self.tree.version

    def chunk_end(
        self, positions: tuple[int, ...], start: int, end: int, length: int
    ) -> int:
        """Return where a prefill chunk from `start` to `end` should end.

        It pauses where a forward pass cannot keep a state inside.

        Args:
            positions: snapshot positions of the sequence.
            start: its first token in the chunk.
            end: where the chunk would end for want of the engine's budget.
            length: tokens of the sequence; at its end nothing is cut short.

        Returns:
            The end; `start` if the sequence must wait for a larger budget.
        """
        inside = self.policy.is_interior
        position = next(
            (one for one in positions if start < one < end and not inside(one)), None
        )
        if position is not None:
            return position
        return end if end >= length else self.policy.align_chunk_end(start, end, length)

    def snapshot_positions_of(self, seq_id: str) -> tuple[int, ...]:
        """Snapshot positions of the live sequence's prefill."""
        return self._sequences[seq_id].snapshot_positions

    def pause_at(self, seq_id: str, position: int) -> None:
        """Have a live sequence take a snapshot at a page end that it has not passed."""
        sequence = self._sequences[seq_id]
        if not sequence.computed < position < sequence.prompt_length:
            raise ValueError(f"{seq_id!r} does not get to {position} any more")
        planned = {position: SnapshotKind.REQUESTED} | sequence.planned
        sequence.planned = dict(sorted(planned.items()))

    def prefilling(self) -> list[Prefill]:
        """Live sequences that still compute prompts which others may resume from."""
        if not self.tree.needs_snapshots:
            return []
        return [
            Prefill(
                seq_id,
                sequence.prompt,
                sequence.namespace,
                partial(int, sequence.computed),
                {one for one in sequence.planned if one > sequence.computed},
            )
            for seq_id, sequence in self._sequences.items()
            if sequence.cacheable and sequence.in_tree < sequence.prompt_length
        ]

    # ---------------------------------------------------------------- host tier

    def restore(self, found: LookUp, after: Awaited | None = None) -> Awaited | None:
        """Begin to restore what other tiers have of a waiting sequence beyond its hit.

        Call it for a sequence that could be admitted now.  Where it returns something
        that is not over, the sequence waits, and is looked up again when it is: the
        time must pass (`pass_time`), outcomes must be reported (`outer_done`), or
        everything else must end.  If the sequence is counted in its `waiters`, ask by
        `is_restored`.  Sequences that wait for the same prefix get the same.  What is
        on the host is restored to the device; what is behind it is fetched to the host
        first.  Either begins only if it is over before the tokens are computed, and
        takes no memory of the device that the admission would not take.

        Args:
            found: its look-up, not older than the step.
            after: what the sequence waited for last, if anything.  Is what a restore
                brought gone already, the sequence waits no more; nothing is fetched
                twice in a row.

        Returns:
            What to wait for; one that is over asks for another look-up at once.  None
            if the sequence should be admitted as it is.
        """
        if self._restores is None or not found.limit:
            return None
        if self.fragmentation.begins or self.fragmentation.holds_back:
            return None
        if isinstance(after, Restore) and found.match.length < after.length:
            return None
        now = self.promises.pace.now
        self._restores.rates.running = self.live
        if self._outer is not None and not isinstance(after, Fetching):
            fetch = self._outer.fetch(found, now, self._restores.queued(now))
            if fetch is not None:
                return fetch
        restore = self._restores.begin(found, now, self._with_promised)
        if restore is not None and not self._sequences:
            self.end_restores()
        return restore

    def prefetch(self, found: LookUp) -> Fetching | None:
        """Begin to fetch to the host what outer tiers have of a waiting sequence.

        `restore` does it too, for a sequence that could be admitted; here nobody asks
        whether it could.  Is something returned, it is what the sequence waits for.
        """
        if self._restores is None or self._outer is None or not found.limit:
            return None
        now = self.promises.pace.now
        self._restores.rates.running = self.live
        return self._outer.fetch(found, now, self._restores.queued(now))

    def offer(self, namespace: Hashable, tokens: Sequence[int]) -> str | None:
        """Let another server read the longest prefix that the host has of a sequence.

        Call it when the sequence has ended.  The prefix stays on the host until the
        outcome is reported (`outer_done`), or everything is flushed.

        Args:
            namespace: of the sequence.
            tokens: as many of it as another server can use.

        Returns:
            What that server must know; None if the host has nothing of it, or if there
            is no tier for offers.
        """
        if self._outer is None:
            return None
        return self._outer.offer(namespace, as_tokens(tokens))

    def decline(self, key: str) -> None:
        """Have another server be told that what it offers is not needed.

        Args:
            key: of its offer, as the tier finds it.
        """
        assert self._outer is not None, "who offers is behind the host"
        self._outer.decline(key)

    def is_restored(self, awaited: Awaited) -> bool:
        """Whether a sequence that waited for something need not wait for it any more.

        Ends a restore if it should be over, so call it when the sequence could be
        admitted.  Nobody waits for a fetch any more that has taken as long as
        computing would, though it is not over.
        """
        now = self.promises.pace.now
        if awaited.is_over or self._restores is None:
            return True
        if isinstance(awaited, Fetching):
            return now >= awaited.awaited_until
        if awaited.due > now:
            return False
        self._restores.end(awaited)
        return True

    def outer_done(
        self,
        ticket: int,
        ok: bool,
        *,
        reason: str = "unknown",
        bundle: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Take the report on a `Write`, `Fetch` or `Offer`, on which all ranks agree.

        Where each rank has a cache, all of them must hear the same reports, in the same
        order, between the same steps.

        Args:
            ticket: of the command.
            ok: whether every rank has done it.
            reason: in few words, where one has not; failures are counted by it.
            bundle: index of the bundle of a fetch that could not be read, if known.
            seconds: what it took the slowest rank, if measured.

        Raises:
            ValueError: for a ticket that is not out.
        """
        if self._outer is None:
            raise ValueError("there is no outer tier")
        now = self.promises.pace.now
        self._outer.done(ticket, ok, now, reason=reason, bundle=bundle, seconds=seconds)

    # ------------------------------------------------------- kept in an outer tier

    def save(self, tokens: Sequence[int], namespace: Hashable = None) -> Saving | None:
        """Have what can be resumed of a sequence in the outer tier, before all others.

        It goes on while steps are made; what it takes of the host's memory is in use
        until it is over.

        Args:
            tokens: of the sequence; all of them may be resumed.
            namespace: what besides tokens must be equal.

        Returns:
            What becomes of the longest prefix that device, host or outer tier can
            resume; None if there is none.

        Raises:
            ValueError: if no outer tier keeps bundles.
        """
        if self._outer is None:
            raise ValueError("there is no outer tier")
        ids = as_tokens(tokens)
        match = self.tree.match(namespace, ids, len(ids))
        return self._outer.save(namespace, ids, match.length)

    def bring(
        self, tokens: Sequence[int], namespace: Hashable = None
    ) -> Fetching | None:
        """Begin to fetch a sequence to the host before anybody needs it there.

        Args:
            tokens: of the sequence; all of them may be resumed.
            namespace: what besides tokens must be equal.

        Returns:
            The fetch; None if no tier has more of it than device and host, or if all of
            the host's memory is in use.

        Raises:
            ValueError: if there is no outer tier.
        """
        if self._outer is None:
            raise ValueError("there is no outer tier")
        ids, length = as_tokens(tokens), len(tokens)
        match = self.tree.match(namespace, ids, length)
        found = LookUp(
            length, namespace, match, {}, self.tree.version, ids, limit=length
        )
        return self._outer.bring(found, self.promises.pace.now)

    def resumable(self, tokens: Sequence[int], namespace: Hashable = None) -> int:
        """Tokens of a sequence that device or host can resume."""
        ids = as_tokens(tokens)
        on_device = self.tree.match(namespace, ids, len(ids)).length
        if self.host is None:
            return on_device
        return max(on_device, self.host.match(namespace, ids, len(ids)).length)

    def record(
        self, name: str, text: str | None, discard: Sequence[str] = ()
    ) -> Recording:
        """Have a text kept beside the bundles, on all ranks, behind what is written.

        Args:
            name: hexadecimal digits; another text of that name goes.
            text: to keep; None removes it.
            discard: keys of bundles that go before, which nobody finds any more.

        Raises:
            ValueError: if no outer tier keeps bundles.
        """
        if self._outer is None:
            raise ValueError("there is no outer tier")
        return self._outer.record(name, text, discard)

    def discard(self, keys: Sequence[str]) -> None:
        """Remove bundles that an outer tier does not find any more.

        Args:
            keys: of them, as the tier calls them.
        """
        if self._outer is not None:
            self._outer.discard(keys)

    @property
    def fetching(self) -> int:
        """Fetches that are out: sequences wait, though nothing may run."""
        return 0 if self._outer is None else self._outer.fetching

    @property
    def writing(self) -> int:
        """Writes that are out, or begin with the next commands if the host keeps them.

        No sequence waits for them; but they go on only while steps are made.
        """
        outer = self._outer
        return 0 if outer is None else outer.writing + outer.to_write

    @property
    def offering(self) -> int:
        """Offers that are out: rows of the host are in use, and nobody waits."""
        return 0 if self._outer is None else self._outer.offering

    @property
    def has_unsent_offers(self) -> bool:
        """Whether ranks hear of an offer, or that one is withdrawn or not needed, only
        with the next commands: other servers may wait for it."""
        return self._outer is not None and self._outer.is_unsent

    def end_restores(self) -> bool:
        """Have the model's stream wait for all loads: what they bring is ordinary.

        The cache does it by itself in time.  An engine whose cache knows no time calls
        it where all ranks do; False if there was nothing to wait for.
        """
        return self._restores is not None and self._restores.end_all()

    def restoring(self, pool: PoolId) -> int:
        """Ids of a pool that restores alone have in use: they make way for others."""
        if self._restores is None or not self._restores.running:
            return 0
        return len(self._restores.held().get(pool, ()))

    @property
    def restores_due(self) -> float | None:
        """When the next restore should be over, on the cache's clock; None for none."""
        running = self._restores.running if self._restores is not None else []
        return running[0].due if running else None

    # --------------------------------------------------------------- admission

    def admit(
        self,
        seq_id: str,
        found: LookUp,
        *,
        num_tokens: int,
        reserve_tokens: int = 0,
        watermark_pages: int = 0,
        window_demand: WindowDemand | None = None,
        cacheable: bool = True,
        resumed: bool = False,
        counted: bool = True,
    ) -> Admission | None:
        """Start a sequence: give it pages for `num_tokens` tokens, and a state slot.

        Args:
            seq_id: name of the sequence; it must not be live.
            found: a current look-up.
            num_tokens: tokens to have pages for now.
            reserve_tokens: tokens that must fit, though pages for them come later.
                Nobody is admitted on those meanwhile; decoding may take them.
            watermark_pages: pages that must be left over.
            window_demand: reserve as many pages of each window group as the sequence
                holds at most, as long as it lives: `grow` always finds them.  By
                default nothing is reserved there.
            cacheable: whether its KV and states may enter the tree.
            resumed: whether it ran before, so that its hit counts apart.
            counted: whether its hit counts at all.

        Returns:
            None if there is no room, with nothing changed.  If nothing is live then,
            the hit is what leaves no room, and is evicted: look up again.
        """
        if seq_id in self._sequences:
            raise ValueError(f"sequence {seq_id!r} is live already")
        if not self.is_current(found):
            raise ValueError("the look-up is older than the tree")
        match = found.match
        if num_tokens <= match.length:
            raise ValueError(
                f"{num_tokens} tokens are no more than the {match.length} hit"
            )
        if self.fragmentation.holds_back:
            self.stats.refusals += 1
            return None
        cacheable = cacheable and not self.fragmentation.begins
        shared = len(match.pages)
        most = self._pages_for(max(num_tokens, reserve_tokens))
        count = self._pages_for(num_tokens) - shared
        self.memory.share(match)
        # A sequence in the middle of its prompt has reserved the rest of its pages.
        promised = self.promised_pages()
        windows = [count] * len(self.windows)
        wanted = self.memory.wanted(
            pages=most - shared + watermark_pages + promised,
            window_pages=self._window_wants(count, window_demand),
            slots=1,
            sequences=self.live + 1,
        )
        kept = self.drafts.kept_pages(found.length, most)
        waits = self._must_wait(wanted)
        if waits or not self._has_room(match, self.memory.with_pages(wanted, kept)):
            self.drafts.refused(match, wanted, waits=True)
            self.memory.unshare(match)
            self.stats.refusals += 1
            if match.length and not self._sequences:
                self.end_restores()
                self.fragmentation.refused_hit()
            return None
        if counted and not resumed:
            self.stats.computed_tokens.update(missed_tokens(self.tree, found))
        self.tree.begin_admission()
        self.promises.pace.admitted()
        self._learn_divergence(found)
        held, origin = self._hold(match), found.origin
        restored, brought = self._take_restored(match) if counted else (0, ("", 0))
        room = self.memory.obtain(
            match,
            now=self.memory.wanted(
                pages=count, window_pages=windows, slots=1, sequences=self.live + 1
            ),
            ahead=self.memory.wanted(
                pages=most - shared + promised,
                window_pages=windows,
                slots=1,
                sequences=self.live + 1,
            )
            if most - shared > count
            else None,
            left=kept,
        )
        self._restore(match, room)
        tables = self._window_tables(match, room)
        if counted:
            self.stats.record_hit(found.length, match.length, resumed=resumed)
        counts = counted and not resumed
        self._note_host_use(found, restored, brought, counts=counts)
        pages = match.pages + room.fresh
        self._sequences[seq_id] = LiveSequence(
            namespace=found.namespace,
            pages=pages,
            slot=room.slot,
            hit=match.length,
            planned=dict(found.planned),
            prompt_length=found.length,
            locked=self._settle(held, room, resumed=resumed),
            cacheable=cacheable,
            origin=origin,
            prompt=found.tokens,
            computed=match.length,
            last_snapshot=match.length,
            reserved=most,
            windows=tables,
            window_demand=window_demand,
            is_last_turn=found.ttl == 0,
            promise=_promise_of(found) if cacheable else None,
            admitted_at=self.tree.clock,
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

    def grow(self, seq_id: str, num_tokens: int) -> Pages | None:
        """Give a live sequence pages for `num_tokens` tokens in all.

        Returns:
            The new pages, or None if there is no room, with nothing changed.
            New pages of window groups are found in the sequence's record.
        """
        sequence = self._sequences[seq_id]
        count = self._pages_for(num_tokens) - len(sequence.pages)
        if count <= 0:  # most steps of a decode end inside a page
            return array("i")
        wanted = dict.fromkeys(self.memory.page_pools, count)
        while not (provided := self.broker.provide(wanted)) and self._end_last():
            pass
        if not provided:
            self.drafts.refused(NO_MATCH, wanted, waits=False)
            self.stats.refusals += 1
            self.fragmentation.refused_growth(sequence, self._pages_for(num_tokens))
            return None
        fresh = self.pages.allocate(count)
        sequence.pages += fresh
        windows = self.memory.allocate_windows(fresh)
        for table, pages in zip(sequence.windows, windows, strict=True):
            table.pages += pages
        return fresh

    def cross(self, seq_id: str, end: int) -> None:
        """Order the snapshots that the next forward pass takes inside a prompt.

        Call it for every sequence that the pass takes on, before the pass's commands
        are drained.  The tree has the snapshots at once: what resumes from one is
        scheduled later, and runs behind the pass.

        Args:
            seq_id: a live sequence.
            end: tokens that its KV and state cover once the pass has run.
        """
        sequence = self._sequences[seq_id]
        if not self.policy.grid or sequence.in_tree >= sequence.prompt_length:
            return
        for position in sequence.planned:
            if sequence.computed < position < end and self.policy.is_interior(position):
                self._take_inside(sequence, position)

    def advance(self, seq_id: str, computed: int) -> None:
        """Note that a step was scheduled which takes a sequence to `computed`.

        Call it after the step's commands were drained: a snapshot taken here
        is a copy that must run behind that step.

        Args:
            seq_id: a live sequence.
            computed: tokens that its KV and state cover once the step has run.
        """
        sequence = self._sequences[seq_id]
        sequence.computed = computed
        if sequence.in_tree < sequence.prompt_length:
            if self._is_snapshot_position(sequence, computed):
                self._take_snapshot(sequence, computed)
                sequence.last_snapshot = computed
            if computed >= sequence.prompt_length:
                if sequence.cacheable and sequence.prompt_length >= self.page_size:
                    self._insert_pages(
                        sequence, sequence.prompt, sequence.prompt_length
                    )
                sequence.in_tree = sequence.prompt_length
                sequence.planned = {}
                sequence.prompt = array("q")
        self.trim(seq_id, computed)

    def trim(self, seq_id: str, computed: int) -> None:
        """Free the pages that no window of a sequence reaches any more.

        `advance` does it too; while a sequence decodes, nothing else does.

        Args:
            seq_id: a live sequence.
            computed: tokens that are computed once the steps scheduled so far
                have run, and that are final.
        """
        sequence = self._sequences[seq_id]
        for group, table in zip(self.windows, sequence.windows, strict=True):
            first = group.window.first_needed(computed) // self.page_size
            group.pages.release(table.trim(first))

    # ------------------------------------------------------------- speculation

    def lend_drafts(
        self, wanted: Mapping[str, int], growth: Mapping[str, int], lookahead: int = 0
    ) -> int:
        """Lend live sequences slots for the states after their drafts.

        They are free slots, or those of snapshots worth less.  Call it before each step
        is planned.  A sequence's columns 1, 2, ... behind its own slot are then
        `LiveSequence.drafts`.  What it holds stays, unless slots or pages are short:
        then all slots are taken back that the last step noted did not verify in, which
        the next one selects no state from.

        Args:
            wanted: drafts that the step should verify, by sequence.
            growth: tokens for which each live sequence will need pages in the step, its
                drafts not counted; what is not there does not grow beyond its prompt.
            lookahead: tokens behind a step's own that `growth` counts for each sequence
                which decodes.

        Returns:
            The step's width: each sequence may verify so many of its drafts.  It is the
            greatest for which all find slots, and pages besides; 0 where somebody waits
            for what drafts hold, or would get.
        """
        return self.drafts.lend(wanted, growth, lookahead)

    def foresee_drafts(
        self, wanted: Mapping[str, int], growth: Mapping[str, int]
    ) -> int:
        """How wide the step after the one that is planned now can be; changes nothing.

        It may turn out narrower, and is never wider: more drafts than that are proposed
        for nothing.

        Args:
            wanted: drafts that the step should verify, by sequence.
            growth: as in `lend_drafts`, of that step.
        """
        return self.drafts.foresee(wanted, growth)

    @property
    def drafts_held(self) -> int:
        """Slots lent for drafts now."""
        return self.slots.drafts

    @property
    def drafts_wanted_back(self) -> bool:
        """Whether an admission or growth waits for memory that drafts hold.

        The next step verifies no drafts, and what it leaves behind is then taken back.
        """
        return self.slots.drafts > 0 and self.drafts.wait

    def verify(
        self,
        seq_id: str,
        start: int | None,
        drafts: int,
        *,
        row: int | None = None,
        known: int | None = None,
    ) -> None:
        """Note that a step was scheduled which verifies drafts of a sequence.

        The step takes one token that is known when it runs, and the drafts.  From the
        first call on, every step of the sequence must be noted, without drafts too, in
        the order in which they run, and `accept` says what became of each.  Call it
        after the step's commands were drained.

        Args:
            seq_id: a live sequence whose prompt is computed; in draft slots, its last
                token may be the known one, unless steps record what they do.
            start: tokens computed before the step, as the engine counts: with all
                drafts of steps in flight.  None where it does not count ahead; the
                first step must have it.
            drafts: number of drafts.
            row: where the engine verifies in a scratch and then commits to the slot,
                the row of the scratch; otherwise draft slots are needed, or a record.
            known: tokens of the sequence known now, for a check of what was accepted;
                an engine that does not count ahead has no other.

        Raises:
            ValueError: if the counts differ from the cache's, or slots are missing.
        """
        sequence = self._sequences[seq_id]
        self.drafts.verify(sequence, start=start, drafts=drafts, row=row, known=known)

    def accept(
        self, seq_id: str, accepted: int, columns: Sequence[int] | None = None
    ) -> None:
        """Note the outcome of the oldest step in flight that was noted with `verify`.

        Call it for every one of them, before a sequence is ended by what it generated,
        with what was accepted before the output was cut at a stop.

        Args:
            seq_id: a live sequence.
            accepted: number of accepted drafts.
            columns: steps of the scratch that have the states after each of them, if
                the drafts were a tree; a chain's are 1, 2, ...

        Raises:
            ValueError: if the step cannot have had that outcome.
        """
        path = None if columns is None else tuple(columns)
        self.drafts.accept(self._sequences[seq_id], accepted, path)

    def forget_scratch(self) -> None:
        """Note that something else than a verification has written the scratch."""
        self.drafts.forget_scratch()

    def is_verifying(self, seq_id: str) -> bool:
        """Whether steps of a live sequence were noted with `verify`."""
        return self._sequences[seq_id].steps is not None

    def trim_scratch(self, batch: int = 0) -> None:
        """Give back the rows of the scratch that no step needs any more.

        Call it before the commands of each step are drained, and when nothing runs.
        What gets their memory runs behind the steps that were launched.

        Args:
            batch: sequences that the next step verifies; they may have ended since it
                was planned.

        Raises:
            ValueError: if there are not so many rows.
        """
        if self.scratch is not None:
            self.scratch.keep(max(self.live, batch, self.drafts.rows_to_take))

    # ------------------------------------------------------------- time and end

    def pass_time(self, now: float) -> None:
        """Set the time, by which the TTLs of sequences end.

        Args:
            now: seconds, of a clock that starts anywhere and is equal on all ranks.
        """
        self.promises.pass_time(now)
        if self._restores is not None:
            self._restores.end_due(self.promises.pace.now)

    def finish(
        self,
        seq_id: str,
        tokens: Sequence[int],
        computed: int | None = None,
        *,
        preempted: bool = False,
    ) -> None:
        """End a sequence, finished, aborted or preempted alike.

        Its KV enters the tree, and the slot with its state too, as the snapshot of its
        known tokens: nothing is copied but, where drafts were accepted, the window of a
        convolution.  If nobody will continue it, nothing enters.

        Args:
            seq_id: a live sequence.
            tokens: all its tokens that are known.
            computed: tokens that its KV and state cover, with every step that was
                scheduled.  Where that is more than are known (a step in flight
                has consumed a token nobody has seen), a state is worthless.  None for
                a sequence whose steps were noted with `verify`: they say it.
            preempted: whether the sequence itself will be resumed.

        Raises:
            ValueError: if the steps noted and the known tokens do not fit together.
        """
        ending = self._ending(seq_id, len(tokens), computed)
        sequence = self._sequences.pop(seq_id)
        self._concurrency.ended(max(ending.length - sequence.prompt_length, 0))
        kept, end = None, None
        if (
            sequence.cacheable
            and ending.length > 0
            and (preempted or not sequence.is_last_turn)
        ):
            self._count_turn_end(ending)
            if self.policy.canonical and ending.length > sequence.prompt_length:
                ending = Ending(sequence.prompt_length, None)
            end, kept = self._donate(sequence, tokens, ending)
        if sequence.promise is not None:
            self.promises.begin_ttl(sequence.promise, end)
        self.pages.release(sequence.pages)
        for group, table in zip(self.windows, sequence.windows, strict=True):
            group.pages.release(table.held())
        self.drafts.free(sequence)
        if kept != sequence.slot:
            self.slots.free_running(sequence.slot)
        if sequence.locked is not None:
            self.tree.unlock(sequence.locked)
        if not self._sequences:  # nothing runs that the wait would hold up
            self.end_restores()
            self.fragmentation.ended(sequence, preempted=preempted)

    def flush(self) -> bool:
        """Forget everything cached.

        Returns:
            False, with nothing changed, while a sequence is live.
        """
        if self._sequences:
            return False
        self.end_restores()
        self._unstored.clear()
        self.promises.clear()
        for evicted in self.tree.clear():
            self.memory.take_back(evicted)
        if self._outer is not None:
            self._outer.flush()
        if self.host is not None:
            self.host.clear()
        return True

    def enqueue(self, command: Command) -> None:
        """Queue a command behind those that are queued already."""
        self._commands.append(command)

    def drain_commands(self) -> list[Command]:
        """Take the commands to run before the next forward pass."""
        if self._outer is not None:
            self._outer.before_commands()
        commands, self._commands = self._commands, []
        # Only now: until here a snapshot might have been moved, or evicted for another.
        commands += [
            SaveInPass(Pool.STATE, slot, boundary, snapshot.slot)
            for node, snapshot, slot, boundary in self._interior
            if node.snapshot is snapshot
        ]
        self._interior = []
        self.drafts.step_planned()
        self._crosses = False
        unstored, self._unstored = self._unstored, []
        for node, snapshot in unstored:
            if node.snapshot is snapshot:
                self._store(node)
        if self._outer is not None:
            self._outer.go_on_saving(self._store_at_any_price)
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

    def promised_pages(self, pool: PoolId = Pool.KV) -> int:
        """Pages that live sequences have reserved and do not hold yet.

        Of full attention, those for the rest of their prompts.
        """
        if pool == Pool.KV:
            return sum([sequence.promised for sequence in self._sequences.values()])
        index = list(self.memory.page_pools).index(pool) - 1
        return max(self._reserved_pages(index) - self._window_pages_held(index), 0)

    def levels(self) -> dict[PoolId, PoolLevel]:
        """How full each pool is."""
        found = {
            name: PoolLevel(pool.in_use, pool.reclaimable, pool.free)
            for name, pool in self.memory.page_pools.items()
        }
        slots = self.slots
        used = slots.running + slots.drafts
        found[Pool.STATE] = PoolLevel(used, slots.snapshots, slots.free)
        if self.scratch is not None:
            rows = self.scratch.ids
            found[Pool.SCRATCH] = PoolLevel(rows.live, rows.cached, rows.free)
        if self.host is not None:
            found |= self.host.levels()
        return found

    # ---------------------------------------------------- internal: admission

    def _window_wants(
        self, count: int, demand: WindowDemand | None = None
    ) -> list[int]:
        """Pages of each window group that must be there to admit a sequence.

        Sequences that share a page do not leave it at the same time, so what each of
        them reserves counts in full.

        Args:
            count: pages that it gets at once, its hit shared already.
            demand: what it wants to have reserved.
        """
        wants = []
        for index, group in enumerate(self.windows):
            reserved = self._reserved_pages(index)
            if demand is not None:
                reserved += demand.pages(group.window, self.page_size, prefilling=True)
            wants.append(max(count, reserved - self._window_pages_held(index)))
        return wants

    def _window_pages_held(self, index: int) -> int:
        """Pages of a window group that live sequences hold."""
        restores = self._restores
        loading = 0 if restores is None else restores.window_pages(index)
        return self.windows[index].pages.in_use - loading

    def _reserved_pages(self, index: int) -> int:
        """Pages of a window group that live sequences reserved, held or not."""
        window = self.windows[index].window
        return sum(
            [
                sequence.window_demand.pages(
                    window,
                    self.page_size,
                    prefilling=sequence.in_tree < sequence.prompt_length,
                )
                for sequence in self._sequences.values()
                if sequence.window_demand is not None
            ]
        )

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _has_room(self, match: Match, wanted: Mapping[PoolId, int]) -> bool:
        """Whether an admission gets what it wants, if restores make way for it.

        Those that began last do, which sequences behind it wait for, and none does if
        that would not be enough.
        """
        if self.memory.has_room(match, wanted):
            return True
        restores = self._restores
        if restores is None or not restores.running:
            return False
        if not self.memory.has_room(match, wanted, returned=restores.held()):
            return False
        while self._end_last():
            if self.memory.has_room(match, wanted):
                return True
        return False

    def _end_last(self) -> bool:
        """Have the restore that began last end now; False if there is none."""
        restores = self._restores
        if restores is None or not restores.running:
            return False
        restores.end(restores.running[-1])
        return True

    def _with_promised(self, wanted: Mapping[PoolId, int]) -> dict[PoolId, int] | None:
        """What must be free for a restore; None if an admission must not have it."""
        left = self.memory.with_pages(
            wanted, self.drafts.kept_pages(0, self.pages.capacity)
        )
        for pool in self.memory.page_pools:
            left[pool] += self.promised_pages(pool)
        if not self.broker.fits(left) or self._must_wait(left):
            return None
        return left

    def _take_restored(self, match: Match) -> tuple[int, tuple[str, int]]:
        """Tokens of a hit that other tiers brought for this sequence.

        Returns:
            All of them, and the name of the outer tier with its part of them.
        """
        snapshot = match.node.snapshot if match.node is not None else None
        if snapshot is None:
            return 0, ("", 0)
        restored, snapshot.restored = snapshot.restored, 0
        fetched, snapshot.fetched = snapshot.fetched, 0
        return restored, (snapshot.source, fetched)

    def _note_host_use(
        self,
        found: LookUp,
        restored: int,
        brought: tuple[str, int],
        *,
        counts: bool,
    ) -> None:
        """Tell the tiers of an admission."""
        if self.host is None:
            return
        hit = found.match.length
        self.host.used(found.namespace, found.tokens, hit)
        if not counts:
            return
        source, fetched = brought
        missed = found.length - hit + restored
        self.host.stats.queried_tokens += missed
        self.host.stats.hit_tokens += restored - fetched
        for tier in self.tiers:
            tier.stats.queried_tokens += missed - restored + fetched
            tier.stats.hit_tokens += fetched * (tier.name == source)

    def _must_wait(self, wanted: Mapping[PoolId, int]) -> bool:
        """Whether a sequence leaves memory to cached content that is worth more."""
        lost = self.memory.price(wanted)
        return lost > 0 and self._concurrency.should_wait(lost, self.live)

    def _hold(self, match: Match) -> Node | None:
        """Keep what is matched while room is made; returns the node it ends at."""
        if match.node is None:
            return None
        if not self.tree.needs_snapshots:
            node = self.tree.cut(match.node, match.length)
            self.tree.lock(node)
            return node
        self.tree.lock(match.node)
        self.tree.lock_state(match.node)
        return match.node

    def _restore(self, match: Match, room: Allocation) -> None:
        """Order the copies that make the slot and tail pages the sequence's."""
        if room.taken_over:
            return
        snapshot = match.node.snapshot if match.node is not None else None
        if snapshot is None:
            if self.slots.needed:
                self._commands.append(Zero(Pool.STATE, room.slot))
            return
        if match.tail_page is not None:
            self._commands.append(Copy(Pool.KV, match.tail_page, room.fresh[0]))
            for index, (own, fresh) in enumerate(
                zip(snapshot.windows, room.windows, strict=True)
            ):
                self._commands.append(Copy(Pool.window(index), own[-1], fresh[0]))
        if self.slots.needed:
            self._commands.append(Copy(Pool.STATE, snapshot.slot, room.slot))

    def _settle(
        self, node: Node | None, room: Allocation, *, resumed: bool
    ) -> Node | None:
        """Swap the hold of admission for the lock a live sequence keeps.

        Copies run before anything that could overwrite their source, so only
        the shared pages need a lock: the path without a tail.
        """
        if node is None or not self.tree.needs_snapshots:
            return node
        kept = node.parent if node.is_tail else node
        assert kept is not None, "a tail has a parent"
        self.tree.lock(kept)
        self.tree.unlock_state(node)
        self.tree.use_snapshot(node)
        self.promises.used(node, resumed=resumed)
        self.tree.unlock(node)
        if room.taken_over:  # the slot is the sequence's now
            evicted = self.tree.detach_snapshot(node)
            self.pages.drop(evicted.pages)
            self.memory.drop_windows(evicted.snapshot)
        if kept.parent is None:  # before the first page there is nothing to lock
            self.tree.unlock(kept)
            return None
        return kept

    def _window_tables(self, match: Match, room: Allocation) -> tuple[WindowTable, ...]:
        shared = self.memory.hit_windows(match)
        return tuple(
            [
                WindowTable.resumed(
                    before + fresh, self.memory.live(group, match.length).start
                )
                for group, before, fresh in zip(
                    self.windows, shared, room.windows, strict=True
                )
            ]
        )

    def _learn_divergence(self, found: LookUp) -> None:
        """Learn where the sequence parts from those before it.

        A conversation that goes on where its last turn ended does not part.
        """
        match = found.match
        if match.kv_length > match.length:
            node = match.kv_node
            if node is not None and node.is_leaf and node.snapshot is None:
                self.tree.eviction.branched_off(node, self.tree.clock)
        elif not match.length or found.origin is SnapshotKind.TURN_END:
            return
        self.policy.divergences.observe(found.length - match.kv_length)

    # ---------------------------------------------------- internal: insertion

    def _is_snapshot_position(self, sequence: LiveSequence, computed: int) -> bool:
        return computed in sequence.planned or (
            computed < sequence.prompt_length
            and self.policy.keeps_chunk_end(computed, sequence.last_snapshot)
        )

    def _insert_pages(
        self, sequence: LiveSequence, tokens: Sequence[int], length: int
    ) -> Node:
        """Put the whole pages of the first `length` tokens into the tree."""
        size, count = self.page_size, length // self.page_size
        after = sequence.locked
        start = sequence.locked_tokens
        if count * size < start:  # it ends before its hit
            after, start = None, 0
        node, taken = self.tree.insert(
            sequence.namespace,
            as_tokens(tokens[start : count * size]),
            sequence.pages[start // size : count],
            after,
        )
        self.pages.adopt(taken)
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
            self.tree.lock(node)
            if before is not None:
                self.tree.unlock(before)
            sequence.locked = node

    def _take_snapshot(self, sequence: LiveSequence, length: int) -> None:
        """Copy the running state into the tree, if a slot can be had for it."""
        node = self._new_snapshot(sequence, length)
        if node is not None and self.slots.needed:
            self._commands.append(Copy(Pool.STATE, sequence.slot, _snapshot(node).slot))
        if node is not None:
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
        if not self.slots.needed:
            return
        grid = self.policy.grid
        boundary = position // grid - sequence.computed // grid - 1
        self._interior.append((node, _snapshot(node), sequence.slot, boundary))
        self.stats.interior_snapshots += 1

    def _new_snapshot(self, sequence: LiveSequence, length: int) -> Node | None:
        """Give the first `length` tokens of a sequence a snapshot without content.

        Returns:
            The node that got it; None if it has one already, or gets none.
        """
        if not sequence.cacheable or not self.tree.needs_snapshots:
            return None
        node = self._insert_pages(sequence, sequence.prompt, length)
        if node.snapshot is not None:
            self.tree.touch_snapshot(node)
            self._store(node)
            return None
        kind = sequence.planned.get(length, SnapshotKind.CHUNK_END)
        planned = Snapshot(0, kind=kind, origin=sequence.origin)
        if kind in PROMISED_KINDS:
            planned.promise = sequence.promise
        if not self.memory.free_snapshot_slot(node, planned):
            return None
        self._attach(node, sequence, self.slots.allocate_snapshot(), kind)
        return node

    def _attach(
        self,
        node: Node,
        sequence: LiveSequence,
        slot: int,
        kind: SnapshotKind,
    ) -> None:
        """Give the node a snapshot with the window pages of its path.

        They are those that `sequence` holds, where the path's KV pages are its own.
        """
        held = []
        for group, table in zip(self.windows, sequence.windows, strict=True):
            live = self.memory.live(group, node.end)
            held.append(table.pages[live.start : live.stop])
        windows = self.memory.settle_windows(node, sequence.pages, held)
        snapshot = Snapshot(slot, windows, kind, sequence.origin)
        self.tree.attach_snapshot(node, snapshot)
        if sequence.promise is not None and kind in PROMISED_KINDS:
            self.promises.give(sequence.promise, node)
        self.stats.snapshots_taken += 1

    def _ending(self, seq_id: str, known: int, computed: int | None) -> Ending:
        """Where a live sequence ends, if so many tokens of it are known."""
        steps = self._sequences[seq_id].steps
        if steps is not None:
            if computed is not None:
                raise ValueError(f"the steps of {seq_id!r} say what is computed")
            return self.drafts.ending(steps, known)
        if computed is None:
            raise ValueError(f"no step of {seq_id!r} was noted")
        length = min(known, computed)
        return Ending(length, 0 if length == computed else None)

    def _count_turn_end(self, ending: Ending) -> None:
        if not self.slots.needed or self.policy.canonical:
            return
        if ending.column is None:
            self.stats.turn_ends_missed += 1
        else:
            self.stats.turn_ends_exact += 1

    def _donate(
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
        length = ending.length
        resumable = self.tree.needs_snapshots and (
            ending.column is not None or self._holds_windows(sequence, length)
        )
        if self.policy.canonical:
            resumable = resumable and self.policy.is_interior(length)
        if not resumable and length < self.page_size:
            return None, None
        node = self._insert_pages(sequence, tokens, length)
        if not resumable:
            return node, None
        rest: Tokens = as_tokens(tokens[node.end : length])
        if rest:
            page = sequence.pages[node.end // self.page_size]
            node, taken = self.tree.insert_tail(node, rest, page)
            if taken:
                self.pages.adopt((page,))
        if node.snapshot is not None:
            self.tree.touch_snapshot(node)
            self._store(node)
            return node, None
        slot = self.drafts.keep(sequence, ending)
        self._attach(node, sequence, slot, SnapshotKind.TURN_END)
        self._store(node)
        return node, slot

    def _store(self, node: Node) -> None:
        """Have the host keep what can be resumed at a node, if it does not already.

        While a pass is planned that writes KV or states of the tree, it waits for it.
        """
        if self.host is None:
            return
        if self._crosses:
            self._unstored.append((node, _snapshot(node)))
            return
        namespace, tokens, pages = self.tree.path_of(node)
        self.host.store(namespace, tokens, pages, _snapshot(node))

    def _store_at_any_price(self, namespace: Hashable, tokens: Tokens) -> None:
        """Have the host keep a prefix that the device can resume, if it has the memory.

        No pass is planned: the device has what its tree says.
        """
        assert self.host is not None and not self._crosses
        match = self.tree.match(namespace, tokens, len(tokens))
        if match.node is not None and match.length == len(tokens):
            _, _, pages = self.tree.path_of(match.node)
            snapshot = _snapshot(match.node)
            self.host.store(namespace, tokens, pages, snapshot, at_any_price=True)

    def _holds_windows(self, sequence: LiveSequence, length: int) -> bool:
        """Whether a sequence without states can be resumed at `length`.

        It can if it still holds the pages that its windows cover there.  Later steps
        only add KV behind `length`; a state they would have overwritten.
        """
        tables = zip(self.windows, sequence.windows, strict=True)
        return not self.slots.needed and all(
            table.first <= self.memory.live(group, length).start
            for group, table in tables
        )


def _promise_of(found: LookUp) -> Promise | None:
    return Promise(found.ttl, frozenset(found.named)) if found.ttl else None


def _snapshot(node: Node) -> Snapshot:
    assert node.snapshot is not None
    return node.snapshot
