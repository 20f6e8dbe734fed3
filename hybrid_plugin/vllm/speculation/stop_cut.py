# SPDX-License-Identifier: Apache-2.0
"""Where accepted drafts go beyond a request's end, found on the device.

A step that is scheduled ahead starts behind all that was accepted, and what it
overwrites are states of a turn that ended before.  If what is accepted ends with the
stop, the step starts there, and its first column has the turn's state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from hybrid_kernels import stops
from hybrid_kernels.stops import NO_TOKEN, ROOM

from hybrid_plugin.device.arena import to_device


class End(NamedTuple):
    """What ends a request."""

    row: int
    """The request's, from now on."""
    stop_ids: Collection[int]
    """Tokens each of which ends it."""
    length: int
    """Tokens in all that end it."""


class StopCut:
    """What ends each request of a model runner, by the request's row."""

    def __init__(self, rows: int, device: torch.device) -> None:
        """Begin without requests.

        Args:
            rows: requests at once, at most.
            device: of the model.
        """
        self._ids = torch.full((rows, ROOM), NO_TOKEN, dtype=torch.int64, device=device)
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

    def add(self, ends: Sequence[End]) -> None:
        """Note requests, with one copy to the device for all.

        Args:
            ends: of each of them.
        """
        if not ends:
            return
        most = max(len(one.stop_ids) for one in ends)
        rows, room = self._ids.shape
        if most > room:
            more = self._ids.new_full((rows, 2 * most - room), NO_TOKEN)
            self._ids = torch.cat([self._ids, more], dim=1)
            room = 2 * most
        lines = [
            [one.row, one.length, *stops.filled(one.stop_ids, room)] for one in ends
        ]
        table = to_device(torch.tensor(lines), self._ids.device)
        self._ids[table[:, 0]] = table[:, 2:]
        self._lengths[table[:, 0]] = table[:, 1]

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
