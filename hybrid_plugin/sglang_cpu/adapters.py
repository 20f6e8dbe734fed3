# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on a CPU, by SGLang's form of them in PyTorch."""

from __future__ import annotations

from typing import Any

from hybrid_plugin.sglang_cpu.plain_memory import WithoutPinning

_BY_DEFAULT = "csgmv"
"""SGLang's kernels for adapters, where nothing is said."""


def adapt_in_torch(server_args: Any) -> None:
    """Symptom: with a LoRA adapter the first pass fails: Triton finds no driver.

    Cause: SGLang computes adapters with kernels for GPUs, whatever the platform,
    unless `--lora-backend` says otherwise.
    Fix: its own form in PyTorch, instead of the kernels that it has by default.  That
    somebody asked for these cannot be told; they would not run either.
    Delete when: SGLang asks its platform.
    """
    adapters = server_args.enable_lora or server_args.lora_paths
    if adapters and server_args.lora_backend == _BY_DEFAULT:
        server_args.lora_backend = "torch_native"


def adapt_in_plain_memory() -> None:
    """Symptom: with a LoRA adapter a server does not start, "Found no NVIDIA driver".

    Cause: its layers, and what each pass tells them, keep numbers in pinned memory
    whatever the platform says.
    Fix: these modules see a PyTorch that pins no tensor.
    Delete when: SGLang asks `is_pin_memory_available` there as elsewhere.
    """
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        module.torch = WithoutPinning()
