# SPDX-License-Identifier: Apache-2.0
"""Interior snapshots: states that a forward pass writes in the middle of a prompt.

The cache orders them by the slot whose sequence the pass takes on (`SaveInPass`).  What
describes the pass to the kernels knows its sequences by the same slots, on the device,
so looking them up there needs no other identity and no waiting for the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hybrid_plugin.core.commands import SaveInPass, table_columns
from hybrid_plugin.device.arena import to_device


class InteriorSnapshots:
    """What the next forward pass is to keep."""

    def __init__(self, device: torch.device) -> None:
        """Keep nothing.

        Args:
            device: on which the passes run.
        """
        self._device = device
        self._orders: list[SaveInPass] = []
        self._sources: torch.Tensor | None = None
        self._table: torch.Tensor | None = None

    def order(self, orders: Iterable[SaveInPass]) -> None:
        """Have the next pass keep more states; see `SaveInPass`."""
        self._orders += orders
        self._sources = self._table = None

    @property
    def are_ordered(self) -> bool:
        """Whether the next pass is to keep any."""
        return bool(self._orders)

    @property
    def columns(self) -> frozenset[int]:
        """Of what `rows` gives, those in which a slot may be named."""
        return frozenset(order.boundary for order in self._orders)

    def clear(self) -> None:
        """Forget the orders of the last pass.

        Raises:
            RuntimeError: if nobody looked them up: the slots hold nothing useful.
        """
        unwritten = bool(self._orders) and self._table is None
        self._orders, self._sources, self._table = [], None, None
        if unwritten:
            raise RuntimeError(
                "snapshots were ordered from a forward pass that wrote none"
            )

    def rows(self, slots: torch.Tensor) -> torch.Tensor | None:
        """The `boundary_slots` of a batch; None if nothing is to be kept.

        Args:
            slots: ``[N]``, int32 or int64, on the device: the batch's slots.

        Returns:
            ``[N, C]``, int32, `C` a multiple of `COLUMNS`; -1 where nothing is kept.
        """
        if not self._orders:
            return None
        if self._sources is None or self._table is None:
            self._sources, self._table = self._upload()
        # One comparison for each sequence and ordered one: both are few.
        same = slots[:, None] == self._sources[None, :]
        # Row 0 is that of a sequence without orders.
        number = torch.arange(1, len(self._sources) + 1, device=slots.device)
        return self._table[(same * number).sum(1)]

    def _upload(self) -> tuple[torch.Tensor, torch.Tensor]:
        sources = list(dict.fromkeys(order.slot for order in self._orders))
        last = max(order.boundary for order in self._orders)
        columns = table_columns(last + 1)
        table = torch.full((len(sources) + 1, columns), -1, dtype=torch.int32)
        row = {slot: index + 1 for index, slot in enumerate(sources)}
        for order in self._orders:
            table[row[order.slot], order.boundary] = order.destination
        names = torch.tensor(sources, dtype=torch.int64)
        return to_device(names, self._device), to_device(table, self._device)
