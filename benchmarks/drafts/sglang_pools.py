# SPDX-License-Identifier: Apache-2.0
"""Equal bytes for SGLang alone: slots, tokens, and rows of the scratch for drafts.

SGLang is told what comes to those bytes.  So that stock is not worse than it could be,
as many sequences are let run as fit with all they need, and what is left goes to slots
and tokens by the same shares.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOTS_OF_CACHED = 5
"""Slots that SGLang wants for a running sequence with its prefix cache (0.5.23): three,
and two that it writes states of prefixes to."""
SLOTS_OF_UNCACHED = 1


@dataclass(frozen=True)
class Sequence:
    """What a running sequence takes."""

    state_bytes: int
    """Of its states."""
    token_bytes: int
    """Of a token's keys and values."""
    tokens: int
    slots: int
    """That hold states of it."""
    verified: int
    """Tokens that it verifies at once: as many states in the scratch; 0 without."""

    @property
    def pool_bytes(self) -> int:
        """Without the scratch."""
        return self.slots * self.state_bytes + self.tokens * self.token_bytes

    @property
    def row_bytes(self) -> int:
        """Of the scratch."""
        return self.verified * self.state_bytes


@dataclass(frozen=True)
class Pools:
    """Sizes as SGLang's arguments have them."""

    running: int
    slots: int
    tokens: int

    @property
    def flags(self) -> dict[str, int]:
        """By argument."""
        return {
            "max_running_requests": self.running,
            "max_mamba_cache_size": self.slots,
            "max_total_tokens": self.tokens,
        }


def pools(budget: int, one: Sequence, most: int) -> Pools:
    """Divide bytes among slots, tokens and the scratch.

    Args:
        budget: in bytes.
        one: sequence.
        most: sequences to let run, however many fit.

    Raises:
        ValueError: if not one sequence fits.
    """
    # SGLang adds a slot and a row of the scratch for padding.
    left = budget - one.state_bytes - one.row_bytes
    running = min(most, left // (one.pool_bytes + one.row_bytes))
    if running < 1:
        raise ValueError(f"{budget} bytes do not hold one sequence: {one}.")
    left -= running * one.row_bytes
    slots = running
    if one.slots > 1:
        share = one.slots * one.state_bytes / one.pool_bytes
        slots = max(one.slots * running, int(left * share) // one.state_bytes)
    tokens = (left - slots * one.state_bytes) // one.token_bytes
    return Pools(running, slots, tokens)
