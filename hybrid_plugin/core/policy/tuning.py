# SPDX-License-Identifier: Apache-2.0
"""AlphaTuner: finds the weight of a FLOP-aware policy by replay.

Which weight is best depends on the workload and on the memory: where snapshots
are few, a large one keeps long prompts that nobody sends again.  So every
sequence that ends is replayed, while a trial lasts, through small copies of the
cache's bookkeeping, one for each weight; the one with most hit tokens wins.
(Marconi, MLSys 2025, replays what it recorded in the same way.)

A trial costs host time, as much as serving once more for every weight, so it
ends when it has seen enough, and the next one begins much later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from hybrid_plugin.core.commands import Command
from hybrid_plugin.core.policy.eviction import FlopAware
from hybrid_plugin.core.sequence import Admission, LookUp
from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.core.tree.tokens import Tokens, as_tokens

ALPHAS = (0.0, 0.25, 0.5, 1.0)
TRIAL = 400
"""Sequences that a trial counts, after every copy evicted a snapshot."""
PAUSE = 10 * TRIAL
"""Sequences between two trials."""


class ReplayedCache(Protocol):
    """What a trial asks of the copy of a cache; `HybridCache` is one."""

    @property
    def stats(self) -> CacheStats:
        """Counters, of which hits decide."""

    def look_up(self, tokens: Tokens, namespace: Hashable) -> LookUp:
        """Find the hit of a new sequence."""

    def admit(self, seq_id: str, found: LookUp, *, num_tokens: int) -> Admission | None:
        """Start a sequence."""

    def snapshot_positions_of(self, seq_id: str) -> tuple[int, ...]:
        """Snapshot positions of the live sequence's prefill."""

    def chunk_end(
        self, positions: tuple[int, ...], start: int, end: int, length: int
    ) -> int:
        """Where a prefill chunk should end."""

    def advance(self, seq_id: str, tokens: Sequence[int], computed: int) -> None:
        """Note a step that was scheduled."""

    def drain_commands(self) -> list[Command]:
        """Take the commands that a device would run."""

    def finish(self, seq_id: str, tokens: Sequence[int], computed: int) -> None:
        """End a sequence."""


class AlphaTuner:
    """Sets the weight of one cache's policy."""

    def __init__(
        self,
        policy: FlopAware,
        build: Callable[[FlopAware], ReplayedCache],
        *,
        alphas: Sequence[float] = ALPHAS,
        trial: int = TRIAL,
        pause: int = PAUSE,
        chunk: int = 8192,
    ) -> None:
        """Prepare a first trial.

        Args:
            policy: of the cache in charge.
            build: makes an empty cache like that one, with the policy given.
            alphas: weights to try.
            trial: sequences that a trial counts.
            pause: sequences between two trials.
            chunk: tokens of a prefill step at most.
        """
        self._policy = policy
        self._build = build
        self._alphas = tuple(alphas)
        self._trial = trial
        self._pause = pause
        self._chunk = chunk
        self._idle = 0
        self._counted = 0
        self._copies: dict[float, ReplayedCache] = {}
        self._before: dict[float, int] = {}
        self._begin()

    def observe(
        self,
        tokens: Sequence[int],
        computed: int,
        prompt_length: int,
        namespace: Hashable,
    ) -> bool:
        """Replay a sequence that ended; returns whether the weight changed.

        Args:
            tokens: all of it that is known.
            computed: tokens of it that were computed, at least one.
            prompt_length: tokens of its prompt.
            namespace: what besides tokens must be equal.
        """
        if not self._copies:
            self._idle += 1
            if self._idle >= self._pause:
                self._begin()
            return False
        ids = as_tokens(tokens[:computed])
        for copy in self._copies.values():
            _replay(copy, ids, min(prompt_length, len(ids)), namespace, self._chunk)
        if not self._before:
            if all(c.stats.snapshots_evicted for c in self._copies.values()):
                self._before = self._hits()
            else:
                self._give_up_in_time()
            return False
        self._counted += 1
        return self._counted >= self._trial and self._decide()

    # ---------------------------------------------------------------- internal

    def _begin(self) -> None:
        self._idle = self._counted = 0
        self._before = {}
        self._copies = {
            alpha: self._build(self._policy.with_alpha(alpha)) for alpha in self._alphas
        }

    def _give_up_in_time(self) -> None:
        """Where there is room for all, no weight is better, and copies are a cost."""
        self._idle += 1
        if self._idle >= self._pause:
            self._copies, self._idle = {}, 0

    def _hits(self) -> dict[float, int]:
        return {alpha: c.stats.hit_tokens for alpha, c in self._copies.items()}

    def _decide(self) -> bool:
        hits = self._hits()
        # The smallest of equally good ones: it is nearest to plain recency.
        best = max(self._alphas, key=lambda a: (hits[a] - self._before[a], -a))
        changed = best != self._policy.alpha
        self._policy.alpha = best
        self._copies = {}
        return changed


def _replay(
    cache: ReplayedCache, tokens: Tokens, prompt: int, namespace: Hashable, chunk: int
) -> None:
    """Serve one sequence, alone; one that does not fit is passed over."""
    found = cache.look_up(tokens[:prompt], namespace)
    if cache.admit("replayed", found, num_tokens=len(tokens)) is None:
        return
    position = found.match.length
    while position < prompt:
        stops = cache.snapshot_positions_of("replayed")
        end = cache.chunk_end(stops, position, min(position + chunk, prompt), prompt)
        cache.advance("replayed", tokens, end)
        position = end
    cache.drain_commands()
    cache.finish("replayed", tokens, len(tokens))
