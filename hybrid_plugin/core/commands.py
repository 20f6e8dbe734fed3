# SPDX-License-Identifier: Apache-2.0
"""Device work that the cache orders and every rank's `Executor` replays.

Commands are picklable and ordered.  A rank runs one step's commands, first to
last, on the model's stream before that step's forward pass, so a command sees
all that earlier forwards wrote and no later forward overtakes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Pool(Enum):
    """The pool a command's ids belong to."""

    KV = "kv"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class WindowPool:
    """The pool of a window group, by its place in `HybridCache.windows`."""

    index: int


PoolId = Pool | WindowPool


@dataclass(frozen=True, slots=True)
class Zero:
    """Set every byte of one page or slot to zero."""

    pool: PoolId
    index: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy one whole page or slot over another."""

    pool: PoolId
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Map:
    """Put memory, all zeros, behind granules of a pool that have none."""

    pool: Pool
    granules: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unmap:
    """Take the memory from granules of which nobody owns a page or slot."""

    pool: Pool
    granules: tuple[int, ...]


Command = Zero | Copy | Map | Unmap
