# SPDX-License-Identifier: Apache-2.0
"""Queues of work, which run beside each other and wait for each other: CUDA's streams.

A queue runs what was issued to it, in order.  `record` marks the point that it has come
to, and another queue that waits for the mark does nothing before that.  The host waits
for neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from hybrid_plugin.device.arena import to_device

Mark: TypeAlias = Any
"""A point in a queue, which others may wait for."""


class Queue(Protocol):
    """Work in order."""

    def issue(self, work: Callable[[], object]) -> None:
        """Run work behind all that was issued before."""

    def upload(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids of the host as this queue's work sees them from here on."""

    def record(self, *, timed: bool = False) -> Mark:
        """Mark the end of what was issued so far.

        Args:
            timed: whether `seconds_between` will be asked of it.
        """

    def wait(self, mark: Mark) -> None:
        """Have what is issued from now on wait for a mark."""

    def seconds_between(self, before: Mark, after: Mark) -> float | None:
        """What lies between two timed marks; None until it has come to the second."""


class Queues(Protocol):
    """What copies between a device and its host run on."""

    stores: Queue
    """Copies from the device to the host."""
    loads: Queue
    """Copies from the host to the device."""
    scatters: Queue
    """What spreads over the device's rows what came from the host."""

    def model(self) -> Queue:
        """What the model's forward passes run on: the stream that is current."""

    def finish(self) -> None:
        """Have the host wait for all work."""

    def copies_over(self) -> Callable[[], None]:
        """What has the host wait, in any thread, for the copies issued so far."""


def queues_for(device: torch.device) -> Queues:
    """The queues of a device.

    Raises:
        ValueError: for a device that is neither a CPU nor a GPU of CUDA's kind.
    """
    if device.type == "cpu":
        return AtOnceQueues()
    if device.type == "cuda":
        return CudaQueues(device)
    raise ValueError(f"host memory for a device of type {device.type!r} is not known")


class AtOnce:
    """The one queue of a CPU: what is issued has been done."""

    def issue(self, work: Callable[[], object]) -> None:
        """Do it."""
        work()

    def upload(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids are where they are read."""
        return ids

    def record(self, *, timed: bool = False) -> Mark:
        """Everything before is over."""

    def wait(self, mark: Mark) -> None:
        """It is over."""

    def seconds_between(self, before: Mark, after: Mark) -> float:
        """Nothing waits."""
        return 0.0


class AtOnceQueues:
    """All queues of a CPU."""

    def __init__(self) -> None:
        self.stores: Queue = AtOnce()
        self.loads: Queue = self.stores
        self.scatters: Queue = self.stores

    def model(self) -> Queue:
        """See `Queues.model`."""
        return self.stores

    def finish(self) -> None:
        """See `Queues.finish`."""

    def copies_over(self) -> Callable[[], None]:
        """They are over."""
        return _nothing


class CudaQueue:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def issue(self, work: Callable[[], object]) -> None:
        """Issue to the stream what `work` issues to the current one."""
        with torch.cuda.stream(self._stream):
            work()

    def upload(self, ids: torch.Tensor) -> torch.Tensor:
        """Copy to the device, in memory that the stream alone uses."""
        with torch.cuda.stream(self._stream):
            return to_device(ids, self._stream.device)

    def record(self, *, timed: bool = False, blocking: bool = False) -> Mark:
        """An event, which no one else records.

        Args:
            timed: whether `seconds_between` will be asked of it.
            blocking: whether a thread of the host that waits for it sleeps.
        """
        event: Any = torch.cuda.Event
        mark = event(enable_timing=timed, blocking=blocking)
        mark.record(self._stream)
        return mark

    def wait(self, mark: Mark) -> None:
        """The stream waits, not the host."""
        self._stream.wait_event(mark)

    def seconds_between(self, before: Mark, after: Mark) -> float | None:
        """See `Queue.seconds_between`; the host does not wait."""
        return float(before.elapsed_time(after)) / 1e3 if after.query() else None


class CudaQueues:
    """Streams beside the model's: copies both ways at once, and what spreads rows."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams.

        Args:
            device: a CUDA device.
        """
        self._device = device
        stream: Any = torch.cuda.Stream
        self._stores = CudaQueue(stream(device))
        self._loads = CudaQueue(stream(device))
        self.stores: Queue = self._stores
        self.loads: Queue = self._loads
        self.scatters: Queue = CudaQueue(stream(device))

    def model(self) -> Queue:
        """See `Queues.model`."""
        return CudaQueue(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        """See `Queues.finish`."""
        torch.cuda.synchronize(self._device)

    def copies_over(self) -> Callable[[], None]:
        """See `Queues.copies_over`; a thread that waits takes no processor's time."""
        marks = [queue.record(blocking=True) for queue in (self._stores, self._loads)]

        def wait() -> None:
            # Another device that is current would get a context of this process.
            with torch.cuda.device(self._device):
                for mark in marks:
                    mark.synchronize()

        return wait


def _nothing() -> None:
    pass
