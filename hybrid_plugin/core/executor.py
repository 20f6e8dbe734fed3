# SPDX-License-Identifier: Apache-2.0
"""Applies commands to arenas, on every rank alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hybrid_plugin.core.arena import Arena
from hybrid_plugin.core.commands import Command, Copy, Pool, Zero


class Executor:
    """Runs command lists on the current stream, first to last."""

    def __init__(self, arenas: Mapping[Pool, Arena]) -> None:
        self._arenas = dict(arenas)

    def run(self, commands: Iterable[Command]) -> None:
        """Issue the commands; returns before a GPU has executed them.

        Raises:
            TypeError: for something that is no command.
        """
        for command in commands:
            match command:
                case Zero(pool, index):
                    self._arenas[pool].zero(index)
                case Copy(pool, source, destination):
                    self._arenas[pool].copy(source, destination)
                case _:
                    raise TypeError(f"{command!r} is not a command")
