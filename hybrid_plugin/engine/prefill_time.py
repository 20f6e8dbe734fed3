# SPDX-License-Identifier: Apache-2.0
"""How long a token's prefill takes: what a restore from host memory saves.

An engine measures its forward passes, and this makes one number of them.  A pass takes
as long as so many tokens even if it has few (`core/policy/costs.py`), which no restore
saves: the request computes something all the same.  So a pass says what a token takes
where its tokens are most of what it takes; one of few tokens says only how much it is
at most.  A server that answers prompts which other servers compute has no other passes.
"""

from __future__ import annotations

from collections import deque
from statistics import median

REMEMBERED_PASSES = 32
"""Passes of which the median is taken, so that one that compiled kernels, or waited for
another process, does not count."""


class PrefillTime:
    """The time of one token's prefill, of the last passes."""

    def __init__(self, pass_tokens: int) -> None:
        """Nothing was measured.

        Args:
            pass_tokens: tokens that take as long as a forward pass of few tokens.
        """
        self._pass_tokens = pass_tokens
        self._rates: deque[float] = deque(maxlen=REMEMBERED_PASSES)
        """Seconds by token, of passes with at least so many tokens."""
        self._bounds: deque[float] = deque(maxlen=REMEMBERED_PASSES)
        """What a token takes at most, of passes with fewer."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Note a forward pass.

        Args:
            tokens: of prompts that it computed; a pass without any says nothing.
            seconds: that it took on the device.
        """
        if tokens <= 0 or seconds <= 0:
            return
        if tokens >= self._pass_tokens:
            self._rates.append(seconds / (tokens + self._pass_tokens))
        else:
            self._bounds.append(seconds / tokens)

    @property
    def token_seconds(self) -> float | None:
        """Seconds by token; at most these, while all passes had few; None without."""
        if self._rates:
            return median(self._rates)
        return min(self._bounds, default=None)
