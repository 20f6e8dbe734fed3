# SPDX-License-Identifier: Apache-2.0
"""Pools of the plugin on the kernels that a GPU runs: the same as on a CPU."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_plugin.core.commands import Command, Copy, Pool, Zero
from hybrid_plugin.device import arena as arena_module
from hybrid_plugin.device.arena import Arena
from hybrid_plugin.device.executor import Executor

PAGES, SLOTS = 9, 6


@pytest.fixture
def by_kernel(
    monkeypatch: pytest.MonkeyPatch, on_triton: Callable[[], Any]
) -> Callable[[Any], Executor]:
    """Executors on arenas that the kernels work on, on a CPU too."""

    def make(pools: Any) -> Executor:
        return Executor({pool: Arena(parts) for pool, parts in pools.items()})

    monkeypatch.setattr(arena_module, "_by_kernel", lambda device: True)
    monkeypatch.setattr(arena_module, "to_device", lambda host, to: host.to(to))
    return make


def pools(device: str) -> dict[Pool, list[torch.Tensor]]:
    """Pages in layers of two sizes; slots that are padded, of one part."""
    layers = torch.randint(-99, 99, (3, PAGES, 64), dtype=torch.int8, device=device)
    wide = torch.randint(-99, 99, (PAGES, 20000), dtype=torch.int8, device=device)
    slots = torch.randint(-99, 99, (SLOTS, 30000), dtype=torch.int8, device=device)
    return {Pool.KV: [*layers, wide], Pool.STATE: [slots[:, :29999]]}


def commands(rng: random.Random) -> list[Command]:
    made: list[Command] = []
    for _ in range(rng.randrange(8)):
        pool, count = rng.choice([(Pool.KV, PAGES), (Pool.STATE, SLOTS)])
        if rng.random() < 0.3:
            made.append(Zero(pool, rng.randrange(count)))
        else:
            made.append(Copy(pool, *rng.sample(range(count), 2)))
    return made


def test_commands_do_what_they_do_on_a_cpu(
    by_kernel: Callable[[Any], Executor], device: str, on_triton: Callable[[], Any]
) -> None:
    rng = random.Random(5)
    ours = pools(device)
    theirs = {pool: copy.deepcopy(parts) for pool, parts in ours.items()}
    with on_triton():
        executor = by_kernel(ours)
        for _ in range(20):
            run = commands(rng)
            executor.run(run)
            for command in run:
                for part in theirs[command.pool]:
                    match command:
                        case Zero(_, index):
                            part[index] = 0
                        case Copy(_, source, destination):
                            part[destination] = part[source]
    for pool, parts in ours.items():
        for part, twin in zip(parts, theirs[pool], strict=True):
            assert torch.equal(part, twin)
