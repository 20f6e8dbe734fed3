# SPDX-License-Identifier: Apache-2.0
"""Where the state of a sequence lies whose steps verify drafts.

A step takes the last known token and `d` drafts.  It leaves the state after each of
them in a column of its own: column 0 is the state after the known token, column `c`
that after `c` accepted drafts.  Which column counts is known when the step's output
arrives.  A wrong column is a wrong state under the right tokens, which nothing notices
later: so columns are never passed in, but derived here from what was scheduled and what
was accepted, and numbers that do not fit are refused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class VerifyingStep:
    """A step that was scheduled."""

    drafts: int
    row: int | None
    """Row of the scratch that it writes; None where it writes draft slots."""
    number: int = 0
    """Of the forward pass that it is part of."""
    recorded: bool = False
    """Whether it changes no state, and the accepted tokens are folded into the slot
    before the next pass's commands: column `c` is the state with `c` of the drafts."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a sequence ends."""

    length: int
    """Tokens that are known and have KV."""
    column: int | None
    """Column with the state after exactly `length` tokens; None if no column has it."""
    step: VerifyingStep | None = None
    """The step whose row of the verification scratch, or whose record, has that column;
    None if it is in a slot."""


@dataclass(slots=True)
class Verification:
    """The steps of one sequence, from its first one that was noted on."""

    final: int
    """Tokens computed by all steps whose outcome is known."""
    in_flight: deque[VerifyingStep] = field(default_factory=deque)
    """Steps whose outcome is not known, oldest first."""
    last: VerifyingStep | None = None
    """The last step whose outcome is known."""
    last_start: int = 0
    """Tokens computed before that step."""
    columns: tuple[int, ...] = (0,)
    """Columns of that step's known token and its accepted drafts."""

    @property
    def counted(self) -> int:
        """Tokens computed if all drafts in flight are accepted."""
        return self.final + sum(1 + step.drafts for step in self.in_flight)

    @property
    def newest(self) -> VerifyingStep | None:
        """The step scheduled last."""
        return self.in_flight[-1] if self.in_flight else self.last

    def schedule(
        self, start: int | None, step: VerifyingStep, known: int | None = None
    ) -> None:
        """Note a step.

        Args:
            start: tokens computed before it, as the engine counts: with all drafts in
                flight.  None if the engine does not count ahead.
            step: what it verifies.
            known: tokens of the sequence that are known now; None if it is not said.

        Raises:
            ValueError: if the engine's counts are not the cache's.
        """
        if known is not None and self.last is not None and known != self.final + 1:
            raise ValueError(
                f"{known} tokens are known, but what was accepted makes {self.final} "
                "computed and one more"
            )
        if start is not None and start != self.counted:
            raise ValueError(
                f"a step starts behind {start} tokens, but those before it compute "
                f"{self.counted}"
            )
        self.in_flight.append(step)

    def accept(self, accepted: int, columns: tuple[int, ...] | None) -> int:
        """Note the outcome of the oldest step in flight.

        Args:
            accepted: drafts that were accepted.
            columns: the column of each of them; None if they are 1, 2, ...

        Returns:
            Number of drafts that it verified.

        Raises:
            ValueError: if it cannot have had this outcome.
        """
        if not self.in_flight:
            raise ValueError("an outcome came, but no step is in flight")
        step = self.in_flight[0]
        if not 0 <= accepted <= step.drafts:
            raise ValueError(f"{accepted} of {step.drafts} drafts were accepted")
        if columns is not None and step.row is None:
            raise ValueError("draft slots hold a chain: its columns are 1, 2, ...")
        columns = tuple(range(1, accepted + 1)) if columns is None else columns
        ascending = all(a < b for a, b in zip((0, *columns), columns, strict=False))
        within = not columns or columns[-1] <= step.drafts
        if len(columns) != accepted or not ascending or not within:
            raise ValueError(
                f"{columns} are no columns of {accepted} of {step.drafts} drafts"
            )
        self.in_flight.popleft()
        self.last, self.last_start = step, self.final
        self.columns = (0, *columns)
        self.final += 1 + accepted
        return step.drafts

    def end(self, known: int) -> Ending:
        """Where the sequence ends, if so many of its tokens are known.

        A step in flight takes the last known token first: its column 0 has the state
        after all known tokens, whatever becomes of its drafts.  If the known tokens
        were cut (at a stop within accepted drafts), it started beyond them, and the
        states it overwrote are lost.

        Raises:
            ValueError: if so many tokens cannot be known.
        """
        if known > self.final + 1 or (self.last and known <= self.last_start):
            raise ValueError(
                f"{known} tokens are known, but the last step took a sequence from "
                f"{self.last_start} to {self.final}"
            )
        if not self.in_flight:
            assert self.last is not None, "there is a step from the first note on"
            length = min(known, self.final)
            if self.last.row is not None and length == self.final:
                return Ending(length, 0)  # the scratch was committed to the slot
            column = self.columns[length - self.last_start - 1]
            return _ending(length, column, self.last)
        if len(self.in_flight) == 1 and known == self.final + 1:
            return _ending(known, 0, self.in_flight[0])
        return Ending(known, None)


def _ending(length: int, column: int, step: VerifyingStep) -> Ending:
    elsewhere = step.row is not None or step.recorded
    return Ending(length, column, step if elsewhere else None)
