# SPDX-License-Identifier: Apache-2.0
"""CacheLayout: how many bytes a page and a slot are, and how a budget splits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Attention layers whose KV lives in pages."""

    layers: tuple[str, ...]
    page_bytes: int
    """Bytes of one page of one layer."""


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


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of one model replica's cache on one rank."""

    page_size: int
    """Tokens in a page."""
    attention: tuple[AttentionGroup, ...]
    states: tuple[StateGroup, ...]
    slot_alignment: int = 256
    """Slots start at multiples of this many bytes."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all attention layers."""
        return sum(g.page_bytes * len(g.layers) for g in self.attention)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all state layers, rounded up to the alignment."""
        used = sum(g.state_bytes * len(g.layers) for g in self.states)
        return -(-used // self.slot_alignment) * self.slot_alignment

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def split(
        self,
        budget: int,
        *,
        max_model_len: int,
        state_memory_ratio: float | None = None,
    ) -> PoolSizes:
        """Divide `budget` bytes between pages and slots.

        Without a ratio the split is the one that holds the most sequences of a
        typical length, each with its running slot and one snapshot.

        Raises:
            ValueError: if one sequence of `max_model_len` tokens does not fit.
        """
        least = PoolSizes(pages=self.pages_for(max_model_len) + 1, slots=2)
        needed = self.bytes_of(least)
        if needed > budget:
            raise ValueError(
                f"The cache memory of {_mib(budget)} cannot hold one sequence of "
                f"{max_model_len} tokens, which takes {_mib(needed)} "
                f"({least.pages} pages and {least.slots} state slots, the reserved "
                "ones included). Give the cache more memory or lower the "
                "maximum model length."
            )
        if state_memory_ratio is None:
            slots = self._automatic_slots(budget, max_model_len)
        else:
            slots = int(budget * state_memory_ratio) // self.slot_bytes
        most = (budget - least.pages * self.page_bytes) // self.slot_bytes
        slots = min(max(slots, least.slots), most)
        pages = (budget - slots * self.slot_bytes) // self.page_bytes
        return PoolSizes(pages=pages, slots=slots)

    def bytes_of(self, sizes: PoolSizes) -> int:
        """Bytes that pools of these sizes take."""
        return sizes.pages * self.page_bytes + sizes.slots * self.slot_bytes

    def _automatic_slots(self, budget: int, max_model_len: int) -> int:
        typical = min(max(max_model_len // 4, 1024), 4096, max_model_len)
        sequence = 2 * self.slot_bytes + self.pages_for(typical) * self.page_bytes
        return 2 * (budget // sequence) + 1


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
