# SPDX-License-Identifier: Apache-2.0
"""What every platform's worker does: run the cache's commands before a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.engine.refusals import named
from hybrid_plugin.vllm import (
    activation,
    deterministic,
    elastic,
    page_layout,
    page_size,
    patches,
    reports,
    servable,
)
from hybrid_plugin.vllm.kernels import agreement, state_layers
from hybrid_plugin.vllm.kernels.agreement import InteriorSpecs
from hybrid_plugin.vllm.kernels.layers import StateLayers
from hybrid_plugin.vllm.planning import HybridKVCacheConfig, pools_of
from hybrid_plugin.vllm.pool_memory import PoolMemory
from hybrid_plugin.vllm.scheduler import COMMANDS, ROWS
from hybrid_plugin.vllm.speculation import block_tables, windows
from hybrid_plugin.vllm.speculation import patches as speculation_patches

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec


class RunsCommands:
    """Mixed into each platform's worker, before it in the bases."""

    model_runner: Any
    vllm_config: VllmConfig
    device: torch.device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not patches.is_applied():
            raise RuntimeError(patches.HALF_LOADED.format(where="a worker"))
        super().__init__(*args, **kwargs)
        self._pools = PoolMemory()
        self._layers = StateLayers({}, "engine", "cpu")
        self._state_groups: list[int] = []
        """Places of the groups of state layers among vLLM's."""
        self._reported = 0.0
        self._stepped_aside: str | None = None
        """Why vLLM's own code runs in this worker, None if it does not."""

    @named()
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load it, and step aside where its layers need what there is no pool for."""
        if activation.read_options(self.vllm_config).is_deterministic:
            patches.patch_batch_invariance()
            patches.patch_gated_norm()
            patches.patch_attention_tiles(self.vllm_config.model_config.max_model_len)
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        reason = servable.find_out(self.vllm_config, self._specs)
        if reason is None:
            if activation.read_options(self.vllm_config).is_deterministic:
                deterministic.check_attention(self.vllm_config)
            self._layers = state_layers.take_over(self.vllm_config, self._specs())
            if self.vllm_config.speculative_config is not None:
                speculation_patches.apply(self.vllm_config)
            return
        activation.refuse_if_demanded(activation.read_options(self.vllm_config), reason)
        activation.step_aside(self.vllm_config)
        self._stepped_aside = reason

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What the layers declare; marked where the plugin stepped aside.

        vLLM has its platform choose the block size after the model is loaded, and
        leaves us a say in it only for hybrid models.
        """
        if self._stepped_aside is not None:
            return servable.StockSpecs(self._specs(), self._stepped_aside)
        page_size.choose(self.vllm_config)
        specs = self._specs()
        return InteriorSpecs(specs) if self._layers.keep_interior else specs

    def _specs(self) -> dict[str, KVCacheSpec]:
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        return specs

    @named()
    def get_supported_kv_cache_layouts(self) -> list[str]:
        """What the backends take; with elastic pools packed pages first."""
        names: list[str] = super().get_supported_kv_cache_layouts()  # type: ignore[misc]
        if self._stepped_aside is not None:
            return names
        return page_layout.supported(self.vllm_config, names)

    @named()
    def determine_available_memory(self) -> int:
        """Find the memory for the cache, and take it where the pools share it.

        What was taken is there when the engine core has planned with it, and
        every rank says how much it really got.
        """
        if self._stepped_aside is not None:
            stock: int = super().determine_available_memory()  # type: ignore[misc]
            return stock
        with patches.pool_allocator(_allocate_for_profiling):
            available: int = super().determine_available_memory()  # type: ignore[misc]
        if not elastic.is_wanted(self.vllm_config):
            return available
        memory = elastic.take_memory(self.vllm_config, available, self.device)
        self._pools.share(memory)
        return memory.held + memory.block_bytes

    @named()
    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the pools; refuses a configuration that is not ours."""
        if self._stepped_aside is not None:
            super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
            return
        if not isinstance(kv_cache_config, HybridKVCacheConfig):
            raise RuntimeError(patches.HALF_LOADED.format(where="the engine core"))
        agreement.check(kv_cache_config.interior, self._layers.keep_interior)
        with patches.pool_allocator(self._pools.allocate):
            super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        # Without an executor, the cache is not ours, which is refused.
        executor = self._pools.executor
        self._layers.interior = executor.interior
        self._state_groups = [
            group
            for group, pool in enumerate(pools_of(kv_cache_config.kv_cache_groups))
            if pool == Pool.STATE
        ]
        if self.vllm_config.speculative_config is not None:
            self._layers.fold_records()
            executor.records = self._layers.records
            executor.windows = windows.rolling_windows(
                self.vllm_config, self._specs(), self._layers.names
            )
        if self.device.type != "cpu":  # where nothing is compiled
            self._layers.warm_up(self.vllm_config.scheduler_config.max_num_seqs)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load them again, for our kernels too."""
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        self._layers.refresh()

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """End an update from a trainer, for our kernels too."""
        super().finish_weight_update(*args, **kwargs)  # type: ignore[misc]
        self._layers.refresh()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the step's commands, then the step, on the same stream.

        Rows that got draft slots are written before: the step's own writes are of other
        columns or rows.
        """
        commands = getattr(scheduler_output, COMMANDS, None)
        if commands is not None:
            self._pools.executor.run(commands)
        rows = getattr(scheduler_output, ROWS, None)
        if rows:
            v2 = self.vllm_config.use_v2_model_runner
            block_tables.write_rows(self.model_runner, self._state_groups, rows, v2=v2)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and report what moving memory has cost if that grew."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if self._stepped_aside is not None:
            return output
        spent = self._pools.executor.moves.seconds
        if spent == self._reported:
            return output
        self._reported = spent
        return reports.attach(output, spent)


def _allocate_for_profiling(*args: Any, **kwargs: Any) -> Any:
    """The small cache on which vLLM measures its CUDA graphs; vLLM alone keeps it."""
    return PoolMemory().allocate(*args, **kwargs)
