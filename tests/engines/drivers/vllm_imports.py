# SPDX-License-Identifier: Apache-2.0
"""What vLLM's processes do first, and all alike: done once, in the fork server.

They import the modules that the plugin hooks, and put the CPU's functions in the place
of Triton's kernels.  Nothing is hooked here.
"""

from __future__ import annotations

import gc

from vllm.platforms.cpu import CpuPlatform

from hybrid_plugin.vllm.contracts import (
    CPU_HOOKS,
    ENGINE_HOOKS,
    WORKER_HOOKS,
    problems,
)

problems((*ENGINE_HOOKS, *WORKER_HOOKS, *CPU_HOOKS))
# To find who has imported a kernel, vLLM looks through all names of all modules.
CpuPlatform.register_triton_kernel_overrides()
CpuPlatform.register_triton_kernel_overrides = staticmethod(lambda: None)
# vLLM collects garbage several times as it starts.  What is here for good is not looked
# through each time.
gc.collect()
gc.freeze()
