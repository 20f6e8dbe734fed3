# SPDX-License-Identifier: Apache-2.0
"""Copies of many ranges of memory, which one call orders.

A prefix is hundreds of pages, and the host needs ten microseconds to order a copy of
each: the engine's thread would spend milliseconds on it, in which no step is launched.
The driver takes them all at once (cuMemcpyBatchAsync, CUDA 12.8), and its copy engines
leave the processors to the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

CopyRanges: TypeAlias = Callable[["Ranges"], None]
"""Orders copies of ranges, in no order, behind all else on the current stream."""


@dataclass(slots=True)
class Ranges:
    """What is copied where; neighbours on both sides are one range."""

    to: list[int] = field(default_factory=list)
    """Addresses."""
    of: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes."""

    def add(self, to: int, of: int, size: int) -> None:
        """Copy `size` bytes more."""
        if self.sizes:
            last = self.sizes[-1]
            if self.to[-1] + last == to and self.of[-1] + last == of:
                self.sizes[-1] += size
                return
        self.to.append(to)
        self.of.append(of)
        self.sizes.append(size)

    def reversed(self) -> Ranges:
        """The way back."""
        return Ranges(self.of, self.to, self.sizes)


def copier_for(device: torch.device) -> CopyRanges:
    """What copies ranges from and to a device's memory.

    Raises:
        RuntimeError: for a GPU without cuda-bindings.
    """
    return _move if device.type == "cpu" else _Batches(device)


def _move(ranges: Ranges) -> None:
    for to, of, size in zip(ranges.to, ranges.of, ranges.sizes, strict=True):
        ctypes.memmove(to, of, size)


class _Batches:
    """Copies of one GPU."""

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver
        except ImportError:
            raise RuntimeError(
                "host_memory needs the package cuda-bindings, which PyTorch for CUDA "
                "brings: pip install cuda-bindings."
            ) from None
        self._driver: Any = driver
        self._device = device
        self._orders_many = _orders_many(driver)
        if self._orders_many:
            attributes = driver.CUmemcpyAttributes()
            order = driver.CUmemcpySrcAccessOrder
            attributes.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            prefer = driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
            attributes.flags = int(prefer)
            self._attributes = attributes

    def __call__(self, ranges: Ranges) -> None:
        """See `CopyRanges`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if self._orders_many:
            self._order_many(ranges, stream)
            return
        for to, of, size in zip(ranges.to, ranges.of, ranges.sizes, strict=True):
            (error,) = self._driver.cuMemcpyAsync(to, of, size, stream)
            self._check(error)

    def _order_many(self, ranges: Ranges, stream: int) -> None:
        pointer = self._driver.CUdeviceptr
        error, *_ = self._driver.cuMemcpyBatchAsync(
            list(map(pointer, ranges.to)),
            list(map(pointer, ranges.of)),
            ranges.sizes,
            len(ranges.sizes),
            [self._attributes],
            [0],  # the attributes are those of all
            1,
            stream,
        )
        self._check(error)

    def _check(self, error: Any) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a copy to or from host memory failed: {error}")


def _orders_many(driver: Any) -> bool:
    """Whether the bindings and the driver know copies by the batch: CUDA 12.8."""
    if not hasattr(driver, "cuMemcpyBatchAsync"):
        return False
    error, version = driver.cuDriverGetVersion()
    return bool(error == driver.CUresult.CUDA_SUCCESS and version >= 12080)
