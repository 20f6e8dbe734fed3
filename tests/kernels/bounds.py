# SPDX-License-Identifier: Apache-2.0
"""Accesses of interpreted kernels, checked against the tensors that they were given.

On a GPU an access next to a tensor mostly reads or overwrites another one, and only
sometimes ends the process.  Triton's interpreter has all addresses at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.uint64]

BY_ADDRESS = frozenset(
    {
        "_commit_kernel",
        "_copy_kernel",
        "_copy_parts_kernel",
        "_promote_kernel",
        "_transfer_parts_kernel",
        "_zero_kernel",
        "_zero_parts_kernel",
    }
)
"""Kernels that are given the address of a pool, or a table of such, and not the pool.

Their tests compare all of the pools.
"""


class Bounds:
    """Where the tensors of the kernel that runs begin and end."""

    def __init__(self) -> None:
        self._starts: Addresses | None = None
        self._ends: Addresses | None = None

    def enter(self, kernel: str, arguments: Iterable[Any]) -> None:
        """Note a kernel's arguments, before it runs.

        Args:
            kernel: its name.
            arguments: tensors among others.
        """
        self._starts = self._ends = None
        if kernel in BY_ADDRESS:
            return
        extents = sorted(
            _extent(given) for given in arguments if isinstance(given, torch.Tensor)
        )
        joined: list[list[int]] = []
        for start, end in extents:
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(end, joined[-1][1])
            else:
                joined.append([start, end])
        # Below them all: for addresses that lie before the first.
        self._starts = np.array([0, *(start for start, _ in joined)], np.uint64)
        self._ends = np.array([0, *(end for _, end in joined)], np.uint64)

    def check(self, addresses: Addresses, mask: npt.NDArray[np.bool_]) -> None:
        """Have an access fail if a part of it that is not masked lies in no tensor.

        Raises:
            IndexError: naming the distance to the end of the tensor before it.
        """
        if self._starts is None or self._ends is None:
            return
        used = addresses[mask]
        found = np.searchsorted(self._starts, used, side="right") - 1
        beyond = used.astype(np.int64) - self._ends[found].astype(np.int64)
        if (beyond >= 0).any():
            raise IndexError(
                f"{int((beyond >= 0).sum())} of {used.size} elements lie in no tensor, "
                f"the first {int(beyond[beyond >= 0][0])} bytes behind the end of one."
            )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte, and of the one behind the last element."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return start, start + (last + 1) * tensor.element_size()


def checked(bounds: Bounds, access: Callable[..., Any], mask_at: int) -> Any:
    """A method of the interpreter's builder that checks before it accesses.

    Args:
        bounds: of the kernel that runs.
        access: the method.
        mask_at: which of its arguments is the mask; the first is the pointers.
    """

    def call(builder: Any, *arguments: Any) -> Any:
        pointers, mask = arguments[0].data, arguments[mask_at].data
        bounds.check(pointers, np.broadcast_to(mask, pointers.shape).astype(bool))
        return access(builder, *arguments)

    return call


def entered(bounds: Bounds, start: Callable[..., Any]) -> Any:
    """The method of the interpreter that has a launch's arguments, noting them."""

    def call(executor: Any, arguments: Any, named: Any) -> Any:
        hosted, hosted_named = start(executor, arguments, named)
        bounds.enter(executor.fn.__name__, [*hosted, *hosted_named.values()])
        return hosted, hosted_named

    return call
