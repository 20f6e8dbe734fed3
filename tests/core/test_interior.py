# SPDX-License-Identifier: Apache-2.0
"""Orders for states in the middle of a prompt, on their way to the kernels."""

from __future__ import annotations

import pytest
import torch

from hybrid_plugin.core.commands import COLUMNS, Pool, SaveInPass
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.interior import InteriorSnapshots


def save(slot: int, boundary: int, destination: int) -> SaveInPass:
    return SaveInPass(Pool.STATE, slot, boundary, destination)


def interior() -> InteriorSnapshots:
    return InteriorSnapshots(torch.device("cpu"))


def rows(of: InteriorSnapshots, *slots: int) -> list[list[int]] | None:
    """Of the first three boundaries; nothing is kept at others."""
    table = of.rows(torch.tensor(slots, dtype=torch.int32))
    if table is None:
        return None
    assert table.shape[1] % COLUMNS == 0 and (table[:, 3:] == -1).all()
    return [row[:3] for row in table.tolist()]


def test_each_sequence_finds_its_own_orders_by_its_slot() -> None:
    passes = interior()
    Executor({}, passes).run([save(7, 0, 21), save(3, 2, 22), save(7, 1, 23)])
    assert rows(passes, 3, 4, 7) == [[-1, -1, 22], [-1, -1, -1], [21, 23, -1]]
    assert rows(passes, 7) == [[21, 23, -1]]
    assert rows(passes, -1, 0) == [[-1, -1, -1], [-1, -1, -1]]


def test_orders_hold_for_one_pass() -> None:
    passes = interior()
    executor = Executor({}, passes)
    assert rows(passes, 3) is None
    executor.run([save(3, 0, 9)])
    assert rows(passes, 3) == [[9, -1, -1]]
    executor.run([])
    assert rows(passes, 3) is None


def test_orders_that_no_pass_looked_up_are_a_fault() -> None:
    executor = Executor({}, interior())
    executor.run([save(3, 0, 9)])
    with pytest.raises(RuntimeError, match="a forward pass that wrote none"):
        executor.run([])
    executor.run([])  # it is said once


def test_where_no_pass_keeps_states_they_cannot_be_ordered() -> None:
    with pytest.raises(TypeError, match="keep no interior states"):
        Executor({}).run([save(3, 0, 9)])


def test_far_boundaries_widen_the_table_in_steps() -> None:
    passes = interior()
    Executor({}, passes).run([save(3, COLUMNS - 1, 7), save(3, COLUMNS, 9)])
    table = passes.rows(torch.tensor([3]))
    assert table is not None and table.shape == (1, 2 * COLUMNS)
    assert table[0, COLUMNS - 1] == 7 and table[0, COLUMNS] == 9
