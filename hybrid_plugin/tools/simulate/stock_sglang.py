# SPDX-License-Identifier: Apache-2.0
"""A model of SGLang's own cache for hybrid models: a radix tree on two static pools.

Written from the definition, for 0.5.23 with its defaults for models of gated delta nets
(`extra_buffer`).  A state is tracked

* at the last multiple of 64 tokens of each prefill pass that has as many, or, instead,
  at the branch point where the prompt parts from what the tree has;
* at every 256th token of a decode.

A prompt enters the tree up to the state of its pass, and a finished sequence up to the
last tracked state; what follows is let go.  KV and states have pools of their own and
are evicted by recency: KV by whole branches, a state at any node, and the branch with
it where nothing lies behind it.  A state is kept while a running sequence has come no
further in the tree.  Such a sequence takes three slots, and SGLang counts five of them
for how many may run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from hybrid_plugin.tools.plan.estimate import SGLANG_SLOTS_PER_REQUEST, StaticPools
from hybrid_plugin.tools.simulate.job import Job
from hybrid_plugin.tools.simulate.stock_vllm import unit_hashes

GRID = 64
"""Tokens between two positions at which a prefill can track a state."""
INTERVAL = 256
"""Tokens between two states that a decode tracks."""
_SLOTS = 3
"""Of a running sequence: its own, and two to track in."""


@dataclass(slots=True, eq=False)
class _Node:
    """The KV of `GRID` tokens behind one prefix."""

    key: int
    parent: _Node | None
    children: int = 0
    users: int = 0
    """Running sequences that read it."""
    used: int = 0
    """When, by a count."""
    has_state: bool = False
    state_used: int = 0
    state_users: int = 0
    """Running sequences whose last position in the tree it is."""


@dataclass(slots=True)
class _Sequence:
    hashes: list[int]
    hit: int = 0
    branch: int = 0
    """Where its first pass tracks a state instead of at its end; 0 for nowhere."""
    path: list[_Node] = field(default_factory=list)
    """What it reads of the tree, and keeps there."""
    own: int = 0
    """Tokens of KV besides."""
    tracked: int = 0
    """Last position at which its state was tracked."""
    computed: int = 0


class SglangModel:
    """Serves by SGLang's rules."""

    link = None
    """There is no host memory behind it."""

    page_size = 1

    def __init__(self, pools: StaticPools, *, states: bool = True) -> None:
        """Start empty; without `states` every position can be resumed."""
        self._states = states
        self._tokens = pools.tokens
        """Free ones."""
        self._slots = pools.slots
        """Free ones."""
        self._most = pools.slots // SGLANG_SLOTS_PER_REQUEST if states else 1 << 30
        self._nodes: dict[int, _Node] = {}
        self._clock = count(1)
        self._leaves: list[tuple[int, int, int]] = []
        self._with_state: list[tuple[int, int, int]] = []
        """Heaps of (when it was used, a count, key), stale entries among them."""
        self._ids = count()
        self._unlocked = 0
        """Tokens of nodes that nobody reads."""
        self._waiting: dict[Job, _Sequence] = {}
        self._live: dict[Job, _Sequence] = {}

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Nothing depends on the time."""

    def plan(self, waiting: Iterable[Job]) -> None:
        """Nothing is planned ahead."""

    def must_wait(self, job: Job) -> bool:
        """Nobody waits for another one's prefix."""
        return False

    def look_up(self, job: Job) -> int:
        """Tokens up to the deepest state, and where the tree goes on."""
        found = self._waiting.get(job)
        if found is None or len(found.hashes) != job.num_tokens // GRID:
            found = _Sequence(unit_hashes(job, GRID))
            self._waiting[job] = found
        kv = hit = 0
        for key in found.hashes[: (job.num_tokens - 1) // GRID]:
            node = self._nodes.get(key)
            if node is None:
                break
            kv += 1
            if node.has_state or not self._states:
                hit = kv
        found.hit = hit * GRID
        found.branch = kv * GRID if kv > hit else 0
        return found.hit

    def chunk_end(self, job: Job, start: int, end: int) -> int:
        """Chunks but the last of a prompt end on the grid."""
        if end >= job.prefill_end:
            return end
        return max(end // GRID * GRID, start + 1)

    def admit(self, job: Job, hit: int, end: int) -> bool:
        """Admit it if its whole prompt fits."""
        if len(self._live) >= self._most:
            return False
        sequence = self._waiting[job]
        path = [self._nodes[key] for key in sequence.hashes[: hit // GRID]]
        locked = sum(not node.users for node in path) * GRID
        if job.num_tokens - hit > self._tokens + self._unlocked - locked:
            return False
        for node in path:
            self._lock(node)
        if path and self._states:
            self._touch_state(path[-1])
            path[-1].state_users += 1
        if self._states and not self._take_slots(_SLOTS):
            for node in reversed(path):
                self._unlock(node)
            if path:
                path[-1].state_users -= 1
            return False
        del self._waiting[job]
        sequence.path, sequence.tracked, sequence.computed = path, hit, hit
        self._live[job] = sequence
        return self.grow(job, end)

    def grow(self, job: Job, num_tokens: int) -> bool:
        """Give it room for KV."""
        sequence = self._live[job]
        more = num_tokens - len(sequence.path) * GRID - sequence.own
        if more > self._tokens + self._unlocked:
            return False
        self._take_tokens(max(more, 0))
        sequence.own += max(more, 0)
        return True

    def free_tokens(self) -> int:
        """Free and evictable ones."""
        return self._tokens + self._unlocked

    def step_scheduled(self, jobs: Sequence[Job]) -> bool:
        """Track states; prompts enter the tree up to them."""
        for job in jobs:
            sequence = self._live[job]
            before, sequence.computed = sequence.computed, job.computed
            if job.computed > job.prefill_end:
                tracked = job.computed // INTERVAL * INTERVAL
                sequence.tracked = max(sequence.tracked, tracked)
                continue
            position = before + (job.computed - before) // GRID * GRID
            if before < sequence.branch <= job.computed:
                position = sequence.branch
            if position > before and position % GRID == 0:
                sequence.tracked = position
                self._insert(sequence, position)
        return False

    def end(self, job: Job) -> None:
        """It enters the tree up to its last tracked state."""
        self._waiting.pop(job, None)
        sequence = self._live.pop(job, None)
        if sequence is None:
            return
        if self._states:
            self._slots += _SLOTS
        sequence.hashes = unit_hashes(job, GRID)
        known = min(job.computed, len(sequence.hashes) * GRID) // GRID * GRID
        end = sequence.tracked if self._states else known
        self._insert(sequence, min(end, known))
        self._tokens += sequence.own
        if sequence.path:
            sequence.path[-1].state_users -= 1
        for node in reversed(sequence.path):
            self._unlock(node)

    # ---------------------------------------------------------------- internal

    def _insert(self, sequence: _Sequence, position: int) -> None:
        """Put its first `position` tokens into the tree, and a state at their end."""
        before = sequence.path[-1] if sequence.path else None
        for key in sequence.hashes[len(sequence.path) : position // GRID]:
            node = self._nodes.get(key)
            if node is None:
                parent = sequence.path[-1] if sequence.path else None
                node = self._nodes[key] = _Node(key, parent)
                if parent is not None:
                    parent.children += 1
                self._unlocked += GRID
            else:
                self._tokens += GRID  # its own copy is let go
            sequence.own -= GRID
            self._lock(node)
            sequence.path.append(node)
        if sequence.path and sequence.path[-1] is not before:
            sequence.path[-1].state_users += 1
            if before is not None:
                before.state_users -= 1
        if not position or not self._states:
            return
        end = sequence.path[position // GRID - 1]
        if not end.has_state and self._take_slots(1):
            end.has_state = True
        if end.has_state:
            self._touch_state(end)

    def _touch_state(self, node: _Node) -> None:
        node.state_used = next(self._clock)
        entry = (node.state_used, next(self._ids), node.key)
        heapq.heappush(self._with_state, entry)

    def _lock(self, node: _Node) -> None:
        if not node.users:
            self._unlocked -= GRID
        node.users += 1

    def _unlock(self, node: _Node) -> None:
        node.users -= 1
        if not node.users:
            self._unlocked += GRID
            node.used = next(self._clock)
            self._offer(node)

    def _offer(self, node: _Node) -> None:
        """Note a node that can be evicted, if it is one."""
        if not node.users and not node.children:
            heapq.heappush(self._leaves, (node.used, next(self._ids), node.key))

    def _take_tokens(self, tokens: int) -> None:
        while self._tokens < tokens:
            used, _, key = heapq.heappop(self._leaves)
            node = self._nodes.get(key)
            if node is None or node.users or node.children or node.used != used:
                continue
            self._remove_branch(node)
        self._tokens -= tokens

    def _take_slots(self, slots: int) -> bool:
        locked = []
        while self._slots < slots and self._with_state:
            entry = heapq.heappop(self._with_state)
            node = self._nodes.get(entry[2])
            if node is None or not node.has_state or node.state_used != entry[0]:
                continue
            if node.state_users:
                locked.append(entry)
            elif node.users or node.children:
                node.has_state = False
                self._slots += 1
            else:
                self._remove_branch(node)
        for entry in locked:
            heapq.heappush(self._with_state, entry)
        if self._slots < slots:
            return False
        self._slots -= slots
        return True

    def _remove_branch(self, leaf: _Node) -> None:
        """Remove a leaf with what only leads to it."""
        node: _Node | None = leaf
        while node is not None and not node.users and not node.children:
            if node.has_state:
                if node is not leaf:
                    self._offer(node)
                    return
                self._slots += 1
            del self._nodes[node.key]
            self._tokens += GRID
            self._unlocked -= GRID
            if node.parent is not None:
                node.parent.children -= 1
            node = node.parent
