# SPDX-License-Identifier: Apache-2.0
"""CacheLayout: how many bytes a page and a slot are, and how a budget splits."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.core.memory.attention_windows import (
    FULL_ATTENTION,
    AttentionWindow,
    max_live_pages,
)
from hybrid_plugin.core.memory.scratch import ScratchLayout

DEFAULT_CHUNK = 8192
"""Tokens of a prefill step at most, where the engine does not say."""

MOST_FREE_PAGES = 1 << 24
"""Pages that take no memory of the device.  Each takes 9 bytes of the host's, before
the tree keeps 8 for each of its tokens."""

_ANY_LENGTH = 1 << 30
"""Tokens that fill every window."""


class TooLittleMemoryError(ValueError):
    """One sequence of the maximum length does not fit."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Attention layers whose KV lives in pages.

    Layers that read another layer's KV own none, and belong to no group.
    """

    layers: tuple[str, ...]
    page_bytes: int
    """Bytes of one page of one layer."""
    window: AttentionWindow = FULL_ATTENTION
    """How far back they look."""


@dataclass(frozen=True, slots=True)
class StateGroup:
    """State layers with equal state shapes."""

    layers: tuple[str, ...]
    state_bytes: int
    """Bytes of all states (convolution, recurrent, ...) of one layer."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Pages and slots of the two pools, the reserved ones included."""

    pages: int
    slots: int
    windows: tuple[int, ...] = ()
    """Pages of each window group, in the order of `CacheLayout.attention_windows`."""

    def of(self, pool: PoolId) -> int:
        """Ids of a pool by its name."""
        if pool == Pool.KV:
            return self.pages
        if pool == Pool.STATE:
            return self.slots
        names = [Pool.window(index) for index in range(len(self.windows))]
        return self.windows[names.index(pool)]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of one model replica's cache on one rank."""

    page_size: int
    """Tokens in a page."""
    attention: tuple[AttentionGroup, ...]
    states: tuple[StateGroup, ...]
    slot_alignment: int = 256
    """Slots start at multiples of this many bytes."""
    addressable_slot_bytes: int | None = None
    """Bytes of slots that the model's kernels can address; None for all."""
    packed: bool = False
    """Whether all layers of a page lie side by side, one page behind the other;
    otherwise all pages of a layer do, one layer behind the other."""
    page_padding: tuple[int, ...] = ()
    """Bytes behind the layers of a packed page, for each of `page_pools`, in order;
    empty for none."""
    scratch: ScratchLayout | None = None
    """Of the rows in which drafts are verified, where they share the memory."""

    @property
    def has_states_alone(self) -> bool:
        """Whether no layer attends: pages only number the tokens of the tree."""
        return bool(self.states) and not self.attention

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers with full attention."""
        return self._page_bytes_of(FULL_ATTENTION)

    @property
    def attention_windows(self) -> tuple[AttentionWindow, ...]:
        """The other spans, each of which makes a window group with its own pool."""
        spans = dict.fromkeys(group.window for group in self.attention)
        return tuple(window for window in spans if window != FULL_ATTENTION)

    @property
    def page_pools(self) -> dict[PoolId, AttentionWindow]:
        """Every pool of pages, and how far back its layers look."""
        pools: dict[PoolId, AttentionWindow] = {Pool.KV: FULL_ATTENTION}
        for index, window in enumerate(self.attention_windows):
            pools[Pool.window(index)] = window
        return pools

    @property
    def row_bytes(self) -> dict[PoolId, int]:
        """Bytes of a page or slot of every pool, over all its layers."""
        sizes = {name: self._page_bytes_of(w) for name, w in self.page_pools.items()}
        return {**sizes, Pool.STATE: self.slot_bytes}

    @property
    def window_page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page of each window group, over all its layers."""
        return tuple(self._page_bytes_of(window) for window in self.attention_windows)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all state layers, rounded up to the alignment."""
        used = sum(g.state_bytes * len(g.layers) for g in self.states)
        return -(-used // self.slot_alignment) * self.slot_alignment

    @property
    def max_slots(self) -> int | None:
        """Slots that the model's kernels can address; None for any number."""
        if self.addressable_slot_bytes is None or not self.slot_bytes:
            return None
        return self.addressable_slot_bytes // self.slot_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Bytes that a snapshot keeps besides KV of full attention."""
        return self._state_bytes(_ANY_LENGTH)

    def sequence_bytes(self, length: int) -> int:
        """Bytes of one sequence of `length` tokens while it runs."""
        row = 0 if self.scratch is None else self.scratch.row_bytes
        pages = self.pages_for(length) * self.page_bytes
        return self._state_bytes(length) + pages + row

    def _state_bytes(self, length: int) -> int:
        """Bytes of a slot, and of the pages in windows after `length` tokens."""
        windows = zip(self.attention_windows, self.window_page_bytes, strict=True)
        return self.slot_bytes + sum(
            self.live_pages(window, length) * size for window, size in windows
        )

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def split(
        self,
        budget: int,
        *,
        max_model_len: int,
        state_memory_ratio: float | None = None,
        chunk: int = DEFAULT_CHUNK,
    ) -> PoolSizes:
        """Divide `budget` bytes between pages, slots and the pages of windows.

        Without a ratio the split is the one that holds the most sequences of a
        typical length, each with its running slot and one snapshot.  There are no
        slots beyond `max_slots`.

        Args:
            budget: bytes in all.
            max_model_len: tokens of the longest sequence.
            state_memory_ratio: share of the budget for slots.
            chunk: tokens of a prefill step at most; a window group holds them
                besides its window.

        Raises:
            TooLittleMemoryError: if one sequence of `max_model_len` tokens does not
                fit.
        """
        least = self.least(max_model_len, chunk)
        needed = self.bytes_of(least)
        if needed > budget:
            raise TooLittleMemoryError(
                f"The cache memory of {_mib(budget)} cannot hold one sequence of "
                f"{max_model_len} tokens, which takes {_mib(needed)} "
                f"({least.pages} pages and {least.slots} state slots, the reserved "
                "ones included). Give the cache more memory or lower the "
                "maximum model length."
            )
        typical = self._typical_bytes(max_model_len)
        sequences = budget // typical
        windows = self._window_pages(
            least, (budget - needed) // typical, self._typical_length(max_model_len)
        )
        rest = budget - sum(
            count * size
            for count, size in zip(windows, self.window_page_bytes, strict=True)
        )
        if state_memory_ratio is None:
            slots = 2 * sequences + 1
        else:
            slots = int(budget * state_memory_ratio) // max(self.slot_bytes, 1)
        if self.slot_bytes:
            most = (rest - least.pages * self.page_bytes) // self.slot_bytes
            if self.max_slots is not None:
                most = min(most, self.max_slots)
            slots = min(max(slots, least.slots), most)
        else:
            slots = least.slots
        rest -= slots * self.slot_bytes
        if self.page_bytes:
            return PoolSizes(rest // self.page_bytes, slots, windows)
        # Pages that cost nothing only number the tokens of the tree: as many as every
        # slot could have before it, so that slots run out first.
        holders = slots if self.slot_bytes else 2 * sequences + 1
        pages = min(holders * (least.pages - 1) + 1, MOST_FREE_PAGES)
        return PoolSizes(max(pages, least.pages), slots, windows)

    def bytes_of(self, sizes: PoolSizes) -> int:
        """Bytes that pools of these sizes take."""
        windows = zip(sizes.windows, self.window_page_bytes, strict=True)
        return (
            sizes.pages * self.page_bytes
            + sizes.slots * self.slot_bytes
            + sum(count * size for count, size in windows)
        )

    def _page_bytes_of(self, window: AttentionWindow) -> int:
        used = sum(
            g.page_bytes * len(g.layers) for g in self.attention if g.window == window
        )
        if not self.page_padding:
            return used
        return used + self.page_padding[list(self.page_pools.values()).index(window)]

    def least(self, max_model_len: int, chunk: int = DEFAULT_CHUNK) -> PoolSizes:
        """What one sequence of the greatest length takes, with the reserved ids.

        Args:
            max_model_len: tokens of that sequence.
            chunk: tokens of a prefill step at most.
        """
        longest = self.pages_for(max_model_len)
        step = self.pages_for(min(chunk, max_model_len)) + 1
        live = [
            self.live_pages(window, max_model_len) for window in self.attention_windows
        ]
        windows = tuple(min(pages + step, longest) + 1 for pages in live)
        return PoolSizes(pages=longest + 1, slots=2, windows=windows)

    def live_pages(self, window: AttentionWindow, length: int) -> int:
        """Most pages that a sequence of up to `length` tokens holds in a window."""
        return max_live_pages(window, length, self.page_size)

    def _typical_length(self, max_model_len: int) -> int:
        return min(max(max_model_len // 4, 1024), 4096, max_model_len)

    def _typical_bytes(self, max_model_len: int) -> int:
        """What a sequence of a typical length takes, with one snapshot."""
        length = self._typical_length(max_model_len)
        pages = self.pages_for(length) * self.page_bytes
        return max(2 * self._state_bytes(length) + pages, 1)

    def _window_pages(
        self, least: PoolSizes, more: int, length: int
    ) -> tuple[int, ...]:
        """Pages of each window group: the least, and two windows a sequence more."""
        return tuple(
            pages + 2 * more * self.live_pages(window, length)
            for pages, window in zip(least.windows, self.attention_windows, strict=True)
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
