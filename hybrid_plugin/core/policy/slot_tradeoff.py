# SPDX-License-Identifier: Apache-2.0
"""Whether a slot is worth more to a shared snapshot than to one more sequence."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T", bound=Hashable)

STEP_TOKENS = 512
"""Tokens whose prefill takes a device about as long as one step of a decoding batch,
whatever its size: the device waits for the weights then.  An estimate, by what devices
compute and read in a second; not measured."""
RUNNING_PER_SNAPSHOT = 3
"""Sequences that run for each snapshot for which another one waits."""
_REMEMBERED = 32
"""Ends of sequences over which answers are averaged."""


@dataclass(slots=True)
class SlotTradeoff:
    """Weighs computation that is saved against sequences that run at once.

    With n sequences running, one more makes each take 1/n² of its steps less of the
    device's time.  A snapshot that one of m others resumes from, each as often, saves
    each of them 1/m of what it saves.
    """

    answer: float = 0.0
    """Steps in which a sequence decodes, as far as seen."""

    def ended(self, answer: int) -> None:
        """Hear of the end of a sequence that decoded for so many steps."""
        self.answer += (answer - self.answer) / _REMEMBERED

    def pays(self, saving: int, *, among: int, running: int) -> bool:
        """Whether to keep a snapshot rather than run one more sequence.

        Args:
            saving: tokens that need not be computed after it.
            among: snapshots that sequences resume from, about as often as from it.
            running: sequences that run.
        """
        return saving * running**2 > among * self.answer * STEP_TOKENS

    def max_kept(self, running: int) -> int:
        """Snapshots for which sequences wait at most, while `running` sequences run."""
        return running // RUNNING_PER_SNAPSHOT

    def worth_keeping(
        self, hot: Mapping[T, int], branch: int, running: int
    ) -> tuple[int, list[T]]:
        """Which snapshots are worth more than one more running sequence.

        Args:
            hot: tokens that each hot snapshot saves, the latest used first.
            branch: tokens that a planned snapshot at a branch point saves; 0 for none.
            running: sequences that run.

        Returns:
            Slots to leave to planned snapshots (0 or 1), and the hot ones to keep.
        """
        among = len(hot) + (branch > 0)
        planned = int(branch > 0 and self.pays(branch, among=among, running=running))
        kept = [
            one
            for one, saving in hot.items()
            if self.pays(saving, among=among, running=running)
        ]
        return planned, kept[: self.max_kept(running) - planned]
