# SPDX-License-Identifier: Apache-2.0
"""The places in vLLM that the adapter relies on, and the check that they are there."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_plugin import hookpoints
from hybrid_plugin.hookpoints import HookPoint, LiveView

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_SPLIT = (
    "request",
    "num_new_tokens",
    "num_new_local_computed_tokens",
    "num_external_computed_tokens",
)

CONFIG_HOOKS = (
    HookPoint("vllm.config:VllmConfig.try_verify_and_update_config", ("self",)),
)
ENGINE_HOOKS = (
    HookPoint(
        "vllm.v1.engine.core:get_kv_cache_configs",
        ("vllm_config", "kv_cache_specs", "available_memory"),
    ),
    HookPoint(
        "vllm.v1.engine.core:update_kv_cache_capacity",
        ("vllm_config", "kv_cache_config"),
    ),
    HookPoint(f"{_SCHEDULER}:KVCacheManager"),
    HookPoint(f"{_SCHEDULER}:Scheduler._mamba_block_aligned_split", _SPLIT),
    HookPoint(f"{_SCHEDULER}:Scheduler.schedule", ("throttle_prefills",)),
    HookPoint(f"{_SCHEDULER}:Scheduler.make_stats", ("self",)),
    HookPoint(f"{_SCHEDULER}:Scheduler._preempt_request", ("request", "timestamp")),
    HookPoint("vllm.v1.core.sched.async_scheduler:AsyncScheduler"),
    HookPoint(
        "vllm.v1.kv_cache_spec_registry:register_kv_cache_spec",
        ("manager_class", "uniform_type_base_spec"),
    ),
)
_ALIGN = HookPoint(
    "vllm.platforms.interface:Platform._align_hybrid_block_size",
    ("vllm_config", "backend_cls"),
)
_ALLOCATE = ("kv_cache_config", "device", "layout", "kernel_block_sizes")
WORKER_HOOKS = (
    _ALIGN,
    HookPoint(
        "vllm.platforms.interface:Platform._find_non_ssm_backends", ("vllm_config",)
    ),
    HookPoint("vllm.v1.worker.gpu_model_runner:allocate_kv_cache", _ALLOCATE),
    HookPoint("vllm.v1.worker.gpu.attn_utils:allocate_kv_cache", _ALLOCATE),
    HookPoint(
        "vllm.v1.worker.utils:create_kv_cache_views",
        ("raw", "spec", "num_blocks", "layout", "kv_cache_tensor", "kernel_block_size"),
    ),
    HookPoint(
        "vllm.v1.worker.gpu_worker:Worker.initialize_from_config", ("kv_cache_config",)
    ),
    HookPoint("vllm.v1.worker.gpu_worker:Worker.execute_model", ("scheduler_output",)),
)


def problems(hooks: Iterable[HookPoint]) -> list[str]:
    """What is wrong with the hook points in the installed vLLM, one phrase each."""
    return hookpoints.problems(hooks, LiveView("vllm"))
