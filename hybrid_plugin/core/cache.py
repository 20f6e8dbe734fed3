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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from itertools import chain

from hybrid_plugin.core.admissions import NO_MATCH, Admissions, Terms
from hybrid_plugin.core.commands import (
    Command,
    Pool,
    PoolId,
)
from hybrid_plugin.core.drafts import Drafts
from hybrid_plugin.core.insertion import Insertion
from hybrid_plugin.core.memory.broker import FixedBroker, MemoryBroker
from hybrid_plugin.core.memory.cache_memory import CacheMemory
from hybrid_plugin.core.memory.fragmentation import FragmentationRelief
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.memory.reclaim import register_pools
from hybrid_plugin.core.memory.reservations import Reservations
from hybrid_plugin.core.memory.scratch import ScratchRows
from hybrid_plugin.core.memory.window_tables import (
    WindowDemand,
    WindowGroup,
)
from hybrid_plugin.core.policy.concurrency import ConcurrencyTradeoff
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.core.policy.in_batch_sharing import Prefill
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.promises import Promises
from hybrid_plugin.core.sequence import Admission, LiveSequence, LookUp
from hybrid_plugin.core.stats import CacheStats, PoolLevel
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.lower import LowerTiers
from hybrid_plugin.core.tiers.outer_tier import OuterTier
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.core.tree.events import EventLog
from hybrid_plugin.core.tree.radix import MambaRadixCache
from hybrid_plugin.core.tree.snapshot import SnapshotKind
from hybrid_plugin.core.tree.tokens import Pages, as_tokens
from hybrid_plugin.core.verification import Ending

__all__ = ["Admission", "HybridCache", "LiveSequence", "LookUp"]


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
        concurrency: says when cached content is worth more than one more sequence.
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
    concurrency: ConcurrencyTradeoff = field(default_factory=ConcurrencyTradeoff)
    records_drafts: bool = False
    """Whether steps that verify record what their tokens do to a state, and what was
    accepted is folded into the slot before the next step's commands."""
    scratch: ScratchRows | None = None
    host: HostTier | None = None
    rates: TransferRates | None = None
    tiers: InitVar[tuple[OuterTier, ...]] = ()
    tree: MambaRadixCache = field(init=False)
    memory: CacheMemory = field(init=False)
    promises: Promises = field(init=False)
    drafts: Drafts = field(init=False)
    fragmentation: FragmentationRelief = field(init=False)
    lower_tiers: LowerTiers = field(init=False)
    """Host memory and what is behind it."""
    _sequences: dict[str, LiveSequence] = field(init=False, default_factory=dict)
    _commands: list[Command] = field(init=False, default_factory=list)
    _reservations: Reservations = field(init=False)
    _admissions: Admissions = field(init=False)
    _insertion: Insertion = field(init=False)

    def __post_init__(self, tiers: tuple[OuterTier, ...]) -> None:
        self.tree = MambaRadixCache(
            self.page_size,
            needs_snapshots=self.slots.needed or bool(self.windows),
            eviction=self.eviction,
        )
        # As many as there could have been: a cache of twice the size had kept them.
        self.tree.remember_evicted(self.pages.capacity * self.page_size)
        self.promises = Promises(self.tree, self.stats)
        self._reservations = Reservations(
            self.page_size,
            self.windows,
            self._sequences,
            lambda index: self.lower_tiers.window_pages(index),
        )
        self.memory = CacheMemory(
            self.pages,
            self.slots,
            self.windows,
            broker=self.broker,
            tree=self.tree,
            promises=self.promises,
            stats=self.stats,
            enqueue=self.enqueue,
            promised_pages=self._reservations.promised,
            scratch=self.scratch,
        )
        register_pools(self.memory)
        self.fragmentation = FragmentationRelief(self.memory, self._sequences)
        self.drafts = Drafts(
            self.memory,
            self._sequences,
            self.concurrency,
            self.stats,
            recorded=self.records_drafts,
        )
        self.lower_tiers = LowerTiers(
            self.memory,
            self.fragmentation,
            host=self.host,
            rates=self.rates,
            running=self._sequences.__len__,
            needs=lambda wanted, others: self._admissions.room_for_restore(
                wanted, others
            ),
        )
        self._admissions = Admissions(
            self.memory,
            self._sequences,
            self._reservations,
            self.policy,
            concurrency=self.concurrency,
            fragmentation=self.fragmentation,
            drafts=self.drafts,
            lower=self.lower_tiers,
        )
        self._insertion = Insertion(
            self.memory, self.policy, self.drafts, self.lower_tiers
        )
        if tiers:
            self.lower_tiers.use_outer(tiers)

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
        pause_at: Sequence[int] = (),
        ttl: float | None = None,
    ) -> LookUp:
        """Find the hit of a new sequence; changes nothing.

        Args:
            tokens: all its tokens; an `array` of type code `q` is not copied.
            namespace: what besides tokens must be equal.
            limit: restore at most this many tokens; never all of them, because
                an engine must compute one to go on.
            snapshot_at: positions at which the application asks for a snapshot.
            pause_at: page ends at which other sequences wait for one.
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
            snapshot_at=(*snapshot_at, *pause_at),
            repays=partial(repays, origin=match.origin, running=self.live),
            useless=(SnapshotKind.PROMPT_END,) if ttl == 0 else (),
        )
        named = tuple(chain.from_iterable(map(self.policy.floors, snapshot_at)))
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
            if sequence.cacheable and sequence.is_prefilling
        ]

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
        terms = Terms(
            num_tokens=num_tokens,
            reserve_tokens=reserve_tokens,
            watermark_pages=watermark_pages,
            window_demand=window_demand,
            cacheable=cacheable,
            resumed=resumed,
            counted=counted,
        )
        return self._admissions.admit(seq_id, found, terms)

    def grow(self, seq_id: str, num_tokens: int) -> Pages | None:
        """Give a live sequence pages for `num_tokens` tokens in all.

        Returns:
            The new pages, or None if there is no room, with nothing changed.
            New pages of window groups are found in the sequence's record.
        """
        sequence = self._sequences[seq_id]
        count = self._admissions.pages_for(num_tokens) - len(sequence.pages)
        if count <= 0:  # most steps of a decode end inside a page
            return array("i")
        wanted = dict.fromkeys(self.memory.page_pools, count)
        while (
            not (provided := self.broker.provide(wanted))
            and self.lower_tiers.end_last()
        ):
            pass
        if not provided:
            self.drafts.refused(NO_MATCH, wanted)
            self.stats.refusals += 1
            self.fragmentation.refused_growth(sequence, len(sequence.pages) + count)
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
        self._insertion.cross(self._sequences[seq_id], end)

    def advance(self, seq_id: str, computed: int) -> None:
        """Note that a step was scheduled which takes a sequence to `computed`.

        Call it after the step's commands were drained: a snapshot taken here
        is a copy that must run behind that step.

        Args:
            seq_id: a live sequence.
            computed: tokens that its KV and state cover once the step has run.
        """
        self._insertion.advance(self._sequences[seq_id], computed)
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
        self.lower_tiers.end_due()

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
        self.concurrency.ended(max(ending.length - sequence.prompt_length, 0))
        kept, end = None, None
        if (
            sequence.cacheable
            and ending.length > 0
            and (preempted or not sequence.is_last_turn)
        ):
            end, kept = self._insertion.end(sequence, tokens, ending)
        if sequence.promise is not None:
            # Whoever was preempted goes on by itself, and promises anew at its end.
            sequence.promise.is_settled |= preempted
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
            self.lower_tiers.end_restores()
            self.fragmentation.ended(sequence, preempted=preempted)

    def leave_nothing(self, is_meant: Callable[[Hashable], bool]) -> None:
        """Have nothing more enter the tree of live sequences, whose weights changed.

        Args:
            is_meant: says of a namespace whether its sequences are meant.
        """
        for sequence in self._sequences.values():
            sequence.cacheable &= not is_meant(sequence.namespace)

    def flush(self) -> bool:
        """Forget everything cached.

        Returns:
            False, with nothing changed, while a sequence is live.
        """
        if self._sequences:
            return False
        self.lower_tiers.end_restores()
        self._insertion.flush()
        self.promises.clear()
        for evicted in self.tree.clear():
            self.memory.take_back(evicted)
        self.lower_tiers.flush()
        return True

    def enqueue(self, command: Command) -> None:
        """Queue a command behind those that are queued already."""
        self._commands.append(command)

    def drain_commands(self) -> list[Command]:
        """Take the commands to run before the next forward pass."""
        self.lower_tiers.before_commands()
        commands, self._commands = self._commands, []
        commands += self._insertion.saves_in_pass()
        self.drafts.step_planned()
        self._insertion.after_commands()
        self.lower_tiers.after_commands()
        return commands

    # ------------------------------------------------------------- inspection

    def is_live(self, seq_id: str) -> bool:
        """Whether the sequence was admitted and has not finished."""
        return seq_id in self._sequences

    def is_prefilling(self, seq_id: str) -> bool:
        """Whether `advance` still has something to do for a live sequence."""
        return self._sequences[seq_id].is_prefilling

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
        return self._reservations.promised(pool)

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
        found |= self.lower_tiers.levels()
        return found

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
