# SPDX-License-Identifier: Apache-2.0
"""Device work that the cache orders and every rank's `Executor` replays.

Commands are picklable and ordered.  A rank runs one step's commands, first to
last, on the model's stream before that step's forward pass, so a command sees
all that earlier forwards wrote and no later forward overtakes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

PoolId: TypeAlias = str
"""Names a pool, in commands, sizes, plans and metrics alike."""


class Pool:
    """Names of the pools that a cache knows; others may be registered beside them."""

    KV: Final[PoolId] = "kv"
    """Pages of the layers with full attention."""
    STATE: Final[PoolId] = "state"
    """Slots of the state layers."""
    SCRATCH: Final[PoolId] = "scratch"
    """Rows in which an engine verifies drafts before it commits to slots."""

    @staticmethod
    def window(index: int) -> PoolId:
        """Pages of a window group, by its place in `HybridCache.windows`."""
        return f"window{index}"

    @staticmethod
    def noun(pool: PoolId) -> str:
        """What the ids of a pool are, in the plural."""
        return {Pool.STATE: "slots", Pool.SCRATCH: "rows"}.get(pool, "pages")


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

    pool: PoolId
    granules: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unmap:
    """Take the memory from granules of which nobody owns a page or slot."""

    pool: PoolId
    granules: tuple[int, ...]


CHUNK: Final = 64
"""Tokens between the states that our kernels can keep inside a forward pass."""
COLUMNS: Final = 16
"""Tables of such states have a multiple of so many columns: kernels are compiled for
whether a row's length is one, and a new kind of length in service would stall it."""


def table_columns(boundaries: int) -> int:
    """Columns of a table with room for so many states of a sequence."""
    return -(-boundaries // COLUMNS) * COLUMNS


def most_boundaries(tokens: int) -> int:
    """Multiples of `CHUNK` that a sequence can reach in so many tokens."""
    # It may lack but one token for the first.
    return (tokens + CHUNK - 1) // CHUNK


@dataclass(frozen=True, slots=True)
class SaveInPass:
    """Have the next forward pass write a state from the middle of a prompt to a slot.

    The pass takes the sequence in `slot` on.  At each multiple of `CHUNK` that it
    reaches, counted from the prompt's start, the state may be kept: the first such
    multiple behind the pass's start is `boundary` 0.
    """

    pool: PoolId
    slot: int
    boundary: int
    destination: int


@dataclass(frozen=True, slots=True)
class MoveWindow:
    """Complete the state in a draft slot with the inputs that its convolutions need.

    Where one rolling window in column 0 serves all drafts, slot `source` has the inputs
    after `offset` accepted drafts, `offset` tokens further on.  They go to where slot
    `destination` has those of an ordinary state; nothing else changes.
    """

    pool: PoolId
    source: int
    offset: int
    destination: int


@dataclass(frozen=True, slots=True)
class Take:
    """Copy a whole state from the scratch of the last verification to a slot.

    No forward pass verified anything after the one that wrote `row`.
    """

    pool: PoolId
    row: int
    step: int
    """Token of the verified ones: 0 is the known one, or a tree's root."""
    destination: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Bring a state that ended on to its end, from the record of the last pass.

    Where passes record what verified tokens do, and change no state, the accepted ones
    of each sequence are folded into its slot before the next step's commands run.  This
    says how many they are for a sequence that ended: the device counts those behind its
    end, too.
    """

    pool: PoolId
    slot: int
    tokens: int
    """Of the last pass, from its known token on; at least 1."""


Command = Zero | Copy | Map | Unmap | SaveInPass | MoveWindow | Take | Fold
