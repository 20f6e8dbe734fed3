# SPDX-License-Identifier: Apache-2.0
"""Drafts: the slots lent to sequences that verify, and when they are wanted back.

A sequence needs one slot; while it verifies `d` drafts, `d` more, until the step after
it has run, because that step selects its state by column.  They are lent from what is
left: admissions come first, and no cached content goes for them that is expected to
save more prefill than drafts save decode steps.  What is left goes to all sequences of
a step alike: its *width* is the greatest number of drafts for which all find slots and
pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        self._lacks_pages = False
        """Whether the step to come is the last that finds its pages beside drafts."""
        self._next: dict[str, int] = {}
        """Tokens that sequences need pages for in the step after the one planned now,
        if that verifies nothing."""
        self._ahead = 0
        """Tokens behind its known ones that a sequence's next step may want pages for:
        its drafts, or the engine's look-ahead."""
        self._passes = 0
        self._scratch_pass = 0
        """The last forward pass that wrote the scratch."""

    # ------------------------------------------------------------------- slots

    @property
    def need_slots(self) -> bool:
        """Whether each draft needs a slot for the state behind it."""
        return self._slots.needed and not self.recorded

    def lend(
        self, wanted: Mapping[str, int], growth: Mapping[str, int], lookahead: int = 0
    ) -> int:
        """Lend slots for a step; see `HybridCache.lend_drafts`."""
        most = max(wanted.values(), default=0)
        self._ahead = max(self._ahead, most, lookahead)
        width = self._lend(wanted, growth, most)
        if (width < most or self.wait) and self._take_back(wanted, width):
            width = self._lend(wanted, growth, most)
        self._next = {
            name: tokens + min(wanted.get(name, 0), width) + 1
            for name, tokens in growth.items()
        }
        dropped = [max(count - width, 0) for count in wanted.values()]
        self._stats.drafts_refused += sum(dropped)
        return width

    def foresee(self, wanted: Mapping[str, int], growth: Mapping[str, int]) -> int:
        """How wide a step can be; see `HybridCache.foresee_drafts`."""
        width = 0 if self._refused_now else max(wanted.values(), default=0)
        while width > 0:
            slots = sum([min(count, width) for count in wanted.values()])
            slots = max(slots - self._slots.drafts, 0)
            fits = self._fits(wanted, growth, width, slots)
            if fits and self._may_find(slots, wanted):
                break
            width -= 1
        return width

    def free(self, sequence: LiveSequence) -> None:
        """Free all draft slots of a sequence that ends."""
        self._slots.free_drafts(sequence.drafts)
        sequence.drafts = []

    def _take_back(self, wanted: Mapping[str, int], width: int) -> bool:
        """Free the slots beyond a width that no next step selects its state from.

        Returns:
            Whether there were any.
        """
        before = self._slots.drafts
        for name, sequence in self._sequences.items():
            newest = sequence.steps.newest if sequence.steps is not None else None
            selected = newest.drafts if newest is not None else 0
            kept = max(selected, min(wanted.get(name, 0), width))
            self._slots.free_drafts(sequence.drafts[kept:])
            del sequence.drafts[kept:]
        return self._slots.drafts < before

    def _lend(
        self, wanted: Mapping[str, int], growth: Mapping[str, int], width: int
    ) -> int:
        """Lend slots for up to that width; returns the width."""
        width = self._narrowed(wanted, growth, width)
        moves = self._memory.broker.moves_memory
        self._lacks_pages = width < 0 and moves and self._slots.drafts > 0
        if self.wait or width <= 0:
            return 0
        least = min(len(self._sequences[name].drafts) for name in wanted)
        for level in range(least + 1, width + 1):
            if not self._widen(wanted, growth, level):
                return level - 1
        return width

    def _narrowed(
        self, wanted: Mapping[str, int], growth: Mapping[str, int], width: int
    ) -> int:
        """The greatest width up to that one which fits; -1 if none does."""
        while width >= 0:
            if self._fits(wanted, growth, width, self._missing(wanted, width)):
                break
            width -= 1
        return width

    def _fits(
        self,
        wanted: Mapping[str, int],
        growth: Mapping[str, int],
        width: int,
        slots: int,
    ) -> bool:
        """Whether there is memory for a step of that width, whatever is evicted.

        Where memory moves, drafts could hold what their own sequences grow into.  They
        are free behind a step without drafts, so that one must find pages as well.
        """
        memory = self._memory
        pages, size = 0, memory.tree.page_size
        further = int(memory.broker.moves_memory) + size - 1  # rounds up
        for name, sequence in self._sequences.items():
            tokens = growth.get(name, 0) + min(wanted.get(name, 0), width)
            most = max((tokens + further) // size, sequence.reserved)
            pages += max(most - len(sequence.pages), 0)
        needs: dict[PoolId, int] = {
            pool: pages + (0 if pool == Pool.KV else memory.promised_pages(pool))
            for pool in memory.page_pools
        }
        if self.need_slots:
            needs[Pool.STATE] = slots
        return memory.broker.fits(needs)

    def _missing(self, wanted: Mapping[str, int], width: int) -> int:
        return sum([n for _, n in self._lacking(wanted, width)])

    def _lacking(
        self, wanted: Mapping[str, int], width: int
    ) -> list[tuple[LiveSequence, int]]:
        """Sequences that hold too few slots for a width, and how many they miss."""
        found = []
        for name, count in wanted.items():
            sequence = self._sequences[name]
            missing = min(count, width) - len(sequence.drafts)
            if missing > 0:
                found.append((sequence, missing))
        return found

    def _widen(
        self, wanted: Mapping[str, int], growth: Mapping[str, int], width: int
    ) -> bool:
        """Have all sequences hold one slot more for a width, or none."""
        if not self.need_slots:
            return True
        lacking = self._lacking(wanted, width)
        if not self._free_for([sequence for sequence, _ in lacking], wanted):
            return False
        for sequence, _ in lacking:
            sequence.drafts.append(self._slots.allocate_draft())
        moves = self._memory.broker.moves_memory
        if lacking and moves and not self._fits(wanted, growth, width, slots=0):
            # Slots take granules as a whole, which cannot be counted before.
            self._take_last([one for one, _ in lacking])
            return False
        self._stats.drafts_lent += len(lacking)
        return True

    def _take_last(self, sequences: Sequence[LiveSequence]) -> None:
        """Take back the slot that each got last, which no step has seen."""
        self._slots.free_drafts([sequence.drafts.pop() for sequence in sequences])

    def _may_find(self, slots: int, wanted: Mapping[str, int]) -> bool:
        """Whether so many slots can be had, as far as is known without trying.

        Where memory moves, or something is worth less than drafts, they may be.
        """
        needed = self.need_slots and not self._memory.broker.moves_memory
        if not needed or slots <= self._slots.free:
            return True
        least, most = self._memory.tree.snapshot_worth(), max(wanted.values())
        return least is not None and any(
            least < self._worth(self._sequences[name], most) for name in wanted
        )

    def _worth(self, sequence: LiveSequence, count: int) -> float:
        answer, running = self._concurrency.answer, len(self._sequences)
        saved = self.gain.saved_tokens(count, answer, running)
        eviction = self._memory.tree.eviction
        return eviction.worth_of_drafts(saved, count, sequence.admitted_at)

    def _free_for(
        self, sequences: Sequence[LiveSequence], wanted: Mapping[str, int]
    ) -> bool:
        """Have a slot free for each of them, nobody's or of content worth less."""
        if self._slots.free >= len(sequences):
            return True
        most = max(wanted.values())
        worth = min([self._worth(sequence, most) for sequence in sequences])
        return self._memory.broker.offer({Pool.STATE: len(sequences)}, worth)

    # ---------------------------------------------------------------- pressure

    @property
    def wait(self) -> bool:
        """Whether a sequence waits for memory that drafts have, or would get."""
        return self._refused_now or self._refused_before or self._lacks_pages

    def kept_pages(self, prompt_length: int, pages: int) -> int:
        """Pages that an admission must leave, so that drafts can make way in time.

        Where memory moves, drafts hold what their sequences could grow into until a
        step without them has been planned: that one must find its pages, for a prompt
        whose first chunk was admitted as well.

        Args:
            prompt_length: of the sequence to be admitted.
            pages: that it asks for, shared ones counted.
        """
        if not self._slots.drafts or not self._memory.broker.moves_memory:
            return 0
        kept = self._further(prompt_length + 1 + self._ahead, pages)
        for name, sequence in self._sequences.items():
            first = sequence.prompt_length + 1 + self._ahead
            held = max(len(sequence.pages), sequence.reserved)
            kept += self._further(self._next.get(name, first), held)
        return kept

    def _further(self, tokens: int, pages: int) -> int:
        """Pages for so many tokens beside those."""
        return max(-(-tokens // self._memory.tree.page_size) - pages, 0)

    def refused(
        self,
        match: Match,
        wanted: Mapping[PoolId, int],
        taken: Mapping[PoolId, int] | None = None,
    ) -> None:
        """Note a refusal: whether it wanted what drafts have, or would get.

        Args:
            match: the hit of an admission, shared; an empty one of a growth.
            wanted: ids by pool.
            taken: those of them that an admission takes, which leaves memory to content
                that is worth more; None for a growth, which does not.
        """
        if not self.need_slots:
            return
        drafts = self._slots.draft_ids()
        # With one slot less: the next one that is free must be for it, not for drafts.
        others = {**wanted, Pool.STATE: 0}
        if not self._memory.has_room(match, others, returned={Pool.STATE: drafts}):
            return
        others[Pool.STATE] -= len(drafts)
        lost = 0.0 if taken is None else self._memory.price(others, taken)
        running = len(self._sequences)
        if not (lost > 0 and self._concurrency.should_wait(lost, running)):
            self._refused_now = True

    def step_planned(self) -> None:
        """Begin to plan another step: what was refused before the last one is over."""
        self._refused_before, self._refused_now = self._refused_now, False
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

    def forget_scratch(self) -> None:
        """Note that the scratch holds no states any more."""
        self._scratch_pass = -1

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
