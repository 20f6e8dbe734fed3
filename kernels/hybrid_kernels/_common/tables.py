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
    draft_slots: torch.Tensor
    """``[N, L]``, where the state after each draft goes; negative keeps none."""
    parents: torch.Tensor | None
    """``[N, L]``, the draft each draft follows, -1 for the main state; or a chain."""

    @staticmethod
    def advance(pool: torch.Tensor, slots: torch.Tensor) -> Drafts:
        """One token each, whose state replaces the main state."""
        return Drafts(pool, slots, slots[:, None], None)

    def check(self, rows: int, drafts: int) -> None:
        """Require the tables to fit ``[rows, drafts]`` tokens.

        Raises:
            ValueError: if they do not.
        """
        check_index("slots", self.slots, (rows,))
        check_index("draft_slots", self.draft_slots, (rows, drafts))
        if self.parents is not None:
            check_index("parents", self.parents, (rows, drafts))
