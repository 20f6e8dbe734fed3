# SPDX-License-Identifier: Apache-2.0
"""Records of verified tokens: how many of them are folded into which slot, and when."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hybrid_kernels import gated_delta_rule, replay

from hybrid_plugin.core.commands import Copy, Fold, Pool
from hybrid_plugin.device.arena import Arena
from hybrid_plugin.device.draft_records import DraftRecords
from hybrid_plugin.device.executor import Executor

SLOTS, HEADS, WIDTH, DEPTH = 8, 2, 4, 4
ROWS, TOKENS = 4, 3
CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@dataclass
class Layer:
    """A gated delta rule of random tokens, `TOKENS` of each of `ROWS` sequences."""

    pool: torch.Tensor
    tokens: tuple[torch.Tensor, ...]
    record: torch.Tensor

    @staticmethod
    def make() -> Layer:
        rng = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng)

        pool = draw(SLOTS, HEADS, WIDTH, DEPTH)
        keys = [draw(ROWS, TOKENS, HEADS, DEPTH) / 2 for _ in range(2)]
        tokens = (
            *keys,
            draw(ROWS, TOKENS, HEADS, WIDTH),
            -draw(ROWS, TOKENS, HEADS).abs(),
            draw(ROWS, TOKENS, HEADS).sigmoid(),
        )
        size = replay.record_size(pool, HEADS, wide_decay=False)
        return Layer(pool, tokens, torch.zeros(ROWS, TOKENS, size))

    def verify(self, slots: list[int]) -> torch.Tensor:
        """A pass that records; returns its slots."""
        table = torch.tensor(slots, dtype=torch.int32)
        given = [part[: len(slots)] for part in self.tokens]
        gated_delta_rule.verify(*given, self.pool, table, record=self.record)
        return table

    def behind(self, slot: int, row: int, count: int) -> torch.Tensor:
        """The state of a slot now, with the first tokens of a row behind it."""
        pool = self.pool.clone()
        for token in range(count):
            one = [part[row : row + 1, token] for part in self.tokens]
            gated_delta_rule.update(*one, pool, torch.tensor([slot]))
        return pool[slot]

    def executor(self) -> Executor:
        """With this layer's record."""
        made = Executor({Pool.STATE: Arena([self.pool.view(SLOTS, -1)])})
        made.records = DraftRecords(ROWS, CPU)
        made.records.fold_into(
            replay.Layers([replay.States(self.pool, self.record, HEADS)])
        )
        return made


def test_as_many_are_folded_as_were_accepted() -> None:
    layer = Layer.make()
    executor = layer.executor()
    assert executor.records is not None
    slots = layer.verify([5, -1, 2])
    executor.records.recorded(slots)
    executor.records.accepted(torch.tensor([3, 3, 1], dtype=torch.int32))
    expected = layer.behind(5, 0, 3), layer.behind(2, 2, 1), layer.pool[6].clone()
    before = layer.pool.clone()
    executor.run(())
    for slot, state in zip((5, 2, 6), expected, strict=True):
        torch.testing.assert_close(layer.pool[slot], state, **CLOSE)
    assert not torch.equal(layer.pool[5], before[5])
    done = layer.pool.clone()
    executor.run(())  # once only
    assert torch.equal(layer.pool, done)


def test_of_sequences_that_ended_the_cache_says_it() -> None:
    layer = Layer.make()
    executor = layer.executor()
    assert executor.records is not None
    executor.records.recorded(layer.verify([5, 3, 2]))
    executor.records.accepted(torch.tensor([3, 2, 3], dtype=torch.int32))
    expected = layer.behind(5, 0, 1), layer.behind(3, 1, 2), layer.behind(2, 2, 2)
    # What is copied, too, is what was folded, wherever the command stands.
    executor.run([Copy(Pool.STATE, 2, 7), Fold(Pool.STATE, 5, 1), Fold("state", 2, 2)])
    for slot, state in zip((5, 3, 2, 7), (*expected, expected[2]), strict=True):
        torch.testing.assert_close(layer.pool[slot], state, **CLOSE)


def test_rows_need_not_be_the_first_of_the_pass() -> None:
    layer = Layer.make()
    executor = layer.executor()
    assert executor.records is not None
    executor.records.recorded(layer.verify([5, 3]), torch.tensor([2, 0]))
    executor.records.accepted(torch.tensor([1, 9, 2], dtype=torch.int32))
    expected = layer.behind(5, 0, 2), layer.behind(3, 1, 1)
    executor.run(())
    for slot, state in zip((5, 3), expected, strict=True):
        torch.testing.assert_close(layer.pool[slot], state, **CLOSE)


def test_a_pass_that_verifies_nothing_leaves_nothing_to_fold() -> None:
    layer = Layer.make()
    executor = layer.executor()
    assert executor.records is not None
    before = layer.pool.clone()
    executor.records.recorded(layer.verify([5]))
    executor.records.recorded(None)
    executor.records.accepted(torch.tensor([2], dtype=torch.int32))
    executor.run(())
    assert torch.equal(layer.pool, before)
    with pytest.raises(RuntimeError, match="the last pass recorded none"):
        executor.run([Fold(Pool.STATE, 5, 1)])


def test_without_records_nothing_is_folded() -> None:
    executor = Executor({})
    executor.run(())
    with pytest.raises(TypeError, match="verifications record nothing here"):
        executor.run([Fold(Pool.STATE, 5, 1)])
