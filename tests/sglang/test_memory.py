# SPDX-License-Identifier: Apache-2.0
"""Command lists on the pools that SGLang allocated."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Command, Copy, Map, Pool, Zero
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.rows import rows_of
from hybrid_plugin.sglang.pool_memory import PoolMemory
from hybrid_plugin.sglang.pool_rows import kv_tensors, page_rows, slot_rows

KV, STATE = Pool.KV, Pool.STATE
LAYERS, PAGE, PAGES, SLOTS = 2, 4, 7, 16
NAN = float("nan")


class StatePool:
    """As much of SGLang's `MambaPool` as commands need: two kinds of state."""

    _slot_siblings: tuple[Any, ...] = ()

    def __init__(self, slots: int = SLOTS) -> None:
        conv = torch.full((LAYERS, slots, 5, 3), NAN, dtype=torch.bfloat16)
        temporal = torch.full((LAYERS, slots, 2, 4, 3), NAN)
        conv.copy_(torch.randn(conv.shape))
        temporal.copy_(torch.randn(temporal.shape))
        self.mamba_cache = SimpleNamespace(
            conv=[conv], temporal=temporal, replayssm_d=None
        )

    def all(self) -> list[torch.Tensor]:
        """Every kind, `[layers, slots, ...]`."""
        return [*self.mamba_cache.conv, self.mamba_cache.temporal]


class MHATokenToKVPool:
    """As much of SGLang's as commands need."""

    def __init__(self, tokens: int) -> None:
        # Keys and values of a layer are halves of one tensor, as in SGLang.
        layers = [torch.randn(2, tokens, 2, 3) for _ in range(LAYERS)]
        self.k_buffer = [layer[0] for layer in layers]
        self.v_buffer = [layer[1] for layer in layers]


def executor_on(kv: Any, states: Any) -> Executor:
    return PoolMemory().executor(SimpleNamespace(full_kv_pool=kv), states, PAGE)


def random_commands(rng: random.Random) -> list[Command]:
    commands: list[Command] = []
    for _ in range(rng.randrange(30)):
        kind = rng.randrange(3)
        if kind == 0:
            commands.append(Zero(STATE, rng.randrange(SLOTS)))
        else:
            which, count = ((KV, PAGES), (STATE, SLOTS))[kind - 1]
            commands.append(Copy(which, *rng.sample(range(count), 2)))
    return commands


def test_random_lists_do_what_one_command_at_a_time_does() -> None:
    rng = random.Random(11)
    pool, states = MHATokenToKVPool(PAGES * PAGE), StatePool()
    executor = executor_on(pool, states)
    kv = [t.clone() for t in kv_tensors(pool)]
    expected = [kind.clone() for kind in states.all()]
    for _ in range(50):
        commands = random_commands(rng)
        executor.run(commands)
        for command in commands:
            match command:
                case Zero(_, index):
                    for kind in expected:
                        kind[:, index] = 0
                case Copy(Pool.STATE, source, destination):
                    for kind in expected:
                        kind[:, destination] = kind[:, source]
                case Copy(_, source, destination):
                    for tensor in kv:
                        rows = tensor.view(PAGES, PAGE, 2, 3)
                        rows[destination] = rows[source]
    assert all(map(torch.equal, states.all(), expected))
    assert all(map(torch.equal, kv_tensors(pool), kv))


def test_memory_of_fixed_pools_does_not_move() -> None:
    executor = executor_on(MHATokenToKVPool(8), StatePool())
    with pytest.raises(TypeError, match="is fixed"):
        executor.run([Map(KV, (1,))])


def test_pages_carry_the_kv_of_a_draft_model() -> None:
    memory, draft = PoolMemory(), MHATokenToKVPool(PAGES * PAGE)
    target = MHATokenToKVPool(PAGES * PAGE)
    executor = memory.executor(SimpleNamespace(full_kv_pool=target), StatePool(), PAGE)
    memory.join(page_rows(draft, PAGE))
    tensors = [*kv_tensors(target), *kv_tensors(draft)]
    pages = [tensor.view(PAGES, PAGE, 2, 3) for tensor in tensors]
    before = [page.clone() for page in pages]
    executor.run([Copy(KV, 3, 5)])
    for page, old in zip(pages, before, strict=True):
        old[5] = old[3]
        assert torch.equal(page, old)


def test_tokens_behind_the_last_whole_page_are_nobody_s() -> None:
    (rows, *_) = page_rows(MHATokenToKVPool(2 * PAGE + 3), PAGE)
    assert rows.shape == (2, PAGE * 2 * 3 * 4)


def test_a_pool_by_pages_has_them_as_rows() -> None:
    """SGLang's layout with heads before tokens: `[pages, heads, page, width]`."""
    pool = MHATokenToKVPool(PAGES)
    pool.k_buffer = [torch.randn(PAGES, 2, PAGE, 3) for _ in range(LAYERS)]
    pool.v_buffer = [torch.randn(PAGES, 2, PAGE, 3) for _ in range(LAYERS)]
    pool.kv_cache_layout = "hnd"  # type: ignore[attr-defined]
    before = pool.k_buffer[1].clone()
    executor_on(pool, StatePool()).run([Copy(KV, 3, 5)])
    before[5] = before[3]
    assert torch.equal(pool.k_buffer[1], before)


def test_states_without_numbers_have_no_rows() -> None:
    states = StatePool()
    states.mamba_cache.temporal = torch.zeros(LAYERS, SLOTS, 0, 4)
    assert len(slot_rows(states)) == LAYERS


def test_an_unknown_kv_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="of the kind object is not supported"):
        kv_tensors(object())


def test_scales_are_refused() -> None:
    pool: Any = MHATokenToKVPool(PAGES * PAGE)
    pool.k_scale_buffer = [torch.ones(1)]
    sentence = (
        "quantised KV with scales beside it is not supported yet; drop "
        "--kv-cache-dtype."
    )
    with pytest.raises(ConfigError) as refusal:
        kv_tensors(pool)
    assert str(refusal.value) == sentence


def test_states_with_something_beside_them_are_refused() -> None:
    class NGramPool:
        """One of SGLang's, for Qwen4-Exp."""

    states = StatePool()
    states._slot_siblings = (NGramPool(),)
    with pytest.raises(ConfigError, match="with NGramPool beside them"):
        slot_rows(states)
    states = StatePool()
    states.mamba_cache.replayssm_d = torch.zeros(1)
    with pytest.raises(ConfigError, match="with replayssm_d beside them"):
        slot_rows(states)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5, 4).transpose(1, 2),
        torch.randn(3, 9)[:, 2:7],
        torch.randn(3, 5, 1, 4)[:, 1:3],
        torch.randn(4, 3, 5).bfloat16()[2],
    ],
    ids=["transposed", "strided", "part of an item", "a layer"],
)
def test_rows_are_the_tensor_s_own_bytes(tensor: torch.Tensor) -> None:
    rows = rows_of(tensor)
    assert rows.shape == (3, tensor[0].numel() * tensor.itemsize)
    assert rows.data_ptr() == tensor.data_ptr()
    before = tensor.clone()
    rows[0] = rows[2]
    before[0] = before[2]
    assert torch.equal(tensor, before)


def test_rows_with_holes_are_refused() -> None:
    with pytest.raises(ValueError, match="are not dense"):
        rows_of(torch.zeros(3, 8)[:, ::2])
