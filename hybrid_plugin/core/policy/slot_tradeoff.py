# SPDX-License-Identifier: Apache-2.0
"""Whether a slot is worth more for a shared snapshot than for one more sequence."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T", bound=Hashable)

STEP_TOKENS = 512
"""Number of tokens whose prefill takes about as long as one decode step of any batch
size, which is bound by reading the weights.  Estimated from the compute and memory
throughput of devices; not measured."""
RUNNING_PER_SNAPSHOT = 3
"""Running sequences per snapshot that other sequences wait for."""
_REMEMBERED = 32
"""Number of finished sequences over which the answer length is averaged."""


@dataclass(slots=True)
class SlotTradeoff:
    """Compares the computation that a snapshot saves with the gain of a larger batch.

    With n running sequences, one more reduces the device time per sequence by 1/n² of
    its decode steps.  If sequences resume equally often from m snapshots, one of them
    saves each sequence 1/m of its saving on average.
    """

    answer: float = 0.0
    """Average number of decode steps of a sequence."""

    def ended(self, answer: int) -> None:
        """Record the end of a sequence that decoded for `answer` steps."""
        self.answer += (answer - self.answer) / _REMEMBERED

    def pays(self, saving: int, *, among: int, running: int) -> bool:
        """Whether to keep a snapshot rather than run one more sequence.

        Args:
            saving: number of tokens that a sequence need not compute with it.
            among: number of snapshots that sequences resume from about equally often.
            running: number of running sequences.
        """
        return saving * running**2 > among * self.answer * STEP_TOKENS

    def max_kept(self, running: int) -> int:
        """Maximum number of snapshots that sequences wait for with `running` ones."""
        return running // RUNNING_PER_SNAPSHOT

    def worth_keeping(
        self, hot: Mapping[T, int], branch: int, running: int
    ) -> tuple[int, list[T]]:
        """Which snapshots are worth more than one more running sequence.

        Args:
            hot: tokens that each hot snapshot saves, the most recently used first.
            branch: tokens that a planned snapshot at a branch point saves; 0 for none.
            running: number of running sequences.

        Returns:
            Number of slots to leave for planned snapshots (0 or 1), and the hot
            snapshots to keep.
        """
        among = len(hot) + (branch > 0)
        planned = int(branch > 0 and self.pays(branch, among=among, running=running))
        kept = [
            one
            for one, saving in hot.items()
            if self.pays(saving, among=among, running=running)
        ]
        return planned, kept[: self.max_kept(running) - planned]
