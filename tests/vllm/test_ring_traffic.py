# SPDX-License-Identifier: Apache-2.0
"""Every index key is one of its own tokens, wherever turns and passes end.

Stands in for a model: each step writes a mark for every token where the tables say, and
makes a key of each few marks, of which the first ones may wait in the ring.  Addresses
are those that vLLM computes, contents lie in real pools.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.models.qwen4_exp.common.qsa_cache import (
    circular_qsa_slot_mapping,
    compressed_qsa_slot_mapping,
)

from hybrid_plugin.core.commands import Copy, Pool, Zero
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.vllm import planning
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from hybrid_plugin.vllm.planning import HybridKVCacheConfig
from hybrid_plugin.vllm.pool_memory import PoolMemory
from tests.vllm.ring_caches import KEYS, PAGE, RATIO, RINGS, Layers
from tests.vllm.test_rings import bound
from tests.vllm.test_windows import manager_of
from tests.vllm.test_windows_traffic import MisreadError, serve

MODULUS = 61
"""Of marks, so small that bfloat16 tells the sums of a key's."""
ROOM = PAGE // RATIO
"""Keys of a page."""


def marks_of(tokens: list[int]) -> torch.Tensor:
    """For each token a number that depends on all before it, and is not 0."""
    marks, mark = [], 17
    for token in tokens:
        mark = (mark * 31 + token + 1) % MODULUS + 1
        marks.append(mark)
    return torch.tensor(marks)


class Model:
    """Marks in place of keys and states."""

    def __init__(self, broken: str = "") -> None:
        """Make the pools.

        Args:
            broken: what copies lose: "ring" or "keys".
        """
        self._layers, self._memory = Layers(), PoolMemory()
        groups = planning.make_groups(self._layers.specs)
        sizes = PoolSizes(80, 5)
        config: HybridKVCacheConfig = planning.make_config(
            self._layers.config, groups, sizes
        )
        self.manager: HybridKVCacheManager = manager_of(config)
        views = bound(self._layers, config, self._memory)
        self._state = views["state"].view(torch.int32)
        self._broken = broken
        self.between = 0
        """Passes that began between the tokens of a key."""

    def run(self, one: Any, start: int) -> None:
        """A step of one request from `start` to what it has computed then."""
        for command in self.manager.drain_commands():
            self._memory.executor.run([command])
            if isinstance(command, Copy):
                self._lose(command)
        marks, end = marks_of(one.all_token_ids), one.num_computed_tokens
        self.between += start % RATIO > 0 and end - start > 1
        keys, _, (slot,), _ = self.manager.get_block_ids(one.request_id)
        self._pass_state(slot, marks, start, end)
        positions = torch.arange(start, end)
        sequence = torch.zeros_like(positions)
        waits = circular_qsa_slot_mapping(
            torch.tensor([[slot]]),
            sequence,
            positions,
            RATIO,
            torch.tensor([0, len(positions)]),
        )
        made = compressed_qsa_slot_mapping(
            torch.tensor([keys]), sequence, positions, ROOM, RATIO
        )
        for ring, cache in zip(RINGS, KEYS, strict=True):
            waiting = self._layers.caches[ring].key_cache[slot, :, 0]
            kept = self._layers.caches[cache].kv_cache[:, :, 0]
            done = made >= 0
            own = positions[done, None] + torch.arange(1 - RATIO, 1)
            waited = waiting[own % RATIO, 0].to(marks.dtype)
            sums = torch.where(own < start, waited, marks[own.clamp(min=0)]).sum(1)
            kept[made[done] // ROOM, made[done] % ROOM] = sums[:, None].bfloat16()
            stays = waits >= 0
            assert (waits[stays] // RATIO == slot).all()
            waiting[waits[stays] % RATIO] = marks[positions[stays], None].bfloat16()
            self._check(kept, keys, marks[:end], one, start)

    def _check(
        self,
        kept: torch.Tensor,
        pages: list[int],
        marks: torch.Tensor,
        one: Any,
        start: int,
    ) -> None:
        """Every key of a sequence is the sum of its tokens' marks."""
        count = len(marks) // RATIO
        numbers = torch.arange(count)
        found = kept[torch.tensor(pages)[numbers // ROOM], numbers % ROOM]
        sums = marks[: count * RATIO].view(count, RATIO).sum(1)
        if not (found == sums[:, None].bfloat16()).all():
            raise MisreadError(f"a key of {one.request_id} behind token {start}")

    def _pass_state(self, slot: int, marks: torch.Tensor, start: int, end: int) -> None:
        state = self._state[slot]
        if not (state == (marks[start - 1] if start else 0)).all():
            raise MisreadError(f"the state at token {start}")
        state[:] = marks[end - 1]

    def _lose(self, copied: Copy) -> None:
        is_slot = copied.pool == Pool.STATE
        if is_slot and self._broken == "ring":
            for ring in RINGS:
                self._layers.caches[ring].kv_cache[copied.destination] = 0
        if not is_slot and self._broken == "keys":
            self._memory.executor.run([Zero(copied.pool, copied.destination)])


def test_every_key_is_of_its_own_tokens() -> None:
    model = Model()
    assert serve(model, seed=3, turns=40) > 500
    assert model.between > 3


@pytest.mark.parametrize("part", ["ring", "keys"])
def test_what_a_hit_must_bring_is_noticed(part: str) -> None:
    with pytest.raises(MisreadError, match="a key of"):
        serve(Model(part), seed=3)
