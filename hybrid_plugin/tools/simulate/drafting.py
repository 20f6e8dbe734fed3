# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in a simulation: memory for drafts, and what is accepted.

Slots are asked for in the calls of vLLM's adapter, so the cache decides who gets some.
A scratch is SGLang's: it lies beside the pools, with room for all that may run.
Whether a draft is right is drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.tools.simulate.job import Job

_HALVINGS = 60
"""More than the digits of a float."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What is drafted, and how good it is."""

    drafts: int
    """Of a step, in a chain."""
    length: float
    """Tokens that a verification of all of them gives on average: those accepted, and
    the one after them."""
    scratch: bool = False
    """Whether states after drafts lie in a scratch, not in slots lent for them."""

    def __post_init__(self) -> None:
        if not 1 <= self.length <= 1 + self.drafts:
            raise ConfigError(
                f"--acceptance is tokens of a verification, from 1 to {1 + self.drafts}"
                f" with {self.drafts} drafts, got {self.length:g}."
            )

    def scratch_bytes(self, sequences: int, state_bytes: int) -> int:
        """Of a scratch for so many sequences, and one more for padding; 0 without."""
        return (sequences + 1) * (1 + self.drafts) * state_bytes * self.scratch

    def decodes(self, drafts: int) -> float:
        """Decodes that a verification reads and writes as many states as.

        A decode reads one and writes one; a verification reads one and writes one after
        each token, of which a scratch is copied from once more.
        """
        if not drafts and not self.scratch:
            return 1.0
        return 1.0 + drafts / 2 + self.scratch

    @property
    def chance(self) -> float:
        """Probability that a draft is right if those before it are.

        The same for all, so that `length` is the sum of its powers up to `drafts`.
        """
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if sum(middle**n for n in range(self.drafts + 1)) < self.length:
                low = middle
            else:
                high = middle
        return high


class Drafting:
    """Draft slots and verified steps of one engine.

    Before each pass `lend`, then what the pass takes is planned; its commands being
    drained, `verify`.
    """

    def __init__(self, cache: HybridCache, speculation: Speculation) -> None:
        """Begin without jobs."""
        self._cache = cache
        self._most = speculation.drafts
        self._chance = speculation.chance
        self._lends = cache.slots.needed and not speculation.scratch
        self.speculation = speculation
        self._planned: dict[Job, int] = {}
        self.verifications = 0
        """Of sequences with at least one draft."""
        self.accepted = 0
        """Drafts."""
        self.narrowed = 0
        """Passes without drafts, for want of memory or because somebody waited."""
        self.peak_slots = 0

    def lend(self, running: Iterable[Job]) -> None:
        """Have slots for the drafts of the next pass.

        All jobs verify equally many; none where somebody waits for what drafts hold.

        Args:
            running: in the order in which they are scheduled.
        """
        cache, jobs = self._cache, list(running)
        wanted = {job.seq_id: self._most for job in jobs if not job.is_prefilling}
        width = self._most
        if self._lends:
            growth = {job.seq_id: job.num_tokens for job in jobs}
            width = cache.lend_drafts(wanted, growth)
        self.narrowed += bool(wanted) and not width
        self._planned = {job: width for job in jobs if job.seq_id in wanted}
        self.peak_slots = max(self.peak_slots, cache.drafts_held)

    def drafts(self, job: Job) -> int:
        """Drafts of a job in the next pass."""
        return self._planned.get(job, 0)

    def verify(self, drafts: Mapping[Job, int]) -> dict[Job, int]:
        """Note a pass, and draw what becomes of it.

        Args:
            drafts: of each job that decodes in it, whose `computed` is that of its
                known token.

        Returns:
            Drafts accepted.
        """
        cache = self._cache
        accepted = {}
        for place, (job, count) in enumerate(drafts.items()):
            start = job.computed - 1
            row = place if self.speculation.scratch else None
            cache.verify(job.seq_id, start, count, row=row, known=job.num_tokens)
            accepted[job] = self._right(job, count)
            cache.accept(job.seq_id, accepted[job])
            self.verifications += count > 0
        self.accepted += sum(accepted.values())
        return accepted

    def _right(self, job: Job, drafts: int) -> int:
        """Drafts that are right; the same at the same token, whatever runs beside."""
        drawn = random.Random(f"{job.number} {job.generated}")
        right = 0
        while right < drafts and drawn.random() < self._chance:
            right += 1
        return right


@dataclass(frozen=True, slots=True)
class Drafted:
    """What became of drafts in a simulation."""

    verifications: int
    """Of sequences with at least one draft."""
    accepted: int
    """Drafts."""
    slots_lent: int
    """Each until it was given back, or its sequence ended."""
    slots_refused: int
    """Asked for again in each pass that lacks them."""
    peak_slots: int
    """Lent at once."""
    narrowed: int
    """Passes without drafts, for want of memory or because somebody waited."""
    turn_ends_missed: int
    """Ends of sequences whose state was lost."""

    @classmethod
    def of(cls, drafting: Drafting, stats: CacheStats) -> Drafted:
        """Counts of an engine and its cache."""
        return cls(
            verifications=drafting.verifications,
            accepted=drafting.accepted,
            slots_lent=stats.drafts_lent,
            slots_refused=stats.drafts_refused,
            peak_slots=drafting.peak_slots,
            narrowed=drafting.narrowed,
            turn_ends_missed=stats.turn_ends_missed,
        )

    @property
    def length(self) -> float | None:
        """Tokens that a verification gave on average; None without any."""
        if not self.verifications:
            return None
        return 1 + self.accepted / self.verifications

    def as_lines(self) -> list[str]:
        """For people."""
        given = "none" if self.length is None else f"{self.length:.2f} tokens each"
        return [
            f"verifications      {self.verifications:,}, {given}; {self.narrowed:,} "
            "passes without drafts, for want of memory",
            f"draft slots        {self.peak_slots:,} at once, {self.slots_lent:,} "
            f"lent, {self.slots_refused:,} refused",
            f"turn ends missed   {self.turn_ends_missed:,}",
        ]
