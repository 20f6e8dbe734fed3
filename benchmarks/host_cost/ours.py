# SPDX-License-Identifier: Apache-2.0
"""This package's core: KV pages and states."""

from __future__ import annotations

from array import array

from benchmarks.host_cost.driver import PAGE, Laps
from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.eviction import ExpectedSaving

TOKEN_BYTES, SLOT_BYTES = 24 << 10, 36 << 20
"""Of Qwen3-Next-80B-A3B."""


class Ours:
    """`HybridCache` with the default options, in one prefill step a stop."""

    name = "hybrid-plugin (KV + states)"

    def __init__(self, kv_tokens: int, slots: int) -> None:
        self._cache = HybridCache(
            PagePool(kv_tokens // PAGE + 1),
            SlotPool(slots + 1),
            PAGE,
            HybridConfig().snapshot_policy(PAGE),
            eviction=ExpectedSaving(token_bytes=TOKEN_BYTES, slot_bytes=SLOT_BYTES),
        )
        self._count = 0

    def serve(self, prompt: array[int], answer: array[int]) -> tuple[int, Laps]:
        """See `Driver`."""
        cache, laps, length = self._cache, Laps(), len(prompt)
        self._count += 1
        name = str(self._count)
        laps.start()
        found = cache.look_up(prompt)
        laps.stop("match")
        admission = cache.admit(name, found, num_tokens=length)
        cache.drain_commands()
        laps.stop("admit")
        assert admission is not None
        for stop in (*found.snapshot_positions, length):
            cache.advance(name, stop)
            cache.drain_commands()
        laps.stop("commit")
        computed = length + len(answer) - 1
        cache.grow(name, computed)
        tokens = prompt + answer
        laps.start()
        cache.finish(name, tokens, computed)
        laps.stop("finish")
        return admission.hit, laps

    def entries(self) -> int:
        """Nodes of the tree."""
        return sum(1 for _ in self._cache.tree.nodes())
