# SPDX-License-Identifier: Apache-2.0
"""Drafts: the slots lent to sequences that verify, and when they are wanted back.

A sequence needs one slot; while it verifies `d` drafts, `d` more, until the step after
it has run, because that step selects its state by column.  They are lent from what is
left: admissions come first, and no cached content goes for them that is expected to
save more prefill than drafts save decode steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_plugin.core.commands import Fold, MoveWindow, Pool, PoolId, Take
from hybrid_plugin.core.memory.cache_memory import CacheMemory
from hybrid_plugin.core.policy.concurrency import ConcurrencyTradeoff
from hybrid_plugin.core.policy.speculation import DraftGain
from hybrid_plugin.core.sequence import LiveSequence
from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.core.tree.radix import Match
from hybrid_plugin.core.verification import Ending, Verification, VerifyingStep


class Drafts:
    """Draft slots of one cache, and the steps that use them."""

    def __init__(
        self,
        memory: CacheMemory,
        sequences: Mapping[str, LiveSequence],
        concurrency: ConcurrencyTradeoff,
        stats: CacheStats,
        *,
        recorded: bool = False,
    ) -> None:
        """Lend from a cache's memory.

        Args:
            memory: where slots are.
            sequences: that are live, always.
            concurrency: knows how long sequences decode, and who must wait.
            stats: where lent and refused slots are counted.
            recorded: whether steps record what their tokens do; then drafts need no
                slots.
        """
        self._memory = memory
        self._slots = memory.slots
        self._sequences = sequences
        self._concurrency = concurrency
        self._stats = stats
        self.recorded = recorded
        self.gain = DraftGain()
        self._refused_now = False
        self._refused_before = False
        self._passes = 0
        self._scratch_pass = 0
        """The last forward pass that wrote the scratch."""

    # ------------------------------------------------------------------- slots

    @property
    def need_slots(self) -> bool:
        """Whether each draft needs a slot for the state behind it."""
        return self._slots.needed and not self.recorded

    def hold(self, sequence: LiveSequence, count: int) -> list[int]:
        """Lend a sequence slots until it holds `count`, or no more can be had."""
        missing = count - len(sequence.drafts)
        if missing <= 0 or not self.need_slots:
            return []
        held = len(sequence.drafts)
        if not self.wait:
            worth = self._worth(sequence, count)
            while len(sequence.drafts) < count and self._free_one(worth):
                sequence.drafts.append(self._slots.allocate_draft())
        fresh = sequence.drafts[held:]
        self._stats.drafts_lent += len(fresh)
        self._stats.drafts_refused += missing - len(fresh)
        return fresh

    def give_back(self, sequence: LiveSequence) -> None:
        """Free a sequence's draft slots.

        Raises:
            ValueError: if the next step selects its state among them.
        """
        steps = sequence.steps
        if steps is not None and steps.newest is not None and steps.newest.drafts:
            raise ValueError("a step that verifies drafts was the last one scheduled")
        self.free(sequence)

    def free(self, sequence: LiveSequence) -> None:
        """Free the draft slots of a sequence that ends, or has settled."""
        self._slots.free_drafts(sequence.drafts)
        sequence.drafts = []

    def _worth(self, sequence: LiveSequence, count: int) -> float:
        answer, running = self._concurrency.answer, len(self._sequences)
        saved = self.gain.saved_tokens(count, answer, running)
        eviction = self._memory.tree.eviction
        return eviction.worth_of_drafts(saved, count, sequence.admitted_at)

    def _free_one(self, worth: float) -> bool:
        """Have one slot free, if it is nobody's or its content is worth less."""
        if not self._leaves_pages(slots=1):
            return False
        return bool(self._slots.free) or self._memory.broker.offer(Pool.STATE, worth)

    def _leaves_pages(self, slots: int) -> bool:
        """Whether all sequences find their pages, if so many more slots are lent.

        Where memory moves, drafts could hold what their own sequences grow into.  They
        are given back within two steps, in which sequences may verify once more.
        """
        memory = self._memory
        if not memory.broker.moves_memory:
            return True
        sequences, size = self._sequences.values(), memory.tree.page_size
        pages = sum([-(-2 * (1 + len(one.drafts)) // size) for one in sequences])
        pages += -(-2 * slots // size)
        wanted = {
            pool: memory.promised_pages(pool) + pages for pool in memory.page_pools
        }
        return memory.broker.fits({**wanted, Pool.STATE: slots})

    # ---------------------------------------------------------------- pressure

    @property
    def wait(self) -> bool:
        """Whether a sequence waits for memory that drafts have, or would get."""
        return self._refused_now or self._refused_before

    def refused(
        self, match: Match, wanted: Mapping[PoolId, int], *, waits: bool
    ) -> None:
        """Note a refusal: whether it wanted what drafts have, or would get.

        Args:
            match: the hit of an admission, shared; an empty one of a growth.
            wanted: ids by pool.
            waits: whether it leaves memory to content that is worth more.
        """
        if not self._slots.needed:
            return
        drafts = self._slots.draft_ids()
        # With one slot less: the next one that is free must be for it, not for drafts.
        others = {**wanted, Pool.STATE: 0}
        if not self._memory.has_room(match, others, returned=drafts):
            return
        others[Pool.STATE] -= len(drafts)
        lost = self._memory.price(others)
        running = len(self._sequences) if waits else 0
        if not (lost > 0 and self._concurrency.should_wait(lost, running)):
            self._refused_now = True

    def step_planned(self) -> None:
        """Begin to plan another step: what was refused before the last one is over."""
        lacks_pages = self._slots.drafts > 0 and not self._leaves_pages(slots=0)
        self._refused_before = self._refused_now or lacks_pages
        self._refused_now = False
        self._passes += 1

    # ------------------------------------------------------------------- steps

    def verify(
        self,
        sequence: LiveSequence,
        *,
        start: int | None,
        drafts: int,
        row: int | None,
        known: int | None,
    ) -> None:
        """Note a step of a sequence; see `HybridCache.verify`."""
        steps, recorded = sequence.steps, self.recorded and row is None
        step = VerifyingStep(drafts, row, self._passes, recorded)
        if row is None and self.need_slots and drafts > len(sequence.drafts):
            raise ValueError(
                f"{drafts} drafts are verified in {len(sequence.drafts)} slots"
            )
        if steps is None:
            # A scratch or a record is committed to the slot, which must not pass the
            # prompt's end before the cache has seen its state there.
            left = 1 if row is None and not recorded else 0
            if start is None or start + left < sequence.prompt_length:
                raise ValueError(
                    f"the first step that is noted starts behind {start} tokens, of a "
                    f"prompt of {sequence.prompt_length}"
                )
            steps = Verification(start)
        elif (newest := steps.newest) and (newest.row is None) != (row is None):
            raise ValueError("a sequence verifies in slots, or in a scratch")
        steps.schedule(start, step, known)
        sequence.steps = steps
        if row is not None:
            self._scratch_pass = self._passes

    def forget_scratch(self) -> None:
        """Note that the scratch holds no states any more."""
        self._scratch_pass = -1

    @property
    def rows_to_take(self) -> int:
        """Rows of the scratch, from the first on, that a state may be taken from."""
        verified = [one.steps for one in self._sequences.values() if one.steps]
        newest = [steps.newest for steps in verified]
        written = [
            step.row + 1
            for step in newest
            if step and step.row is not None and step.number == self._scratch_pass
        ]
        return max(written, default=0)

    def accept(
        self, sequence: LiveSequence, accepted: int, columns: tuple[int, ...] | None
    ) -> None:
        """Note the outcome of a step; see `HybridCache.accept`."""
        if sequence.steps is None:
            raise ValueError("an outcome came, but no step was noted")
        if sequence.steps.accept(accepted, columns):
            self.gain.observe(accepted)

    def ending(self, steps: Verification, known: int) -> Ending:
        """Where a sequence ends, if so many of its tokens are known.

        Raises:
            ValueError: if so many cannot be known.
        """
        ending = steps.end(known)
        step = ending.step
        if step is None:
            return ending
        if step.recorded and step.number != self._passes:
            # What was accepted was folded into the slot since.
            exact = not steps.in_flight and ending.length == steps.final
            return Ending(ending.length, 0 if exact else None)
        if not step.recorded and step.number != self._scratch_pass:
            return Ending(ending.length, None)  # another pass wrote the row since
        return ending

    def keep(self, sequence: LiveSequence, ending: Ending) -> int:
        """Turn the slot with the state of an ending sequence into a snapshot.

        Returns:
            That slot; commands that complete it are queued.
        """
        slot, column, enqueue = sequence.slot, ending.column, self._memory.enqueue
        if not self._slots.needed:
            return slot
        assert column is not None, "a state that is lost is not kept"
        if ending.step is not None and ending.step.recorded:
            enqueue(Fold(Pool.STATE, slot, 1 + column))
        elif ending.step is not None and ending.step.row is not None:
            enqueue(Take(Pool.STATE, ending.step.row, column, slot))
        elif column:
            slot = sequence.drafts.pop(column - 1)
            enqueue(MoveWindow(Pool.STATE, sequence.slot, column, slot))
            self._slots.promote(slot)
            return slot
        self._slots.donate(slot)
        return slot
