# SPDX-License-Identifier: Apache-2.0
"""Kernel tests: Triton on a GPU if there is one, else under its interpreter.

The interpreter must be chosen before Triton's own library functions are
decorated, that is before the first `import triton`, and must not leak into
engines that other tests start as child processes. So it is switched on here, the
modules that need it are imported, and it is switched off again.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import hybrid_kernels
import pytest
import torch

from .bounds import Bounds, checked, entered
from .quick_interpreter import speed_up

ON_GPU = (
    "_common.operation",
    "gated_norm",
    "part_norm",
    "replay",
    "state_copy",
    "stops",
)
"""Modules that ask whether Triton should run an operation."""


def _import_interpreted() -> str | None:
    """Import the Triton modules for this machine; a reason if that is impossible."""
    if not torch.cuda.is_available():
        if "triton" in sys.modules:
            return "triton was imported before its interpreter could be chosen"
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        # Triton imports this lazily, and checks the switch when it does.
        importlib.import_module("triton.experimental.gluon")
        for path in Path(hybrid_kernels.__file__).parent.glob("*/triton.py"):
            importlib.import_module(f"hybrid_kernels.{path.parent.name}.triton")
    except ImportError as error:
        return f"no usable triton: {error}"
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
    return None


_NO_TRITON = _import_interpreted()


@pytest.fixture
def device() -> str:
    """Where Triton's tensors live: the GPU, or the CPU under the interpreter."""
    if _NO_TRITON:
        pytest.skip(_NO_TRITON)
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def on_triton(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], AbstractContextManager[None]]:
    """Within ``with on_triton():`` operations run on Triton, on the CPU too."""

    @contextmanager
    def switch() -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in ON_GPU:
                patch.setattr(f"hybrid_kernels.{name}.on_gpu", lambda tensor: True)
            yield

    return switch


@pytest.fixture(params=[False, True], ids=["reference", "triton"])
def backend(
    request: pytest.FixtureRequest,
    device: str,
    on_triton: Callable[[], AbstractContextManager[None]],
) -> Iterator[str]:
    """Where tensors are to lie so that the reference runs an operation, or Triton."""
    with on_triton() if request.param else nullcontext():
        yield device if request.param else "cpu"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _poison(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = function(*args, **kwargs)
        module = sys._getframe(1).f_globals.get("__name__", "")
        if module.startswith("hybrid_kernels"):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return poisoned


@pytest.fixture(autouse=True)
def _poison_uninitialised(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory the library asks for uninitialised holds NaN, so a read of it shows."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poison(getattr(owner, name)))
    yield


@pytest.fixture(autouse=True)
def _stay_within_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter, an access that is in none of a kernel's tensors fails."""
    if _NO_TRITON or torch.cuda.is_available():
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    speed_up(interpreter, monkeypatch)
    bounds = Bounds()
    for owner, name, mask_at in (
        (interpreter.InterpreterBuilder, "create_masked_load", 1),
        (interpreter.InterpreterBuilder, "create_masked_store", 2),
    ):
        access = checked(bounds, getattr(owner, name), mask_at)
        monkeypatch.setattr(owner, name, access)
    executor, name = interpreter.GridExecutor, "_init_args_hst"
    monkeypatch.setattr(executor, name, entered(bounds, getattr(executor, name)))
