# SPDX-License-Identifier: Apache-2.0
"""What vLLM's processes do first, and all alike: done once, in the fork server.

They import the modules that the plugin hooks, and the plugin's own.  Nothing is hooked
here.
"""

from __future__ import annotations

import gc

import hybrid_plugin.vllm.cpu_worker
import hybrid_plugin.vllm.scheduler
from hybrid_plugin.vllm.contracts import (
    CPU_HOOKS,
    ENGINE_HOOKS,
    WORKER_HOOKS,
    problems,
)

problems((*ENGINE_HOOKS, *WORKER_HOOKS, *CPU_HOOKS))
# What is here for good is not looked through in each process again.
gc.collect()
gc.freeze()
