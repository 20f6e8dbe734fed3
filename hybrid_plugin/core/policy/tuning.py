# SPDX-License-Identifier: Apache-2.0
"""AlphaTuner: finds the weight of a FLOP-aware policy by replay.

The best weight depends on the workload and on the memory.  With few snapshots, for
example, a large weight keeps long prompts that are never sent again.  During a trial,
every finished sequence is therefore replayed through copies of the cache's bookkeeping,
one for each weight.  The weight with the most hit tokens wins.  (Marconi, MLSys 2025,
replays its recorded requests in the same way.)

For every weight, a trial costs as much host time as the cache itself.  So it ends after
a fixed number of sequences, and the next one begins much later.
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
"""Number of sequences in a trial, counted once every copy has evicted a snapshot."""
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

    def advance(self, seq_id: str, computed: int) -> None:
        """Note a step that was scheduled."""

    def drain_commands(self) -> list[Command]:
        """Take the commands that a device would run."""

    def finish(self, seq_id: str, tokens: Sequence[int], computed: int) -> None:
        """End a sequence."""


class AlphaTuner:
    """Sets the weight of one cache's eviction policy."""

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
            policy: of the cache that serves.
            build: returns an empty cache of the same size, with the given policy.
            alphas: weights to try.
            trial: sequences that a trial counts.
            pause: sequences between two trials.
            chunk: maximum number of tokens in a prefill step.
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
        """Replay a finished sequence; return whether the weight changed.

        Args:
            tokens: all its known tokens.
            computed: number of computed tokens, at least one.
            prompt_length: number of tokens of its prompt.
            namespace: must be equal, besides the tokens, for a hit.
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
        """Without evictions all weights are equal, and the copies only cost time."""
        self._idle += 1
        if self._idle >= self._pause:
            self._copies, self._idle = {}, 0

    def _hits(self) -> dict[float, int]:
        return {alpha: c.stats.hit_tokens for alpha, c in self._copies.items()}

    def _decide(self) -> bool:
        hits = self._hits()
        # Of equally good weights the smallest: it is closest to plain recency.
        best = max(self._alphas, key=lambda a: (hits[a] - self._before[a], -a))
        changed = best != self._policy.alpha
        self._policy.alpha = best
        self._copies = {}
        return changed


def _replay(
    cache: ReplayedCache, tokens: Tokens, prompt: int, namespace: Hashable, chunk: int
) -> None:
    """Serve one sequence alone; skip it if it does not fit."""
    found = cache.look_up(tokens[:prompt], namespace)
    if cache.admit("replayed", found, num_tokens=len(tokens)) is None:
        return
    position = found.match.length
    while position < prompt:
        stops = cache.snapshot_positions_of("replayed")
        end = cache.chunk_end(stops, position, min(position + chunk, prompt), prompt)
        cache.advance("replayed", end)
        position = end
    cache.drain_commands()
    cache.finish("replayed", tokens, len(tokens))
