# SPDX-License-Identifier: Apache-2.0
"""Queues that do their work later, in any order that their waits allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybrid_plugin.device.host.queues import Queue

NAMES = ("model", "stores", "loads", "scatters")


@dataclass(eq=False)
class LaterMark:
    """A point in a queue, and whether the queue has come to it."""

    queue: str
    reached: bool = False


class Later:
    """A queue; whoever has it runs its entries one by one."""

    def __init__(self, name: str, deaf: Callable[[str, str], bool]) -> None:
        """Empty.

        Args:
            name: one of `NAMES`.
            deaf: whether a queue, by its name, ignores the marks of another.
        """
        self.name = name
        self._deaf = deaf
        self._entries: deque[Callable[[], object] | LaterMark] = deque()
        self.heard: set[str] = set()
        """Queues whose marks it was told to wait for."""

    def issue(self, work: Callable[[], object]) -> None:
        self._entries.append(work)

    def upload(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.clone()

    def record(self, *, timed: bool = False) -> LaterMark:
        mark = LaterMark(self.name)

        def reach() -> None:
            mark.reached = True

        self._entries.append(reach)
        return mark

    def wait(self, mark: LaterMark) -> None:
        self.heard.add(mark.queue)
        if not self._deaf(self.name, mark.queue):
            self._entries.append(mark)

    def seconds_between(self, before: LaterMark, after: LaterMark) -> float | None:
        assert before.reached or not after.reached
        return 1.0 if after.reached else None

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def step(self) -> bool:
        """Run the next entry; False if it cannot run yet, or there is none."""
        if not self._entries:
            return False
        entry = self._entries[0]
        if isinstance(entry, LaterMark):
            if not entry.reached:
                return False
        else:
            entry()
        self._entries.popleft()
        return True


class LaterQueues:
    """Queues that run when they are told to."""

    def __init__(self, deaf: tuple[str, str] | None = None) -> None:
        """All empty.

        Args:
            deaf: one queue and another, whose marks the first ignores.
        """

        def ignores(queue: str, other: str) -> bool:
            return (queue, other) == deaf

        self.all = {name: Later(name, ignores) for name in NAMES}
        self.stores: Queue = self.all["stores"]
        self.loads: Queue = self.all["loads"]
        self.scatters: Queue = self.all["scatters"]

    def model(self) -> Queue:
        return self.all["model"]

    def copies_over(self) -> Callable[[], None]:
        marks = [self.all[name].record() for name in ("stores", "loads")]

        def wait() -> None:
            while not all(mark.reached for mark in marks):
                ran = [queue.step() for queue in self.all.values()]
                assert any(ran), "it waits for ever"

        return wait

    def run_some(self, rng: random.Random, first: Sequence[str], steps: int) -> None:
        """Run entries, nearly always of the first queue that can."""
        for _ in range(steps):
            order = list(first)
            if rng.random() < 0.1:
                rng.shuffle(order)
            if not any(self.all[name].step() for name in order):
                return

    def finish(self) -> None:
        """Run everything.

        Raises:
            AssertionError: if queues wait for each other.
        """
        while any(queue.step() for queue in self.all.values()):
            pass
        stuck = [name for name, queue in self.all.items() if not queue.is_empty]
        assert not stuck, f"{stuck} wait for ever"
