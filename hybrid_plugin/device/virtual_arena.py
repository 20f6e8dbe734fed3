# SPDX-License-Identifier: Apache-2.0
"""Physical memory under a byte budget, mapped into reserved addresses.

A `VirtualArena` reserves address ranges that are larger than the memory there
is, and puts memory behind parts of them: blocks of one size, all alike, so a
block that leaves one range can back another without anything being created.
Addresses never change, so tensors over a range stay valid, and so do CUDA
graphs that were captured on them.

Where a range has no memory behind it, it has a *hole*.  Reading a hole is
harmless and gives bytes without meaning: attention kernels may look at table
entries behind a sequence's end.  Writing to one is a fault, because what is
written there would be lost.

Pressure is a return value: where memory cannot be had, `hold` and `map` return
a `Refusal`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import ClassVar

import torch


@dataclass(frozen=True, slots=True)
class Refusal:
    """Memory that could not be had."""

    wanted: int
    """Bytes that were asked for."""
    reason: str

    def __str__(self) -> str:
        return f"{self.wanted} bytes of cache memory were refused: {self.reason}"


class AddressRange:
    """Reserved addresses, seen as bytes."""

    def __init__(self, memory: torch.Tensor, block_bytes: int) -> None:
        """Describe a range of holes.

        Args:
            memory: `[size]` int8 over all of it.
            block_bytes: bytes of a block; divides the size.
        """
        self.memory = memory
        self.address = memory.data_ptr()
        self.size = memory.numel()
        self.backed = bytearray(self.size // block_bytes)
        """For each block, whether there is memory behind it; the arena's own."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` to `stop` of a range, both multiples of the block size."""

    range: AddressRange
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class VirtualArena(ABC):
    """Blocks of physical memory, and the ranges they are mapped into.

    One block of the budget is set aside: devices that need memory behind holes
    use that one.
    """

    clears: ClassVar[bool]
    """Whether what is mapped reads as zeros."""

    def __init__(self, budget: int, block_bytes: int) -> None:
        """Take no memory yet.

        Args:
            budget: bytes that may be held, ever.
            block_bytes: bytes of a block, a multiple of the device's own.

        Raises:
            ValueError: for a budget of less than two blocks.
        """
        if budget < 2 * block_bytes:
            raise ValueError(
                f"a budget of {budget} bytes is less than two blocks of {block_bytes}"
            )
        self.block_bytes = block_bytes
        self.budget = budget // block_bytes * block_bytes
        self.mapped = 0
        """Bytes of memory behind ranges."""
        self.held = 0
        """Bytes taken from the system for ranges, mapped or not."""
        self.created = 0
        """Bytes that were ever taken from the system for ranges."""
        self.waits_for_stream = False
        """Whether a move waits for the current stream, and not for the whole device.
        Set it where other streams wait for other ranks: what those send may come behind
        work that this process has yet to launch.  Then the stream must be the only one
        that uses the ranges."""
        self._ranges: list[AddressRange] = []

    @property
    def usable(self) -> int:
        """Bytes that may be mapped at once."""
        return self.budget - self.block_bytes

    def reserve(self, size: int) -> AddressRange:
        """Reserve addresses for `size` bytes, all of them holes.

        Raises:
            ValueError: if `size` is no whole number of blocks.
            MemoryError: if the system has no addresses left.
        """
        if size < 1 or size % self.block_bytes:
            raise ValueError(
                f"{size} bytes are no whole number of blocks of {self.block_bytes}"
            )
        reserved = AddressRange(self._reserve(size), self.block_bytes)
        self._ranges.append(reserved)
        return reserved

    def hold(self, size: int, *, partly: bool = False) -> Refusal | None:
        """Take memory from the system until `size` bytes are held.

        What is held is there for `map`, whatever other processes take later.

        Args:
            size: bytes to hold, rounded up to whole blocks.
            partly: keep what could be had if it is not all; `held` says how much.
        """
        room = self.usable - self.held
        wanted = -(-size // self.block_bytes) * self.block_bytes - self.held
        if wanted <= 0:
            return None
        if wanted > room and not partly:
            return Refusal(wanted, f"the budget has {room} left")
        count, reason = self._create(min(wanted, room) // self.block_bytes)
        created = count * self.block_bytes
        if created < min(wanted, room) and not partly:
            self._destroy(count)
            return Refusal(wanted, reason)
        self.held += created
        self.created += created
        if created == wanted:
            return None
        return Refusal(wanted, reason or f"the budget has {room} left")

    def trim(self) -> int:
        """Give back to the system what is held and not mapped; returns bytes."""
        idle = self.held - self.mapped
        self._destroy(idle // self.block_bytes)
        self.held -= idle
        return idle

    def lower(self, usable: int) -> None:
        """Map at most so many bytes from now on, and give back what that leaves.

        Raises:
            ValueError: if that is more than so far, or less than is mapped.
        """
        if not self.mapped <= usable <= self.usable:
            raise ValueError(
                f"{usable} bytes are not between {self.mapped} that are mapped and "
                f"{self.usable}"
            )
        self.budget = usable // self.block_bytes * self.block_bytes + self.block_bytes
        idle = max(self.held - self.usable, 0)
        self._destroy(idle // self.block_bytes)
        self.held -= idle

    def map(self, spans: Iterable[ByteRange]) -> Refusal | None:
        """Put memory behind spans that are holes; a refusal changes nothing.

        Blocks that left other ranges are used first; only what is missing is
        taken from the system.  Waits for the work issued so far, which may read
        the holes.

        Raises:
            ValueError: if there is memory behind a part of them already.
        """
        runs = self._merge(spans, backed=False)
        wanted = sum(run.size for run in runs)
        if wanted > self.usable - self.mapped:
            return Refusal(wanted, f"{self.mapped} of {self.usable} are mapped")
        refusal = self.hold(self.mapped + wanted)
        if refusal is not None:
            return refusal
        if runs:
            self._wait()
        for done, run in enumerate(runs):
            reason = self._attach(run.range.address + run.start, run.size)
            if reason is not None:
                self._detach_all(runs[:done])
                return Refusal(wanted, reason)
            self._mark(run, backed=True)
        return None

    def unmap(self, spans: Iterable[ByteRange]) -> None:
        """Turn spans into holes; waits for the work issued so far (`_wait`).

        Their blocks stay held, for `map` to use.

        Raises:
            ValueError: if there is a hole in them already.
        """
        runs = self._merge(spans, backed=True)
        if runs:
            self._wait()
        self._detach_all(runs)

    def close(self) -> None:
        """Give all memory and addresses back; no tensor may be used after."""
        for reserved in self._ranges:
            self.unmap(self._backed_runs(reserved))
        self.trim()
        while self._ranges:
            self._release(self._ranges.pop())

    # ------------------------------------------------------------- the device

    @abstractmethod
    def _reserve(self, size: int) -> torch.Tensor:
        """A `[size]` int8 tensor over new addresses, all of them holes."""

    @abstractmethod
    def _release(self, reserved: AddressRange) -> None:
        """Give up the addresses of a range that is all holes."""

    @abstractmethod
    def _create(self, blocks: int) -> tuple[int, str]:
        """Take blocks from the system; returns how many, and why if not all."""

    @abstractmethod
    def _destroy(self, blocks: int) -> None:
        """Give so many blocks that are not mapped back to the system."""

    @abstractmethod
    def _attach(self, address: int, size: int) -> str | None:
        """Put held blocks behind a hole; returns why that cannot be done."""

    @abstractmethod
    def _detach(self, address: int, size: int) -> None:
        """Make a hole, and keep its blocks."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait for the device to do all that was issued to it so far, or to the current
        stream where that is enough."""

    # ---------------------------------------------------------------- internal

    def _detach_all(self, runs: Iterable[ByteRange]) -> None:
        for run in runs:
            self._detach(run.range.address + run.start, run.size)
            self._mark(run, backed=False)

    def _blocks(self, run: ByteRange) -> slice:
        return slice(run.start // self.block_bytes, run.stop // self.block_bytes)

    def _mark(self, run: ByteRange, *, backed: bool) -> None:
        self.mapped += run.size if backed else -run.size
        count = run.size // self.block_bytes
        run.range.backed[self._blocks(run)] = bytes([backed]) * count

    def _merge(self, spans: Iterable[ByteRange], *, backed: bool) -> list[ByteRange]:
        """The same bytes in few runs, by address.

        Raises:
            ValueError: for spans that overlap, are no whole blocks, or are not
                backed, or not holes, throughout.
        """
        runs: list[ByteRange] = []
        for span in sorted(spans, key=lambda s: (s.range.address, s.start)):
            self._check(span, backed)
            last = runs[-1] if runs else None
            if last and last.range is span.range and last.stop == span.start:
                runs[-1] = ByteRange(last.range, last.start, span.stop)
            elif span.size:
                runs.append(span)
        for one, following in pairwise(runs):
            if one.range is following.range and following.start < one.stop:
                raise ValueError(f"byte {following.start} of a range comes twice")
        return runs

    def _check(self, span: ByteRange, backed: bool) -> None:
        where = f"bytes {span.start} to {span.stop} of a range of {span.range.size}"
        inside = 0 <= span.start <= span.stop <= span.range.size
        if not inside or span.start % self.block_bytes or span.stop % self.block_bytes:
            raise ValueError(f"{where} are no whole blocks of it")
        if any(found != backed for found in span.range.backed[self._blocks(span)]):
            raise ValueError(f"{where} are not {'mapped' if backed else 'holes'}")

    def _backed_runs(self, reserved: AddressRange) -> list[ByteRange]:
        runs, block = [], 0
        for backed, group in groupby(reserved.backed):
            start, block = block, block + len(list(group))
            if backed:
                size = self.block_bytes
                runs.append(ByteRange(reserved, start * size, block * size))
        return runs
