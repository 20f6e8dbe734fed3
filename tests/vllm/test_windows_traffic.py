# SPDX-License-Identifier: Apache-2.0
"""Every token that attention reads is where the block tables say, through real pools.

Stands in for a model: each step writes a mark for every token at the places that the
manager gave, and reads those that each layer's window reaches, in vLLM's own views.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import KVCacheSpec

from hybrid_plugin.core.commands import Copy, Zero
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from hybrid_plugin.vllm.planning import HybridKVCacheConfig
from hybrid_plugin.vllm.pool_memory import PoolMemory
from hybrid_plugin.vllm.specs import window_of
from tests.vllm.test_windows import (
    CHUNKS,
    FULL,
    NEAR,
    PAGE,
    STATE,
    config_of,
    manager_of,
    request,
    views,
)

STEP = 48
KINDS: dict[str, tuple[dict[str, KVCacheSpec], PoolSizes]] = {
    "windows and full": ({"f0": FULL, "w0": NEAR}, PoolSizes(80, 2, (24,))),
    "chunks and full": ({"f0": FULL, "c0": CHUNKS}, PoolSizes(80, 2, (24,))),
    "windows and states": ({"w0": NEAR, "s0": STATE}, PoolSizes(80, 5, (24,))),
    "all": (
        {"f0": FULL, "w0": NEAR, "w1": NEAR, "c0": CHUNKS, "s0": STATE},
        PoolSizes(80, 5, (24, 24)),
    ),
}


class MisreadError(AssertionError):
    """A layer read something else than the KV or the state it needs."""


class Model:
    """Marks in place of KV and states."""

    def __init__(self, config: HybridKVCacheConfig, broken: bool) -> None:
        self.manager: HybridKVCacheManager = manager_of(config)
        self._memory = PoolMemory()
        self._groups = config.kv_cache_groups
        self._views = {
            name: view[..., :4].view(torch.int32)
            for name, view in views(config, self._memory).items()
        }
        self._broken = broken
        self.copied = 0

    def run(self, one: Any, start: int) -> None:
        """A step of one request from `start` to what it has computed then."""
        for command in self.manager.drain_commands():
            if isinstance(command, Copy) and command.pool.startswith("window"):
                self.copied += 1
                if self._broken:
                    command = Zero(command.pool, command.destination)
            self._memory.executor.run([command])
        marks = _marks(one.all_token_ids)
        for group, ids in zip(
            self._groups, self.manager.get_block_ids(one.request_id), strict=True
        ):
            window = window_of(group.kv_cache_spec)
            for name in group.layer_names:
                view = self._views[name]
                if window is None:
                    self._pass_state(view[ids[0]], marks, start, one)
                    continue
                end, table = one.num_computed_tokens, torch.tensor(ids)
                _write(view, table, marks, range(start, end))
                if not _reads(
                    view, table, marks, range(window.first_needed(start), end)
                ):
                    raise MisreadError(f"{name} at token {start} of {one.request_id}")

    def _pass_state(
        self, state: torch.Tensor, marks: list[int], start: int, one: Any
    ) -> None:
        expected = marks[start - 1] if start else 0
        if not (state == expected).all():
            raise MisreadError(f"state at token {start} of {one.request_id}")
        state[:] = marks[one.num_computed_tokens - 1]


def _write(
    view: torch.Tensor, table: torch.Tensor, marks: list[int], places: range
) -> None:
    where = torch.arange(places.start, places.stop)
    values = torch.tensor(marks, dtype=torch.int32)[where]
    view[table[where // PAGE], :, where % PAGE] = values[:, None, None]


def _reads(
    view: torch.Tensor, table: torch.Tensor, marks: list[int], places: range
) -> bool:
    where = torch.arange(places.start, places.stop)
    values = torch.tensor(marks, dtype=torch.int32)[where]
    found = view[table[where // PAGE], :, where % PAGE]
    return bool((found == values[:, None, None]).all())


def _marks(tokens: list[int]) -> list[int]:
    """For each token a number that depends on all before it, and is not 0."""
    marks, mark = [], 17
    for token in tokens:
        mark = (mark * 31 + token + 1) % 1_000_003 + 1
        marks.append(mark)
    return marks


def advance(model: Model, one: Any) -> bool:
    """Schedule and run one step of a request; False if there was no room."""
    manager, start = model.manager, one.num_computed_tokens
    if not manager.cache.is_live(one.request_id):
        _, start, _ = manager.get_computed_blocks(one)
        end = cut(manager, one, start)
        if manager.allocate_slots(one, end - start, start) is None:
            return False
    else:
        end = cut(manager, one, start)
        if manager.allocate_slots(one, end - start) is None:
            return False
    one.num_computed_tokens = end
    model.run(one, start)
    manager.step_scheduled([one])
    return True


def cut(manager: HybridKVCacheManager, one: Any, start: int) -> int:
    return manager.chunk_end(one, start, min(start + STEP, one.num_tokens))


def serve(model: Model, seed: int, turns: int = 60) -> int:
    """Chats with shared beginnings, three at a time; returns tokens that were hit."""
    rng = random.Random(seed)
    systems = [[rng.randrange(250) for _ in range(n)] for n in (70, 130)]
    chats = [list(rng.choice(systems)) for _ in range(6)]
    live: dict[int, tuple[Any, int]] = {}
    begun = 0
    while begun < turns or live:
        chat = rng.randrange(len(chats))
        if chat not in live and len(live) < 3 and begun < turns:
            more = [rng.randrange(250) for _ in range(rng.randint(1, 60))]
            chats[chat] = (chats[chat] + more)[:350]
            live[chat] = request(f"{chat}.{begun}", chats[chat][:]), rng.randint(1, 40)
            begun += 1
        for number, (one, answer) in list(live.items()):
            if not advance(model, one):  # preempted, and begun again later
                model.manager.free(one)
                one.num_computed_tokens = 0
                continue
            if one.num_computed_tokens < one.num_tokens:
                continue
            if one.num_tokens - len(chats[number]) < answer and one.num_tokens < 400:
                one.all_token_ids.append(rng.randrange(250))
                one.num_tokens += 1
                continue
            model.manager.free(one)
            chats[number] = one.all_token_ids
            del live[number]
    assert model.manager.cache.pages.in_use == 0
    assert all(group.pages.in_use == 0 for group in model.manager.cache.windows)
    return model.manager.cache.stats.hit_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_in_reach_is_where_the_tables_say(kind: str) -> None:
    model = Model(config_of(*KINDS[kind]), broken=False)
    hits = serve(model, seed=3)
    assert hits > 500
    assert model.copied > 2, "hits that end inside a page"


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_page_that_was_not_copied_is_noticed(kind: str) -> None:
    model = Model(config_of(*KINDS[kind]), broken=True)
    with pytest.raises(MisreadError):
        serve(model, seed=3)
