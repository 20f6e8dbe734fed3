# SPDX-License-Identifier: Apache-2.0
"""What every platform's worker does: run the cache's commands before a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_plugin.vllm import compat
from hybrid_plugin.vllm.memory import executor_of
from hybrid_plugin.vllm.planning import HybridKVCacheConfig
from hybrid_plugin.vllm.scheduler import COMMANDS

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class RunsCommands:
    """Mixed into each platform's worker, before it in the bases."""

    model_runner: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not compat.is_applied():
            raise RuntimeError(compat.HALF_LOADED.format(where="a worker"))
        compat.patch_worker()
        super().__init__(*args, **kwargs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the pools; refuses a configuration that is not ours."""
        if not isinstance(kv_cache_config, HybridKVCacheConfig):
            raise RuntimeError(compat.HALF_LOADED.format(where="the engine core"))
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        executor_of(self.model_runner.kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the step's commands, then the step, on the same stream."""
        commands = getattr(scheduler_output, COMMANDS, None)
        if commands:
            executor_of(self.model_runner.kv_cache_config).run(commands)
        return super().execute_model(scheduler_output)  # type: ignore[misc]
