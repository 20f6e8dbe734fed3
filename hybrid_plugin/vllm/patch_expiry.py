# SPDX-License-Identifier: Apache-2.0
"""In which versions of vLLM each patch of the adapter is needed."""

from __future__ import annotations

from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.upstream.hookpoints import HookPoint
from hybrid_plugin.upstream.patch_expiry import Need
from hybrid_plugin.vllm.contracts import (
    ATTENTION_BUILD,
    BUILDERS,
    GATED_NORM_ROWS,
    GDN_CPU_PLAIN_ROWS,
    GDN_CPU_ROWS,
    GDN_FORWARD,
    GDN_FUSED_NORM,
    GDN_NORM,
    KDA_FORWARD,
    LIGHTNING_FORWARD,
    MAMBA2_FORWARD,
    SCALES,
    SHORT_CONV_FORWARD,
    V2_POSTPROCESS,
    V2_SAMPLE,
)

_PLATFORM = "vllm.platforms.interface:Platform"
_CPU_OPERATIONS = "vllm.model_executor.layers.mamba.ops.cpu"
_CPU_CONVOLUTION = f"{_CPU_OPERATIONS}.causal_conv1d:causal_conv1d_update_cpu"
_CPU_UPDATE = f"{_CPU_OPERATIONS}.mamba_ssm:selective_state_update"
_V1_ADD_REQUEST = "vllm.v1.worker.gpu_input_batch:InputBatch.add_request"
_CORE = "vllm.v1.engine.core:EngineCore._initialize_kv_caches"

NEEDED = {
    "patches.patch_config": Need(
        HookPoint(
            "vllm.config:VllmConfig.__post_init__",
            mentions=("try_verify_and_update_config",),
        )
    ),
    "patches.patch_arguments": Need(
        HookPoint("vllm.entrypoints.launchers.cli_args:BaseFrontendArgs.chat_template")
    ),
    "patches.patch_defaults": Need(
        HookPoint(
            "vllm.config.model:ModelConfig.is_prefix_caching_supported",
            mentions=("attention_free",),
        )
    ),
    "patches.patch_engine": Need(
        HookPoint(_CORE, mentions=("get_kv_cache_configs",)),
    ),
    "patches._patch_utilities": Need(
        HookPoint(
            "vllm.v1.engine.core:EngineCoreProc._handle_client_request",
            mentions=("UTILITY", "getattr"),
        )
    ),
    "patches._patch_adapters": Need(
        HookPoint(
            "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter",
            mentions=("load_inplace",),
        )
    ),
    "patches.patch_app": Need(
        HookPoint("vllm.plugins:load_endpoint_plugins", mentions=("VLLM_PLUGINS",))
    ),
    "patches.patch_sessions": Need(
        HookPoint(
            "vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request",
            mentions=("num_output_placeholders",),
        )
    ),
    "patches.patch_connector_warning": Need(
        HookPoint(
            "vllm.v1.engine.core:EngineCore.add_request",
            mentions=("kv_transfer_params", "get_kv_connector"),
        )
    ),
    "patches.make_stage_buffers": Need(
        HookPoint(
            "vllm.v1.worker.cpu_model_runner:CPUModelRunner.warming_up_model",
            mentions=("CompilationMode",),
        )
    ),
    "patches.watch_weights": Need(
        HookPoint(
            "vllm.v1.worker.worker_base:WorkerBase.apply_model",
            mentions=("get_model",),
        )
    ),
    "patches._patch_specs": Need(
        HookPoint(_CORE, mentions=("get_kv_cache_specs",)),
    ),
    "patches._patch_builder": Need(
        HookPoint(f"{_PLATFORM}.get_kv_cache_config_builder_cls")
    ),
    "patches.patch_platform": Need(
        HookPoint(
            f"{_PLATFORM}.update_block_size_for_backend",
            mentions=("_align_hybrid_block_size",),
        )
    ),
    "patches.pool_allocator": Need(
        HookPoint("vllm.v1.worker.utils:allocate_kv_cache", ("kv_cache_config",))
    ),
    "patches.manager_factory": Need(
        HookPoint(
            "vllm.v1.core.sched.scheduler:Scheduler.__init__",
            mentions=("KVCacheManager",),
        )
    ),
    "patches.patch_batch_invariance": Need(
        HookPoint(
            "vllm.v1.attention.selector:_cached_get_mamba_attn_backend",
            mentions=("supports_batch_invariance",),
        )
    ),
    "patches.patch_gated_norm": Need(
        HookPoint(GATED_NORM_ROWS, mentions=("sm_count",)),
    ),
    "patches.patch_attention_tiles": Need(
        HookPoint(
            ATTENTION_BUILD,
            mentions=("max_query_len",),
        ),
    ),
    "patches.patch_scales": Need(HookPoint(SCALES, mentions=("fill_",))),
    "patches.patch_prefill_graphs": Need(
        HookPoint(
            f"{BUILDERS[Mixer.GATED_DELTA_NET][0]}.build_for_cudagraph_capture",
            mentions=("decode_cudagraph_max_bs",),
        )
    ),
    "patches._patch_attention_in_graphs": Need(
        HookPoint(
            ATTENTION_BUILD,
            mentions=("max_cudagraph_size",),
        )
    ),
    "patches._patch_builder_of_passes": Need(
        HookPoint(f"{BUILDERS[Mixer.GATED_DELTA_NET][0]}.build")
    ),
    "patches._patch_gated_delta_net": Need(HookPoint(GDN_FORWARD)),
    "patches._patch_gated_delta_net_with_drafts": Need(HookPoint(GDN_FUSED_NORM)),
    "patches._patch_norm_behind_drafts": Need(
        HookPoint(GDN_NORM, mentions=("reshape",))
    ),
    "patches.patch_accepted": Need(HookPoint(V2_POSTPROCESS)),
    "patches._patch_kda": Need(HookPoint(KDA_FORWARD)),
    "patches._patch_mamba2": Need(HookPoint(MAMBA2_FORWARD)),
    "patches._patch_short_conv": Need(HookPoint(SHORT_CONV_FORWARD[0])),
    "patches._patch_lightning": Need(HookPoint(LIGHTNING_FORWARD[0])),
    "speculation.patches.patch_ragged_rows_on_cpu": Need(
        HookPoint(GDN_CPU_ROWS, mentions=("keep", "new_B"))
    ),
    "speculation.patches.patch_single_rows_on_cpu": Need(
        HookPoint(GDN_CPU_PLAIN_ROWS, mentions=("contiguous",))
    ),
    "speculation.patches.patch_mamba2_convolution_on_cpu": Need(
        HookPoint(_CPU_CONVOLUTION, mentions=("num_accepted_tokens",)),
        where_it_holds=False,
    ),
    "speculation.patches.patch_mamba2_states_on_cpu": Need(
        HookPoint(_CPU_UPDATE, mentions=("_sbi", "_dsbi"))
    ),
    "speculation.patches.patch_stops_in_accepted_runs": Need(HookPoint(V2_SAMPLE)),
    "speculation.patches.patch_paused_rows": Need(
        HookPoint(_V1_ADD_REQUEST, mentions=("num_accepted_tokens_cpu",))
    ),
}
