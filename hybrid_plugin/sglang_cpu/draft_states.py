# SPDX-License-Identifier: Apache-2.0
"""States after each draft, kept where `hybrid_kernels` can write them.

SGLang verifies with its states read only: the state after each draft goes to a buffer
of its own, ``[R, D, *state]``, a row for each sequence of the batch.  `hybrid_kernels`
writes such states to slots of the pool that it reads.  Here both meet: a pool for one
forward pass of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftStates:
    """The states of `N` sequences, and room for one after each of their `L` drafts."""

    pool: torch.Tensor
    """``[N + N * L, *state]``, of the states' type: a state is rounded after each
    token, as in decoding."""
    slots: torch.Tensor
    """``[N]``, of the states before the drafts."""
    draft_slots: torch.Tensor
    """``[N, L]``"""

    @classmethod
    def start(
        cls, states: torch.Tensor, slots: torch.Tensor | None, rows: int, drafts: int
    ) -> DraftStates:
        """Copy the states before the drafts; a negative slot stands for zeros.

        Args:
            states: ``[S, *state]``.
            slots: ``[N]``; None means 0, 1, 2, ...
            rows: `N`.
            drafts: `L`.
        """
        source = torch.arange(rows) if slots is None else slots[:rows].long()
        pool = states.new_zeros((rows * (1 + drafts), *states.shape[1:]))
        pool[:rows] = states[source.clamp(min=0)]
        pool[:rows][source < 0] = 0
        places = torch.arange(rows * drafts).view(rows, drafts) + rows
        return cls(pool, torch.arange(rows), places)

    def keep(self, buffer: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Write the states after the drafts where SGLang looks for them.

        Args:
            buffer: ``[R, D, *state]`` with ``D >= L``.  Of windows, those of one row
                may overlap where they hold the same inputs: a chain's do.
            rows: ``[N]``; None means 0, 1, 2, ...
        """
        count, drafts = self.draft_slots.shape
        places = torch.arange(count) if rows is None else rows[:count].long()
        for step in range(drafts):
            buffer[:, step][places] = self.pool[self.draft_slots[:, step]].to(
                buffer.dtype
            )


def parents_below_roots(parents: torch.Tensor | None) -> torch.Tensor | None:
    """Parents as `hybrid_kernels` takes them: -1 for the first draft of each row.

    SGLang says nothing about the parent of a tree's root, which is no draft.

    Args:
        parents: ``[N, L]``, or None for chains.
    """
    if parents is None:
        return None
    own = parents.to(torch.int32, copy=True)
    own[:, 0] = -1
    return own


def commit(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Make the states after accepted drafts those of their sequences, in all layers.

    Args:
        dst: ``[layers, S, *state]``, written.
        src: ``[layers, R, D, *state]``.
        dst_indices_raw: ``[N]`` slots; a negative one is left out.
        step_indices_raw: ``[N]``, the last accepted draft of each; negative for none.
        src_indices_raw: ``[N]`` rows of `src`; None means 0, 1, 2, ...
    """
    rows = torch.arange(len(step_indices_raw))
    if src_indices_raw is not None:
        rows = src_indices_raw.long()
    wanted = (step_indices_raw >= 0) & (dst_indices_raw >= 0)
    steps, slots = step_indices_raw[wanted].long(), dst_indices_raw[wanted].long()
    dst[:, slots] = src[:, rows[wanted], steps].to(dst.dtype)


def commit_windows(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    dst_indices2_raw: torch.Tensor | None = None,
    step_indices2_raw: torch.Tensor | None = None,
) -> None:
    """`commit` of several pools, and of the positions that SGLang's own cache wants.

    Args:
        pairs: each a pool and the windows after drafts, as for `commit`.
        dst_indices_raw: as for `commit`.
        step_indices_raw: likewise.
        dst_indices2_raw: ``[N]`` slots of snapshots.
        step_indices2_raw: ``[N]``, the draft whose state each takes.
    """
    for pool, windows in pairs:
        commit(pool, windows, dst_indices_raw, step_indices_raw)
        if dst_indices2_raw is not None and step_indices2_raw is not None:
            commit(pool, windows, dst_indices2_raw, step_indices2_raw)
