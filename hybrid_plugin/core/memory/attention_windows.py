# SPDX-License-Identifier: Apache-2.0
"""How far back the attention of a layer reaches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token sees all tokens before it."""

    def __str__(self) -> str:
        return "full attention"

    def first_needed(self, position: int) -> int:
        """The first token whose KV is read to compute token `position`."""
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Every token sees itself and the `window - 1` tokens before it."""

    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"a window holds at least 1 token, got {self.window}")

    def __str__(self) -> str:
        return f"a sliding window of {self.window}"

    def first_needed(self, position: int) -> int:
        """The first token whose KV is read to compute token `position`."""
        return max(position - self.window + 1, 0)


@dataclass(frozen=True, slots=True)
class ChunkedLocal:
    """Every token sees the tokens before it in its own chunk of `chunk` tokens."""

    chunk: int

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"a chunk holds at least 1 token, got {self.chunk}")

    def __str__(self) -> str:
        return f"local chunks of {self.chunk}"

    def first_needed(self, position: int) -> int:
        """The first token whose KV is read to compute token `position`."""
        return position // self.chunk * self.chunk


FULL_ATTENTION = FullAttention()

AttentionWindow = FullAttention | SlidingWindow | ChunkedLocal
"""`first_needed` never falls as the position grows, so what lies before it is
never needed again."""


def live_pages(window: AttentionWindow, position: int, page_size: int) -> range:
    """Indices of the pages that a sequence of `position` computed tokens holds."""
    first = window.first_needed(position) // page_size
    return range(first, max(-(-position // page_size), first))


def max_live_pages(window: AttentionWindow, length: int, page_size: int) -> int:
    """Most pages that a sequence of up to `length` tokens holds at one position."""
    pages = -(-length // page_size)
    if isinstance(window, FullAttention):
        return pages
    reach = window.window if isinstance(window, SlidingWindow) else window.chunk
    return min(-(-reach // page_size) + 1, pages)
