# SPDX-License-Identifier: Apache-2.0
"""Drafts: the slots lent to sequences that verify, and when they are wanted back.

A sequence needs one slot; while it verifies `d` drafts, `d` more, until the step after
it has run, because that step selects its state by column.  They are lent from what is
left: admissions come first, and no cached content goes for them that is expected to
save more prefill than drafts save decode steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_plugin.core.commands import MoveWindow, Pool, PoolId, Take
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
        self, memory: CacheMemory, concurrency: ConcurrencyTradeoff, stats: CacheStats
    ) -> None:
        """Lend from a cache's memory.

        Args:
            memory: where slots are.
            concurrency: knows how long sequences decode, and who must wait.
            stats: where lent and refused slots are counted.
        """
        self._memory = memory
        self._slots = memory.slots
        self._concurrency = concurrency
        self._stats = stats
        self.gain = DraftGain()
        self._refused_now = False
        self._refused_before = False

    # ------------------------------------------------------------------- slots

    def hold(self, sequence: LiveSequence, count: int, running: int) -> list[int]:
        """Lend a sequence slots until it holds `count`, or no more can be had.

        Args:
            sequence: that verifies.
            count: drafts in a step.
            running: number of live sequences.
        """
        missing = count - len(sequence.drafts)
        if missing <= 0 or not self._slots.needed:
            return []
        fresh: list[int] = []
        if not self.wait:
            worth = self._worth(sequence, count, running)
            while len(fresh) < missing and self._free_one(worth):
                fresh.append(self._slots.allocate_draft())
        sequence.drafts += fresh
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

    def _worth(self, sequence: LiveSequence, count: int, running: int) -> float:
        saved = self.gain.saved_tokens(count, self._concurrency.answer, running)
        eviction = self._memory.tree.eviction
        return eviction.worth_of_drafts(saved, count, sequence.admitted_at)

    def _free_one(self, worth: float) -> bool:
        """Have one slot free, if it is nobody's or its content is worth less."""
        promised = {
            pool: self._memory.promised_pages(pool) for pool in self._memory.page_pools
        }
        if self._memory.broker.moves_memory and not self._memory.broker.fits(
            {**promised, Pool.STATE: 1}
        ):
            return False
        return bool(self._slots.free) or self._memory.broker.offer(Pool.STATE, worth)

    # ---------------------------------------------------------------- pressure

    @property
    def wait(self) -> bool:
        """Whether an admission or growth waits for a slot or its memory."""
        return self._refused_now or self._refused_before

    def refused(
        self, match: Match, wanted: Mapping[PoolId, int], *, running: int
    ) -> None:
        """Note a refusal: whether it wanted what drafts have, or would get.

        Args:
            match: the hit of an admission, shared; an empty one of a growth.
            wanted: ids by pool.
            running: number of live sequences that it may wait for; 0 if it may not.
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
        if not (lost > 0 and self._concurrency.should_wait(lost, running)):
            self._refused_now = True

    def step_planned(self) -> None:
        """Begin to plan another step: what was refused before the last one is over."""
        self._refused_before, self._refused_now = self._refused_now, False

    # ------------------------------------------------------------------- steps

    def verify(
        self, sequence: LiveSequence, start: int | None, step: VerifyingStep
    ) -> None:
        """Note a step of a sequence; see `HybridCache.verify`."""
        steps = sequence.steps
        if step.row is None and self._slots.needed:
            held = len(sequence.drafts)
            if step.drafts > held:
                raise ValueError(f"{step.drafts} drafts are verified in {held} slots")
        if steps is None:
            if start is None or start + 1 < sequence.prompt_length:
                raise ValueError(
                    f"the first step that is noted starts behind {start} tokens, of a "
                    f"prompt of {sequence.prompt_length}"
                )
            steps = Verification(start)
        elif (newest := steps.newest) and (newest.row is None) != (step.row is None):
            raise ValueError("a sequence verifies in slots, or in a scratch")
        steps.schedule(start, step)
        sequence.steps = steps

    def accept(
        self, sequence: LiveSequence, accepted: int, columns: tuple[int, ...] | None
    ) -> None:
        """Note the outcome of a step; see `HybridCache.accept`."""
        if sequence.steps is None:
            raise ValueError("an outcome came, but no step was noted")
        if sequence.steps.accept(accepted, columns):
            self.gain.observe(accepted)

    def keep(self, sequence: LiveSequence, ending: Ending) -> int:
        """Turn the slot with the state of an ending sequence into a snapshot.

        Returns:
            That slot; commands that complete it are queued.
        """
        slot, column, enqueue = sequence.slot, ending.column, self._memory.enqueue
        if not self._slots.needed:
            return slot
        assert column is not None, "a state that is lost is not kept"
        if ending.row is not None:
            enqueue(Take(Pool.STATE, ending.row, column, slot))
        elif column:
            slot = sequence.drafts.pop(column - 1)
            enqueue(MoveWindow(Pool.STATE, sequence.slot, column, slot))
            self._slots.promote(slot)
            return slot
        self._slots.donate(slot)
        return slot
