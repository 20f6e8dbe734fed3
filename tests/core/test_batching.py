# SPDX-License-Identifier: Apache-2.0
"""Which commands may run as one."""

from __future__ import annotations

import random
from array import array

import pytest

from hybrid_plugin.core.commands import (
    BundleRows,
    Command,
    Copy,
    Discard,
    Fetch,
    Map,
    MoveWindow,
    PageRows,
    Pool,
    Take,
    Unmap,
    Write,
    Zero,
)
from hybrid_plugin.device.batching import batches

KV, STATE = Pool.KV, Pool.STATE


def split(*commands: Command) -> list[list[Command]]:
    return list(batches(commands))


def test_equal_commands_on_different_rows_run_as_one() -> None:
    commands = [Copy(STATE, 1, 2), Copy(STATE, 1, 3), Copy(STATE, 4, 5)]
    assert split(*commands) == [commands]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Copy(STATE, 1, 2), Copy(STATE, 2, 3)),  # reads what the first writes
        (Copy(STATE, 1, 2), Copy(STATE, 3, 1)),  # writes what the first reads
        (Copy(STATE, 1, 2), Copy(STATE, 3, 2)),  # writes what the first writes
        (Zero(STATE, 1), Zero(STATE, 1)),
        (Zero(STATE, 1), Copy(STATE, 2, 3)),  # another kind
        (Copy(KV, 1, 2), Copy(STATE, 3, 4)),  # another pool
        (Copy(KV, 1, 2), Unmap(KV, (3,))),  # what moves waits for all before it
        (Unmap(KV, (3,)), Unmap(KV, (4,))),
        (Map(STATE, (3,)), Zero(STATE, 30)),
    ],
)
def test_order_is_kept_where_it_matters(first: Command, second: Command) -> None:
    assert split(first, second) == [[first], [second]]


def test_nothing_is_lost_or_reordered() -> None:
    rng = random.Random(5)
    commands: list[Command] = [
        Copy(rng.choice([KV, STATE]), rng.randrange(6), rng.randrange(6))
        for _ in range(200)
    ]
    assert [c for batch in split(*commands) for c in batch] == commands


def test_what_is_no_command() -> None:
    with pytest.raises(TypeError, match="'zero' is not a command"):
        split("zero")  # type: ignore[arg-type]


def test_what_completes_a_state_keeps_its_place() -> None:
    moves = [MoveWindow(STATE, 1, 2, 3), MoveWindow(STATE, 4, 1, 5)]
    takes = [Take(STATE, 1, 2, 6), Take(STATE, 2, 0, 7)]
    assert split(*moves, *takes) == [moves, takes]
    for later in (Copy(STATE, 3, 9), MoveWindow(STATE, 3, 1, 9), Zero(STATE, 1)):
        assert split(moves[0], later) == [[moves[0]], [later]]
    assert split(takes[0], Take(STATE, 1, 3, 6)) == [[takes[0]], [Take(STATE, 1, 3, 6)]]


def test_what_has_to_do_with_other_tiers_stands_alone() -> None:
    tokens = array("q", [1, 2])
    rows = BundleRows("k", None, tokens, 0, {KV: PageRows(0, (1,))}, 1)
    fetch, discard = Fetch(3, "disk", (rows,)), Discard(("k",))
    alone: list[Command] = [Write(1, rows), Write(2, rows), fetch, discard]
    copies: list[Command] = [Copy(KV, 1, 2), Copy(KV, 3, 4)]
    for command in alone:
        for other in (*copies, *alone):
            assert split(command, other) == [[command], [other]]
            assert split(other, command) == [[other], [command]]
