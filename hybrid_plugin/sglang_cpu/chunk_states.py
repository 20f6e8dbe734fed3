# SPDX-License-Identifier: Apache-2.0
"""States inside a prefill, kept where `hybrid_kernels` can write them.

SGLang's tracking reads the state at a boundary between chunks from a buffer that
its kernels return; those of `hybrid_kernels` write such states to slots.  Here both
meet: a float32 pool for one forward pass, with a slot for each sequence and one
for each chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hybrid_kernels import state_copy

CHUNK = 64
"""Tokens between two positions where `hybrid_kernels` hands out states."""


@dataclass(frozen=True)
class ChunkStates:
    """The states of `N` packed sequences at the start of each of their `C` chunks."""

    pool: torch.Tensor
    """``[N + C, *state]``, float32: running states, then the states of chunks."""
    running: torch.Tensor
    """``[N]``, the slots of running states."""
    slots: torch.Tensor
    """``[N]``, where running states come from and go to."""
    first_chunk: torch.Tensor
    """``[N]``, the number of each sequence's first chunk."""
    boundary_slots: torch.Tensor
    """``[N, most chunks]``, as `prefill` of an operation takes them."""

    @classmethod
    def start(
        cls,
        initial: torch.Tensor,
        slots: torch.Tensor | None,
        cu_seqlens: torch.Tensor,
    ) -> ChunkStates:
        """Copy the initial states in; a negative slot stands for zeros.

        Args:
            initial: ``[S, *state]``.
            slots: ``[N]``; None means 0, 1, 2, ...
            cu_seqlens: ``[N + 1]``.
        """
        lengths = cu_seqlens.diff().long()
        count = lengths.numel()
        chunks = (lengths + CHUNK - 1) // CHUNK
        first = chunks.cumsum(0) - chunks
        source = torch.arange(count) if slots is None else slots.long()
        start = initial[source.clamp(min=0)].float()
        start[source < 0] = 0
        pool = initial.new_empty(
            (count + int(chunks.sum()), *initial.shape[1:]), dtype=torch.float32
        )
        running = torch.arange(count)
        state_copy.scatter(pool, running, start)
        state_copy.scatter(pool, torch.where(chunks > 0, count + first, -1), start)
        column = torch.arange(1, max(1, int(chunks.max())))
        boundary_slots = torch.where(
            column < chunks[:, None], count + first[:, None] + column, -1
        )
        return cls(pool, running, source, first, boundary_slots)

    def chunks(self) -> torch.Tensor:
        """``[C, *state]``: sequence after sequence, the state before each chunk."""
        return self.pool[self.running.numel() :]

    def final(self) -> torch.Tensor:
        """``[N, *state]``: the states after the last tokens."""
        return self.pool[: self.running.numel()]

    def write_final(self, states: torch.Tensor) -> None:
        """Put the final states into their slots of ``[S, *state]``."""
        state_copy.scatter(states, self.slots, self.final().to(states.dtype))

    def at(self, sequences: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States inside sequences.

        Args:
            sequences: ``[n]``.
            tokens: ``[n]``, how many tokens of the sequence the state has seen;
                less than its length.

        Returns:
            ``[n, *state]``.

        Raises:
            NotImplementedError: for a position between two boundaries.
        """
        if bool((tokens % CHUNK).any()):
            raise NotImplementedError(
                f"states are kept every {CHUNK} tokens; the model's chunk size must "
                f"be a multiple of {CHUNK}"
            )
        return self.chunks()[self.first_chunk[sequences] + tokens // CHUNK]
