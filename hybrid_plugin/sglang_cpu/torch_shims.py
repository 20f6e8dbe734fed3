# SPDX-License-Identifier: Apache-2.0
"""What SGLang asks of PyTorch that a machine without a GPU cannot answer.

Each function changes PyTorch for the whole process, and only where it must.  None
replaces a function that creates tensors: `torch.device`, as a context, would not put on
its device what the replacement creates.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

_APPLIED = "_hybrid_plugin_original"


def apply() -> None:
    """Apply all; a second call changes nothing."""
    answer_with_the_cpu_module()
    leave_memory_unpinned()
    name_no_gpu()
    wait_for_no_gpu()
    record_no_streams()


def answer_with_the_cpu_module() -> None:
    """Symptom: Qwen3-Next fails to load, "Found no NVIDIA driver".

    Cause: it asks `torch.get_device_module()`, without an argument, for the
    current device; a CUDA build of PyTorch answers with `torch.cuda` whether
    there is a device or not.
    Fix: answer `torch.cpu`.
    Delete when: SGLang asks its platform, or PyTorch looks for a device first.
    """
    original = torch.get_device_module
    if original() is torch.cpu or hasattr(original, _APPLIED):
        return

    @functools.wraps(original)
    def get_device_module(device: torch.device | str | None = None) -> ModuleType:
        return torch.cpu if device is None else original(device)

    setattr(get_device_module, _APPLIED, original)
    torch.get_device_module = get_device_module  # type: ignore[assignment]


def wait_for_no_gpu() -> None:
    """Symptom: an MTP head fails to load, "Found no NVIDIA driver".

    Cause: models that share their embedding with it wait for `torch.cuda`, whatever
    device they are on.
    Fix: there is nothing to wait for.
    Delete when: they ask `torch.get_device_module()`.
    """
    original = torch.cuda.synchronize
    if hasattr(original, _APPLIED):
        return

    @functools.wraps(original)
    def synchronize(device: object = None) -> None:
        return None

    setattr(synchronize, _APPLIED, original)
    torch.cuda.synchronize = synchronize


def name_no_gpu() -> None:
    """Symptom: a model with sparse attention does not start, "Found no NVIDIA driver".

    Cause: what chooses its kernels asks `torch.cuda` what the GPU is capable of,
    whatever device there is.
    Fix: answer that it is capable of nothing.
    Delete when: it asks its platform first.
    """
    original = torch.cuda.get_device_capability
    if hasattr(original, _APPLIED):
        return

    @functools.wraps(original)
    def get_device_capability(device: object = None) -> tuple[int, int]:
        return 0, 0

    setattr(get_device_capability, _APPLIED, original)
    torch.cuda.get_device_capability = get_device_capability


def leave_memory_unpinned() -> None:
    """Symptom: the first decode step with `extra_buffer` fails, "Cannot access
    accelerator device when none is available".

    Cause: `ScheduleBatch.prepare_for_decode` pins a tensor whatever its platform
    says about pinned memory.
    Fix: a tensor that is to be pinned stays as it is; nothing is copied to a
    device that pinning would help.
    Delete when: SGLang asks `is_pin_memory_available` there as elsewhere.
    """
    original = torch.Tensor.pin_memory
    if hasattr(original, _APPLIED):
        return

    @functools.wraps(original)
    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    setattr(pin_memory, _APPLIED, original)
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign,assignment]


def record_no_streams() -> None:
    """Symptom: the first step with drafts of a block fails, "unknown parameter type".

    Cause: its worker tells a tensor of the stream that reads it, on whatever device;
    a CPU's streams are none that a tensor could be told of.
    Fix: a tensor in a CPU's memory is told of none; nothing runs behind its back.
    Delete when: SGLang looks where the tensor is, as `record_stream_each` does.
    """
    original = torch.Tensor.record_stream
    if hasattr(original, _APPLIED):
        return

    @functools.wraps(original)
    def record_stream(self: torch.Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            original(self, stream)

    setattr(record_stream, _APPLIED, original)
    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign,assignment]
