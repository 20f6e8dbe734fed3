# SPDX-License-Identifier: Apache-2.0
"""What vLLM's processes do first, and all alike: done once, in the fork server.

They import the modules that the plugin hooks, and put the CPU's functions in the place
of Triton's kernels.  Nothing is hooked here.
"""

from __future__ import annotations

import gc
import time

from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform

from hybrid_plugin.vllm.contracts import (
    CPU_HOOKS,
    ENGINE_HOOKS,
    WORKER_HOOKS,
    problems,
)

NAP_S = 1e-4
"""Less than a hundredth of a step."""


def nap() -> None:
    """Wait for another process, and leave the core to it, or to other tests.

    For a second after each message, processes of vLLM look for the next one again and
    again, which takes as much time of cores as the steps themselves.
    """
    time.sleep(NAP_S)


problems((*ENGINE_HOOKS, *WORKER_HOOKS, *CPU_HOOKS))
shm_broadcast.sched_yield = nap
# vLLM looks at a model's class in a process that first imports all of vLLM, unless this
# machine has seen the model: so that no GPU is initialised, and here is none.
registry._run_in_subprocess = lambda look: look()
# To find who has imported a kernel, vLLM looks through all names of all modules.
CpuPlatform.register_triton_kernel_overrides()
CpuPlatform.register_triton_kernel_overrides = staticmethod(lambda: None)
# vLLM collects garbage several times as it starts.  What is here for good is not looked
# through each time.
gc.collect()
gc.freeze()
