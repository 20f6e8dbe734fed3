# SPDX-License-Identifier: Apache-2.0
"""Where accepted drafts go beyond a request's end, found on the device.

A step that is scheduled ahead starts behind all that was accepted, and what it
overwrites are states of a turn that ended before.  If what is accepted ends with the
stop, the step starts there, and its first column has the turn's state.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from hybrid_kernels import stops
from hybrid_kernels.stops import NO_TOKEN

from hybrid_plugin.device.arena import to_device

_IDS = 8
"""Stop tokens that there is room for at first."""


class StopCut:
    """What ends each request of a model runner, by the request's row."""

    def __init__(self, rows: int, device: torch.device) -> None:
        """Begin without requests.

        Args:
            rows: requests at once, at most.
            device: of the model.
        """
        self._ids = torch.full((rows, _IDS), NO_TOKEN, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=device)

    def warm_up(self, width: int) -> None:
        """Compile what a GPU runs, on a step that ends nothing.

        Args:
            width: tokens that a step may give a request.
        """
        device = self._ids.device
        tokens = torch.zeros((1, width), dtype=torch.int64, device=device)
        count = torch.zeros(1, dtype=torch.int32, device=device)
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        self.cut(tokens, count, count, rows, torch.zeros_like(self._lengths).int())

    def add(self, row: int, stop_ids: Collection[int], length: int) -> None:
        """Note a request.

        Args:
            row: of it from now on.
            stop_ids: tokens each of which ends it.
            length: tokens in all that end it.
        """
        rows, room = self._ids.shape
        if len(stop_ids) > room:
            more = self._ids.new_full((rows, 2 * len(stop_ids) - room), NO_TOKEN)
            self._ids = torch.cat([self._ids, more], dim=1)
        ids = [*stop_ids, *[NO_TOKEN] * (self._ids.shape[1] - len(stop_ids))]
        line = to_device(torch.tensor([*ids, length]), self._ids.device)
        self._ids[row], self._lengths[row] = line[:-1], line[-1]

    def cut(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        rows: torch.Tensor,
        computed: torch.Tensor,
        repeated: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count as rejected what was accepted behind a request's end.

        Args:
            sampled: ``[N, 1 + k]``, accepted drafts and one token more.
            num_sampled: ``[N]``, how many of them count.
            num_rejected: ``[N]``, of the drafts.
            rows: ``[N]``, of the requests.
            computed: by row, tokens computed before the step.
            repeated: ``[N, 1 + k]``, which tokens complete a repetition that ends the
                request; None if none does.

        Returns:
            `num_sampled` and `num_rejected` of what is left.
        """
        ends = stops.Ends(self._ids, self._lengths, computed, repeated)
        return stops.cut(sampled, num_sampled, num_rejected, rows, ends)
