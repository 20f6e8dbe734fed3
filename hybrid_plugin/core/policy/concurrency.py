# SPDX-License-Identifier: Apache-2.0
"""Whether memory is worth more for what is cached than for one more sequence."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_plugin.core.policy.costs import PASS_TOKENS, STEP_TOKENS

_REMEMBERED = 32
"""Number of finished sequences over which the answer length is averaged."""


@dataclass(slots=True)
class ConcurrencyTradeoff:
    """Compares what an admission would evict with the gain of a larger batch.

    A decode step takes about as long for any number of sequences, and so does what the
    host needs to launch a pass that prefills.  With n sequences, one more reduces the
    device time per sequence by 1/n² of its decode steps and of such a pass.  A server
    that only prefills has nothing but that pass: prompts that waited for each other
    there would have one each.
    """

    answer: float | None = None
    """Average number of decode steps of a sequence; None before the first one ended."""
    pass_tokens: float = PASS_TOKENS
    """Tokens whose prefill takes as long as a pass of few tokens."""

    def ended(self, answer: int) -> None:
        """Record the end of a sequence that decoded for `answer` steps."""
        before = answer if self.answer is None else self.answer
        self.answer = before + (answer - before) / _REMEMBERED

    def should_wait(self, lost: float, running: int) -> bool:
        """Whether a sequence should wait until another one ends.

        Args:
            lost: tokens that the others are expected to compute again, by admission,
                if it starts now.
            running: number of running sequences; alone it never waits.
        """
        if self.answer is None or not running:
            return False
        return lost * running**2 > self.answer * STEP_TOKENS + self.pass_tokens
