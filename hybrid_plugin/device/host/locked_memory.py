# SPDX-License-Identifier: Apache-2.0
"""Host memory that a GPU copies from and to while the host does other things.

Such memory is locked: the system neither moves it nor pages it out.  PyTorch's own
allocator takes the next power of two, up to twice what is asked for.  So the memory is
mapped here, and handed to CUDA with `cudaHostRegister`.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch


class LockedMemory:
    """A buffer of the host; locked if a GPU copies to it."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Take the memory.

        Without a GPU the system puts memory behind a page when it is first written.

        Args:
            size: bytes, at least 1.
            device: that it is copied to and from.

        Raises:
            MemoryError: if the system does not have it, or cannot lock it.
        """
        try:
            self._map: mmap.mmap | None = mmap.mmap(
                -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise MemoryError(f"no {size} bytes of host memory: {error}") from error
        # Child processes have no use for it, and copies of it would take as much again.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # a kernel that does not take it
                self._map.madvise(advice)
        self._memory: torch.Tensor | None = torch.frombuffer(
            self._map, dtype=torch.int8
        )
        self._unlock: Callable[[], object] = _nothing
        if device.type == "cuda":
            address = self._memory.data_ptr()
            _lock(device, address, size)
            # Whether or not it is closed, before the system takes the memory: addresses
            # that come back are refused if they are still locked.
            self._unlock = weakref.finalize(self, _unlock, device, address)

    @property
    def memory(self) -> torch.Tensor:
        """`[size]` int8, over all of it.

        Raises:
            RuntimeError: if it was given back.
        """
        if self._memory is None:
            raise RuntimeError("the host memory was given back")
        return self._memory

    def close(self) -> None:
        """Give it back, once nothing copies any more; the second time does nothing.

        The system takes it when the last tensor over it is gone.
        """
        self._unlock()
        self._memory = self._map = None


def _lock(device: torch.device, address: int, size: int) -> None:
    """Lock memory.

    Raises:
        MemoryError: if it cannot be locked.
    """
    with torch.cuda.device(device):
        error = _runtime().cudaHostRegister(address, size, 0)
    if int(error) != 0:
        reason = _runtime().cudaGetErrorString(error)
        raise MemoryError(f"{size} bytes of host memory cannot be locked: {reason}")


def _unlock(device: torch.device, address: int) -> None:
    with torch.cuda.device(device):
        _runtime().cudaHostUnregister(address)


def _nothing() -> None:
    pass


def _runtime() -> Any:
    """CUDA's runtime library, as PyTorch gives it."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
