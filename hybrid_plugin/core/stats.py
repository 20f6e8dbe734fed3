# SPDX-License-Identifier: Apache-2.0
"""Counters of what the cache did; only ever growing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class CacheStats:
    """Totals since start-up."""

    queried_tokens: int = 0
    """Tokens of admitted prompts, first admissions only."""
    hit_tokens: int = 0
    """Of those, tokens that were restored instead of computed."""
    computed_tokens: Counter[str] = field(default_factory=Counter)
    """The others, by the reason why; see `core/misses.py`."""
    resumed_queried_tokens: int = 0
    """Tokens of sequences that were admitted again after a preemption."""
    resumed_hit_tokens: int = 0
    """Of those, tokens that were restored."""
    snapshots_taken: int = 0
    interior_snapshots: int = 0
    """Of those, snapshots that a forward pass wrote without a pause."""
    graph_passes: int = 0
    """Forward passes with prompts that replayed a CUDA graph of the whole model, as far
    as the engine's adapter counts them."""
    snapshots_evicted: int = 0
    pages_evicted: int = 0
    refusals: int = 0
    """Admissions and growths that found no room."""
    pools_emptied: int = 0
    """Times that everything cached went because a sequence alone found no room."""
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

    hit_checks: int = 0
    """Hits that were computed again and compared; see `engine/hit_checks.py`."""
    hit_checks_failed: int = 0
    """Of those, the ones that differed by more than rounding."""

    def record_hit(self, queried: int, hit: int, *, resumed: bool) -> None:
        """Count one admission."""
        if resumed:
            self.resumed_queried_tokens += queried
            self.resumed_hit_tokens += hit
        else:
            self.queried_tokens += queried
            self.hit_tokens += hit

    def as_dict(self) -> dict[str, int]:
        """Every total by name; tokens that were computed for all reasons together."""
        return _totals(self)


@dataclass(slots=True)
class HostStats:
    """Totals of a host tier since start-up."""

    queried_tokens: int = 0
    """Tokens of admitted prompts, first admissions only, that the device did not have
    when they came."""
    hit_tokens: int = 0
    """Of those, tokens that were restored from the host, and not brought there by
    another tier.  They count as hits of the cache too."""
    stores: int = 0
    """Bundles of KV and a state that were copied to the host."""
    stored_bytes: int = 0
    stores_refused: int = 0
    """Bundles for which there was no room that was worth less."""
    loads: int = 0
    """Prefixes that were copied back."""
    loaded_bytes: int = 0
    loads_refused: int = 0
    """Look-ups whose prefix the host had, but for which the device had no room."""
    wait_seconds: float = 0.0
    """For how long a rank's device has waited for copies, as that rank says."""

    def as_dict(self) -> dict[str, int]:
        """Every total that is a whole number by name, as `host_NAME`."""
        names = [one.name for one in fields(self) if one.name != "wait_seconds"]
        return {f"host_{name}": getattr(self, name) for name in names}


@dataclass(slots=True)
class OuterStats:
    """Totals of a tier behind the host since start-up; bytes are those of one rank."""

    queried_tokens: int = 0
    """Tokens of admitted prompts, first admissions only, that neither the device nor
    the host had when they came."""
    hit_tokens: int = 0
    """Of those, tokens that this tier brought.  They count as hits of the cache too."""
    stores: int = 0
    """Bundles of KV and a state that were written."""
    stored_bytes: int = 0
    stores_refused: int = 0
    """Bundles that the tier did not take."""
    loads: int = 0
    """Prefixes that were brought to the host."""
    loaded_bytes: int = 0
    loads_refused: int = 0
    """Look-ups whose prefix the tier had, but for which the host had no room that was
    worth less."""
    store_failures: Counter[str] = field(default_factory=Counter)
    """Bundles that could not be written, by reason."""
    load_failures: Counter[str] = field(default_factory=Counter)
    """Prefixes that could not be brought, by reason."""

    def as_dict(self, tier: str) -> dict[str, int]:
        """Every total by name, as `TIER_NAME`; failures for all reasons together."""
        return {f"{tier}_{name}": total for name, total in _totals(self).items()}


def _totals(stats: CacheStats | OuterStats) -> dict[str, int]:
    values = {one.name: getattr(stats, one.name) for one in fields(stats)}
    return {
        name: value.total() if isinstance(value, Counter) else value
        for name, value in values.items()
    }


@dataclass(frozen=True, slots=True)
class PoolLevel:
    """How many ids of a pool are in which place."""

    used: int
    """Of live sequences."""
    cached: int
    """That only the tree holds."""
    free: int
