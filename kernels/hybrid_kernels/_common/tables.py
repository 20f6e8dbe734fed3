# SPDX-License-Identifier: Apache-2.0
"""Which sequences a call runs, and where their states are read and written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_kernels._common.checks import (
    check_flags,
    check_index,
    check_last_contiguous,
    require,
)

if TYPE_CHECKING:
    import torch

CHUNK = 64
"""Tokens between two positions at which prefill can hand out interior states."""


@dataclass(frozen=True)
class Sequences:
    """The packed sequences of one prefill."""

    cu_seqlens: torch.Tensor
    """``[N + 1]``, running sum of lengths, starting at 0."""
    pool: torch.Tensor
    """``[S, *state]``."""
    slots: torch.Tensor
    """``[N]``; a negative one stands for a zero state that is not kept."""
    has_initial: torch.Tensor | None
    """``[N]`` bool; False starts from zeros whatever the slot holds."""
    boundary_slots: torch.Tensor | None
    """``[N, C]``: where the state goes at the sequence's ``c``-th boundary."""
    round_boundaries: bool = False
    """Round the running state to the pool's type at every boundary."""
    every: int = CHUNK
    """Tokens between boundaries."""
    offsets: torch.Tensor | None = None
    """``[N]``, 0 to ``every - 1``: tokens before the call, modulo `every`.

    Boundary `c` then lies behind ``every * (c + 1) - offset`` tokens of the call.
    None means zeros.
    """

    def check(self) -> None:
        """Require the tables to fit together.

        Raises:
            ValueError: if they do not.
        """
        count = self.count
        check_index("slots", self.slots, (count,))
        check_index("cu_seqlens", self.cu_seqlens, (count + 1,))
        if self.has_initial is not None:
            check_flags("has_initial", self.has_initial, (count,))
        table = self.boundary_slots
        if table is not None:
            require(table.ndim == 2, "boundary_slots has not 2 dimensions")
            check_index("boundary_slots", table, (count, table.shape[1]))
            check_last_contiguous("boundary_slots", table)
        if self.offsets is not None:
            check_index("offsets", self.offsets, (count,))
            check_last_contiguous("offsets", self.offsets)

    @property
    def count(self) -> int:
        """How many sequences there are."""
        return self.slots.numel()


@dataclass(frozen=True)
class Drafts:
    """One token, or a few draft tokens, for each of `N` sequences."""

    pool: torch.Tensor
    """``[S, *state]``."""
    slots: torch.Tensor
    """``[N]``, where each sequence's main state lies."""
    draft_slots: torch.Tensor | None
    """``[N, L]``, where the state after each draft goes; negative keeps none."""
    parents: torch.Tensor | None
    """``[N, L]``, the draft each draft follows, -1 for the main state; or a chain."""
    cu_seqlens: torch.Tensor | None = None
    """``[N + 1]``: drafts are packed, and row `n` has as many as it says, or none if
    its slot is negative; else `L`."""
    record: torch.Tensor | None = None
    """``[R, L, size]``, ``R >= N``: what `replay.commit` reads, instead of states."""

    @staticmethod
    def advance(pool: torch.Tensor, slots: torch.Tensor) -> Drafts:
        """One token each, whose state replaces the main state."""
        return Drafts(pool, slots, slots[:, None], None)

    @property
    def count(self) -> int:
        """How many sequences there are."""
        return self.slots.numel()

    def strides(self, tensor: torch.Tensor | None) -> tuple[int, int, int]:
        """Of a tensor of tokens: between rows, between drafts, and the next.

        Packed drafts are counted from a row's first token, so that rows are tokens.
        The last is 0 for a tensor with no other dimension.
        """
        if tensor is None:
            return (0, 0, 0)
        strides = tensor.stride()
        if self.cu_seqlens is not None:
            strides = (strides[0], *strides)
        return strides[0], strides[1], strides[2] if len(strides) > 2 else 0

    def check(self, lead: tuple[int, ...]) -> None:
        """Require the tables to fit tokens of leading dimensions `lead`.

        They are ``(N, L)``, or ``(T,)`` with `cu_seqlens`.

        Raises:
            ValueError: if they do not.
        """
        rows = self.count if self.cu_seqlens is not None else lead[0]
        check_index("slots", self.slots, (rows,))
        check_last_contiguous("slots", self.slots)
        if self.cu_seqlens is not None:
            check_index("cu_seqlens", self.cu_seqlens, (rows + 1,))
            check_last_contiguous("cu_seqlens", self.cu_seqlens)
        both = self.draft_slots is not None and self.record is not None
        require(not both, "drafts keep states in draft_slots or a record, not both")
        none = self.draft_slots is None and self.record is None
        require(
            not (none and self.parents is not None),
            "a tree needs draft_slots or a record to go back to a parent",
        )
        self._check_widths(rows, None if self.cu_seqlens is not None else lead[1])

    def _check_widths(self, rows: int, drafts: int | None) -> None:
        """Tables of exactly `drafts` columns, or all of the same number."""
        table = self.draft_slots if self.draft_slots is not None else self.parents
        if self.record is not None:
            require(self.record.ndim == 3, "record has not 3 dimensions")
            most = self.record.shape[1]
            drafts = most if drafts is None else drafts
            require(
                self.record.shape[0] >= rows and most >= drafts,
                f"record has {self.record.shape[0]} rows of {most} drafts, "
                f"fewer than {rows} of {drafts}",
            )
            check_last_contiguous("record", self.record)
        elif drafts is None and table is not None:
            require(table.ndim == 2, "draft_slots has not 2 dimensions")
            drafts = table.shape[1]
        if drafts is None:
            return
        if self.draft_slots is not None:
            check_index("draft_slots", self.draft_slots, (rows, drafts))
        if self.parents is not None:
            check_index("parents", self.parents, (rows, drafts))


def two_strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    """The first two strides of a table that need not be there."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))
