# SPDX-License-Identifier: Apache-2.0
"""Fake device memory that knows what every byte of it should be.

The content of a KV cell, and of a state, is the number of the token prefix it
was computed from.  A forward pass checks all it reads, so any stale, lost or
foreign content fails at the first step that would use it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import (
    Await,
    BundleRows,
    Command,
    Copy,
    Decline,
    Discard,
    Fetch,
    Fold,
    Load,
    Map,
    MoveWindow,
    Offer,
    OuterCommand,
    Pool,
    PoolId,
    SaveInPass,
    Store,
    Take,
    Unmap,
    Withdraw,
    Write,
    WriteRecord,
    Zero,
)
from hybrid_plugin.core.memory.attention_windows import AttentionWindow, live_pages
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tree.node import Node, Snapshot
from hybrid_plugin.core.tree.radix import MambaRadixCache

GARBAGE = -1
ZEROED = 0
"""What cleared memory holds: the number of the empty prefix too."""


class Variant(int):
    """Content whose bits depend on how it was computed, though it means the same."""


@dataclass(frozen=True, slots=True)
class State:
    """Content of a slot."""

    recurrent: int
    inputs: tuple[int, ...]
    """What a convolution needs, by offset in its window; 0 is that of a plain state."""


ZERO_STATE = State(ZEROED, (ZEROED,))


class ContentError(AssertionError):
    """The memory does not hold what a forward pass was promised."""


HOLE, LOADING = object(), object()
"""What is there in place of content without memory, and of what a load writes."""


class Memory(list[Any]):
    """Pages or slots; holes, and those that are being loaded, cannot be touched."""

    def __getitem__(self, index: Any) -> Any:
        content = super().__getitem__(index)
        if content is HOLE:
            raise ContentError(f"id {index} was touched, but has no memory")
        if content is LOADING:
            raise ContentError(f"id {index} was touched while it is being loaded")
        return content

    def __setitem__(self, index: Any, content: Any) -> None:
        self[index]
        super().__setitem__(index, content)

    def turn(self, index: int, content: Any) -> None:
        """Open an id to use, or close it."""
        super().__setitem__(index, content)

    def is_loading(self, index: int) -> bool:
        return super().__getitem__(index) is LOADING

    def copy(self) -> Memory:
        """The same, with cells of its own."""
        return Memory([list(c) if isinstance(c, list) else c for c in self])


class HostMemory:
    """Rows of host memory; those without a block cannot be touched.

    While a row is being loaded, or written to an outer tier, its content may be read at
    any moment, so nothing may change it.  While it is fetched, nobody may touch it.
    """

    def __init__(self, plan: HostPlan) -> None:
        self.plan = plan
        self.rows: dict[tuple[PoolId, int], Any] = {}
        """What was stored; by device pool."""
        self.mapped: dict[PoolId, set[int]] = {pool: {0} for pool in plan.row_bytes}
        self.loads: dict[int, list[tuple[PoolId, int, int]]] = {}
        """By ticket, what is being loaded: pool, row, and where to."""
        self.tickets: set[int] = set()
        self.queue: list[Write | Fetch | Discard | WriteRecord | Offer] = []
        """What the ranks have yet to do for outer tiers."""
        self.out: dict[int, Write | Fetch | WriteRecord | Offer] = {}
        """By ticket, what was ordered and not reported."""
        self.withdrawn: set[int] = set()
        """Tickets of offers that nobody may use any more."""
        self.declined: list[str] = []
        """Keys of other servers' offers that they are told are not needed."""

    def clone(self) -> HostMemory:
        """A copy to try commands on."""
        twin = HostMemory(self.plan)
        twin.rows = dict(self.rows)
        twin.mapped = {pool: set(granules) for pool, granules in self.mapped.items()}
        twin.loads = {ticket: list(loads) for ticket, loads in self.loads.items()}
        twin.tickets = set(self.tickets)
        twin.queue, twin.out = list(self.queue), dict(self.out)
        twin.withdrawn = set(self.withdrawn)
        twin.declined = list(self.declined)
        return twin

    def order(self, command: OuterCommand) -> None:
        """Take what is to be done for an outer tier."""
        if isinstance(command, Withdraw):
            out = self.out.keys() & set(command.tickets)  # others ended meanwhile
            for ticket in out:
                if not isinstance(self.out[ticket], Offer):
                    raise ContentError(f"ticket {ticket} is no offer")
            self.withdrawn |= out
            return
        if isinstance(command, Decline):
            self.declined += command.keys
            return
        self.queue.append(command)
        if isinstance(command, Discard):
            return
        if command.ticket in self.out:
            raise ContentError(f"ticket {command.ticket} is out already")
        for pool, row in () if isinstance(command, WriteRecord) else rows_of(command):
            if isinstance(command, Write | Offer):
                self.read(pool, row)
                continue
            if (pool, row) in self._read_by_others() or (pool, row) in self._fetched():
                raise ContentError(f"row {row} of {pool} is in use, but to be fetched")
            self._require_there(pool, row)
            self.rows.pop((pool, row), None)
        self.out[command.ticket] = command

    def run(self, command: Copy | Map | Unmap) -> None:
        """Move rows or blocks."""
        pool = command.pool.removeprefix(Pool.host(""))
        match command:
            case Copy(_, source, destination):
                self.write(pool, destination, self.read(pool, source))
                return
            case Map(_, granules):
                assert not self.mapped[pool] & set(granules), command
                self.mapped[pool] |= set(granules)
                for granule in granules:
                    self._forget(pool, granule)
            case Unmap(_, granules):
                assert self.mapped[pool] >= set(granules), command
                assert 0 not in granules, command
                for granule in granules:
                    self._forget(pool, granule)
                self.mapped[pool] -= set(granules)
        blocks = sum(len(granules) for granules in self.mapped.values())
        if blocks > self.plan.blocks:
            raise ContentError(f"{blocks} blocks are in use after {command}")

    def write(self, pool: PoolId, row: int, content: Any) -> None:
        """Change a row that nobody loads."""
        self._require_there(pool, row)
        if (pool, row) in self._loading():
            raise ContentError(f"row {row} of {pool} changes while it is being loaded")
        if (pool, row) in self._read_by_others() or (pool, row) in self._fetched():
            raise ContentError(f"row {row} of {pool} changes while a ticket is out")
        self.rows[pool, row] = content

    def begin(self, ticket: int, pool: PoolId, row: int, destination: int) -> None:
        """Begin to load a row."""
        self.read(pool, row)
        self.loads.setdefault(ticket, []).append((pool, row, destination))

    def end(self, ticket: int) -> list[tuple[PoolId, int, Any]]:
        """What the loads of a ticket brought: pool, id and content."""
        if ticket in self.tickets or ticket not in self.loads:
            raise ContentError(f"ticket {ticket} is awaited twice, or without a load")
        self.tickets.add(ticket)
        return [
            (pool, destination, self.read(pool, row))
            for pool, row, destination in self.loads.pop(ticket)
        ]

    def all_rows(self, pool: PoolId, unknown: Any) -> Memory:
        """Every row, as the memory of a device pool."""
        per = self.plan.rows_per_block(pool)
        return Memory(
            [
                self.rows.get((pool, row), unknown)
                if row // per in self.mapped[pool]
                else HOLE
                for row in range(self.plan.rows(pool))
            ]
        )

    def read(self, pool: PoolId, row: int) -> Any:
        """The content of a row that was stored, and that nobody fetches."""
        self._require_there(pool, row)
        if (pool, row) in self._fetched():
            raise ContentError(f"row {row} of {pool} is read while it is fetched")
        if (pool, row) not in self.rows:
            raise ContentError(f"row {row} of {pool} was never stored")
        content = self.rows[pool, row]
        return list(content) if isinstance(content, list) else content

    def _loading(self) -> set[tuple[PoolId, int]]:
        return {(pool, row) for each in self.loads.values() for pool, row, _ in each}

    def _read_by_others(self) -> set[tuple[PoolId, int]]:
        reads = [
            one
            for ticket, one in self.out.items()
            if isinstance(one, Write | Offer) and ticket not in self.withdrawn
        ]
        return self._loading().union(*map(rows_of, reads))

    def _fetched(self) -> set[tuple[PoolId, int]]:
        fetches = [one for one in self.out.values() if isinstance(one, Fetch)]
        return set().union(*map(rows_of, fetches))

    def _require_there(self, pool: PoolId, row: int) -> None:
        if row // self.plan.rows_per_block(pool) not in self.mapped[pool]:
            raise ContentError(f"row {row} of {pool} was touched, but has no block")

    def _forget(self, pool: PoolId, granule: int) -> None:
        per = self.plan.rows_per_block(pool)
        for row in range(granule * per, (granule + 1) * per):
            if (pool, row) in self._loading():
                raise ContentError(f"row {row} of {pool} leaves while it is loaded")
            if (pool, row) in self._read_by_others() | self._fetched():
                raise ContentError(f"row {row} of {pool} leaves while a ticket is out")
            self.rows.pop((pool, row), None)


def rows_of(command: Write | Fetch | Offer) -> set[tuple[PoolId, int]]:
    """Host rows that a command reads or fills, by device pool."""
    bundles = command.rows if isinstance(command, Fetch) else (command.rows,)
    return {row for bundle in bundles for row in _rows_of_bundle(bundle)}


def _rows_of_bundle(bundle: BundleRows) -> set[tuple[PoolId, int]]:
    rows = {(pool, row) for pool, part in bundle.pages.items() for row in part.rows}
    return rows | ({(Pool.STATE, bundle.state)} if bundle.state is not None else set())


@dataclass(slots=True)
class Prefixes:
    """Numbers token prefixes; equal numbers mean equal prefixes."""

    first: int = 1
    """The first number; where content means something else, numbers are others."""
    _numbers: dict[tuple[int, Hashable, int], int] = field(default_factory=dict)

    def extend(self, prefix: int, namespace: Hashable, token: int) -> int:
        """The number of `prefix` with one more token."""
        key = (prefix, namespace, token)
        return self._numbers.setdefault(key, len(self._numbers) + self.first)

    def history(self, namespace: Hashable, tokens: Iterable[int]) -> list[int]:
        """Numbers of the prefixes of every length, the empty one first."""
        numbers = [ZEROED]
        for token in tokens:
            numbers.append(self.extend(numbers[-1], namespace, token))
        return numbers


@dataclass(frozen=True, slots=True)
class Forward:
    """One sequence's part of a forward pass: tokens `start` to `end`."""

    table: tuple[int, ...]
    """Its pages."""
    slot: int
    history: Sequence[int]
    """Number of the prefix of every length, see `Prefixes.history`."""
    start: int
    end: int
    windows: tuple[tuple[int, ...], ...] = ()
    """Its pages in each window group."""
    prompt: int = 0
    """Tokens of it that were known when it was admitted."""
    columns: tuple[int, ...] = ()
    """Slots of its drafts."""
    selected: int = 0
    """Column that has its state, of a chain: the drafts accepted in its last step."""
    verified: tuple[int, ...] = ()
    """Numbers of the prefixes after each token that it verifies, the known one first;
    `end` is `start` and so many then.  Empty for a step that is not noted."""
    written: tuple[int, ...] = ()
    """The same as they come to lie in its KV: what is accepted first."""
    accepted: tuple[int, ...] = ()
    """Which of them were right, besides the known one."""
    row: int | None = None
    """Row of the scratch that it verifies in; None if in its slots."""
    recorded: bool = False
    """Whether it verifies in neither, and what its tokens do is recorded."""

    @property
    def row_of_slots(self) -> tuple[int, ...]:
        """Its slot and those of its drafts that the step reads or writes."""
        elsewhere = self.row is not None or self.recorded
        used = 0 if elsewhere else max(len(self.verified) - 1, self.selected)
        return (self.slot, *self.columns[:used])

    def numbers(self) -> Sequence[int]:
        """Numbers of the prefixes after each token that it computes."""
        return self.written or self.history[self.start + 1 : self.end + 1]

    def pages(self, page_size: int) -> set[int]:
        """Pages that it reads or writes."""
        return set(self.table[: -(-self.end // page_size)])

    def written_pages(self, page_size: int) -> set[int]:
        """Pages that it writes."""
        return set(self.table[self.start // page_size : -(-self.end // page_size)])


class FakeDevice:
    """Pages and slots as lists; runs commands and forward passes."""

    def __init__(
        self,
        pages: int,
        slots: int,
        page_size: int,
        windows: Sequence[tuple[AttentionWindow, int]] = (),
        grid: int = 0,
        canonical: int = 0,
        host: HostPlan | None = None,
    ) -> None:
        """Make memory that holds garbage.

        Args:
            pages: of the full attention.
            slots: of the states; 0 for a model without.
            page_size: tokens in a page.
            windows: span and pages of each window group.
            grid: tokens between the states that a pass can keep; 0 if it keeps none.
            canonical: tokens of the chunks in which prompts must be computed if the
                tree is to offer them; 0 if it may offer anything.
            host: rows of host memory, if there are any.
        """
        self.page_size = page_size
        self.canonical = canonical
        self.grid = grid
        self.orders: list[SaveInPass] = []
        self.pages = _garbage(pages, page_size)
        self.slots = Memory([State(GARBAGE, (GARBAGE,))] * slots)
        self.host = None if host is None else HostMemory(host)
        self.scratch: dict[int, tuple[int, ...]] = {}
        """By row, the states that the last verification left."""
        self.records: dict[int, tuple[tuple[int, ...], int]] = {}
        """By slot, the prefixes after each token that the last pass verified, and how
        many were accepted; folded into the slot before the next step's commands."""
        self.spans = [span for span, _ in windows]
        self.windows = [_garbage(count, page_size) for _, count in windows]
        self.window_names = [Pool.window(i) for i in range(len(windows))]

    def clone(self) -> FakeDevice:
        """A copy to try commands on."""
        twin = FakeDevice(
            0, 0, self.page_size, grid=self.grid, canonical=self.canonical
        )
        self._copy_to(twin)
        return twin

    def _copy_to(self, twin: FakeDevice) -> None:
        twin.orders = list(self.orders)
        twin.pages, twin.slots = self.pages.copy(), self.slots.copy()
        twin.scratch, twin.records = dict(self.scratch), dict(self.records)
        twin.spans, twin.window_names = self.spans, self.window_names
        twin.windows = [group.copy() for group in self.windows]
        twin.host = None if self.host is None else self.host.clone()

    def run(self, commands: Iterable[Command]) -> None:
        """Execute commands in order, behind what was recorded."""
        for command in self._folded(commands):
            self._execute(command)

    def _folded(self, commands: Iterable[Command]) -> list[Command]:
        """Fold what was recorded; the other commands."""
        commands = list(commands)
        self._fold([command for command in commands if isinstance(command, Fold)])
        return [command for command in commands if not isinstance(command, Fold)]

    def _execute(self, command: Command) -> None:
        match command:
            case Zero(Pool.STATE, index):
                self._store(index, ZERO_STATE)
            case Copy(Pool.STATE, source, destination):
                self._store(destination, self.slots[source])
            case MoveWindow(Pool.STATE, source, offset, destination):
                recurrent = self.slots[destination].recurrent
                moved = self.slots[source].inputs[offset]
                self._store(destination, State(recurrent, (moved,)))
            case Take(Pool.STATE, row, step, destination):
                taken = self.scratch[row][step]
                self._store(destination, State(taken, (taken,)))
            case SaveInPass(Pool.STATE):
                self.orders.append(command)
            case Copy(Pool.KV, source, destination):
                self._require(destination != 0, "page 0 is nobody's")
                self.pages[destination] = list(self.pages[source])
            case Copy(pool, source, destination) if pool in self.window_names:
                self._require(0 not in (source, destination), "page 0 is nobody's")
                group = self.windows[self.window_names.index(pool)]
                group[destination] = list(group[source])
            case Store() | Load() | Await():
                self._copy_rows(command)
            case command if isinstance(command, OuterCommand):
                self._require(self.host is not None, f"{command}: there is no host")
                assert self.host is not None
                self.host.order(command)
            case Copy(pool) | Map(pool) | Unmap(pool) if Pool.is_host(pool):
                self._require(self.host is not None, f"{command}: there is no host")
                assert self.host is not None
                self.host.run(command)
            case _:
                raise ContentError(f"{command} is not used by the core")

    def memory(self, pool: PoolId) -> Memory:
        """The rows of a pool."""
        if pool == Pool.STATE:
            return self.slots
        if pool == Pool.KV:
            return self.pages
        return self.windows[self.window_names.index(pool)]

    def _copy_rows(self, command: Store | Load | Await) -> None:
        """Copy to the host at once; from there, no earlier than it is awaited."""
        host = self.host
        self._require(host is not None, f"{command}: there is no host")
        assert host is not None
        if isinstance(command, Await):
            for pool, index, content in host.end(command.ticket):
                self._require(self.memory(pool).is_loading(index), f"{pool} {index}")
                self.memory(pool).turn(index, content)
            return
        memory = self.memory(command.pool)
        alike = len(command.sources) == len(command.destinations)
        self._require(alike, f"{command}: not as many")
        for source, destination in zip(
            command.sources, command.destinations, strict=True
        ):
            self._require(0 not in (source, destination), f"{command}: id 0")
            if isinstance(command, Store):
                content = memory[source]
                row = list(content) if isinstance(content, list) else content
                host.write(command.pool, destination, row)
            else:
                memory[destination]  # there is memory, and no load that runs already
                host.begin(command.ticket, command.pool, source, destination)
                memory.turn(destination, LOADING)

    def _fold(self, ended: Sequence[Fold]) -> None:
        counts = {fold.slot: fold.tokens for fold in ended}
        self._require(len(counts) == len(ended), f"folded twice: {ended}")
        self._require(counts.keys() <= self.records.keys(), f"not recorded: {ended}")
        for slot, (verified, accepted) in self.records.items():
            tokens = counts.get(slot, accepted)
            self._require(0 < tokens <= len(verified), f"{tokens} of {verified}")
            state = verified[tokens - 1]
            self._store(slot, State(state, (state,)))
        self.records = {}

    def forward(self, batch: Sequence[Forward]) -> None:
        """Execute one step of several sequences, which must not disturb each other."""
        self._check_apart(batch)
        self._require(not self.records, "what was recorded was not folded")
        for part in batch:
            self._check(part)
        self._keep(batch)
        self.scratch = {
            row: (GARBAGE,) * len(left) for row, left in self.scratch.items()
        }
        for part in batch:
            self._write(part)

    def _keep(self, batch: Sequence[Forward]) -> None:
        """Write the states that the pass was to keep, each where nothing else is."""
        parts = {part.slot: part for part in batch}
        running = set(parts)
        targets = [order.destination for order in self.orders]
        self._require(len(set(targets)) == len(targets), f"kept twice: {self.orders}")
        for order in self.orders:
            self._require(order.slot in parts, f"{order}: its sequence does not run")
            self._require(order.destination not in running, f"{order}: a slot in use")
            part = parts[order.slot]
            position = (part.start // self.grid + 1 + order.boundary) * self.grid
            self._require(part.start < position < part.end, f"{order}: outside")
            state = self._kind(part)(part.history[position])
            self._store(order.destination, State(state, (state,)))
        self.orders = []

    def check_tree(self, cache: HybridCache, prefixes: Prefixes) -> None:
        """Check all that the tree offers, as it is once queued commands ran.

        What the host offers is checked as if all of it were loaded.
        """
        twin = self.clone()
        twin.run(cache._commands)
        twin._check_all(cache.tree, prefixes)
        if cache.host is not None and twin.host is not None:
            twin._read_host(twin.host)
            twin._check_all(cache.host.tree, prefixes)

    def _read_host(self, host: HostMemory) -> None:
        """Have all pools hold what the host's rows do, by their ids."""
        size = self.page_size
        self.pages = host.all_rows(Pool.KV, [GARBAGE] * size)
        if self.slots:
            self.slots = host.all_rows(Pool.STATE, State(GARBAGE, (GARBAGE,)))
        self.windows = [
            host.all_rows(name, [GARBAGE] * size) for name in self.window_names
        ]

    def _check_all(self, tree: MambaRadixCache, prefixes: Prefixes) -> None:
        for namespace, root in tree._roots.items():
            pending: list[tuple[Node, list[int]]] = [(root, [ZEROED])]
            while pending:
                node, history = pending.pop()
                reached = self._check_node(node, namespace, history, prefixes)
                below = [*node.children.values(), *node.tails.values()]
                pending += [(child, reached) for child in below]

    # ---------------------------------------------------------------- internal

    def _store(self, slot: int, content: State) -> None:
        self._require(slot != 0, "slot 0 is nobody's")
        self.slots[slot] = content

    def _check_apart(self, batch: Sequence[Forward]) -> None:
        touched: dict[int, int] = {}
        for part in batch:
            for page in part.pages(self.page_size):
                touched[page] = touched.get(page, 0) + 1
        for part in batch:
            for page in part.written_pages(self.page_size):
                self._require(touched[page] == 1, f"written page {page} is shared")
        for index in range(len(self.windows)):
            self._check_windows_apart(index, batch)
        slots = [slot for part in batch for slot in part.row_of_slots]
        unshared = not self.slots or len(set(slots)) == len(slots)
        self._require(unshared, f"a slot is shared: {slots}")

    def _check_windows_apart(self, index: int, batch: Sequence[Forward]) -> None:
        held = [page for part in batch for page in part.windows[index] if page]
        for part in batch:
            first = part.start // self.page_size
            for page in part.windows[index][first : -(-part.end // self.page_size)]:
                self._require(held.count(page) == 1, f"window page {page} is shared")

    def _check(self, part: Forward) -> None:
        if self.slots:
            self._require(part.selected < len(part.row_of_slots), f"no column: {part}")
            slot = part.row_of_slots[part.selected]
            inputs = self.slots[part.slot].inputs[part.selected :][:1]
            state = (self.slots[slot].recurrent, *inputs)
            expected = part.history[part.start]
            self._require(
                state == (expected, expected),
                f"slot {slot} holds {state}, not {expected} ({part.start} tokens)",
            )
        for index, table in enumerate(part.windows):
            self._check_window(index, table, part.history, part.start)
        size = self.page_size
        for first in range(0, part.start, size):
            wanted = list(part.history[first + 1 : min(first + size, part.start) + 1])
            page = part.table[first // size]
            cells = self.pages[page][: len(wanted)]
            self._require(cells == wanted, f"page {page} holds {cells}, not {wanted}")

    def _check_window(
        self, index: int, table: Sequence[int], history: Sequence[int], length: int
    ) -> None:
        """Token `length` must find all that its window reaches."""
        for position in range(self.spans[index].first_needed(length), length):
            page = table[position // self.page_size]
            cell = self.windows[index][page][position % self.page_size]
            self._require(
                page != 0 and cell == history[position + 1],
                f"window group {index}, token {position} of {length}: page {page} "
                f"holds {cell}, not {history[position + 1]}",
            )

    def _kind(self, part: Forward) -> type[int]:
        """Whether the bits that a pass writes are those of one pass over the prompt."""
        chunk = self.canonical or 1
        aligned = part.start % chunk == 0 and (
            part.end == part.prompt or part.end % chunk == 0
        )
        alone = part.end - part.start == 1 < part.prompt  # a decode step for kernels
        prefills = part.end <= part.prompt and aligned and not alone
        resumes = self.slots and isinstance(self.slots[part.slot].recurrent, Variant)
        return int if prefills and not resumes else Variant

    def _write(self, part: Forward) -> None:
        kind = self._kind(part)
        groups = [(self.pages, part.table)]
        groups += list(zip(self.windows, part.windows, strict=True))
        for memory, table in groups:
            for position, number in enumerate(part.numbers(), part.start):
                page = table[position // self.page_size]
                self._require(page != 0, "page 0 is nobody's")
                memory[page][position % self.page_size] = kind(number)
        if self.slots and part.verified:
            self._write_columns(part)
        elif self.slots:
            whole = self.canonical == 0 or part.end % self.canonical == 0
            state = kind(part.history[part.end])
            state = state if whole else Variant(state)
            self._store(part.slot, State(state, (state,)))

    def _write_columns(self, part: Forward) -> None:
        """Leave a state after each verified token, right or wrong."""
        if part.row is not None:
            self.scratch[part.row] = part.verified
            state = part.verified[(0, *part.accepted)[-1]]
            self._store(part.slot, State(state, (state,)))
            return
        if part.recorded:
            self.records[part.slot] = part.verified, 1 + len(part.accepted)
            return
        # One window for all columns, in the first; those of the others are not touched.
        self._store(part.slot, State(part.verified[0], part.verified))
        for slot, number in zip(part.columns, part.verified[1:], strict=False):
            self._store(slot, State(number, self.slots[slot].inputs))

    def _check_node(
        self,
        node: Node,
        namespace: Hashable,
        before: Sequence[int],
        prefixes: Prefixes,
    ) -> list[int]:
        """Check what a node offers; returns the numbers of all prefixes up to it."""
        history = list(before)
        for position, token in enumerate(node.tokens):
            history.append(prefixes.extend(history[-1], namespace, token))
            page = node.pages[position // self.page_size]
            cell = self.pages[page][position % self.page_size]
            self._require(
                cell == history[-1],
                f"the tree offers page {page} for {node.end} tokens, but cell "
                f"{position % self.page_size} holds {cell}, not {history[-1]}",
            )
            self._require_canonical(cell, f"page {page}", node)
        if node.snapshot is not None:
            self._check_snapshot(node, node.snapshot, history)
        return history

    def _check_snapshot(
        self, node: Node, snapshot: Snapshot, history: Sequence[int]
    ) -> None:
        if self.slots:
            state = self.slots[snapshot.slot]
            self._require(
                (state.recurrent, state.inputs[0]) == (history[-1], history[-1]),
                f"the tree offers slot {snapshot.slot} for {node.end} tokens, but it "
                f"holds {state}, not {history[-1]}",
            )
            self._require_canonical(state.recurrent, f"slot {snapshot.slot}", node)
        for index, (span, pages) in enumerate(
            zip(self.spans, snapshot.windows, strict=True)
        ):
            first = live_pages(span, node.end, self.page_size).start
            self._check_window(index, [*([0] * first), *pages], history, node.end)

    def _require_canonical(self, content: int, place: str, node: Node) -> None:
        self._require(
            not self.canonical or not isinstance(content, Variant),
            f"the tree offers {place} for {node.end} tokens, whose bits depend on how "
            "it was computed",
        )

    @staticmethod
    def _require(condition: bool, message: str) -> None:
        if not condition:
            raise ContentError(message)


def _garbage(pages: int, page_size: int) -> Memory:
    return Memory([[GARBAGE] * page_size for _ in range(pages)])
