# SPDX-License-Identifier: Apache-2.0
"""vLLM's tests make a scheduler on one pool of blocks; they get ours on two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.vllm import specs
from hybrid_plugin.vllm.planning import HybridKVCacheConfig
from hybrid_plugin.vllm.scheduler import HybridAsyncScheduler, HybridScheduler

_NEVER = 1 << 30


class WithoutPasses(LeastRecentlyUsed):
    """No snapshot is worth a pause."""

    def repays_pass(self, *args: Any, **kwargs: Any) -> bool:
        """See `LeastRecentlyUsed`."""
        return False


def scheduler(**arguments: Any) -> Scheduler:
    """In place of `Scheduler(...)`."""
    return _without_snapshots(HybridScheduler(**_on_two_pools(arguments)))


def async_scheduler(**arguments: Any) -> Scheduler:
    """In place of `AsyncScheduler(...)`."""
    return _without_snapshots(HybridAsyncScheduler(**_on_two_pools(arguments)))


def _without_snapshots(scheduler: Any) -> Scheduler:
    """The tests count the tokens of every step, and pauses would change them."""
    cache = scheduler.kv_cache_manager.cache
    cache.policy = replace(cache.policy, chunk_end_min_tokens=_NEVER)
    cache.tree.eviction = WithoutPasses()
    return cast(Scheduler, scheduler)


def _on_two_pools(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with as many pages as there were blocks, and slots enough."""
    vllm_config, stock = arguments["vllm_config"], arguments["kv_cache_config"]
    state = MambaSpec(
        block_size=vllm_config.model_config.max_model_len,
        shapes=((1,),),
        dtypes=(torch.float32,),
    )
    layers = {"attention": stock.kv_cache_groups[0].kv_cache_spec, "state": state}
    config = HybridKVCacheConfig(
        num_blocks=stock.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([layer], specs.to_pool_spec(layer, spec))
            for layer, spec in layers.items()
        ],
        pages=stock.num_blocks,
        slots=stock.num_blocks + vllm_config.scheduler_config.max_num_seqs,
    )
    return {**arguments, "kv_cache_config": config}
