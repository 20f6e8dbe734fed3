# SPDX-License-Identifier: Apache-2.0
"""Host memory that really comes and goes: reserved anonymous memory (Linux).

The kernel puts memory behind an anonymous page when it is first written to,
and takes it back on `madvise(MADV_DONTNEED)`, so a process's resident size
follows what is mapped here.  A hole is read-only and empty: reads give zeros
from the kernel's one zero page, writes end the process (SIGSEGV).  Mapped
blocks are therefore always zero at first.

A block that is held is a share of the budget, not a certain physical page, so
moving one costs no more than changing the access to two ranges; the page is
cleared by the kernel when it is next used.  Blocks of 2 MiB and more come in
huge pages, where the system has them on demand.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys

import torch

from hybrid_plugin.device.virtual_arena import AddressRange, VirtualArena

_READ, _WRITE = mmap.PROT_READ, mmap.PROT_WRITE
_NO_RESERVE = 0x4000  # MAP_NORESERVE; the mmap module names it from 3.13 on
_HUGE_PAGE = 2 << 20


def is_available() -> bool:
    """Whether this system takes memory back when it is told to (Linux)."""
    return sys.platform == "linux"


class HostArena(VirtualArena):
    """Blocks of anonymous memory."""

    clears = True

    def __init__(self, budget: int, block_bytes: int) -> None:
        """Take no memory yet.

        Args:
            budget: bytes that may be mapped and written to, and one block.
            block_bytes: a multiple of the system's page size.

        Raises:
            ValueError: for sizes that do not fit.
            OSError: on a system other than Linux.
        """
        if not is_available():
            raise OSError("HostArena needs Linux: others keep memory that is unmapped")
        if block_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"blocks of {block_bytes} bytes are no multiple of the system's pages "
                f"of {mmap.PAGESIZE}"
            )
        super().__init__(budget, block_bytes)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._maps: dict[int, mmap.mmap] = {}
        self._huge = block_bytes % _HUGE_PAGE == 0

    def _reserve(self, size: int) -> torch.Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        slack = _HUGE_PAGE if self._huge else 0
        try:
            reserved = mmap.mmap(-1, size + slack, flags=flags, prot=_READ | _WRITE)
        except OSError as error:
            raise MemoryError(f"no addresses for {size} bytes: {error}") from error
        memory = torch.frombuffer(reserved, dtype=torch.int8)
        self._maps[memory.data_ptr()] = reserved
        if self._huge:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                reserved.madvise(mmap.MADV_HUGEPAGE)
            memory = memory[-memory.data_ptr() % _HUGE_PAGE :][:size]
        reason = self._protect(memory.data_ptr(), size, _READ)
        if reason is not None:
            raise MemoryError(f"{size} bytes cannot be reserved: {reason}")
        return memory

    def _release(self, reserved: AddressRange) -> None:
        # The tensor keeps the addresses until it is gone itself.
        del self._maps[self._base(reserved.address)]

    def _create(self, blocks: int) -> tuple[int, str]:
        return blocks, ""

    def _destroy(self, blocks: int) -> None:
        pass

    def _attach(self, address: int, size: int) -> str | None:
        return self._protect(address, size, _READ | _WRITE)

    def _detach(self, address: int, size: int) -> None:
        base = self._base(address)
        self._maps[base].madvise(mmap.MADV_DONTNEED, address - base, size)
        reason = self._protect(address, size, _READ)
        if reason is not None:
            raise OSError(f"memory cannot be made a hole: {reason}")

    def _wait(self) -> None:
        """What was called has been done: the host's work has no queue."""

    def _base(self, address: int) -> int:
        """Where the reservation begins that an address lies in."""
        return max(start for start in self._maps if start <= address)

    def _protect(self, address: int, size: int, access: int) -> str | None:
        """Change the access to addresses; returns what the system says against it."""
        failed = self._libc.mprotect(
            ctypes.c_void_p(address), ctypes.c_size_t(size), access
        )
        return os.strerror(ctypes.get_errno()) if failed else None
