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


def room(
    tokens: int, sequences: int, device: torch.device, *, round_states: bool = False
) -> Prefills:
    """Tensors that hold any pass of so many tokens and sequences; padding as yet.

    Args:
        tokens: of the largest pass.
        sequences: the same of it.
        device: of the states.
        round_states: as in `Prefills`.
    """
    columns = table_columns(most_boundaries(tokens))  # one may have all tokens

    def full(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    return Prefills(
        cu_seqlens=full(sequences + 1),
        slots=full(sequences, value=_PADDING),
        has_initial=torch.zeros(sequences, dtype=torch.bool, device=device),
        offsets=full(sequences),
        boundary_slots=full(sequences, columns, value=_PADDING),
        round_states=round_states,
    )


def put(held: Prefills, given: Prefills) -> None:
    """Copy a pass's sequences to where graphs look for them, without waiting for it.

    Args:
        held: room for as many sequences, or more: those are empty then.  Without
            boundary slots nothing is kept.
        given: the pass.
    """
    for target, source, padding in (
        (held.cu_seqlens, given.cu_seqlens, given.cu_seqlens[-1]),
        (held.slots, given.slots, _PADDING),
        (held.has_initial, given.has_initial, False),
        (held.offsets, given.offsets, 0),
    ):
        count = source.shape[0]
        target[:count].copy_(source)
        target[count:].fill_(padding)
    if held.boundary_slots is not None:
        held.boundary_slots.fill_(_PADDING)
        if given.boundary_slots is not None:
            rows, columns = given.boundary_slots.shape
            held.boundary_slots[:rows, :columns].copy_(given.boundary_slots)


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
        self._rows = torch.arange(tokens, dtype=torch.int32, device=device)
        self.padding = torch.ones(tokens, dtype=torch.bool, device=device)
        """``[tokens]``: which belong to no sequence of the pass."""
        self.prefills = room(tokens, sequences, device, round_states=round_states)
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
        self._check_room(len(slots), boundary_slots)
        ends = torch.cumsum(lengths, 0, dtype=torch.int32)
        described = Prefills(
            cu_seqlens=torch.nn.functional.pad(ends, (1, 0)),
            slots=slots,
            has_initial=computed > 0,
            offsets=computed % CHUNK,
            boundary_slots=boundary_slots,
        )
        put(self.prefills, described)
        torch.ge(self._rows, self.prefills.cu_seqlens[-1], out=self.padding)

    def _check_room(self, count: int, boundary_slots: torch.Tensor | None) -> None:
        room = self.prefills.boundary_slots
        assert room is not None
        columns = 0 if boundary_slots is None else boundary_slots.shape[1]
        if not 0 < count <= room.shape[0] or columns > room.shape[1]:
            raise ValueError(
                f"a pass of {count} sequences that keeps {columns} states of one does "
                f"not fit a graph of {room.shape[0]} and {room.shape[1]}"
            )
