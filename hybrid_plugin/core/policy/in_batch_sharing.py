# SPDX-License-Identifier: Apache-2.0
"""In-batch prefix sharing: sequences wait for another one to compute their prefix.

Sequences that arrive together with the same prefix would each compute it, because no
snapshot exists yet.  Therefore one of them, the *leader*, takes a snapshot where they
diverge: inside a forward pass, or it pauses.  The *followers* wait and resume there.
They would have had to compute the prefix themselves, so waiting costs little even on an
idle device.

A sequence follows a live sequence, or one before it in the queue.  It never waits for a
leader that has passed the position already.  So every wait ends: the leader reaches the
position, or ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.sequence import LookUp
from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.core.tree.tokens import Tokens, as_tokens, common_units

LOOK_AHEAD = 64
"""Maximum number of waiting sequences that are considered in a step."""
ENOUGH = 0.75
"""An already planned pause is used if it saves at least this share of the maximum."""
_SHORTEST = 2
"""Minimum length of a prompt's first chunk: kernels treat one token as a decode."""
_CANDIDATES = 8
"""Maximum number of leaders that a sequence is compared with."""


@dataclass(slots=True, eq=False)
class Prefill:
    """A sequence in prefill, or one that waits for admission."""

    seq_id: str
    tokens: Tokens
    """Of its prompt."""
    namespace: Hashable
    reach: Callable[[], int]
    """Returns the number of tokens that it need not compute: computed or scheduled, or
    cached while it waits."""
    pauses: set[int] = field(default_factory=set)
    """Positions at which it will take a snapshot."""
    _reached: int | None = None

    @property
    def reached(self) -> int:
        """The result of `reach`, computed once."""
        if self._reached is None:
            self._reached = self.reach()
        return self._reached

    def beginning(self, page_size: int) -> Hashable:
        """Key that is equal for all sequences that can share a prefix."""
        return self.namespace, self.tokens[:page_size].tobytes()

    def position_for(self, follower: Prefill, policy: SnapshotPolicy) -> int:
        """Where it would take a snapshot for a follower; 0 if waiting does not pay.

        Args:
            follower: the sequence that would wait.
            policy: where snapshots can lie, and how much waiting must save.
        """
        step, fewest = policy.step, policy.in_batch_prefix_min_tokens
        shared = common_units(self.tokens, follower.tokens, step)
        last = (min(len(self.tokens), len(follower.tokens)) - 1) // step
        position = min(shared, last) * step
        if position < max(fewest, _SHORTEST) or position <= self.reached:
            return 0
        saved = position - follower.reached
        if saved < fewest:
            return 0
        if policy.grid:
            return position
        least = position - (1 - ENOUGH) * saved
        return max([p for p in self.pauses if least <= p <= position], default=position)


class SharingCache(Protocol):
    """What in-batch prefix sharing asks of a cache; `HybridCache` is one."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def policy(self) -> SnapshotPolicy:
        """Where snapshots are taken, and how much a wait must save."""

    @property
    def stats(self) -> CacheStats:
        """Counters, of which waits are one."""

    def prefilling(self) -> list[Prefill]:
        """Live sequences that still compute prompts."""

    def is_live(self, seq_id: str) -> bool:
        """Whether a sequence was admitted and has not finished."""

    def pause_at(self, seq_id: str, position: int) -> None:
        """Have a live sequence take a snapshot at `position`."""

    def look_up(self, tokens: Tokens, namespace: Hashable) -> LookUp:
        """Find the hit of a new sequence; changes nothing."""


class InBatchPrefixSharing:
    """Decides which sequences wait for a leader."""

    def __init__(self, cache: SharingCache) -> None:
        """Start without waiting sequences.

        Args:
            cache: of the sequences; its policy has the minimum saving.
        """
        self._cache = cache
        self._fewest = cache.policy.in_batch_prefix_min_tokens
        self._held: set[str] = set()
        self._pauses: dict[str, set[int]] = {}
        self._seen: Hashable = None

    def holds(self, seq_id: str) -> bool:
        """Whether a sequence waits for a leader in this step."""
        return seq_id in self._held

    def pauses_of(self, seq_id: str) -> tuple[int, ...]:
        """Where a sequence that is not live yet should pause for followers."""
        return tuple(sorted(self._pauses.get(seq_id, ())))

    def plan(self, waiting: Sequence[tuple[str, Callable[[], Prefill]]]) -> None:
        """Decide which sequences wait in the next step.

        Args:
            waiting: sequences that may be admitted in it, in queue order; adapters
                pass at most `LOOK_AHEAD`.
        """
        if not self._fewest:
            return
        leaders = self._cache.prefilling()
        seen = (
            [seq_id for seq_id, _ in waiting],
            [(p.seq_id, p.reached) for p in leaders],
        )
        if seen == self._seen:
            return
        before, self._held, self._pauses = self._held, set(), {}
        self._seen = seen
        if len(waiting) + len(leaders) > 1:
            self._decide(leaders, [prefill() for _, prefill in waiting])
        self._cache.stats.in_batch_prefix_waits += len(self._held - before)

    def _decide(self, leaders: Iterable[Prefill], waiting: Iterable[Prefill]) -> None:
        size = self._cache.page_size
        groups: dict[Hashable, list[Prefill]] = defaultdict(list)
        for live in leaders:
            groups[live.beginning(size)].append(live)
        for sequence in waiting:
            group = groups[sequence.beginning(size)]
            positions = [
                (one.position_for(sequence, self._cache.policy), one) for one in group
            ]
            position, leader = max(positions, default=(0, None), key=lambda at: at[0])
            if leader is None or not position:
                if len(group) < _CANDIDATES:
                    group.append(sequence)
                continue
            self._held.add(sequence.seq_id)
            leader.pauses.add(position)
            if self._cache.is_live(leader.seq_id):
                self._cache.pause_at(leader.seq_id, position)
            else:
                self._pauses.setdefault(leader.seq_id, set()).add(position)


def waiting_prefill(
    cache: SharingCache, seq_id: str, tokens: Sequence[int], namespace: Hashable
) -> Prefill:
    """The `Prefill` of a sequence that is not admitted yet."""
    ids = as_tokens(tokens)
    return Prefill(
        seq_id, ids, namespace, lambda: cache.look_up(ids, namespace).match.length
    )
