# SPDX-License-Identifier: Apache-2.0
"""Short forms of the calls an adapter makes, for tests with a few sequences."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

from hybrid_plugin.core.cache import Admission, HybridCache
from hybrid_plugin.core.commands import Command, Copy, Pool, SaveInPass, Zero
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.eviction import ExpectedSaving, LeastRecentlyUsed
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tiers.outer_tier import OuterTier
from hybrid_plugin.core.tree.snapshot import SnapshotKind

NO_SNAPSHOTS = 1_000_000

Tokens: TypeAlias = "tuple[int, ...]"
"""As some engines have them; the cache takes any sequence."""


Tiers: TypeAlias = tuple[OuterTier, ...]
"""What a cache is built with behind its host memory."""


class ByMinimum(LeastRecentlyUsed):
    """Recency, and planned snapshots that save so many tokens."""

    def __init__(self, branch: int = 1, prompt_end: int = NO_SNAPSHOTS) -> None:
        super().__init__()
        self.least = {SnapshotKind.BRANCH: branch, SnapshotKind.PROMPT_END: prompt_end}

    def repays_pass(
        self,
        kind: SnapshotKind,
        saved: int,
        *,
        origin: SnapshotKind | None,
        running: int,
    ) -> bool:
        return saved >= self.least.get(kind, NO_SNAPSHOTS)


class Economical(ExpectedSaving):
    """The plugin's policy, at the scale of tests."""

    def __init__(
        self,
        branch: int = 1,
        prompt_end: int = NO_SNAPSHOTS,
        *,
        token_bytes: float = 1,
    ) -> None:
        super().__init__(token_bytes=token_bytes, slot_bytes=4)
        self.least = ByMinimum(branch, prompt_end)

    def repays_pass(
        self,
        kind: SnapshotKind,
        saved: int,
        *,
        origin: SnapshotKind | None,
        running: int,
    ) -> bool:
        return self.least.repays_pass(kind, saved, origin=origin, running=running)


def make_cache(
    pages: int = 33,
    slots: int = 9,
    page_size: int = 4,
    branch: int = 1,
    prompt_end: int = NO_SNAPSHOTS,
    chunk_end: int = NO_SNAPSHOTS,
    policy: LeastRecentlyUsed | None = None,
    grid: int = 0,
    *,
    records_drafts: bool = False,
) -> HybridCache:
    """A small cache; prompt and chunk ends get snapshots where a test says so."""
    return HybridCache(
        PagePool(pages),
        SlotPool(slots),
        page_size,
        SnapshotPolicy(page_size, chunk_end, grid=grid),
        eviction=ByMinimum(branch, prompt_end) if policy is None else policy,
        records_drafts=records_drafts,
    )


def admission(pages: Sequence[int], slot: int, hit: int) -> Admission:
    return Admission(array("i", pages), slot, hit)


def span(start: int, end: int) -> Tokens:
    """Tokens `start` to `end`, all different."""
    return tuple(range(start, end))


def state(source: int, destination: int) -> Copy:
    return Copy(Pool.STATE, source, destination)


def save(slot: int, boundary: int, destination: int) -> SaveInPass:
    return SaveInPass(Pool.STATE, slot, boundary, destination)


def page(source: int, destination: int) -> Copy:
    return Copy(Pool.KV, source, destination)


def zero(slot: int) -> Zero:
    return Zero(Pool.STATE, slot)


def admit(
    cache: HybridCache,
    seq_id: str,
    tokens: Tokens,
    namespace: Hashable = None,
    **options: Any,
) -> Admission | None:
    """Look up and admit, with pages for all tokens."""
    found = cache.look_up(tokens, namespace)
    return cache.admit(seq_id, found, **{"num_tokens": len(tokens), **options})


def start(
    cache: HybridCache,
    seq_id: str,
    tokens: Tokens,
    namespace: Hashable = None,
    **options: Any,
) -> Admission:
    """The same where there must be room."""
    admission = admit(cache, seq_id, tokens, namespace, **options)
    assert admission is not None
    return admission


def grow(cache: HybridCache, seq_id: str, num_tokens: int) -> list[int] | None:
    """Grow, with the new pages as a list."""
    fresh = cache.grow(seq_id, num_tokens)
    return None if fresh is None else list(fresh)


def prefill(
    cache: HybridCache, seq_id: str, tokens: Tokens, budget: int = 1_000_000
) -> list[tuple[int, list[Command]]]:
    """Compute the whole prompt, up to `budget` tokens in a step.

    Returns:
        For each step its end and the commands that precede it.
    """
    position = cache.sequence(seq_id).hit
    steps = []
    while position < len(tokens):
        stops = cache.snapshot_positions_of(seq_id)
        end = min(position + budget, len(tokens))
        position = cache.chunk_end(stops, position, end, len(tokens))
        cache.cross(seq_id, position)
        steps.append((position, cache.drain_commands()))
        cache.advance(seq_id, position)
    return steps


def serve(
    cache: HybridCache,
    seq_id: str,
    prompt: Tokens,
    answer: Tokens = (),
    namespace: Hashable = None,
) -> Admission:
    """Run a whole request; the last token of an answer is never computed."""
    admission = start(cache, seq_id, prompt, namespace)
    prefill(cache, seq_id, prompt)
    computed = len(prompt) + max(len(answer) - 1, 0)
    assert cache.grow(seq_id, computed) is not None
    cache.finish(seq_id, prompt + answer, computed)
    return admission
