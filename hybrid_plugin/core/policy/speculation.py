# SPDX-License-Identifier: Apache-2.0
"""What it saves to verify drafts: the worth of the slots that they need."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_plugin.core.policy.costs import STEP_TOKENS

_REMEMBERED = 256
"""Number of verifying steps of a sequence over which acceptance is averaged."""


@dataclass(slots=True)
class DraftGain:
    """How many decode steps drafts save, from what was accepted so far."""

    accepted: float | None = None
    """Average number of accepted drafts in a step; None before the first one."""

    def observe(self, accepted: int) -> None:
        """Record the outcome of a step that verified drafts."""
        before = accepted if self.accepted is None else self.accepted
        self.accepted = before + (accepted - before) / _REMEMBERED

    def saved_tokens(self, drafts: int, answer: float | None, running: int) -> float:
        """Tokens, by admission, whose prefill takes as long as the steps saved.

        A step that accepts `a` drafts replaces `1 + a`, so a sequence saves the part
        `a / (1 + a)` of its decode steps.  A step is shared by all sequences that run,
        and while one of them runs, about as many are admitted: as in
        `ConcurrencyTradeoff`, `n` of them divide the gain by n².

        Args:
            drafts: verified in a step; until something was seen, all count as accepted.
            answer: average number of tokens decoded by a sequence; before it is known,
                nothing cached goes for drafts.
            running: number of sequences that run.
        """
        if answer is None:
            return 0.0
        accepted = drafts if self.accepted is None else self.accepted
        steps = answer * accepted / (1.0 + accepted)
        return steps * STEP_TOKENS / max(running, 1) ** 2
