# SPDX-License-Identifier: Apache-2.0
"""Running what a CUDA graph would hold on tensors without data.

A read of the device has nothing to read there, and fails.  Kernels are not launched.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


class HostCopyError(Exception):
    """Something was brought to the device, which has to wait for it."""


class _NothingFromTheHost(TorchDispatchMode):
    """Fails where a tensor of the host's goes to the device."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        if any(isinstance(x, torch.Tensor) and x.device != META for x in given):
            raise HostCopyError(str(function))
        return function(*args, **kwargs or {})


@contextmanager
def captured(patch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """What runs here may be in a graph; yields names and grids of its kernels."""
    kernels: Any = importlib.import_module("triton.runtime.jit")
    launches: list[tuple[str, Any]] = []

    def launcher(kernel: Any, grid: Any) -> Any:
        name = getattr(kernel, "fn", kernel).__name__
        return lambda *_, **__: launches.append((name, grid))

    with patch.context() as patched, _NothingFromTheHost():
        patched.setattr(kernels.KernelInterface, "__getitem__", launcher)
        yield launches


def moved(found: Any) -> Any:
    """The same without data: a tensor, a record, or a sequence of them."""
    if isinstance(found, torch.Tensor):
        return torch.empty_strided(
            found.shape, found.stride(), dtype=found.dtype, device=META
        )
    if is_dataclass(found) and not isinstance(found, type):
        values = {f.name: moved(getattr(found, f.name)) for f in fields(found)}
        return replace(found, **values)
    if isinstance(found, list | tuple):
        return [moved(one) for one in found]
    return found
