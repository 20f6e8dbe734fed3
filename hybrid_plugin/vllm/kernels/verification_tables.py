# SPDX-License-Identifier: Apache-2.0
"""The rows of a pass that verify drafts, where CUDA graphs of all sizes find them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_plugin.mixers.verifications import Verifications

if TYPE_CHECKING:
    from hybrid_plugin.device.draft_records import DraftRecords

_PADDING = -1


class VerificationTables:
    """Tables of the passes without prefills: a CUDA graph reads them where they were
    when it was captured.
    """

    def __init__(
        self,
        most: int,
        width: int,
        device: torch.device,
        records: DraftRecords | None = None,
    ) -> None:
        """Room for rows, none of them there yet.

        Args:
            most: rows of a pass, without padding.
            width: tokens that a row verifies, at most.
            device: of the states.
            records: what passes record instead of states; None if they keep those.
        """

        def room(*shape: int, fill: int = _PADDING) -> torch.Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        self.most, self.width, self.records = most, width, records
        self._held = 0
        self._starts = room(most + 1, fill=0)
        self._slots, self._columns = room(most), room(most, width)

    def hold(self, verifications: Verifications) -> Verifications:
        """Put a pass's rows there; returns them.

        A graph of more rows than the pass has finds empty ones without slots behind
        them.
        """
        count, columns = verifications.slots.shape[0], None
        if verifications.columns is not None:
            columns = self._columns[:count].copy_(verifications.columns)
        held = Verifications(
            self._starts[: count + 1].copy_(verifications.cu_seqlens),
            self._slots[:count].copy_(verifications.slots),
            columns,
        )
        behind = slice(count, self._held)
        if count < self._held:
            self._slots[behind].fill_(_PADDING)
            self._columns[behind].fill_(_PADDING)
            end = self._starts[count]
            self._starts[count + 1 : self._held + 1].copy_(end)
        self._held = count
        return held
