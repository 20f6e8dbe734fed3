# SPDX-License-Identifier: Apache-2.0
"""The core's fake device once more, in real tensors whose copies run later.

What the fake device's commands and passes write, the model's queue writes here.  What
comes from the host must have come through real stores and loads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_plugin.core.commands import (
    Await,
    Command,
    Discard,
    Fetch,
    Load,
    Pool,
    PoolId,
    Store,
    Write,
    WriteRecord,
)
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.device.host.ring import RingSizes
from tests.core.device import HOLE, LOADING, FakeDevice, Forward, State
from tests.device.later import NAMES, LaterQueues

STATE_NUMBERS = 12
"""Of a state: what it holds, and what its convolutions need."""
RINGS = RingSizes(256, store_pieces=2, load_pieces=2)


@dataclass(frozen=True)
class RealPlan(HostPlan):
    """A plan with as many rows as a fake one, of real sizes."""

    fake: HostPlan

    def rows_per_block(self, pool: PoolId) -> int:
        return self.fake.rows_per_block(pool)


def numbers_of(plan: HostPlan, page_size: int) -> dict[PoolId, int]:
    """Numbers in a row of each pool."""
    return {
        pool: STATE_NUMBERS if pool == Pool.STATE else page_size
        for pool in plan.row_bytes
    }


def real_row_bytes(plan: HostPlan, page_size: int) -> dict[PoolId, int]:
    """Bytes of a host row of each pool, with some that nothing fills."""
    return {pool: 8 * n + 8 for pool, n in numbers_of(plan, page_size).items()}


class Mirror:
    """Real pools and host rows that follow a fake device."""

    def __init__(
        self,
        device: FakeDevice,
        rng: random.Random,
        deaf: tuple[str, str] | None = None,
    ) -> None:
        """Follow a device with a host from its start.

        Args:
            device: that nothing ran on.
            rng: decides in which order queues run.
            deaf: as for `LaterQueues`.
        """
        assert device.host is not None
        self._device = device
        self._rng = rng
        self._queues = LaterQueues(deaf)
        fake = device.host.plan
        numbers = numbers_of(fake, device.page_size)
        rows = real_row_bytes(fake, device.page_size)
        block = max(fake.rows_per_block(pool) * size for pool, size in rows.items())
        self._pools = {
            pool: torch.full((len(device.memory(pool)), numbers[pool]), -7)
            for pool in rows
        }
        # Two parts each, of which one is as wide as a number.
        parts = {
            pool: [cells[:, :1].view(torch.int8), cells[:, 1:].view(torch.int8)]
            for pool, cells in self._pools.items()
        }
        self._copies = HostCopies(
            {pool: [p for p in some if p.shape[1]] for pool, some in parts.items()},
            RealPlan(rows, block, fake.blocks, fake),
            rings=RINGS,
            queues=self._queues,
        )
        self._known: dict[tuple[PoolId, int], list[int]] = {}
        """What the rows hold once the model's queue has run."""
        self.wrong: list[str] = []
        self.loaded = 0
        self._follow(device)

    def finish(self) -> None:
        """Run everything, and compare all rows."""
        self._write_news()
        self._expect(list(self._known))
        self._queues.finish()

    # --------------------------------------------------------------- internal

    def _follow(self, device: FakeDevice) -> None:
        execute, forward = device._execute, device.forward
        own: Any = device

        def follow(command: Command) -> None:
            if isinstance(command, Write | Fetch | Discard | WriteRecord):
                self._write_news()
                execute(command)
                self._follow_outer(command)
                return
            if not isinstance(command, Store | Load | Await) and not (
                Pool.is_host(command.pool)
            ):
                execute(command)
                return
            self._write_news()
            ended = list(self._loads_of(command))
            execute(command)
            self._copies.run(command)  # type: ignore[arg-type]
            for pool, index in ended:
                self._known[pool, index] = self._numbers(pool, index)
            self._expect(ended)
            self._run_some()

        def passes(batch: Sequence[Forward]) -> None:
            forward(batch)
            self._write_news()
            self._run_some()

        own._execute, own.forward = follow, passes

    def _follow_outer(self, command: Write | Fetch | Discard | WriteRecord) -> None:
        """Run a command about what is behind the host."""
        raise AssertionError(f"{command}: nothing is behind this host")

    def _loads_of(self, command: Any) -> list[tuple[PoolId, int]]:
        host = self._device.host
        assert host is not None
        if not isinstance(command, Await):
            return []
        found = host.loads.get(command.ticket, [])
        self.loaded += len(found)
        return [(pool, destination) for pool, _, destination in found]

    def _content(self, pool: PoolId, index: int) -> Any:
        return list.__getitem__(self._device.memory(pool), index)

    def _numbers(self, pool: PoolId, index: int) -> list[int]:
        return self.numbers(self._content(pool, index))

    @staticmethod
    def numbers(content: Any) -> list[int]:
        """What a real row holds for a fake one."""
        if not isinstance(content, State):
            return [int(number) for number in content]
        numbers = [content.recurrent, *content.inputs]
        return [int(n) for n in numbers] + [0] * (STATE_NUMBERS - len(numbers))

    def _write_news(self) -> None:
        """Have the model's queue write what the fake device holds by now."""
        for pool, cells in self._pools.items():
            for index in range(len(cells)):
                if self._content(pool, index) in (HOLE, LOADING):
                    continue
                numbers = self._numbers(pool, index)
                if self._known.get((pool, index)) != numbers:
                    self._known[pool, index] = numbers
                    self._queues.model().issue(_write(cells, index, numbers))

    def _expect(self, rows: Sequence[tuple[PoolId, int]]) -> None:
        """Have the model's queue compare rows."""
        for pool, index in rows:
            if self._content(pool, index) in (HOLE, LOADING):
                continue
            self._queues.model().issue(self._compare(pool, index))

    def _compare(self, pool: PoolId, index: int) -> Callable[[], None]:
        wanted, cells = self._known[pool, index], self._pools[pool]

        def work() -> None:
            found = cells[index].tolist()
            if found != wanted:
                self.wrong.append(f"{pool} {index} holds {found}, not {wanted}")

        return work

    def _run_some(self) -> None:
        order = self._rng.sample(NAMES, len(NAMES))
        self._queues.run_some(self._rng, order, self._rng.randrange(60))


def _write(cells: torch.Tensor, index: int, numbers: list[int]) -> Callable[[], None]:
    def work() -> None:
        cells[index] = torch.tensor(numbers)

    return work
