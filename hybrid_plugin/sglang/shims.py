# SPDX-License-Identifier: Apache-2.0
"""In which versions of SGLang each shim of the adapter is needed."""

from __future__ import annotations

from hybrid_plugin.compatibility.shims import Need
from hybrid_plugin.hookpoints import HookPoint

_SRT = "sglang.srt"
_SCHEDULER = f"{_SRT}.managers.scheduler:Scheduler"
_CONFIGURATOR = f"{_SRT}.mem_cache.kv_cache_configurator:KVCacheConfigurator"


def _while_there(target: str, *mentions: str) -> Need:
    return Need(HookPoint(target, mentions=mentions))


NEEDED = {
    "compat.hook_command_line": _while_there(
        f"{_SRT}.server_args:ServerArgs.add_cli_args"
    ),
    "compat._settle_arguments": _while_there(
        f"{_SRT}.arg_groups.resolution_hooks:register_resolution_hook"
    ),
    "compat._allow_paged_overlap": _while_there(
        f"{_SRT}.arg_groups.mamba_hook:validate_mamba_no_buffer", "page_size"
    ),
    "compat._divide_memory": _while_there(f"{_CONFIGURATOR}._calculate_mamba_ratio"),
    "compat._share_memory": _while_there(
        f"{_SRT}.mem_cache.memory_pool:MHATokenToKVPool._create_buffers_normal"
    ),
    "compat._convolve_in_few_shapes": _while_there(
        f"{_SRT}.layers.attention.linear.gdn_backend:GDNAttnBackend",
        "needs_state_gather",
    ),
    "compat._admit_by_demand": _while_there(f"{_SCHEDULER}.get_prefill_adder_class"),
    "compat._place_tokens": _while_there(
        f"{_SRT}.mem_cache.allocation:alloc_for_extend"
    ),
    "compat._run_commands": _while_there(
        f"{_SRT}.managers.tp_worker:TpModelWorker.forward_batch_generation"
    ),
    "platform.cpu.keep_inputs_in_float32": _while_there(
        f"{_SRT}.configs.mamba_utils:mamba2_state_dtype", "SGLANG_MAMBA_CONV_DTYPE"
    ),
    "platform.cpu.HybridCpu.get_device": _while_there(
        f"{_SRT}.platforms.cpu:CpuDeviceMixin.get_device", "torch", "device"
    ),
    "platform.cpu.leave_a_core": _while_there(
        f"{_SRT}.distributed.bootstrap:_init_cpu_threads_env", "sgl_kernel"
    ),
    "platform.cpu.leave_the_cores_when_idle": _while_there(_SCHEDULER, "sleep_on_idle"),
    "platform.cpu.wait_for_no_gpu_s_dump": _while_there(
        f"{_SRT}.managers.tokenizer_manager:TokenizerManager.dump_requests_before_crash",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH",
    ),
    "platform.torch_shims.answer_with_the_cpu_module": _while_there(
        f"{_SRT}.models.qwen3_next:Qwen3GatedDeltaNet", "get_device_module"
    ),
    "platform.torch_shims.leave_memory_unpinned": _while_there(
        f"{_SRT}.managers.schedule_batch:ScheduleBatch.prepare_for_decode",
        "pin_memory",
    ),
}
