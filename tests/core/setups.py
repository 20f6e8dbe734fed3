# SPDX-License-Identifier: Apache-2.0
"""Sizes and habits of a fake engine, and the cache that it drives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.attention_windows import AttentionWindow
from hybrid_plugin.core.memory.layout import CacheLayout, StateGroup
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.outer_tier import OuterTier
from hybrid_plugin.core.tiers.restores import TransferRates
from tests.core.outer import FakePeers, FakeTier
from tests.core.support import ByMinimum, Economical


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes and habits of a fake engine."""

    page_size: int = 4
    pages: int = 13
    slots: int = 6
    lagging: bool = False
    """Whether outputs arrive one step late (asynchronous scheduling)."""
    lookahead: int = 0
    watermark: int = 0
    full_fit: bool = False
    """Whether admission asks for room for all tokens."""
    branch_min: int = 1
    prompt_end_min: int = 1
    chunk_end_min: int = 1
    max_running: int = 8
    economical: bool = True
    """Whether evictions weigh what content is expected to save."""
    has_states: bool = True
    states_alone: bool = field(default=False, repr=False)
    """Whether no layer attends: pages take no memory, and there are as many as all
    slots could have before them; those of `pages` are for the longest sequence."""
    windows: tuple[tuple[AttentionWindow, int], ...] = ()
    """The window of each group, and the pages that it has beyond those of `pages`."""
    grid: int = field(default=0, repr=False)
    """Tokens between the states that a forward pass can keep; 0 if it keeps none."""
    canonical: bool = field(default=False, repr=False)
    """Whether the cache keeps canonical content only; with a grid."""
    follow: int = field(default=0, repr=False)
    """Tokens for which a sequence waits for another one's prefill; 0 for never."""
    hears_first: bool = field(default=False, repr=False)
    """Whether outputs that come late come between a step's plan and its launch."""
    drafts: int = field(default=0, repr=False)
    """Drafts of a sequence in a step, at most; 0 for no speculation."""
    scratch: bool = field(default=False, repr=False)
    """Whether they are verified in a scratch, as trees, and not in draft slots."""
    records: bool = field(default=False, repr=False)
    """Whether steps record what drafts do, and no draft has a state."""
    acceptance: float = field(default=0.6, repr=False)
    """Chance of each draft to be right, if the one before it was."""
    host: HostPlan | None = field(default=None, repr=False)
    """Rows of a host tier, if there is one."""
    load_bytes_per_second: float = field(default=1e9, repr=False)
    prefill_seconds_per_token: float | None = field(default=None, repr=False)
    outer_bytes: int = field(default=0, repr=False)
    """Budget of an outer tier behind the host; 0 if there is none."""
    read_bytes_per_second: float = field(default=1e9, repr=False)
    peers: bool = field(default=False, repr=False)
    """Whether other servers read from the host, and offer it what they have."""
    trouble: float = field(default=0.0, repr=False)
    """Chance of a write or a fetch of the outer tier to fail."""

    @property
    def in_slots(self) -> bool:
        """Whether each draft that is verified needs a slot."""
        return not (self.scratch or self.records)

    @property
    def overrun(self) -> int:
        """Tokens that steps in flight may compute beyond a sequence's end."""
        return 3 * (1 + self.drafts) if self.drafts else 0

    @property
    def all_pages(self) -> int:
        """Pages that there are, the reserved one included."""
        if not self.states_alone:
            return self.pages
        alone = CacheLayout(self.page_size, (), (StateGroup(("s",), 4),), 4)
        longest = (self.pages - 1) * self.page_size
        return alone.split(4 * self.slots, max_model_len=longest).pages

    @property
    def window_pools(self) -> list[tuple[AttentionWindow, int]]:
        """AttentionWindow and pages of each window group."""
        return [(span, self.pages + more) for span, more in self.windows]

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that fits alone."""
        return (self.pages - 1) * self.page_size - self.lookahead - self.overrun

    @property
    def chunk(self) -> int:
        """Tokens of the chunks of canonical content; 0 without."""
        return math.lcm(self.page_size, self.grid) if self.canonical else 0

    @property
    def eviction(self) -> LeastRecentlyUsed:
        """A new policy."""
        if not self.economical:
            return ByMinimum(self.branch_min, self.prompt_end_min)
        size = 0 if self.states_alone else 1
        return Economical(self.branch_min, self.prompt_end_min, token_bytes=size)

    def build(self, cls: type[HybridCache] = HybridCache) -> HybridCache:
        """The cache under test."""
        return cls(
            pages=PagePool(self.all_pages),
            slots=SlotPool(self.slots) if self.has_states else NoSlots(),
            page_size=self.page_size,
            policy=SnapshotPolicy(
                page_size=self.page_size,
                chunk_end_min_tokens=self.chunk_end_min,
                in_batch_prefix_min_tokens=self.follow,
                grid=self.grid,
                canonical=self.canonical,
            ),
            eviction=self.eviction,
            windows=tuple(
                WindowGroup(span, PagePool(pages)) for span, pages in self.window_pools
            ),
            records_drafts=self.records,
            host=self.build_host(),
            rates=self.rates,
            tiers=self.build_tiers(),
        )

    def build_host(self) -> HostTier | None:
        """The host tier of the cache under test."""
        if self.host is None:
            return None
        windows = tuple(window for window, _ in self.windows)
        return HostTier(self.host, self.page_size, self.eviction, windows)

    def build_tiers(self) -> tuple[OuterTier, ...]:
        """What is behind the host."""
        found: list[OuterTier] = []
        if self.outer_bytes:
            found.append(FakeTier(self.outer_bytes, self.read_bytes_per_second))
        if self.peers:
            found.append(FakePeers(20.0, self.read_bytes_per_second))
        return tuple(found)

    @property
    def rates(self) -> TransferRates:
        """What was measured."""
        return TransferRates(self.load_bytes_per_second, self.prefill_seconds_per_token)
