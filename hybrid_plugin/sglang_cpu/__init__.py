# SPDX-License-Identifier: Apache-2.0
"""SGLang on a machine without a GPU: for tests, laptops and CI.

An out-of-tree platform of SGLang (entry point group `sglang.srt.platforms`).  Its
scheduler, caches, memory pools and model classes are SGLang's own; attention runs
on PyTorch, and the state layers on the references of `hybrid_kernels`.  It serves
small models at some hundred tokens a second; it says nothing about the speed or
the rounding of SGLang's GPU kernels.

`SGLANG_PLATFORM=hybrid_cpu` chooses it.  Without that variable it offers itself
where there is no accelerator and the plugin was asked for.
"""

from __future__ import annotations

import os

NAME = "hybrid_cpu"
PLATFORM = "hybrid_plugin.sglang_cpu.cpu.HybridCpu"


def activate() -> str | None:
    """Tell SGLang which platform class to use, or None to leave the choice to it.

    SGLang calls this in each of its processes, before it loads a model.

    Raises:
        ConfigError: if the platform was chosen on a machine with an accelerator.
    """
    import torch

    from hybrid_plugin.config import ConfigError
    from hybrid_plugin.sglang_cpu import torch_shims

    chosen = os.environ.get("SGLANG_PLATFORM") == NAME
    if not chosen and not _offers_itself():
        return None
    if torch.accelerator.is_available():
        raise ConfigError(
            f"SGLANG_PLATFORM={NAME} runs SGLang without an accelerator, and this "
            "machine has one: unset the variable, or hide the device "
            "(CUDA_VISIBLE_DEVICES= for CUDA)."
        )
    torch_shims.apply()
    return PLATFORM


def _offers_itself() -> bool:
    import torch

    from hybrid_plugin.sglang import activation

    other = os.environ.get("SGLANG_PLATFORM")
    return not other and not torch.accelerator.is_available() and activation.requested()
