# SPDX-License-Identifier: Apache-2.0
"""Commands on real tensors."""

from __future__ import annotations

import pickle
import random

import pytest
import torch

import hybrid_plugin.device.arena as arena_module
from hybrid_plugin.core.commands import Command, Copy, Pool, Zero
from hybrid_plugin.device.arena import Arena
from hybrid_plugin.device.executor import Executor
from tests.core.support import page, state, zero


def arena(ids: int, parts: int, width: int = 3) -> Arena:
    """Row `i` of part `p` is filled with `10 * p + i`."""
    rows = torch.arange(ids, dtype=torch.int8)[:, None].expand(ids, width)
    return Arena([rows + 10 * part for part in range(parts)])


def column(of: Arena, part: int) -> list[int]:
    rows = of.parts[part]
    assert torch.equal(rows, rows[:, :1].expand_as(rows)), "rows are torn"
    return [int(cell) for cell in rows[:, 0]]


def test_commands_reach_every_part_of_their_pool_only() -> None:
    pages, slots = arena(4, parts=2), arena(3, parts=1)
    executor = Executor({Pool.KV: pages, Pool.STATE: slots})
    executor.run([page(1, 3), zero(2), Zero(Pool.KV, 2)])
    assert column(pages, 0) == [0, 1, 0, 1]
    assert column(pages, 1) == [10, 11, 0, 11]
    assert column(slots, 0) == [0, 1, 0]


def test_commands_run_in_order() -> None:
    slots = arena(4, parts=1)
    executor = Executor({Pool.STATE: slots})
    commands: list[Command] = [state(1, 2), state(2, 3), zero(1), state(1, 2)]
    executor.run(iter(commands))
    assert column(slots, 0) == [0, 0, 0, 1]


def test_a_strided_part() -> None:
    whole = torch.arange(5 * 8, dtype=torch.int8).view(5, 8)
    before = whole.clone()
    Executor({Pool.KV: Arena([whole[:, 2:5]])}).run([page(4, 1)])
    before[1, 2:5] = before[4, 2:5]
    assert torch.equal(whole, before)


@pytest.mark.parametrize("width", [3, 16], ids=["bytes", "words"])
@pytest.mark.parametrize("at_once", [1, 50, 4 << 20])
def test_many_copies_do_what_one_at_a_time_does(
    width: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_COPY_BYTES", at_once)
    rng = random.Random(width)
    pages = arena(12, parts=3, width=width)
    executor = Executor({Pool.KV: pages})
    expected = list(range(12))
    for _ in range(40):
        moves = [tuple(rng.sample(range(12), 2)) for _ in range(rng.randrange(9))]
        executor.run([page(*move) for move in moves])
        for source, destination in moves:
            expected[destination] = expected[source]
    for part in range(3):
        assert column(pages, part) == [10 * part + row for row in expected]


def test_what_is_no_command() -> None:
    with pytest.raises(TypeError, match="'zero' is not a command"):
        Executor({}).run(["zero"])  # type: ignore[list-item]


def test_commands_travel_between_processes() -> None:
    commands = [zero(1), Copy(Pool.KV, 2, 3)]
    assert pickle.loads(pickle.dumps(commands)) == commands


@pytest.mark.parametrize(
    "shapes",
    [[], [(4, 3), (5, 3)], [(4,)], [(4, 3, 2)]],
    ids=["none", "unequal rows", "vector", "cube"],
)
def test_parts_that_do_not_fit_together(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="matrices with equal row counts"):
        Arena([torch.zeros(shape, dtype=torch.int8) for shape in shapes])
