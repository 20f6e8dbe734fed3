# SPDX-License-Identifier: Apache-2.0
"""Counters of what the cache did; only ever growing."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class CacheStats:
    """Totals since start-up."""

    queried_tokens: int = 0
    """Tokens of admitted prompts, first admissions only."""
    hit_tokens: int = 0
    """Of those, tokens that were restored instead of computed."""
    resumed_queried_tokens: int = 0
    """Tokens of sequences that were admitted again after a preemption."""
    resumed_hit_tokens: int = 0
    """Of those, tokens that were restored."""
    snapshots_taken: int = 0
    interior_snapshots: int = 0
    """Of those, snapshots that a forward pass wrote without a pause."""
    snapshots_evicted: int = 0
    pages_evicted: int = 0
    refusals: int = 0
    """Admissions and growths that found no room."""
    preemptions: int = 0
    in_batch_prefix_waits: int = 0
    """Sequences that waited for one that computed what they begin with."""
    promised_hits: int = 0
    """Sequences that resumed from a snapshot within its TTL."""
    promises_broken: int = 0
    """TTLs that ended without a use of what they kept."""
    promises_evicted: int = 0
    """Promises of which all that they kept was evicted within their TTL."""

    drafts_lent: int = 0
    """Slots lent to sequences that verify drafts."""
    drafts_refused: int = 0
    """Drafts that were dropped for want of slots or pages, or while somebody waited."""
    turn_ends_exact: int = 0
    """Sequences that ended with the state after their last known token."""
    turn_ends_missed: int = 0
    """Sequences that ended after that state was overwritten: a later turn resumes from
    the snapshot before."""

    def record_hit(self, queried: int, hit: int, *, resumed: bool) -> None:
        """Count one admission."""
        if resumed:
            self.resumed_queried_tokens += queried
            self.resumed_hit_tokens += hit
        else:
            self.queried_tokens += queried
            self.hit_tokens += hit

    def as_dict(self) -> dict[str, int]:
        """Every total by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class PoolLevel:
    """How many ids of a pool are in which place."""

    used: int
    """Of live sequences."""
    cached: int
    """That only the tree holds."""
    free: int
