# SPDX-License-Identifier: Apache-2.0
"""Command lists on SGLang's pools."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Command, Copy, Map, Pool, Unmap, Zero
from hybrid_plugin.sglang.executor import SglangExecutor, kv_tensors

KV, STATE = Pool.KV, Pool.STATE


class StatePool:
    """As much of SGLang's `MambaPool` as commands need, one state of one number."""

    def __init__(self, slots: int) -> None:
        self.mamba_cache = SimpleNamespace(temporal=torch.arange(1.0, slots + 1))

    def clear_slots(self, indices: torch.Tensor) -> None:
        self.mamba_cache.temporal[indices] = 0

    def copy_from(self, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
        states = self.mamba_cache.temporal
        states[dst_indices] = states[src_indices]


class MHATokenToKVPool:
    """As much of SGLang's as commands need."""

    def __init__(self, tokens: int) -> None:
        self.k_buffer = [torch.randn(tokens, 2, 3) for _ in range(2)]
        self.v_buffer = [torch.randn(tokens, 2, 3) for _ in range(2)]


def test_random_lists_do_what_one_command_at_a_time_does() -> None:
    rng = random.Random(11)
    page_size, pages, slots = 4, 7, 16
    pool, states = MHATokenToKVPool(pages * page_size), StatePool(slots)
    executor = SglangExecutor(SimpleNamespace(full_kv_pool=pool), states, page_size)
    kv = [t.clone() for t in kv_tensors(pool)]
    expected_states = states.mamba_cache.temporal.clone()
    for _ in range(50):
        commands: list[Command] = []
        for _ in range(rng.randrange(30)):
            kind = rng.randrange(3)
            if kind == 0:
                commands.append(Zero(STATE, rng.randrange(slots)))
            else:
                which, count = ((KV, pages), (STATE, slots))[kind - 1]
                commands.append(Copy(which, *rng.sample(range(count), 2)))
        executor.run(commands)
        for command in commands:
            match command:
                case Zero(_, index):
                    expected_states[index] = 0
                case Copy(Pool.STATE, source, destination):
                    expected_states[destination] = expected_states[source]
                case Copy(_, source, destination):
                    for tensor in kv:
                        rows = tensor.view(pages, page_size, 2, 3)
                        rows[destination] = rows[source]
    assert torch.equal(states.mamba_cache.temporal, expected_states)
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(kv_tensors(pool), kv, strict=True)
    )


def test_memory_moves_between_the_copies_before_and_after() -> None:
    pool, states = MHATokenToKVPool(8), StatePool(4)
    seen: list[tuple[Command, float]] = []

    class Mover:
        """Notes what moves, and what slot 3 holds by then."""

        def run(self, commands: list[Command]) -> None:
            seen.append((commands[0], float(states.mamba_cache.temporal[3])))

    mover: Any = Mover()
    executor = SglangExecutor(SimpleNamespace(full_kv_pool=pool), states, 4, mover)
    moves = Unmap(STATE, (1,)), Map(KV, (1,))
    executor.run([Copy(STATE, 1, 3), *moves, Zero(STATE, 3)])
    assert seen == [(moves[0], 2.0), (moves[1], 2.0)]
    assert states.mamba_cache.temporal[3] == 0


def test_memory_of_fixed_pools_does_not_move() -> None:
    pool, states = MHATokenToKVPool(8), StatePool(4)
    executor = SglangExecutor(SimpleNamespace(full_kv_pool=pool), states, 4)
    with pytest.raises(KeyError):
        executor.run([Map(KV, (1,))])


def test_an_unknown_kv_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="of the kind object is not supported"):
        kv_tensors(object())
