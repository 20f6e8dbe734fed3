# SPDX-License-Identifier: Apache-2.0
"""A model of vLLM's own cache for hybrid models: one pool of aligned blocks.

Written from the definition, for 0.32 and 0.33 with their defaults.  A block holds
`unit` tokens of one group of attention layers, or the states of one group of state
layers; the unit is so long that both weigh the same.  A prefix of whole units is found
by its hash.  It can be resumed where the states at its end are cached too, and they are
kept

* at the last whole unit of a prompt, where its prefill pauses for that;
* where a prompt parts from one before it: at the end of the KV that it finds beyond the
  states, rounded down to a unit.

Blocks that no sequence uses are evicted in the order in which they were let go, those
at the end of a sequence first.  What a running sequence holds cannot be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hybrid_plugin.tools.plan.estimate import VLLM_ALIGNED_STATES, AlignedBlocks
from hybrid_plugin.tools.simulate.job import Job

_Key = tuple[Literal["kv", "state"], int]
"""Kind, and the hash of all tokens up to the end of a unit."""


@dataclass(slots=True)
class _Sequence:
    hashes: list[int]
    """Of each whole unit of what is known."""
    hit: int = 0
    kept_at: set[int] = field(default_factory=set)
    """Positions at which its states are kept."""
    columns: list[_Key | None] = field(default_factory=list)
    """What it holds, unit by unit; None for what nobody else can find."""


class VllmModel:
    """Serves by vLLM's rules."""

    link = None
    """There is no host memory behind it."""

    def __init__(self, pool: AlignedBlocks) -> None:
        """Start empty."""
        self._pool = pool
        self._free = pool.blocks
        self._users: dict[_Key, int] = {}
        """Sequences that use a cached unit or state."""
        self._unused: OrderedDict[_Key, None] = OrderedDict()
        """Those that nobody uses, the next one to be evicted first."""
        self._unused_blocks = 0
        self._waiting: dict[Job, _Sequence] = {}
        self._live: dict[Job, _Sequence] = {}

    @property
    def page_size(self) -> int:
        """Tokens of a unit."""
        return self._pool.unit

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Nothing depends on the time."""

    def plan(self, waiting: Iterable[Job]) -> None:
        """Nothing is planned ahead."""

    def must_wait(self, job: Job) -> bool:
        """Nobody waits for another one's prefix."""
        return False

    def look_up(self, job: Job) -> int:
        """Tokens up to the deepest states, and where the next ones are kept."""
        unit, length = self._pool.unit, job.num_tokens
        found = self._waiting.get(job)
        if found is None or len(found.hashes) != length // unit:
            found = _Sequence(unit_hashes(job, unit))
            self._waiting[job] = found
        kv = 0
        for unit_hash in found.hashes[: (length - 1) // unit]:
            if ("kv", unit_hash) not in self._users:
                break
            kv += 1
        hit = kv
        if self._pool.states:
            while hit and ("state", found.hashes[hit - 1]) not in self._users:
                hit -= 1
        found.hit = hit * unit
        found.kept_at = {kv * unit, (length - 1) // unit * unit}
        return found.hit

    def chunk_end(self, job: Job, start: int, end: int) -> int:
        """At a unit's end, but for the last chunk of a prompt."""
        if not self._pool.states:
            return end
        sequence = self._live.get(job) or self._waiting[job]
        stops = [one for one in sequence.kept_at if start < one < end]
        if stops:
            return min(stops)
        if end >= job.prefill_end:
            return end
        return max(end // self._pool.unit * self._pool.unit, start + 1)

    def admit(self, job: Job, hit: int, end: int) -> bool:
        """Admit it if its whole prompt fits."""
        sequence, pool = self._waiting[job], self._pool
        shared: list[_Key] = [("kv", h) for h in sequence.hashes[: hit // pool.unit]]
        own = -(-job.num_tokens // pool.unit) - len(shared)
        needed = own * pool.full + VLLM_ALIGNED_STATES * pool.states
        found = sum(key in self._unused for key in shared)
        available = self._free + self._unused_blocks - found * pool.full
        if needed > available:
            return False
        for key in shared:
            self._use(key)
        if hit and pool.states:
            state: _Key = ("state", sequence.hashes[hit // pool.unit - 1])
            self._use(state)
            self._let_go(state)  # the most recent one now
        self._take(pool.states)
        sequence.columns = list(shared)
        del self._waiting[job]
        self._live[job] = sequence
        return self.grow(job, end)

    def grow(self, job: Job, num_tokens: int) -> bool:
        """Give it blocks."""
        sequence, pool = self._live[job], self._pool
        count = -(-num_tokens // pool.unit) - len(sequence.columns)
        if count <= 0:
            return True
        if count * pool.full > self._free + self._unused_blocks:
            return False
        self._take(count * pool.full)
        sequence.columns += [None] * count
        return True

    def free_tokens(self) -> int:
        """Of free and evictable blocks."""
        blocks = self._free + self._unused_blocks
        return blocks // max(self._pool.full, 1) * self._pool.unit

    def step_scheduled(self, jobs: Sequence[Job]) -> bool:
        """Whole units of prompts can be found, and states where they are kept."""
        for job in jobs:
            sequence = self._live[job]
            if job.computed <= job.prefill_end:
                self._publish(sequence, job.computed)
                if job.computed in sequence.kept_at:
                    self._keep_state(sequence, job.computed)
        return False

    def end(self, job: Job) -> None:
        """Whole units stay, as long as there is room."""
        self._waiting.pop(job, None)
        sequence = self._live.pop(job, None)
        if sequence is None:
            return
        pool = self._pool
        sequence.hashes = unit_hashes(job, pool.unit)
        self._publish(sequence, min(job.computed, len(sequence.hashes) * pool.unit))
        self._free += pool.states
        for key in reversed(sequence.columns):
            if key is None:
                self._free += pool.full
            else:
                self._let_go(key)

    # ---------------------------------------------------------------- internal

    def _publish(self, sequence: _Sequence, computed: int) -> None:
        """Let others find the whole units of `computed` tokens."""
        for index in range(computed // self._pool.unit - 1, -1, -1):
            if sequence.columns[index] is not None:
                break
            key: _Key = ("kv", sequence.hashes[index])
            if key not in self._users:
                self._users[key] = 1
                sequence.columns[index] = key

    def _keep_state(self, sequence: _Sequence, position: int) -> None:
        if not position or not self._pool.states:
            return
        key: _Key = ("state", sequence.hashes[position // self._pool.unit - 1])
        blocks = self._pool.states
        if key not in self._users and blocks <= self._free + self._unused_blocks:
            self._take(blocks)
            self._users[key] = 1
            self._let_go(key)

    def _blocks(self, key: _Key) -> int:
        return self._pool.full if key[0] == "kv" else self._pool.states

    def _use(self, key: _Key) -> None:
        self._users[key] += 1
        if key in self._unused:
            del self._unused[key]
            self._unused_blocks -= self._blocks(key)

    def _let_go(self, key: _Key) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            self._unused[key] = None
            self._unused_blocks += self._blocks(key)

    def _take(self, blocks: int) -> None:
        while self._free < blocks:
            key, _ = self._unused.popitem(last=False)
            del self._users[key]
            self._unused_blocks -= self._blocks(key)
            self._free += self._blocks(key)
        self._free -= blocks


def unit_hashes(job: Job, unit: int) -> list[int]:
    """Of each whole unit of a job's tokens, with all that lies before it."""
    tokens, parent = job.tokens(), hash(("namespace", job.namespace()))
    found = []
    for start in range(0, len(tokens) - unit + 1, unit):
        parent = hash((parent, tokens[start : start + unit].tobytes()))
        found.append(parent)
    return found
