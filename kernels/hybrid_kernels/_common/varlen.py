# SPDX-License-Identifier: Apache-2.0
"""Walking packed sequences and their state slots in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hybrid_kernels._common.checks import require
from hybrid_kernels._common.tables import Drafts, Sequences


@dataclass(frozen=True)
class Span:
    """One sequence of a packed batch."""

    start: int
    end: int
    slot: int
    """Where its state goes; negative for nowhere."""
    fresh: bool
    """Whether it starts from no state."""
    state: torch.Tensor
    """Float32, zeros if it starts from none."""
    keep: dict[int, int]
    """Slots of interior states by how many of the call's tokens they have seen."""
    offset: int
    """How far it starts behind a boundary."""
    every: int
    """Tokens between boundaries."""

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.end - self.start

    def at_boundary(self, done: int) -> bool:
        """Whether a boundary lies behind `done` of its tokens."""
        return (done + self.offset) % self.every == 0

    def parts(self, size: int) -> Iterator[tuple[int, int]]:
        """Its rows in ranges that end at multiples of `size` behind a boundary."""
        start = self.start
        while start < self.end:
            behind = (start - self.start + self.offset) % size
            end = min(start + size - behind, self.end)
            yield start, end
            start = end


def spans(sequences: Sequences) -> Iterator[Span]:
    """The sequences of a packed batch in turn, empty ones included.

    Raises:
        ValueError: if an offset is not in 0 to ``every - 1``.
    """
    pool = sequences.pool
    slots = sequences.slots.tolist()
    flags = [True] * len(slots)
    if sequences.has_initial is not None:
        flags = sequences.has_initial.tolist()
    offsets = _offsets(sequences)
    bounds = pairwise(sequences.cu_seqlens.tolist())
    for index, (start, end) in enumerate(bounds):
        slot, fresh = slots[index], slots[index] < 0 or not flags[index]
        # Not a view: the slot may be written before the state is last read.
        state = pool.new_zeros(pool.shape[1:], dtype=torch.float32)
        if not fresh:
            state += pool[slot]
        offset = offsets[index]
        keep = _boundaries(sequences, index, end - start, offset)
        yield Span(start, end, slot, fresh, state, keep, offset, sequences.every)


def write_state(pool: torch.Tensor, slot: int, state: torch.Tensor) -> None:
    """Write a state, rounded to the pool's type; a negative slot takes none."""
    if slot >= 0:
        pool[slot] = state.to(pool.dtype)


class DraftStates:
    """States along drafts, vectorised over rows, as if each were run by itself."""

    def __init__(self, drafts: Drafts, out: torch.Tensor) -> None:
        """Read the main states; padding rows get zeros, or no drafts if packed.

        Args:
            drafts: the rows.
            out: what the operation returns; its leading dimensions are the tokens'.

        Raises:
            ValueError: if a row has more drafts than the tables have columns.
        """
        self._drafts = drafts
        pool, slots = drafts.pool, drafts.slots
        main = pool[slots.long().clamp(min=0)].float()
        main[slots < 0] = 0
        self._states = [main]
        self._starts: torch.Tensor | None = None
        if drafts.cu_seqlens is None:
            self.longest = out.shape[1]
            return
        bounds = drafts.cu_seqlens.long()
        self._starts, self._lengths = bounds[:-1], bounds.diff() * (slots >= 0)
        self._tokens = out.shape[0]
        self.longest = max(self._lengths.tolist(), default=0)
        for table in (drafts.draft_slots, drafts.parents, drafts.record):
            most = self.longest if table is None else table.shape[1]
            require(
                self.longest <= most,
                f"a row has {self.longest} drafts, more than {most} columns",
            )

    def index(self, draft: int) -> Any:
        """Of the rows' tokens; of any token for a row without this draft."""
        if self._starts is None:
            return slice(None), draft
        return (self._starts + draft).clamp(max=self._tokens - 1)

    def put(self, out: torch.Tensor, draft: int, values: torch.Tensor) -> None:
        """Write the rows' outputs of a draft."""
        if self._starts is None:
            out[:, draft] = values.to(out.dtype)
        else:
            live = self._live(draft)
            out[self._starts[live] + draft] = values[live].to(out.dtype)

    def keep(self, draft: int, values: torch.Tensor) -> None:
        """Write ``[N, size]`` numbers of a draft to the record, if there is one."""
        record = self._drafts.record
        if record is not None:
            live = self._live(draft).nonzero()[:, 0]
            record[live, draft] = values[live].to(record.dtype)

    def origin(self, draft: int) -> torch.Tensor:
        """``[N, *state]``, float32: what each row's draft starts from."""
        parents = self._drafts.parents
        if parents is None:
            return self._states[-1]
        column = parents[:, draft].long().clamp(max=draft - 1) + 1
        row = torch.arange(column.numel(), device=column.device)
        return torch.stack(self._states)[column, row]

    def append(self, states: torch.Tensor) -> None:
        """Add the states after the next draft, rounded as a slot would round them."""
        self._states.append(states.to(self._drafts.pool.dtype).float())

    def write(self) -> None:
        """Put all states into their slots, in the order of the drafts."""
        pool, targets = self._drafts.pool, self._drafts.draft_slots
        if targets is None:
            return
        for draft, states in enumerate(self._states[1:]):
            keep = (targets[:, draft] >= 0) & self._live(draft)
            pool[targets[keep, draft].long()] = states[keep].to(pool.dtype)

    def _live(self, draft: int) -> torch.Tensor:
        """``[N]``: which rows have this draft."""
        if self._starts is None:
            return torch.ones_like(self._drafts.slots, dtype=torch.bool)
        return self._lengths > draft


def _offsets(sequences: Sequences) -> list[int]:
    if sequences.offsets is None:
        return [0] * sequences.count
    offsets: list[int] = sequences.offsets.tolist()
    known = all(0 <= offset < sequences.every for offset in offsets)
    require(known, f"offsets are {offsets}, expected 0 to {sequences.every - 1}")
    return offsets


def _boundaries(
    sequences: Sequences, index: int, tokens: int, offset: int
) -> dict[int, int]:
    table = sequences.boundary_slots
    if table is None:
        return {}
    every = sequences.every
    ends = (every * (column + 1) - offset for column in range(table.shape[1]))
    pairs = zip(ends, table[index].tolist(), strict=True)
    return {end: slot for end, slot in pairs if slot >= 0 and end <= tokens}
