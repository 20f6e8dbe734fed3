# SPDX-License-Identifier: Apache-2.0
"""Commands that may run as one: those of one kind in which no order matters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hybrid_plugin.core.commands import (
    Await,
    Command,
    Copy,
    Load,
    Map,
    MoveWindow,
    OuterCommand,
    SaveInPass,
    Store,
    Take,
    Unmap,
    Zero,
)

_Alone = Await | OuterCommand
"""Of no pool, or of several."""


def batches(commands: Iterable[Command]) -> Iterator[list[Any]]:
    """Split into runs of one kind and pool that do not touch each other's rows.

    What moves memory, and what copies many rows to the host or back, stands alone.

    Raises:
        TypeError: for something that is no command.
    """
    batch: list[Command] = []
    read: set[int] = set()
    written: set[int] = set()
    for command in commands:
        source, target = _rows(command)
        apart = (
            batch
            and not isinstance(command, _Alone)
            and not isinstance(batch[0], _Alone)
            and type(batch[0]) is type(command)
            and batch[0].pool == command.pool
            and not isinstance(command, Map | Unmap | Store | Load)
            and not target & (read | written)
            and not source & written
        )
        if batch and not apart:
            yield batch
            batch, read, written = [], set(), set()
        batch.append(command)
        read |= source
        written |= target
    if batch:
        yield batch


def _rows(command: Command) -> tuple[set[int], set[int]]:
    """Rows that a command reads, and rows that it writes."""
    if isinstance(command, _Alone):
        return set(), set()
    match command:
        case Zero(_, index):
            return set(), {index}
        case Copy(_, source, destination) | MoveWindow(_, source, _, destination):
            return {source}, {destination}
        case Take(_, _, _, destination):
            return set(), {destination}
        case SaveInPass(_, slot, _, destination):
            return {slot}, {destination}
        case Map() | Unmap() | Store() | Load():
            return set(), set()
    raise TypeError(f"{command!r} is not a command")
