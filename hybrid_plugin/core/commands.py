# SPDX-License-Identifier: Apache-2.0
"""Device work that the cache orders and every rank's `Executor` replays.

Commands are picklable and ordered.  A rank runs one step's commands, first to
last, on the model's stream before that step's forward pass, so a command sees
all that earlier forwards wrote and no later forward overtakes it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from hybrid_plugin.core.tree.tokens import Tokens

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
    def host(pool: PoolId) -> PoolId:
        """Rows of host memory for the pages or slots of a pool."""
        return f"host.{pool}"

    @staticmethod
    def is_host(pool: PoolId) -> bool:
        """Whether the ids of a pool are rows of host memory."""
        return pool.startswith("host.")

    @staticmethod
    def noun(pool: PoolId) -> str:
        """What the ids of a pool are, in the plural."""
        if Pool.is_host(pool):
            return "rows"
        return {Pool.STATE: "slots", Pool.SCRATCH: "rows"}.get(pool, "pages")


@dataclass(frozen=True, slots=True)
class Zero:
    """Set every byte of one page or slot to zero."""

    pool: PoolId
    index: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy one whole page or slot over another, or one host row over another.

    Host rows are copied behind all stores so far, and before those and the loads that
    follow.
    """

    pool: PoolId
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Map:
    """Put memory, all zeros, behind granules of a pool that have none.

    A granule of a host pool gets a block of the tier's memory, with any content.
    Granule 0 of every pool has its memory from the start.
    """

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


@dataclass(frozen=True, slots=True)
class Store:
    """Copy pages or slots of a device pool to rows of the host pool of the same name.

    What is copied is what the model's stream holds at this point: commands and passes
    behind it may rewrite the sources at once.  Rows may be stored again while an older
    store to them has not run: the last one counts.
    """

    pool: PoolId
    """The device pool; the rows are those of `Pool.host(pool)`."""
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    """As many as sources."""


@dataclass(frozen=True, slots=True)
class Load:
    """Begin to copy host rows to pages or slots of the device pool of the same name.

    It reads what the stores before it wrote, and what it writes runs behind all that
    the model's stream did before it.  The stream does not wait for it: until `Await`,
    nothing touches the destinations, and nothing rewrites or moves the sources.
    """

    pool: PoolId
    """The device pool; the rows are those of `Pool.host(pool)`."""
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    """As many as sources."""
    ticket: int
    """Loads, of several pools too, that are awaited together."""


@dataclass(frozen=True, slots=True)
class Await:
    """Have the model's stream wait for the loads of a ticket.

    Each ticket is awaited once.
    """

    ticket: int


@dataclass(frozen=True, slots=True)
class PageRows:
    """Host rows of one pool of pages that belong to a bundle."""

    start: int
    """The first token that counts: the bundle's first one, or that of the page in which
    a window begins.  What is fetched must be there from this token on."""
    rows: tuple[int, ...]
    """One for each page from that of `start` to that of the bundle's last token."""


@dataclass(frozen=True, slots=True)
class BundleRows:
    """A bundle, which is KV of tokens `start` to the end and the state there, on rows.

    The same on every rank; each has its own part of the content in its own rows.
    """

    key: str
    """Names the bundle; only the outer tier knows how it is made."""
    namespace: Hashable
    """What the whole sequence has in common with others."""
    tokens: Tokens
    """From the start of the sequence to the end of the bundle; never empty."""
    start: int
    """Where the bundle before it on the path ends; 0 if there is none."""
    pages: Mapping[PoolId, PageRows]
    """By device pool, rows of `Pool.host(pool)`.  A pool that is not named is not
    wanted: where several bundles are fetched, windows are those of the last one."""
    state: int | None
    """Row of `Pool.host(Pool.STATE)`; None for a model without states, or if the state
    is not wanted."""


@dataclass(frozen=True, slots=True)
class Write:
    """Begin to write a bundle from host rows to where the outer tier keeps bundles.

    What is written is what the stores and copies before it leave in the rows: whoever
    writes waits for these, the model's stream waits for nothing.  Until the outcome was
    reported, nothing rewrites or moves the rows.
    """

    ticket: int
    """Its outcome is reported under this number, which no other command has."""
    rows: BundleRows


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to fill host rows with bundles of an outer tier: with all, or it failed.

    Whoever fills them waits for the stores, loads and copies before it, which may have
    to do with the rows' content of before; the model's stream waits for nothing.  Until
    the outcome was reported, nothing reads, rewrites or moves the rows.
    """

    ticket: int
    """Its outcome is reported under this number, which no other command has."""
    source: str
    """Name of the outer tier."""
    rows: tuple[BundleRows, ...]
    """In the order of the sequence.  Where one ends inside a page, the next one begins
    in the same row, and leaves or writes again what is before its start."""

    def __reduce__(self) -> tuple[Callable[..., Fetch], tuple[object, ...]]:
        """Pickle tokens once: those of each bundle begin those of the last one."""
        last = self.rows[-1]
        parts = []
        for one in self.rows:
            end = len(one.tokens)
            if (one.namespace, one.tokens) != (last.namespace, last.tokens[:end]):
                raise ValueError("the bundles of a fetch are of one sequence")
            parts.append((one.key, end, one.start, one.pages, one.state))
        whole = last.namespace, last.tokens, tuple(parts)
        return _fetch, (self.ticket, self.source, *whole)


def _fetch(
    ticket: int,
    source: str,
    namespace: Hashable,
    tokens: Tokens,
    parts: tuple[tuple[str, int, int, Mapping[PoolId, PageRows], int | None], ...],
) -> Fetch:
    rows = tuple(
        BundleRows(key, namespace, tokens[:end], start, pages, state)
        for key, end, start, pages, state in parts
    )
    return Fetch(ticket, source, rows)


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove what was written under these keys, if it is there.

    It comes behind the writes and fetches before it, and before the writes behind it.
    Whether a fetch behind it finds something is not said.  No outcome is reported.
    """

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Begin to keep a small text beside the bundles, in the place of any other of its
    name, or to remove it.

    It comes behind the writes before it, so a text that names bundles is there only if
    they are.
    """

    ticket: int
    """Its outcome is reported under this number, which no other command has."""
    name: str
    """Hexadecimal digits."""
    text: str | None
    """None removes it, if it is there."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Let a peer read a bundle from host rows, until it did or its lease ends.

    What it reads is what the stores and copies before it leave in the rows: whoever
    answers the peer waits for these, the model's stream waits for nothing.  Until the
    outcome was reported, nothing rewrites or moves the rows, unless it is withdrawn.
    """

    ticket: int
    """Its outcome is reported under this number, which no other command has."""
    rows: BundleRows


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Tell every peer that it must not use what it read under these offers.

    The commands behind it may rewrite the rows.  The outcomes are still reported.
    """

    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decline:
    """Tell those who offer these bundles that this server does not need them.

    Nobody waits for it, and no outcome is reported: an offer that hears nothing ends by
    its time.
    """

    keys: tuple[str, ...]
    """As the outer tier found them."""


OuterCommand: TypeAlias = (
    Write | Fetch | Discard | WriteRecord | Offer | Withdraw | Decline
)
"""What has to do with files and peers: ranks begin it, and the stream goes on."""

Command = (
    Zero
    | Copy
    | Map
    | Unmap
    | SaveInPass
    | MoveWindow
    | Take
    | Fold
    | Store
    | Load
    | Await
    | Write
    | Fetch
    | Discard
    | WriteRecord
    | Offer
    | Withdraw
    | Decline
)
