# SPDX-License-Identifier: Apache-2.0
"""`Prefills` of one shape at addresses that stay: what a CUDA graph of a prefill reads.

Kernels find sequences, chunks and boundaries on the device, so one graph serves every
batch that fits its tokens and sequences.
"""

from __future__ import annotations

import torch

from hybrid_plugin.core.commands import CHUNK, most_boundaries, table_columns
from hybrid_plugin.mixers.prefills import Prefills

_PADDING = -1


class FixedPrefills:
    """Up to `sequences` packed sequences of up to `tokens` tokens together.

    Rows behind those of a pass are empty sequences without slots, and nothing is kept
    of them.
    """

    def __init__(
        self,
        tokens: int,
        sequences: int,
        device: torch.device,
        *,
        round_states: bool = False,
    ) -> None:
        """Room for passes; none is described yet.

        Args:
            tokens: of the graph, padding included.
            sequences: the most of a pass.
            device: of the states.
            round_states: as in `Prefills`.
        """
        columns = table_columns(most_boundaries(tokens))  # one may have all tokens
        self._rows = torch.arange(tokens, dtype=torch.int32, device=device)
        self.padding = torch.ones(tokens, dtype=torch.bool, device=device)
        """``[tokens]``: which belong to no sequence of the pass."""
        self.prefills = Prefills(
            cu_seqlens=torch.zeros(sequences + 1, dtype=torch.int32, device=device),
            slots=torch.full((sequences,), _PADDING, dtype=torch.int32, device=device),
            has_initial=torch.zeros(sequences, dtype=torch.bool, device=device),
            offsets=torch.zeros(sequences, dtype=torch.int32, device=device),
            boundary_slots=torch.full(
                (sequences, columns), _PADDING, dtype=torch.int32, device=device
            ),
            round_states=round_states,
        )
        """Always the same tensors."""

    def fill(
        self,
        lengths: torch.Tensor,
        computed: torch.Tensor,
        slots: torch.Tensor,
        boundary_slots: torch.Tensor | None,
    ) -> None:
        """Describe a pass, in place and without waiting for the device.

        Args:
            lengths: ``[n]``, integers: tokens of each sequence, at least one sequence.
            computed: ``[n]``, integers: tokens computed before.
            slots: ``[n]``, integers, as in `Prefills`.
            boundary_slots: ``[n, c]``, as in `Prefills`.

        Raises:
            ValueError: if the pass has more sequences, or boundaries of one, than there
                is room for.
        """
        record, count = self.prefills, len(slots)
        self._check_room(count, boundary_slots)
        ends = record.cu_seqlens[1:]
        torch.cumsum(lengths, 0, dtype=torch.int32, out=ends[:count])
        ends[count:].copy_(ends[count - 1])
        torch.ge(self._rows, ends[-1], out=self.padding)
        for held, given, empty in (
            (record.slots, slots, _PADDING),
            (record.has_initial, computed > 0, False),
            (record.offsets, computed % CHUNK, 0),
        ):
            held[:count].copy_(given)
            held[count:].fill_(empty)
        assert record.boundary_slots is not None
        record.boundary_slots.fill_(_PADDING)
        if boundary_slots is not None:
            columns = boundary_slots.shape[1]
            record.boundary_slots[:count, :columns].copy_(boundary_slots)

    def _check_room(self, count: int, boundary_slots: torch.Tensor | None) -> None:
        room = self.prefills.boundary_slots
        assert room is not None
        columns = 0 if boundary_slots is None else boundary_slots.shape[1]
        if not 0 < count <= room.shape[0] or columns > room.shape[1]:
            raise ValueError(
                f"a pass of {count} sequences that keeps {columns} states of one does "
                f"not fit a graph of {room.shape[0]} and {room.shape[1]}"
            )
