# SPDX-License-Identifier: Apache-2.0
"""SGLang on a CPU, told that it runs on an NVIDIA GPU: all that is pretended.

SGLang has one place for the facts of a machine, and a way to give others.  What it
resolves of a server's arguments then is what it resolves on such a GPU.
"""

from __future__ import annotations

import os

GPUS = {
    "H100": (9, 0, 80),
    "H200": (9, 0, 141),
    "B200": (10, 0, 180),
    "B300": (10, 3, 268),
}
"""Compute capability and GiB, by name."""


def pretend(gpu: str = "H100") -> None:
    """Make this process one of a machine with such GPUs, for good.

    Args:
        gpu: one of `GPUS`.
    """
    os.environ["SGLANG_PLATFORM"] = "hybrid_cpu"
    os.environ.setdefault("HYBRID_PLUGIN", "1")
    import sglang.srt.server_args  # noqa: F401  all of it imported as on a CPU
    from sglang.srt.plugins import load_plugins

    load_plugins()
    become(gpu)


def become(gpu: str) -> None:
    """Turn a process that pretends already into one of a machine with other GPUs."""
    from sglang.srt import platforms
    from sglang.srt.arg_groups import memory_hook, serving_hook
    from sglang.srt.platforms.cuda import CudaSRTPlatform
    from sglang.srt.runtime_context import override_platform

    major, minor, gib = GPUS[gpu]
    # Modules hold the object, so the object changes, not the name.
    platforms.current_platform.__class__ = CudaSRTPlatform
    memory_hook.get_device_memory_capacity = lambda *_: gib * 1024
    serving_hook.get_device = lambda *_: "cuda"
    override_platform(
        is_cuda=True,
        is_sm90=major == 9,
        is_hopper_with_cuda_12_3=major == 9,
        is_sm100=major == 10,
        is_sm100_or_sm110=major == 10,
        is_blackwell=major == 10,
        has_amx=False,
        has_flashinfer=True,
        device_sm=major * 10 + minor,
        device_capability=(major, minor),
    ).install()
