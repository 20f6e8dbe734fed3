# SPDX-License-Identifier: Apache-2.0
"""What every platform's worker does: run the cache's commands before a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.device.host.ring import rings_for
from hybrid_plugin.engine import host_memory
from hybrid_plugin.engine.refusals import named
from hybrid_plugin.vllm import (
    activation,
    deterministic,
    elastic,
    host_rows,
    page_layout,
    page_size,
    patches,
    reports,
    servable,
    worker_tiers,
)
from hybrid_plugin.vllm.kernels import agreement, state_layers
from hybrid_plugin.vllm.kernels.layers import StateLayers
from hybrid_plugin.vllm.planning import HybridKVCacheConfig, pools_of
from hybrid_plugin.vllm.pool_memory import PoolMemory
from hybrid_plugin.vllm.prefill_measure import PrefillMeasure
from hybrid_plugin.vllm.reports import Report
from hybrid_plugin.vllm.scheduler import COMMANDS, FLUSHED, PREFILL_TOKENS, ROWS
from hybrid_plugin.vllm.speculation import block_tables, windows
from hybrid_plugin.vllm.speculation import patches as speculation_patches
from hybrid_plugin.vllm.worker_tiers import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from hybrid_plugin.engine.rank_tiers import RankTiers
    from hybrid_plugin.tiers.agreement import Outcome

_LOST = (
    "hybrid-plugin: the memory of the cache was released, and what was cached was not "
    "forgotten: have the engine sleep (/sleep), or reset the prefix cache first."
)
KV_MEMORY = "kv_cache"
"""What vLLM calls the memory of its cache where a part of its memory sleeps."""


class RunsCommands:
    """Mixed into each platform's worker, before it in the bases."""

    model_runner: Any
    vllm_config: VllmConfig
    device: torch.device
    _has_other_weights = False
    """Whether what our kernels keep of weights may be of earlier ones."""
    _holds_content = False
    """Whether anything that is cached may be in the pools."""
    _lost_content = False
    """Whether it went with their memory, and the scheduler has not said it knows."""
    _is_scheduled = False
    """Whether the last step came from our scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not patches.is_applied():
            raise RuntimeError(patches.HALF_LOADED.format(where="a worker"))
        super().__init__(*args, **kwargs)
        self._pools = PoolMemory()
        self._layers = StateLayers({}, "engine", "cpu")
        self._state_groups: list[int] = []
        """Places of the groups of state layers among vLLM's."""
        self._reported = Report()
        self._passes: PrefillMeasure | None = None
        """Where it counts how long a prefill takes."""
        self._load_rate: float | None = None
        """Bytes in a second that come from host memory, on every rank at least."""
        self._tiers: RankTiers | None = None
        """Behind the host memory, where the options give some."""
        self._ranks = Ranks()
        """What of the ranks the scheduler has not heard yet."""
        self._outcomes: list[Outcome] = []
        """Of writes, fetches and offers, likewise."""
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
            patches.watch_weights(self.get_model(), self._weights_written)  # type: ignore[attr-defined]
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
        return agreement.specs_of(
            self._specs(),
            interior=self._layers.keep_interior,
            records=self._layers.records is not None,
        )

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
        wanted = activation.read_options(self.vllm_config).host_memory
        if wanted is not None:
            ranks = self.vllm_config.parallel_config.local_world_size
            host_memory.check_room(wanted, ranks, host_memory.free_bytes())
        # What the user set aside for the cache holds the cache alone.  vLLM may take a
        # number of an earlier start for it, which is what it measured then.
        said = self.vllm_config.cache_config.kv_cache_memory_bytes
        with patches.pool_allocator(_allocate_for_profiling):
            available: int = super().determine_available_memory()  # type: ignore[misc]
        if wanted is not None and not said:
            available -= rings_for(self.device).bytes
        if not elastic.is_wanted(self.vllm_config):
            return available
        if servable.has_scales(self.vllm_config):
            patches.patch_scales()
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
        if kv_cache_config.host is not None:
            self._load_rate = host_rows.attach(executor, kv_cache_config.host)
            self._passes = PrefillMeasure(self.device)
        self._open_tiers(kv_cache_config)
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

    def _open_tiers(self, config: HybridKVCacheConfig) -> None:
        """Put what the options name behind the host memory: files, peers."""
        options = activation.read_options(self.vllm_config)
        if not options.has_outer_tiers:
            return
        layers = self.vllm_config.compilation_config.static_forward_context
        self._tiers, self._ranks = worker_tiers.attach(
            self._pools.executor,
            self.vllm_config,
            config,
            options,
            self._pools.layouts(config, layers),
        )

    def shutdown(self) -> None:
        """End, and give the host memory back."""
        if self._tiers is not None:
            self._tiers.close()
        self._pools.close()
        super().shutdown()  # type: ignore[misc]

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load them again, for our kernels too."""
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        self._weights_changed()

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """End an update from a trainer, for our kernels too."""
        super().finish_weight_update(*args, **kwargs)  # type: ignore[misc]
        self._weights_changed()

    def apply_model(self, fn: Callable[[Any], Any]) -> Any:
        """Have a function see the model; it may write weights."""
        result = super().apply_model(fn)  # type: ignore[misc]
        if self._stepped_aside is None:
            self._weights_written()
        return result

    def _weights_changed(self) -> None:
        self._layers.refresh()
        if self._tiers is not None:
            self._tiers.weights_changed()

    def _weights_written(self) -> None:
        """Note that weights may have been written, of which more may follow.

        Until a pass, some may be nowhere: vLLM loads weights anew layer by layer.
        """
        self._has_other_weights = True
        if self._tiers is not None:
            self._tiers.weights_changed()

    def sleep(self, level: int = 1) -> None:
        """Sleep; the engine core has flushed the cache.

        The memory of elastic pools is ours, not vLLM's to release.
        """
        if self._stepped_aside is None:
            self._release()
        super().sleep(level)  # type: ignore[misc]

    def discard(self, tags: tuple[str, ...]) -> None:
        """Release memory of some kinds; the engine core has flushed the cache."""
        super().discard(tags)  # type: ignore[misc]
        if KV_MEMORY in tags and self._stepped_aside is None:
            self._release()

    def _release(self) -> None:
        self._pools.release()
        self._lost_content |= self._holds_content
        self._holds_content = False

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up, or have memory of some kinds again."""
        super().wake_up(tags)  # type: ignore[misc]
        if (not tags or KV_MEMORY in tags) and self._stepped_aside is None:
            self._pools.restore()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the step's commands, then the step, on the same stream.

        Rows that got draft slots are written before: the step's own writes are of other
        columns or rows.
        """
        commands = getattr(scheduler_output, COMMANDS, None)
        self._is_scheduled = commands is not None
        if commands is not None:
            self._prepare(scheduler_output)
            self._pools.executor.run(commands)
        if self._tiers is not None:
            self._outcomes += self._tiers.settle()
        rows = getattr(scheduler_output, ROWS, None)
        if rows:
            v2 = self.vllm_config.use_v2_model_runner
            block_tables.write_rows(self.model_runner, self._state_groups, rows, v2=v2)
        tokens = getattr(scheduler_output, PREFILL_TOKENS, 0)
        if self._passes is None or not tokens:
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
        else:
            with self._passes.pass_of(tokens):
                output = super().execute_model(scheduler_output)  # type: ignore[misc]
        # A step without requests is over here; others are when they have sampled.
        return self._with_report(output)

    def _prepare(self, scheduler_output: SchedulerOutput) -> None:
        """Note what a step says of the cache, before its commands run.

        Raises:
            RuntimeError: if it may read what went with released memory.
        """
        flushed = getattr(scheduler_output, FLUSHED, False)
        computes = scheduler_output.total_num_scheduled_tokens > 0
        self._has_other_weights |= flushed
        self._lost_content &= not flushed
        if not computes:
            self._holds_content &= not flushed
            return
        if self._lost_content:
            raise RuntimeError(_LOST)
        self._holds_content = True
        if self._has_other_weights:
            self._layers.refresh()
            self._has_other_weights = False

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and report what was measured, if there is news."""
        return self._with_report(
            super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        )

    def _with_report(self, output: Any) -> Any:
        """The same, with what is news; it is kept where there is no output yet.

        It is also kept in passes that no scheduler made, with which vLLM's second
        model runner warms up: nobody reads their outputs.
        """
        if not self._is_scheduled or not reports.can_carry(output):
            return output
        report = self._measured()
        if report == self._reported:
            return output
        self._outcomes, self._ranks = [], Ranks()
        self._reported = self._measured()
        return reports.attach(output, report)

    def _measured(self) -> Report:
        executor, passes = self._pools.executor, self._passes
        return Report(
            move_seconds=executor.moves.seconds,
            wait_seconds=0.0 if executor.host is None else executor.host.wait_seconds,
            token_seconds=None if passes is None else passes.token_seconds(),
            load_bytes_per_second=self._load_rate,
            disk=self._ranks.disk,
            peers=self._ranks.peers,
            store=self._ranks.store,
            weight_updates=0 if self._tiers is None else self._tiers.updates,
            graph_passes=self._layers.replayed,
            outcomes=tuple(self._outcomes),
        )


def _allocate_for_profiling(*args: Any, **kwargs: Any) -> Any:
    """The small cache on which vLLM measures its CUDA graphs; vLLM alone keeps it."""
    return PoolMemory().allocate(*args, **kwargs)
