# SPDX-License-Identifier: Apache-2.0
"""Pages of attention groups that look back only so far.

Each such group has a pool of its own.  A sequence's table keeps one entry for
every page of tokens, as an engine's block table does; entries that left the
window, or that were never restored, are the reserved page.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from hybrid_plugin.core.memory.attention_windows import AttentionWindow, max_live_pages
from hybrid_plugin.core.memory.pools import PagePool
from hybrid_plugin.core.tree.tokens import Pages


@dataclass(slots=True)
class WindowGroup:
    """Attention layers with one window, and their pool."""

    window: AttentionWindow
    pages: PagePool


@dataclass(frozen=True, slots=True)
class WindowDemand:
    """Bounds the pages that a sequence holds in a window at once."""

    chunk_tokens: int
    """Tokens of one step of its prefill, at most."""
    max_tokens: int
    """Tokens that it has at its end, at most."""

    def pages(
        self, window: AttentionWindow, page_size: int, *, prefilling: bool
    ) -> int:
        """Most pages that it holds at once.

        A prefill holds the pages of its next chunk besides those of the window.  A
        decode starts a page only after another one has left the window.
        """
        live = max_live_pages(window, self.max_tokens, page_size)
        if not prefilling:
            return live
        chunk = -(-self.chunk_tokens // page_size)
        return min(live + chunk, -(-self.max_tokens // page_size))


@dataclass(slots=True)
class WindowTable:
    """What one sequence holds in one window group."""

    pages: Pages
    """By page index; the reserved page where nothing is held."""
    first: int
    """Index of the first page that is held."""

    @classmethod
    def resumed(cls, shared: Pages, first: int) -> WindowTable:
        """A table that begins with restored pages, from index `first` on."""
        return cls(array("i", bytes(4 * first)) + shared, first)

    def trim(self, first: int) -> Pages:
        """Let go of the pages before index `first`; returns them."""
        first = min(max(first, self.first), len(self.pages))
        gone = self.pages[self.first : first]
        self.pages[self.first : first] = array("i", bytes(4 * len(gone)))
        self.first = first
        return gone

    def held(self) -> Pages:
        """All pages that are held."""
        return self.pages[self.first :]
