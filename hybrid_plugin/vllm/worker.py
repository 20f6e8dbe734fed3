# SPDX-License-Identifier: Apache-2.0
"""What every platform's worker does: run the cache's commands before a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_plugin.vllm import activation, elastic, patches, reports, servable
from hybrid_plugin.vllm.planning import HybridKVCacheConfig
from hybrid_plugin.vllm.pool_memory import executor_of, lend_memory
from hybrid_plugin.vllm.scheduler import COMMANDS

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from hybrid_plugin.device.virtual_arena import VirtualArena


class RunsCommands:
    """Mixed into each platform's worker, before it in the bases."""

    model_runner: Any
    vllm_config: VllmConfig
    device: torch.device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not patches.is_applied():
            raise RuntimeError(patches.HALF_LOADED.format(where="a worker"))
        patches.patch_worker()
        super().__init__(*args, **kwargs)
        self._memory: VirtualArena | None = None
        self._reported = 0.0
        self._stepped_aside: str | None = None
        """Why vLLM's own code runs in this worker, None if it does not."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load it, and step aside where its layers need what there is no pool for."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        reason = servable.find_out(self.vllm_config, self._specs)
        if reason is None:
            return
        activation.refuse_if_demanded(activation.read_options(self.vllm_config), reason)
        activation.step_aside(self.vllm_config)
        self._stepped_aside = reason

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What the layers declare; marked where the plugin stepped aside."""
        specs = self._specs()
        if self._stepped_aside is None:
            return specs
        return servable.StockSpecs(specs, self._stepped_aside)

    def _specs(self) -> dict[str, KVCacheSpec]:
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        return specs

    def determine_available_memory(self) -> int:
        """Find the memory for the cache, and take it where the pools share it.

        What was taken is there when the engine core has planned with it, and
        every rank says how much it really got.
        """
        available: int = super().determine_available_memory()  # type: ignore[misc]
        if self._stepped_aside is not None or not elastic.is_wanted(self.vllm_config):
            return available
        self._memory = elastic.take_memory(self.vllm_config, available, self.device)
        return self._memory.held + self._memory.block_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the pools; refuses a configuration that is not ours."""
        if self._stepped_aside is not None:
            super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
            return
        if not isinstance(kv_cache_config, HybridKVCacheConfig):
            raise RuntimeError(patches.HALF_LOADED.format(where="the engine core"))
        if self._memory is not None:
            if kv_cache_config.shared is None:
                self._memory.close()
            else:
                lend_memory(kv_cache_config, self._memory)
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        executor_of(self.model_runner.kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the step's commands, then the step, on the same stream."""
        commands = getattr(scheduler_output, COMMANDS, None)
        if commands:
            executor_of(self.model_runner.kv_cache_config).run(commands)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and report what moving memory has cost if that grew."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if self._stepped_aside is not None:
            return output
        spent = executor_of(self.model_runner.kv_cache_config).moves.seconds
        if spent == self._reported:
            return output
        self._reported = spent
        return reports.attach(output, spent)
