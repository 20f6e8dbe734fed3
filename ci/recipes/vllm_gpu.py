# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU build, told that it runs on an NVIDIA GPU: all that is pretended.

Its own classes for CUDA then configure an engine, choose attention backends and build
layers as they do on such a GPU.  No kernel is there, and none runs: what a layer only
holds for later is a stand-in.  What a GPU decides when it runs is not decided here.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

GPUS = {"H100": (9, 0, 80), "B200": (10, 0, 180), "B300": (10, 3, 268)}
"""Compute capability and GiB, by name."""
_KERNELS = (
    "vllm._C_stable_libtorch",
    "vllm._flashkda_C",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""Compiled modules of the CUDA build that vLLM imports for their side effects."""
_OPERATIONS = (
    "_C",
    "_C_cache_ops",
    "_flashkda_C",
    "_moe_C",
    "_vllm_fa2_C",
    "_vllm_fa3_C",
)
_LIBRARIES = (
    "cuda",
    "cutlass",
    "flashinfer",
    "flashinfer_cubin",
    "tokenspeed_mla",
    "torchvision",
)
"""Packages that the CUDA build is installed with, and the CPU build is not."""


def pretend(gpu: str = "H100") -> None:
    """Make this process one of a machine with eight such GPUs, for good.

    Args:
        gpu: one of `GPUS`.
    """
    _import_as_on_a_cpu()
    import torch

    for name in _KERNELS:
        sys.modules[name] = ModuleType(name)
    sys.meta_path.append(_Libraries())
    _stand_in_for_operations()
    torch.cuda.Stream = torch.cuda.Event = MagicMock  # type: ignore[misc, assignment]
    become(gpu)
    backends = "vllm.v1.attention.backends"
    # It was imported as on a CPU, and imports what backends ask it for.
    importlib.reload(importlib.import_module(f"{backends}.fa_utils"))
    # It takes memory of the GPU when it is imported.
    with patch.object(torch, "empty", MagicMock()):
        importlib.import_module(f"{backends}.mla.cutlass_mla")
    _inspect_models_here()
    # A kernel of Kimi K3's experts that meets its peers while it is made.
    tail: Any = importlib.import_module(
        "vllm.models.kimi_k3.nvidia.ops.latent_moe_tail"
    )
    tail.KimiK3LatentMoETailOp.initialize = _always(MagicMock())


def _import_as_on_a_cpu() -> None:
    """Import what would load kernels, were this a GPU when it is imported."""
    for module in (
        "cpu_worker",
        "gpu_worker",
        "gpu_model_runner",
        "gpu.model_runner",
        "utils",
    ):
        importlib.import_module(f"vllm.v1.worker.{module}")
    importlib.import_module("vllm.v1.attention.backends.cpu_attn")


def become(gpu: str) -> None:
    """Turn a process that pretends already into one of a machine with other GPUs."""
    import torch
    import vllm.config.vllm
    from vllm.platforms import current_platform
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    major, minor, gib = GPUS[gpu]

    class Pretended(NonNvmlCudaPlatform):
        get_device_capability = _always(DeviceCapability(major, minor))
        get_device_name = _always(f"NVIDIA {gpu}")
        get_device_total_memory = _always(gib << 30)
        get_cuda_runtime_major = _always(13)
        num_compute_units = _always(132)
        device_count = _always(8)
        is_fully_connected = _always(True)
        is_cumem_allocator_available = _always(True)
        import_kernels = _always(None)
        current_device = _always(torch.device("meta"))

    # Modules hold the object, so the object changes, not the name.
    current_platform.__class__ = Pretended
    vllm.config.vllm.HAS_TRITON = True
    _forget_the_machine()


def _forget_the_machine() -> None:
    """Empty vLLM's caches, in which answers lie that other machines gave."""
    for found in gc.get_objects():
        if isinstance(found, functools._lru_cache_wrapper) and (
            found.__module__.startswith("vllm.")
        ):
            found.cache_clear()


def _always(answer: Any) -> Any:
    """A method of the class, of whatever arguments, that gives one answer."""
    return classmethod(lambda cls, *args, **kwargs: answer)


def _stand_in_for_operations() -> None:
    from torch import _ops

    namespace: Any = _ops._OpNamespace
    found = namespace.__getattr__

    def operation(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if self.name not in _OPERATIONS:
                raise
            return MagicMock(name=name)

    namespace.__getattr__ = operation


class _Libraries(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of kernels, each name in which is a stand-in."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _LIBRARIES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Library(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Library(ModuleType):
    __version__ = "9.9.9"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def _inspect_models_here() -> None:
    """Look at a model's class in this process, not in one that knows nothing of it."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()
    model: Any = registry._LazyRegisteredModel
    model._load_modelinfo_from_cache = lambda *_: None
    model._save_modelinfo_to_cache = lambda *_: None
