# SPDX-License-Identifier: Apache-2.0
"""Everything in vLLM that the adapter relies on, and the check that it is there.

Importing this module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.upstream import hookpoints
from hybrid_plugin.upstream.hookpoints import Contract, HookPoint, Interface, LiveView

_CONNECTORS = "only with KV connectors, which are refused at start-up"
_ZEROING = "only where vLLM zeroes blocks, which our configurations switch off"


def _returns_the_table(function: Callable[..., Any]) -> str | None:
    """Column 0 of a state layer's block table is its state slot in mode "none"."""
    table = object()
    returned = function(
        block_table=table, seq_lens=None, kv_cache_spec=None, mamba_cache_mode="none"
    )
    return None if returned is table else "changes the block table in mode 'none'"


def _spans_all_ranks(function: Callable[..., Any]) -> str | None:
    """A block of attention layers holds the tokens of all ranks that share it."""
    spans = [
        function(SimpleNamespace(block_size=16, dcp_sharded=sharded), 2)
        for sharded in (True, False)
    ]
    return None if spans == [32, 16] else f"says that blocks of 16 rows span {spans}"


def _fields(cls: str, *names: str) -> tuple[HookPoint, ...]:
    return tuple(HookPoint(f"{cls}.{name}") for name in names)


CONFIG_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        "vllm.config:VllmConfig.try_verify_and_update_config", ("self",), closed=True
    ),
    HookPoint("vllm.config:VllmConfig.model_config"),
    HookPoint("vllm.config.model:ModelConfig", mentions=("hf_text_config",)),
    HookPoint("vllm.config.model:ModelConfig.is_hybrid"),
    HookPoint("vllm.config.model:ModelConfig.is_attention_free"),
    HookPoint("vllm.config.model:ModelConfig.has_inner_state"),
    HookPoint("vllm.config.vllm:VllmConfig.scheduler_config"),
)
"""Without them the plugin cannot tell whether a model is its business."""

_MODEL = "vllm.config.model:ModelConfig"
_CACHE = "vllm.config.cache:CacheConfig"
_SCHEDULING = "vllm.config.scheduler:SchedulerConfig"
_PARALLEL = "vllm.config.parallel:ParallelConfig"
_PLATFORM = "vllm.platforms.interface:Platform"

ARGUMENT_HOOKS: tuple[Contract, ...] = (
    HookPoint("vllm.engine.arg_utils:EngineArgs.from_cli_args", ("args",)),
    HookPoint("vllm.engine.arg_utils:EngineArgs.additional_config"),
    HookPoint(
        "vllm.renderers.chat_utils:load_chat_template",
        ("chat_template",),
    ),
)
"""How the chat template of the server gets to the engine core."""

CACHING_DEFAULT = (
    "vllm.engine.arg_utils:EngineArgs."
    "_set_default_chunked_prefill_and_prefix_caching_args"
)
DEFAULT_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        CACHING_DEFAULT,
        ("self", "model_config"),
        closed=True,
        mentions=("is_prefix_caching_supported",),
    ),
    HookPoint("vllm.engine.arg_utils:EngineArgs.enable_prefix_caching"),
    HookPoint("vllm.engine.arg_utils:EngineArgs.additional_config"),
)
"""Whether prefix caching is off by a flag or by vLLM's default."""

OPTION_HOOKS: tuple[Contract, ...] = (
    *ARGUMENT_HOOKS,
    *_fields(
        "vllm.config.vllm:VllmConfig",
        "additional_config",
        "cache_config",
        "scheduler_config",
        "parallel_config",
        "speculative_config",
        "kv_transfer_config",
        "kv_events_config",
    ),
    HookPoint("vllm.config.vllm:VllmConfig.use_v2_model_runner"),
    *_fields(
        "vllm.config.kv_transfer:KVTransferConfig",
        "kv_connector",
        "kv_role",
        "kv_connector_extra_config",
    ),
    *_fields(
        "vllm.config.cache:CacheConfig", "kv_offloading_size", "kv_offloading_backend"
    ),
    *_fields(
        _MODEL,
        "is_encoder_decoder",
        "is_mm_prefix_lm",
        "max_model_len",
        "tokenizer",
        "tokenizer_revision",
        "trust_remote_code",
        "served_model_name",
        "enable_sleep_mode",
        "hf_text_config",
        "registry",
        "architecture",
    ),
    HookPoint(_MODEL, mentions=("runner_type", "original_max_model_len")),
    *_fields(
        _CACHE,
        "cache_dtype",
        "enable_prefix_caching",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "block_size",
        "user_specified_block_size",
        "sliding_window",
        "mamba_cache_mode",
        "mamba_block_size",
        "prefix_cache_retention_interval",
        "kv_cache_size_tokens",
        "kv_cache_max_concurrency",
        "num_gpu_blocks",
        "num_gpu_blocks_override",
    ),
    *_fields("vllm.config.observability:ObservabilityConfig", "kv_cache_metrics"),
    *_fields(_SCHEDULING, "scheduler_cls", "async_scheduling", "max_num_seqs"),
    *_fields(_SCHEDULING, "enable_chunked_prefill", "max_num_batched_tokens"),
    *_fields(_SCHEDULING, "long_prefill_token_threshold"),
    HookPoint(
        f"{_SCHEDULING}.get_scheduler_cls", ("self",), mentions=("scheduler_cls",)
    ),
    *_fields(_PARALLEL, "worker_cls", "pipeline_parallel_size"),
    *_fields(
        _PARALLEL, "decode_context_parallel_size", "prefill_context_parallel_size"
    ),
    HookPoint(f"{_PARALLEL}.local_world_size"),
    *_fields(_PARALLEL, "data_parallel_size_local", "enable_elastic_ep"),
    HookPoint(f"{_PARALLEL}.use_ubatching", mentions=("enable_dbo", "ubatch_size")),
    HookPoint("vllm.config.kv_events:KVEventsConfig.enable_kv_cache_events"),
    HookPoint(f"{_CACHE}.prefix_caching_hash_algo"),
    HookPoint(f"{_PLATFORM}.is_cpu", ("self",)),
    HookPoint(f"{_PLATFORM}.is_cuda", ("self",)),
    HookPoint(f"{_PLATFORM}.device_type"),
    HookPoint(f"{_PLATFORM}.get_device_total_memory", ()),
    HookPoint("vllm.config:get_current_vllm_config_or_none", ()),
    HookPoint("vllm.config.vllm:set_current_vllm_config", ("vllm_config",)),
)
"""What activation reads or sets."""

_CORE = "vllm.v1.engine.core"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_SPECS = "vllm.v1.kv_cache_interface"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_BUILDER = "vllm.v1.core.kv_cache_config_builder:KVCacheConfigBuilder"
_SPLIT = (
    "self",
    "request",
    "num_new_tokens",
    "num_new_local_computed_tokens",
    "num_external_computed_tokens",
)

CORE_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_CORE}:get_kv_cache_configs",
        ("vllm_config", "kv_cache_specs", "available_memory"),
    ),
    HookPoint(
        f"{_CORE}:update_kv_cache_capacity",
        ("vllm_config", "kv_cache_config"),
        closed=True,
    ),
    HookPoint(
        "vllm.v1.executor.abstract:Executor.get_kv_cache_specs", ("self",), closed=True
    ),
    HookPoint(f"{_CORE}:EngineCore.add_lora", ("self", "lora_request"), closed=True),
    HookPoint(f"{_CORE}:EngineCore.remove_lora", ("self", "lora_id"), closed=True),
)
"""The engine core's functions that are replaced."""

PLANNING_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_CORE}:EngineCore._initialize_kv_caches",
        mentions=(
            "get_kv_cache_specs",
            "get_kv_cache_configs",
            "update_kv_cache_capacity",
        ),
    ),
    *_fields(
        f"{_SPECS}:KVCacheTensor",
        "size",
        "layers",
        "layer_stride",
        "block_stride",
        "offset",
    ),
    *_fields(
        f"{_SPECS}:KVCacheConfig",
        "num_blocks",
        "kv_cache_tensors",
        "kv_cache_groups",
        "prefix_cache_retention_interval",
        "has_mamba_layers",
        "needs_kv_cache_zeroing",
    ),
    HookPoint(f"{_SPECS}:KVCacheConfig.num_blocks_of", ("self", "tensor"), closed=True),
    *_fields(f"{_SPECS}:KVCacheGroupSpec", "layer_names", "kv_cache_spec"),
    *_fields(f"{_SPECS}:KVCacheSpec", "block_size", "page_size_bytes", "dcp_sharded"),
    HookPoint(f"{_SPECS}:FullAttentionSpec"),
    HookPoint(f"{_SPECS}:MLAAttentionSpec"),
    HookPoint(f"{_SPECS}:SlidingWindowSpec.sliding_window"),
    *_fields(f"{_SPECS}:SlidingWindowMLASpec", "bounded_replay", "model_version"),
    HookPoint(f"{_SPECS}:ChunkedLocalAttentionSpec.attention_chunk_size"),
    HookPoint(f"{_SPECS}:MambaSpec.page_size_padded"),
    # The ring of a sequence is the block in column 0 of its table.
    HookPoint(f"{_SPECS}:CircularBufferSpec.max_num_blocks_per_req", own=True),
    HookPoint(f"{_SPECS}:CircularBufferSpec.uses_slot_mapping", own=True),
    HookPoint(f"{_MANAGERS}:CircularBufferManager"),
    HookPoint(f"{_MANAGERS}:FullAttentionManager"),
    HookPoint(f"{_MANAGERS}:MambaManager"),
    HookPoint(f"{_MANAGERS}:register_all_kvcache_specs", ("vllm_config",)),
    HookPoint(
        "vllm.v1.kv_cache_spec_registry:register_kv_cache_spec",
        ("manager_class", "uniform_type_base_spec"),
    ),
    HookPoint(
        f"{_PLATFORM}.get_kv_cache_config_builder_cls",
        ("vllm_config",),
        closed=True,
        since="0.33",
    ),
    HookPoint(
        f"{_BUILDER}.get_kv_cache_groups",
        ("self", "vllm_config", "kv_cache_spec"),
        closed=True,
        since="0.33",
    ),
    HookPoint(
        f"{_BUILDER}.get_kv_cache_config_from_groups",
        ("self", "vllm_config", "kv_cache_groups", "num_blocks"),
        closed=True,
        since="0.33",
    ),
)
"""How the pools are planned in place of vLLM's one pool."""

SESSION_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        ("self", "request_id", "resumable"),
    ),
    HookPoint(
        "vllm.v1.engine.input_processor:InputProcessor", mentions=("vllm_config",)
    ),
    HookPoint(
        "vllm.v1.engine.async_llm:AsyncLLM._add_streaming_input_request",
        mentions=("process_inputs", "resumable"),
    ),
)
"""Where streaming-input sessions come in."""

_EVENTS = "vllm.distributed.kv_events"
_NAMES = "vllm.v1.core.kv_cache_utils"

KV_EVENT_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_SCHEDULER}:Scheduler.update_from_output",
        mentions=("take_events", "kv_event_publisher"),
        own=True,
    ),
    *_fields(
        f"{_EVENTS}:BlockStored",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    *_fields(f"{_EVENTS}:BlockRemoved", "block_hashes", "medium", "group_idx"),
    HookPoint(f"{_EVENTS}:AllBlocksCleared"),
    HookPoint("vllm.utils.hashing:get_hash_fn_by_name", ("hash_fn_name",)),
    HookPoint(f"{_NAMES}:init_none_hash", ("hash_fn",)),
    HookPoint(
        f"{_NAMES}:hash_block_tokens",
        (
            "hash_function",
            "parent_block_hash",
            "curr_block_token_ids",
            "extra_keys",
        ),
    ),
    HookPoint(
        f"{_NAMES}:generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    ),
    HookPoint(f"{_NAMES}:to_event_extra_keys", ("extra_keys",)),
    HookPoint(f"{_NAMES}:maybe_convert_block_hash", ("hash_bytes",)),
    HookPoint(f"{_SPECS}:get_kv_cache_spec_kind", ("kv_cache_spec",)),
    HookPoint(f"{_SPECS}:get_kv_cache_spec_sliding_window", ("kv_cache_spec",)),
)
"""How pages are named in events, and who publishes them."""

SCHEDULER_HOOKS: tuple[Contract, ...] = (
    *KV_EVENT_HOOKS,
    *SESSION_HOOKS,
    HookPoint(f"{_SCHEDULER}:KVCacheManager"),
    HookPoint(
        f"{_SCHEDULER}:Scheduler.__init__",
        ("vllm_config", "kv_cache_config", "block_size", "hash_block_size"),
        mentions=("KVCacheManager", "kv_cache_manager", "requests"),
    ),
    HookPoint(
        f"{_SCHEDULER}:Scheduler._mamba_block_aligned_split", _SPLIT, closed=True
    ),
    HookPoint(
        f"{_SCHEDULER}:Scheduler.schedule",
        mentions=(
            "need_mamba_block_aligned_split",
            "_mamba_block_aligned_split",
            "_handle_blocked_waiting_request",
            "waiting",
        ),
    ),
    HookPoint(
        f"{_SCHEDULER}:Scheduler._handle_blocked_waiting_request", ("self", "request")
    ),
    HookPoint(f"{_SCHEDULER}:Scheduler._is_blocked_waiting_status", ("status",)),
    HookPoint(f"{_SCHEDULER}:Scheduler.make_stats", ("self",), own=True),
    HookPoint(
        f"{_SCHEDULER}:Scheduler._preempt_request", ("self", "request", "timestamp")
    ),
    HookPoint(
        f"{_SCHEDULER}:Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        own=True,
    ),
    HookPoint("vllm.v1.core.sched.async_scheduler:AsyncScheduler"),
    HookPoint("vllm.v1.core.sched.output:SchedulerOutput", open=True),
    HookPoint("vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens"),
    HookPoint(
        "vllm.v1.request:Request",
        mentions=(
            "request_id",
            "num_computed_tokens",
            "num_tokens",
            "num_preemptions",
            "skip_reading_prefix_cache",
            "all_token_ids",
            "mm_features",
            "lora_request",
            "cache_salt",
            "prompt_embeds",
            "sampling_params",
            "kv_cache_report_mode",
        ),
    ),
    HookPoint("vllm.sampling_params:SamplingParams.extra_args"),
    HookPoint("vllm.v1.core.kv_cache_manager:KVCacheBlocks.blocks"),
    HookPoint("vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids", ("self",)),
    HookPoint("vllm.v1.core.kv_cache_utils:KVCacheBlock.block_id"),
    HookPoint(
        "vllm.v1.metrics.stats:PrefixCacheStats.record",
        ("self", "num_tokens", "num_hits", "preempted"),
    ),
    HookPoint("vllm.v1.metrics.stats:SchedulerStats.num_kv_fetch_reqs_by_stage"),
    HookPoint(
        "vllm.v1.metrics.loggers:StatLoggerBase.__init__",
        ("self", "vllm_config", "engine_index"),
        closed=True,
    ),
    HookPoint(
        "vllm.v1.metrics.loggers:StatLoggerBase.record", ("self", "scheduler_stats")
    ),
    Interface(
        _SCHEDULER,
        "kv_cache_manager",
        "hybrid_plugin.vllm.manager:HybridKVCacheManager",
        unreached={
            "evict_blocks": _CONNECTORS,
            "finalize_partial_tail_offloads": _CONNECTORS,
            "get_computed_blocks_for_connector": _CONNECTORS,
            "pop_blocks_for_free": _CONNECTORS,
            "truncate_computed_blocks": _CONNECTORS,
            "record_blocks_for_zeroing": _ZEROING,
        },
    ),
    Interface(
        _SCHEDULER,
        "kv_cache_manager.coordinator",
        "hybrid_plugin.vllm.manager:_Coordinator",
    ),
    Interface(
        _SCHEDULER,
        "kv_cache_manager.block_pool",
        "hybrid_plugin.vllm.manager:_Blocks",
    ),
)
"""What the scheduler and its manager build on."""

_ALLOCATE = ("kv_cache_config", "device", "layout", "kernel_block_sizes")
_GROUPS = "vllm.distributed.parallel_state"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_ATTENTION = "vllm.model_executor.layers.attention"

WORKER_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_PLATFORM}._align_hybrid_block_size",
        ("vllm_config", "backend_cls"),
        closed=True,
    ),
    HookPoint(
        f"{_PLATFORM}.update_block_size_for_backend",
        ("vllm_config",),
        mentions=("_align_hybrid_block_size",),
    ),
    HookPoint(f"{_PLATFORM}._find_non_ssm_backends", ("vllm_config",)),
    HookPoint(
        f"{_ATTENTION}.attention:Attention.get_kv_cache_spec",
        ("self", "vllm_config"),
        mentions=("block_size",),
    ),
    HookPoint(
        f"{_ATTENTION}.chunked_local_attention:ChunkedLocalAttention.get_kv_cache_spec",
        ("self", "vllm_config"),
        mentions=("ChunkedLocalAttentionSpec", "block_size"),
    ),
    HookPoint(
        "vllm.v1.attention.backend:AttentionBackend.supports_block_size",
        ("block_size",),
    ),
    HookPoint("vllm.v1.attention.backend:AttentionBackend.get_name", ()),
    HookPoint(
        "vllm.v1.attention.backends.utils:mamba_get_block_table_tensor",
        ("block_table", "seq_lens", "kv_cache_spec", "mamba_cache_mode"),
        behaves=_returns_the_table,
    ),
    HookPoint(
        "vllm.v1.worker.gpu_model_runner:allocate_kv_cache", _ALLOCATE, closed=True
    ),
    HookPoint(
        "vllm.v1.worker.gpu.attn_utils:allocate_kv_cache", _ALLOCATE, closed=True
    ),
    HookPoint(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache",
        ("self", "kv_cache_config"),
        mentions=("kv_cache_config",),
    ),
    HookPoint(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
        ("self", "kv_cache_config"),
        mentions=("kv_cache_config",),
    ),
    HookPoint(
        "vllm.v1.worker.utils:create_kv_cache_views",
        ("raw", "spec", "num_blocks", "layout", "kv_cache_tensor", "kernel_block_size"),
    ),
    HookPoint(
        "vllm.v1.worker.utils:select_common_block_size",
        ("kv_manager_block_size", "backends"),
    ),
    HookPoint(
        "vllm.v1.worker.worker_base:WorkerBase.get_supported_kv_cache_layouts",
        ("self",),
        closed=True,
    ),
    HookPoint(
        "vllm.v1.attention.backend:AttentionBackend.supported_kv_cache_layouts", ()
    ),
    HookPoint(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.__init__",
        ("self",),
        mentions=("vllm_flash_attn_version",),
    ),
    HookPoint("vllm.config.cache:CacheConfig.get_resolved_kv_cache_layout", ("self",)),
    HookPoint(
        f"{_WORKER}.initialize_from_config", ("self", "kv_cache_config"), closed=True
    ),
    HookPoint(f"{_WORKER}.load_model", ("self",), own=True),
    HookPoint(f"{_WORKER}.get_kv_cache_spec", ("self",), closed=True, own=True),
    HookPoint(
        f"{_WORKER}.determine_available_memory", ("self",), closed=True, own=True
    ),
    HookPoint(
        f"{_WORKER}.execute_model",
        ("self", "scheduler_output"),
        closed=True,
        own=True,
    ),
    HookPoint(f"{_WORKER}.sample_tokens", ("self",), own=True),
    HookPoint(f"{_WORKER}.get_model", ("self",), own=True),
    HookPoint(f"{_WORKER}.sleep", ("self", "level"), closed=True, own=True),
    HookPoint(f"{_WORKER}.wake_up", ("self", "tags"), closed=True, own=True),
    # Whoever sleeps has flushed the cache.
    HookPoint(f"{_CORE}:EngineCore.sleep", mentions=("clear_prefix_cache", "level")),
    HookPoint(f"{_CORE}:EngineCore._finish_pause", mentions=("_reset_caches",)),
    HookPoint(
        "vllm.v1.worker.worker_base:WorkerBase.apply_model", ("self", "fn"), closed=True
    ),
    HookPoint(f"{_WORKER}.init_device", ("self",), mentions=("device",), own=True),
    HookPoint("vllm.v1.worker.worker_base:WorkerBase.shutdown", ("self",), closed=True),
    HookPoint(f"{_GROUPS}:get_tp_group", ()),
    HookPoint(f"{_GROUPS}:GroupCoordinator", mentions=("cpu_group",)),
    HookPoint("vllm.v1.outputs:ModelRunnerOutput", open=True),
    HookPoint("vllm.v1.outputs:AsyncModelRunnerOutput.get_output", ("self",)),
)
"""What every worker builds on."""

CPU_ATTENTION_HOOKS: tuple[Contract, ...] = (
    HookPoint("vllm.v1.attention.backends.registry:AttentionBackendEnum.CPU_ATTN"),
    HookPoint(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.get_class", ("self",)
    ),
    HookPoint(
        "vllm.v1.attention.backend:AttentionBackend.supports_kv_cache_dtype",
        ("kv_cache_dtype",),
    ),
)
"""The attention that a CPU has, and which types of KV it claims to read."""

CPU_HOOKS: tuple[Contract, ...] = (
    *CPU_ATTENTION_HOOKS,
    HookPoint(
        "vllm.platforms.cpu:CpuPlatform.update_block_size_for_backend",
        ("vllm_config",),
        mentions=("_align_hybrid_block_size",),
        own=True,
    ),
    HookPoint("vllm.v1.worker.cpu_worker:CPUWorker"),
    HookPoint(f"{_GROUPS}:get_pp_group", ()),
    HookPoint(
        "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
        ("self",),
        closed=True,
        own=True,
    ),
    # Where a stage keeps what the one before it sends, and how it is made.
    HookPoint(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        mentions=(
            "intermediate_tensors",
            "make_empty_intermediate_tensors",
            "max_num_tokens",
        ),
    ),
    HookPoint(
        "vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory",
        ("self",),
        closed=True,
        own=True,
    ),
    HookPoint(
        "vllm.v1.worker.cpu_worker:CPUWorker.init_device",
        ("self",),
        mentions=("device",),
        own=True,
    ),
)
"""What the CPU worker builds on: importing it takes a CPU build."""

_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
GDN_FORWARD = f"{_GDN}:QwenGatedDeltaNetAttention._forward_core"
_GDN_ON_CPU = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
GDN_FORWARD_ON_CPU = f"{_GDN_ON_CPU}:_cpu_gdn_attention_nonspec"
GDN_FUSED_NORM = f"{_GDN}:QwenGatedDeltaNetAttention._forward_core_fused_norm"
GDN_NORM = f"{_GDN}:QwenGatedDeltaNetAttention._rms_norm_gated_cuda"
GDN_DRAFTS_ON_CPU = f"{_GDN_ON_CPU}:_cpu_gdn_attention_spec_aware"
_KDA = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
KDA_FORWARD = f"{_KDA}:KimiGatedDeltaNetAttention._forward"
EAGER = "vllm.compilation.breakable_cudagraph:eager_break_during_capture"
"""The mark of what runs between pieces of a CUDA graph."""
_MAMBA2 = "vllm.model_executor.layers.mamba.mamba_mixer2"
MAMBA2_FORWARD = f"{_MAMBA2}:MambaMixer2.conv_ssm_forward"
_LINEAR = "vllm.model_executor.layers.mamba.linear"
LIGHTNING_FORWARD = tuple(
    f"{_LINEAR}.{cls}.{method}"
    for cls in (
        "minimax_linear_attn:MiniMaxText01LinearAttention",
        "bailing_linear_attn:BailingMoELinearAttention",
    )
    for method in ("_prefill_and_mix_infer", "_decode_infer")
)
_SHORT_CONV = "vllm.model_executor.layers.mamba.short_conv"
SHORT_CONV_FORWARD = tuple(
    f"{_SHORT_CONV}:ShortConv.{method}" for method in ("forward_cuda", "forward_native")
)
_BACKENDS = "vllm.v1.attention.backends"
BUILDERS: Mapping[Mixer, tuple[str, ...]] = {
    Mixer.GATED_DELTA_NET: (f"{_BACKENDS}.gdn_attn:GDNAttentionMetadataBuilder",),
    Mixer.KDA: (f"{_BACKENDS}.gdn_attn:GDNAttentionMetadataBuilder",),
    Mixer.MAMBA2: (f"{_BACKENDS}.mamba2_attn:Mamba2AttentionMetadataBuilder",),
    Mixer.SHORT_CONV: (
        f"{_BACKENDS}.short_conv_attn:ShortConvAttentionMetadataBuilder",
    ),
    Mixer.LIGHTNING: (
        f"{_BACKENDS}.linear_attn:LinearAttentionMetadataBuilder",
        f"{_BACKENDS}.linear_attn:BailingLinearAttentionMetadataBuilder",
    ),
    # The kind that such layers declare.
    Mixer.MODEL_CLASS: (
        f"{_BACKENDS}.short_conv_attn:ShortConvAttentionMetadataBuilder",
    ),
}
"""Who makes the metadata of the layers that a mixer runs."""

_PASSES = "vllm.v1.attention.backend"
_ANY_BUILDER = f"{_PASSES}:AttentionMetadataBuilder"
_STATE_BUILDER = f"{_BACKENDS}.mamba_attn:BaseMambaAttentionMetadataBuilder"
_CAPTURE = "build_for_cudagraph_capture"
_INHERITED = {
    (f"{_BACKENDS}.{builder}", method): owner
    for builder, owner, methods in (
        (
            "mamba2_attn:Mamba2AttentionMetadataBuilder",
            _STATE_BUILDER,
            (_CAPTURE,),
        ),
        (
            "short_conv_attn:ShortConvAttentionMetadataBuilder",
            _STATE_BUILDER,
            ("build", "update_block_table", _CAPTURE),
        ),
        (
            "linear_attn:LinearAttentionMetadataBuilder",
            _ANY_BUILDER,
            ("update_block_table", _CAPTURE),
        ),
        (
            "linear_attn:BailingLinearAttentionMetadataBuilder",
            _ANY_BUILDER,
            ("update_block_table",),
        ),
    )
    for method in methods
}
"""Methods of builders that another class defines, and that class."""


def _method(
    builder: str, name: str, *parameters: str, closed: bool = False
) -> HookPoint:
    """A builder's method, where it is defined: a base class has all of them."""
    owner = _INHERITED.get((builder, name), builder)
    return HookPoint(f"{owner}.{name}", ("self", *parameters), closed=closed, own=True)


_COUNTS = (
    "num_decodes",
    "num_decode_tokens",
    "num_prefills",
    "num_prefill_tokens",
)


GDN_METADATA = f"{_BACKENDS}.gdn_attn:GDNAttentionMetadata"
GDN_COUNTS = (*_COUNTS, "num_spec_decodes", "num_spec_decode_tokens")
"""Beside the number of tokens, all that such metadata cannot be made without."""


def _builder_hooks(mixer: Mixer, *metadata: str) -> tuple[Contract, ...]:
    """What our kernels rely on of the builders of a mixer's layers.

    Args:
        mixer: what runs them.
        metadata: the classes that its builders make, one each.
    """
    hooks: list[Contract] = []
    for builder, made in zip(BUILDERS[mixer], metadata, strict=True):
        module, _, _ = builder.partition(":")
        hooks += (
            _method(builder, "build", "common_prefix_len", "common_attn_metadata"),
            _method(builder, "update_block_table", "metadata"),
            HookPoint(f"{module}:{made}", open=True),
            *_fields(f"{module}:{made}", *_COUNTS),
        )
    return tuple(hooks)


_PASS_HOOKS: tuple[Contract, ...] = (
    *_fields(
        f"{_PASSES}:CommonAttentionMetadata",
        "num_reqs",
        "num_actual_tokens",
        "block_table_tensor",
        "query_start_loc",
        "query_start_loc_cpu",
        "seq_lens_cpu_upper_bound",
    ),
    HookPoint(
        f"{_PASSES}:CommonAttentionMetadata.compute_num_computed_tokens", ("self",)
    ),
    HookPoint(
        f"{_PASSES}:AttentionMetadataBuilder.__init__",
        mentions=("layer_names", "vllm_config", "device"),
    ),
    HookPoint(f"{_PASSES}:AttentionMetadataBuilder.build_for_cudagraph_capture"),
    *_fields(
        "vllm.config.compilation:CompilationConfig",
        "static_forward_context",
        "max_cudagraph_capture_size",
    ),
    HookPoint("vllm.forward_context:get_forward_context", ()),
    HookPoint("vllm.forward_context:ForwardContext.attn_metadata"),
    HookPoint("vllm.model_executor.layers.mamba.abstract:MambaBase.kv_cache"),
    HookPoint(f"{_WORKER}.reload_weights", ("self",), own=True),
    HookPoint(f"{_WORKER}.finish_weight_update", ("self",), own=True),
)
"""What all kernels of ours rely on."""

_CONVOLUTION_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        "vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first", ()
    ),
)

KERNEL_HOOKS: Mapping[Mixer, tuple[Contract, ...]] = {
    Mixer.MODEL_CLASS: (
        *_PASS_HOOKS,
        *_builder_hooks(Mixer.MODEL_CLASS, "ShortConvAttentionMetadata"),
    ),
    Mixer.GATED_DELTA_NET: (
        *_PASS_HOOKS,
        *_CONVOLUTION_HOOKS,
        *_builder_hooks(Mixer.GATED_DELTA_NET, "GDNAttentionMetadata"),
        HookPoint(
            f"{_GDN}:QwenGatedDeltaNetAttention.__init__",
            mentions=("gdn_prefill_backend",),
            own=True,
        ),
        HookPoint(
            GDN_FORWARD,
            ("self", "mixed_qkv", "b", "a", "core_attn_out"),
            mentions=(
                "attn_metadata",
                "prefix",
                "kv_cache",
                "is_conv_state_dim_first",
                "A_log",
                "dt_bias",
                "activation",
            ),
            closed=True,
            own=True,
        ),
        HookPoint(
            f"{_GDN}:qwen_gdn_attention_core",
            mentions=("_forward_core", "no_compile_layers"),
        ),
        HookPoint(
            f"{_GDN}:QwenGatedDeltaNetAttention.get_state_shape",
            ("self",),
            mentions=("gated_delta_net_state_shape",),
        ),
    ),
    Mixer.KDA: (
        *_PASS_HOOKS,
        *_CONVOLUTION_HOOKS,
        *_builder_hooks(Mixer.KDA, "GDNAttentionMetadata"),
        HookPoint(
            KDA_FORWARD,
            ("self", "mixed_qkv", "g1", "g2", "beta", "core_attn_out"),
            mentions=(
                "attn_metadata",
                "prefix",
                "kv_cache",
                "is_conv_state_dim_first",
                "conv1d",
                "A_log",
                "dt_bias",
                "gate_lower_bound",
                "o_norm",
            ),
            closed=True,
            own=True,
        ),
        HookPoint(f"{_KDA}:KimiGatedDeltaNetAttention.forward", mentions=("_forward",)),
        HookPoint(
            f"{_KDA}:KimiGatedDeltaNetAttention.get_state_shape",
            ("self",),
            mentions=("kda_state_shape",),
        ),
        HookPoint(EAGER, ("fn",)),
    ),
    Mixer.MAMBA2: (
        *_PASS_HOOKS,
        *_CONVOLUTION_HOOKS,
        *_builder_hooks(Mixer.MAMBA2, "Mamba2AttentionMetadata"),
        HookPoint(
            MAMBA2_FORWARD,
            ("self", "projected_states", "output"),
            mentions=(
                "attn_metadata",
                "prefix",
                "kv_cache",
                "is_conv_state_dim_first",
                "tped_intermediate_size",
                "tped_conv_size",
                "tped_dt_size",
                "conv1d",
                "A",
                "D",
                "dt_bias",
                "activation",
            ),
            closed=True,
            own=True,
        ),
        HookPoint(
            f"{_MAMBA2}:mamba_mixer2",
            mentions=("conv_ssm_forward", "no_compile_layers"),
        ),
        HookPoint(f"{_MAMBA2}:MambaMixer2", mentions=("composed_weight_loader",)),
    ),
    Mixer.SHORT_CONV: (
        *_PASS_HOOKS,
        *_CONVOLUTION_HOOKS,
        *_builder_hooks(Mixer.SHORT_CONV, "ShortConvAttentionMetadata"),
        *(
            HookPoint(
                method,
                ("self", "hidden_states", "output"),
                mentions=("in_proj", "out_proj", "conv", "kv_cache", "chunk", "prefix"),
                closed=True,
                own=True,
            )
            for method in SHORT_CONV_FORWARD
        ),
        HookPoint(
            f"{_SHORT_CONV}:short_conv",
            mentions=("forward_cuda", "forward_native", "no_compile_layers"),
        ),
    ),
    Mixer.LIGHTNING: (
        *_PASS_HOOKS,
        *_builder_hooks(
            Mixer.LIGHTNING, "LinearAttentionMetadata", "BailingLinearAttentionMetadata"
        ),
        *(
            HookPoint(
                method,
                (
                    "self",
                    "q",
                    "k",
                    "v",
                    "kv_cache",
                    "state_indices_tensor",
                    "attn_metadata",
                ),
                mentions=("tp_slope",),
                closed=True,
                own=True,
            )
            for method in LIGHTNING_FORWARD
        ),
        HookPoint(
            f"{_LINEAR}.minimax_linear_attn:MiniMaxText01LinearAttention._forward",
            mentions=("_prefill_and_mix_infer", "_decode_infer", "kv_cache"),
        ),
        HookPoint(
            f"{_LINEAR}.bailing_linear_attn:BailingMoELinearAttention._forward",
            mentions=("_prefill_and_mix_infer", "_decode_infer", "kv_cache", "scaling"),
        ),
    ),
}
"""Where our kernels come in, by what they run."""

_REPACKED = HookPoint(
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    mentions=("_cpu_unpacked_conv_weight",),
)
CPU_KERNEL_HOOKS: Mapping[Mixer, tuple[Contract, ...]] = {
    Mixer.GATED_DELTA_NET: (
        HookPoint(
            GDN_FORWARD_ON_CPU,
            ("layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out"),
            closed=True,
        ),
        HookPoint(
            "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:"
            "cpu_gdn_attention_core",
            mentions=("_cpu_gdn_attention_nonspec", "no_compile_layers"),
        ),
        _REPACKED,
    ),
    Mixer.MAMBA2: (_REPACKED,),
    Mixer.SHORT_CONV: (_REPACKED,),
}
"""The same on a CPU, where they are not those of a GPU."""

STATE_BACKENDS = (
    f"{_BACKENDS}.gdn_attn:GDNAttentionBackend",
    f"{_BACKENDS}.mamba2_attn:Mamba2AttentionBackend",
    f"{_BACKENDS}.short_conv_attn:ShortConvAttentionBackend",
    f"{_BACKENDS}.linear_attn:LinearAttentionBackend",
)
"""Of the layers that a mixer can run."""
_GATED_NORM = "vllm.third_party.flash_linear_attention.ops.layernorm_guard"
GATED_NORM_ROWS = f"{_GATED_NORM}:calc_rows_per_block"
_FLASH_ATTENTION = "vllm.v1.attention.backends.flash_attn"
ATTENTION_BUILD = f"{_FLASH_ATTENTION}:FlashAttentionMetadataBuilder.build"
ATTENTION_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        ATTENTION_BUILD,
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
        mentions=("max_query_len", "FlashAttentionMetadata"),
    ),
    HookPoint(
        f"{_FLASH_ATTENTION}:FlashAttentionImpl.forward", mentions=("max_query_len",)
    ),
)
"""For the same option."""
_TRITON_ATTENTION = "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl"
SCALES = f"{_TRITON_ATTENTION}._ensure_scale_caches"
SCALE_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        SCALES,
        ("self", "kv_cache"),
        closed=True,
        mentions=(
            "_k_scale_cache",
            "_v_scale_cache",
            "fill_",
            "as_strided",
            "untyped_storage",
            "storage_offset",
        ),
    ),
)
"""For KV with a scale for each token in elastic pools."""
ATTENTION_IN_GRAPHS: tuple[Contract, ...] = (
    HookPoint(
        ATTENTION_BUILD,
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
        mentions=("max_cudagraph_size", "max_num_splits", "num_actual_tokens"),
    ),
)
"""For the option `prefill_graphs`."""
DETERMINISTIC_HOOKS: tuple[Contract, ...] = (
    HookPoint(f"{_PASSES}:AttentionBackend.supports_batch_invariance", (), closed=True),
    HookPoint(
        "vllm.v1.attention.selector:_cached_get_mamba_attn_backend",
        mentions=("VLLM_BATCH_INVARIANT", "supports_batch_invariance"),
    ),
    *(HookPoint(backend) for backend in STATE_BACKENDS),
    HookPoint(GATED_NORM_ROWS, ("M", "device"), closed=True),
    HookPoint(
        "vllm.compilation.breakable_cudagraph:is_breakable_cudagraph_enabled", ()
    ),
)
"""For the option `deterministic`."""

_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
GRAPH_CANDIDATES = f"{_GRAPHS}:ModelCudaGraphManager._init_candidates"
GRAPH_CAPTURE = f"{_GRAPHS}:CudaGraphManager.capture"
GRAPH_DISPATCH = f"{_GRAPHS}:CudaGraphManager.dispatch"
GRAPH_REPLAY = f"{_GRAPHS}:ModelCudaGraphManager.run_fullgraph"
PREFILL_GRAPH_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        GRAPH_CANDIDATES,
        ("self",),
        mentions=("cudagraph_capture_sizes", "_capture_descs", "_candidates"),
        closed=True,
    ),
    HookPoint(
        f"{_GRAPHS}:CudaGraphManager._init_candidates",
        mentions=("uses_dynamic_speculative_decoding",),
    ),
    HookPoint(
        f"{_GRAPHS}:CudaGraphManager.__init__",
        mentions=(
            "vllm_config",
            "compilation_config",
            "cudagraph_mode",
            "lora_capture_cases",
            "_init_candidates",
            "varlen_decode",
        ),
    ),
    HookPoint(
        GRAPH_CAPTURE,
        ("self", "create_forward_fn", "progress_bar_desc"),
        mentions=("_capture_descs", "_max_full_descs_to_capture", "graphs", "warmup"),
        closed=True,
    ),
    HookPoint(GRAPH_DISPATCH, ("self", "num_reqs"), mentions=("_candidates",)),
    HookPoint(GRAPH_REPLAY, ("self", "desc"), closed=True, own=True),
    *_fields(
        f"{_GRAPHS}:BatchExecutionDescriptor",
        "cg_mode",
        "num_tokens",
        "num_reqs",
        "num_active_loras",
    ),
    HookPoint(
        "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState"
        ".prepare_attn",
        mentions=("num_reqs_after_padding", "num_tokens_after_padding", "FULL"),
        own=True,
    ),
    HookPoint(
        "vllm.config.compilation:CUDAGraphMode.decode_mode",
        ("self",),
    ),
    HookPoint("vllm.config.compilation:CUDAGraphMode.separate_routine", ("self",)),
    HookPoint(
        "vllm.config.compilation:CompilationConfig.cudagraph_capture_sizes",
    ),
    HookPoint("vllm.config.vllm:VllmConfig.use_v2_model_runner"),
    HookPoint("vllm.config.multimodal:MultiModalConfig.language_model_only"),
    HookPoint(f"{_MODEL}.multimodal_config"),
    *(
        HookPoint(
            "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase"
            f".{method}",
            ("self", *more),
        )
        for method, more in (
            ("get_attn_backend", ()),
            ("get_kv_cache_spec", ("vllm_config",)),
        )
    ),
    HookPoint(f"{_PASSES}:AttentionCGSupport.ALWAYS"),
    HookPoint(
        f"{_PASSES}:AttentionMetadataBuilder.get_cudagraph_support",
        ("vllm_config", "kv_cache_spec"),
    ),
    *(
        _method(builder, _CAPTURE, "common_attn_metadata", closed=True)
        for builder in dict.fromkeys(b for bs in BUILDERS.values() for b in bs)
    ),
)
"""For the option `prefill_graphs`."""

_SCHEDULED = "vllm.v1.core.sched.output:SchedulerOutput"
_DRAFTING = "vllm.config.speculative:SpeculativeConfig"
_V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_V2_STATES = "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState"
V1_UPDATE_STATES = f"{_V1_RUNNER}._update_states"
SPECULATION_HOOKS: tuple[Contract, ...] = (
    *_fields(_DRAFTING, "method", "draft_model_config"),
    HookPoint("vllm.config.vllm:VllmConfig.num_speculative_tokens"),
    HookPoint("vllm.config.vllm:VllmConfig.use_v2_model_runner"),
    HookPoint(f"{_MODEL}.get_sliding_window", ("self",)),
    HookPoint(f"{_SPECS}:MambaSpec.mamba_type"),
    *_fields(
        "vllm.v1.attention.backends.registry:MambaAttentionBackendEnum",
        "GDN_ATTN",
        "MAMBA2",
        "SHORT_CONV",
    ),
    *_CONVOLUTION_HOOKS,
    # What a step verifies, and what becomes of it.
    HookPoint(
        f"{_SCHEDULER}:Scheduler.schedule",
        mentions=(
            "running",
            "spec_token_ids",
            "scheduled_spec_decode_tokens",
            "pad_spec_decode",
        ),
    ),
    HookPoint(
        f"{_SCHEDULER}:Scheduler.__init__",
        mentions=("num_spec_tokens", "num_lookahead_tokens"),
    ),
    HookPoint(f"{_SCHEDULED}.scheduled_spec_decode_tokens"),
    HookPoint(
        "vllm.v1.request:Request",
        mentions=("spec_token_ids", "num_output_placeholders"),
    ),
    # How many drafts are proposed behind a step.
    HookPoint(
        f"{_SCHEDULER}:Scheduler._update_after_schedule", ("self", "scheduler_output")
    ),
    HookPoint(f"{_SCHEDULED}.num_spec_tokens_to_schedule"),
    *_fields("vllm.v1.outputs:ModelRunnerOutput", "sampled_token_ids"),
    *_fields("vllm.v1.outputs:ModelRunnerOutput", "req_id_to_index"),
    # The columns of a row, in the tables of both model runners.
    HookPoint(
        "vllm.v1.worker.block_table:BlockTable.add_row", ("block_ids", "row_idx")
    ),
    HookPoint("vllm.v1.worker.block_table:MultiGroupBlockTable.__getitem__"),
    HookPoint("vllm.v1.worker.gpu_input_batch:CachedRequestState.block_ids"),
    HookPoint(
        "vllm.v1.worker.gpu_input_batch:InputBatch.__init__",
        mentions=("req_id_to_index", "num_accepted_tokens_cpu", "block_table"),
    ),
    HookPoint(f"{_V1_RUNNER}.__init__", mentions=("requests", "input_batch")),
    HookPoint(
        "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.stage_write",
        ("self", "index", "start", "x"),
    ),
    HookPoint(
        "vllm.v1.worker.gpu.block_table:BlockTables.append_block_ids",
        mentions=("block_tables", "stage_write", "num_blocks", "np"),
    ),
    HookPoint(
        f"{_V2_RUNNER}.update_requests",
        mentions=("req_states", "req_id_to_index", "block_tables"),
    ),
    # A step without drafts goes on from the column that the last one left, to 0.
    HookPoint(f"{_V1_RUNNER}._prepare_inputs", mentions=("num_decode_draft_tokens",)),
    HookPoint(
        f"{_V2_STATES}.prepare_attn",
        mentions=("num_accepted_tokens_gpu", "num_decode_draft_tokens_cpu"),
        own=True,
    ),
    HookPoint(
        f"{_V2_STATES}.postprocess_state",
        mentions=("num_accepted_tokens_gpu",),
        own=True,
    ),
    HookPoint(
        V1_UPDATE_STATES,
        ("self", "scheduler_output"),
        mentions=("remove_request", "add_request", "resumed_req_ids"),
        closed=True,
    ),
)
"""For speculative decoding."""

V2_ADD_REQUESTS = f"{_V2_RUNNER}.add_requests"
V2_SAMPLE = f"{_V2_RUNNER}.sample"
STOP_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        V2_ADD_REQUESTS,
        ("self", "scheduler_output"),
        mentions=("scheduled_new_reqs", "sampling_params", "prompt_len"),
        closed=True,
    ),
    HookPoint(
        V2_SAMPLE,
        ("self", "hidden_states", "input_batch", "grammar_output"),
        mentions=("num_sampled", "num_rejected", "num_draft_tokens"),
        closed=True,
    ),
    HookPoint(
        f"{_V2_RUNNER}.sample_tokens",
        mentions=("sample", "postprocess_sampled", "propose", "sampled_token_ids"),
    ),
    HookPoint(f"{_V2_RUNNER}.__init__", mentions=("num_speculative_steps",)),
    HookPoint(
        f"{_V2_RUNNER}.__init__", mentions=("max_num_reqs", "max_model_len", "device")
    ),
    HookPoint(
        "vllm.v1.worker.gpu.states:RequestState.__init__",
        mentions=("req_id_to_index", "num_computed_tokens", "all_token_ids"),
    ),
    *_fields("vllm.v1.worker.gpu.input_batch:InputBatch", "idx_mapping"),
    *_fields("vllm.v1.worker.gpu.input_batch:InputBatch", "idx_mapping_np"),
    *_fields("vllm.v1.worker.gpu.input_batch:InputBatch", "num_draft_tokens"),
    HookPoint("vllm.sampling_params:SamplingParams.eos_token_id"),
    *_fields("vllm.sampling_params:SamplingParams", "stop_token_ids", "max_tokens"),
    *_fields("vllm.sampling_params:SamplingParams", "min_tokens"),
    *_fields("vllm.sampling_params:SamplingParams", "repetition_detection"),
    *_fields(
        "vllm.sampling_params:RepetitionDetectionParams",
        "min_pattern_size",
        "max_pattern_size",
        "min_count",
    ),
)
"""For stops inside accepted drafts, where steps are scheduled ahead."""

V1_AFTER_EXECUTION = f"{_V1_RUNNER}._update_states_after_model_execute"
V2_POSTPROCESS = f"{_V2_STATES}.postprocess_state"
REPLAY_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        V1_AFTER_EXECUTION,
        ("self", "output_token_ids", "scheduler_output"),
        mentions=("num_accepted_tokens", "gpu"),
        closed=True,
    ),
    HookPoint(f"{_V1_RUNNER}.__init__", mentions=("vllm_config",)),
    HookPoint(
        V2_POSTPROCESS,
        ("self", "idx_mapping", "num_sampled", "num_computed_tokens"),
        mentions=("num_accepted_tokens_gpu",),
        closed=True,
        own=True,
    ),
    HookPoint(f"{_V2_STATES}.__init__", ("self", "vllm_config"), own=True),
    HookPoint(
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState.__init__",
        mentions=("vllm_config",),
        own=True,
    ),
    HookPoint(
        "vllm.model_executor.layers.mamba.abstract:MambaBase.get_state_dtype", ("self",)
    ),
)
"""Where drafts are recorded, and what was accepted is folded into the states."""

GDN_DRAFT_HOOKS: tuple[Contract, ...] = (
    *_fields(GDN_METADATA, *GDN_COUNTS, "num_actual_tokens"),
    HookPoint(
        GDN_FUSED_NORM,
        ("self", "mixed_qkv", "b", "a", "output_gate", "core_attn_out"),
        mentions=("num_actual_tokens", "_rms_norm_gated_cuda"),
        closed=True,
        own=True,
    ),
    HookPoint(
        GDN_NORM,
        ("self", "x", "output_gate", "out"),
        mentions=(
            "norm",
            "weight",
            "bias",
            "eps",
            "group_size",
            "norm_before_gate",
            "activation",
        ),
        closed=True,
        own=True,
    ),
    HookPoint(
        f"{_GDN}:QwenGatedDeltaNetAttention.forward_cuda",
        mentions=("enable_fused_gdn_spec_decode",),
        own=True,
    ),
)
"""For drafts of gated delta nets that our kernels verify."""
GDN_CPU_DRAFT_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        GDN_DRAFTS_ON_CPU,
        (
            "layer",
            "attn_metadata_i",
            "mixed_qkv",
            "b",
            "a",
            "core_attn_out",
            "width",
            "state_len",
        ),
        closed=True,
    ),
)
"""The same on a CPU."""

GDN_CPU_ROWS = f"{_GDN_ON_CPU}:_spec_forward"
GDN_CPU_PLAIN_ROWS = f"{_GDN_ON_CPU}:_spec_aware_nonspec"
GDN_CPU_WEIGHT = f"{_GDN_ON_CPU}:_unpacked_conv_weight"
GDN_CPU_VERIFY = "vllm._custom_ops:fused_sigmoid_gating_delta_rule_update_spec_cpu"
MAMBA2_CONVOLUTION = f"{_MAMBA2}:causal_conv1d_update"
MAMBA2_UPDATE = f"{_MAMBA2}:selective_state_update"
CPU_SPECULATION_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        GDN_CPU_ROWS,
        (
            "layer",
            "attn_metadata_i",
            "mixed_qkv_spec",
            "b_spec",
            "a_spec",
            "conv_buf",
            "ssm_state",
            "width",
            "state_len",
        ),
        mentions=(
            "num_spec_decodes",
            "spec_state_indices_tensor",
            "spec_query_start_loc",
            "num_accepted_tokens",
            "rearrange_mixed_qkv",
            "fused_sigmoid_gating_delta_rule_update_spec_cpu",
        ),
        closed=True,
    ),
    HookPoint(
        GDN_CPU_PLAIN_ROWS,
        (
            "layer",
            "attn_metadata_i",
            "mixed_qkv",
            "b",
            "a",
            "core_attn_out",
            "conv_buf",
            "ssm_state",
            "width",
        ),
        mentions=("non_spec_state_indices_tensor",),
    ),
    HookPoint(GDN_CPU_WEIGHT, ("layer",)),
    HookPoint(
        GDN_CPU_VERIFY,
        (
            "A_log",
            "dt_bias",
            "q",
            "k",
            "v",
            "a",
            "b",
            "initial_state_source",
            "spec_state_indices",
            "num_accepted_tokens",
            "cu_seqlens",
            "use_qk_l2norm_in_kernel",
        ),
    ),
    HookPoint(MAMBA2_CONVOLUTION),
    HookPoint(MAMBA2_UPDATE),
    HookPoint(
        MAMBA2_FORWARD,
        mentions=(
            "causal_conv1d_update",
            "conv_state_indices",
            "num_accepted_tokens",
            "query_start_loc",
            "selective_state_update",
            "state_batch_indices",
            "dst_state_batch_indices",
            "cu_seqlens",
            "out",
        ),
    ),
)
"""The same on a CPU."""

_KINDS = "vllm.v1.attention.backends.registry:MambaAttentionBackendEnum"

DISK_HOOKS: tuple[Contract, ...] = (
    # Steps go on for what is written and read, and empty ones are reported.
    HookPoint(f"{_SCHEDULER}:Scheduler.has_requests", ("self",), own=True),
    HookPoint(f"{_SCHEDULER}:Scheduler.pause_state", mentions=("_pause_state",)),
    HookPoint("vllm.v1.core.sched.interface:PauseState", mentions=("UNPAUSED",)),
    HookPoint(f"{_SCHEDULER}:Scheduler.shutdown", ("self",), own=True),
    HookPoint(f"{_CORE}:EngineCore.step", mentions=("has_requests", "model_output")),
    HookPoint(
        f"{_CORE}:EngineCore.step_with_batch_queue",
        mentions=("has_requests", "model_executed", "exec_future"),
    ),
    HookPoint(
        f"{_CORE}:EngineCoreProc._process_engine_step",
        mentions=("has_requests", "sleep"),
    ),
    HookPoint("vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens"),
    # Orders about saved sessions come as utility calls.
    HookPoint(
        f"{_CORE}:EngineCoreProc._handle_client_request",
        mentions=("UTILITY", "getattr", "_invoke_utility_method"),
    ),
    HookPoint(f"{_CORE}:EngineCore", mentions=("scheduler",)),
    # What names a model.
    *_fields(_MODEL, "model", "revision", "hf_config_path", "hf_overrides"),
    *_fields(_MODEL, "dtype", "quantization", "multimodal_config"),
    *_fields("vllm.config.load:LoadConfig", "load_format"),
    *_fields(_PARALLEL, "tensor_parallel_size", "data_parallel_size", "nnodes"),
    *_fields("vllm.config.multimodal:MultiModalConfig", "mm_processor_cache_gb"),
    HookPoint(
        "vllm.renderers.base:BaseRenderer._process_mm_uuids",
        mentions=("mm_processor_cache_gb", "enable_prefix_caching"),
    ),
    *_fields(
        "vllm.lora.request:LoRARequest",
        "lora_name",
        "lora_path",
        "lora_int_id",
        "load_inplace",
    ),
    # How the bytes of a page and of a slot lie.
    *_fields(
        f"{_SPECS}:AttentionSpec",
        "num_kv_heads",
        "head_size",
        "head_size_v",
        "dtype",
        "kv_quant_mode",
        "num_head_slots",
        "state_content_bytes",
        "page_size_padded",
    ),
    HookPoint(f"{_SPECS}:KVCacheSpec.tokens_per_state"),
    HookPoint(f"{_SPECS}:KVQuantMode.NONE"),
    HookPoint(f"{_SPECS}:SparseCacheRole.SPARSE"),
    *_fields(f"{_SPECS}:MLAAttentionSpec", "cache_role"),
    *_fields(
        f"{_SPECS}:MambaSpec",
        "shapes",
        "dtypes",
        "mamba_type",
        "num_speculative_blocks",
    ),
    *(
        HookPoint(f"{_KINDS}.{kind}")
        for kind in ("GDN_ATTN", "LINEAR", "MAMBA1", "MAMBA2", "SHORT_CONV")
    ),
    HookPoint(
        "vllm.model_executor.layers.attention_layer_base:"
        "AttentionLayerBase.get_attn_backend",
        ("self",),
    ),
    HookPoint(
        "vllm.v1.attention.backends.cpu_attn:"
        "CPUAttentionMetadataBuilder._set_isa_to_layers",
        mentions=("isa",),
    ),
    HookPoint(
        "vllm.model_executor.layers.mamba.abstract:MambaBase.bind_kv_cache",
        mentions=("get_state_shape", "get_state_dtype"),
    ),
    *_CONVOLUTION_HOOKS,
)
"""What files behind host memory rely on."""

_CLIENT = "vllm.v1.engine.core_client"
_LAUNCHERS = "vllm.entrypoints.launchers"
_TOKENIZE = "vllm.entrypoints.serve.tokenize"

SAVED_SESSION_HOOKS: tuple[Contract, ...] = (
    HookPoint(f"{_LAUNCHERS}.app:attach_endpoint_plugins", ("app",)),
    HookPoint(f"{_LAUNCHERS}.app:build_app", mentions=("attach_endpoint_plugins",)),
    HookPoint(
        f"{_LAUNCHERS}.api_server.app_state:init_app_state",
        mentions=("engine_client", "openai_serving_models"),
    ),
    HookPoint(
        "vllm.v1.engine.async_llm:AsyncLLM.__init__",
        mentions=("engine_core", "vllm_config"),
    ),
    HookPoint(f"{_CLIENT}:AsyncMPClient.call_utility_async", ("self", "method")),
    HookPoint(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels",
        mentions=("lora_requests",),
    ),
    # What is asked of the server itself, and what its API key is asked for.
    HookPoint(f"{_TOKENIZE}.api_router:tokenize", ("request", "raw_request")),
    *_fields(f"{_TOKENIZE}.protocol:TokenizeCompletionRequest", "prompt"),
    *_fields(f"{_TOKENIZE}.protocol:TokenizeChatRequest", "messages", "tools"),
    *_fields(f"{_TOKENIZE}.protocol:TokenizeResponse", "tokens"),
    HookPoint(
        "vllm.entrypoints.serve.middleware.authenticate:GUARDED_PREFIX",
    ),
)
"""What endpoints for saved sessions rely on, in the process with the API."""

PEER_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_SCHEDULER}:Scheduler.add_request",
        ("self", "request"),
        closed=True,
        own=True,
    ),
    HookPoint(f"{_SCHEDULER}:Scheduler._free_request", ("self", "request")),
    HookPoint(
        f"{_SCHEDULER}:Scheduler.update_from_output",
        mentions=("_free_request", "kv_transfer_params"),
        own=True,
    ),
    HookPoint(f"{_CORE}:EngineCore.add_request", mentions=("kv_transfer_params",)),
    HookPoint(
        "vllm.v1.request:Request",
        mentions=(
            "kv_transfer_params",
            "prompt_token_ids",
            "num_prompt_tokens",
            "_all_token_ids",
            "max_tokens",
            "resumable",
        ),
    ),
    *_fields(
        "vllm.v1.request:RequestStatus", "FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"
    ),
    HookPoint("vllm.v1.engine:EngineCoreOutput.kv_transfer_params"),
)
"""How a request says that another server goes on with it, or has begun it."""

HIT_CHECK_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        "vllm.v1.request:Request.__init__",
        (
            "request_id",
            "prompt_token_ids",
            "sampling_params",
            "pooling_params",
            "lora_request",
            "cache_salt",
        ),
        mentions=("mm_features", "num_preemptions", "num_prompt_tokens"),
    ),
    *_fields(
        "vllm.sampling_params:SamplingParams",
        "temperature",
        "max_tokens",
        "logprobs",
        "detokenize",
        "skip_reading_prefix_cache",
    ),
    *_fields(
        "vllm.v1.engine:EngineCoreOutput",
        "request_id",
        "new_logprobs",
        "prefill_stats",
    ),
    *_fields("vllm.v1.engine:EngineCoreOutputs", "outputs"),
    *_fields("vllm.v1.metrics.stats:PrefillStats", "num_cached_tokens"),
    *_fields("vllm.v1.outputs:LogprobsLists", "logprob_token_ids", "logprobs"),
)
"""Requests of our own, and what comes of them."""

_V2_TABLES = "vllm.v1.worker.gpu.block_table:BlockTables"
CONTEXT_PARALLEL_HOOKS: tuple[Contract, ...] = (
    *_fields(_PARALLEL, "cp_kv_cache_interleave_size"),
    HookPoint(
        f"{_NAMES}:resolve_dcp_kv_block_size",
        ("spec", "dcp_world_size"),
        behaves=_spans_all_ranks,
    ),
    # Tables have a column for each such block, and both runners interleave its tokens.
    HookPoint(
        f"{_SPECS}:AttentionSpec.max_num_blocks_per_req",
        ("self", "vllm_config", "max_len"),
        mentions=("decode_context_parallel_size", "dcp_sharded", "block_size"),
    ),
    HookPoint(f"{_SPECS}:MambaSpec.max_num_blocks_per_req", own=True),
    HookPoint(
        f"{_V2_TABLES}.compute_slot_mappings",
        ("self",),
        mentions=("dcp_sharded", "cp_rank", "cp_size", "cp_interleave"),
    ),
    HookPoint(
        "vllm.v1.worker.block_table:BlockTable.compute_slot_mapping",
        ("self",),
        mentions=("dcp_rank", "dcp_world_size", "cp_kv_cache_interleave_size"),
    ),
)
"""How decode context parallelism interleaves tokens over its ranks."""

ENGINE_HOOKS = (
    *OPTION_HOOKS,
    *CORE_HOOKS,
    *PLANNING_HOOKS,
    *SCHEDULER_HOOKS,
    *DISK_HOOKS,
)
HOOKS: tuple[Contract, ...] = (
    *CONFIG_HOOKS,
    *DEFAULT_HOOKS,
    *ENGINE_HOOKS,
    *SAVED_SESSION_HOOKS,
    *WORKER_HOOKS,
    *CPU_HOOKS,
    *DETERMINISTIC_HOOKS,
    *ATTENTION_HOOKS,
    *PREFILL_GRAPH_HOOKS,
    *ATTENTION_IN_GRAPHS,
    *SCALE_HOOKS,
    *PEER_HOOKS,
    *HIT_CHECK_HOOKS,
    *CONTEXT_PARALLEL_HOOKS,
    *SPECULATION_HOOKS,
    *STOP_HOOKS,
    *REPLAY_HOOKS,
    *GDN_DRAFT_HOOKS,
    *GDN_CPU_DRAFT_HOOKS,
    *CPU_SPECULATION_HOOKS,
    *dict.fromkeys(
        contract
        for hooks in (*KERNEL_HOOKS.values(), *CPU_KERNEL_HOOKS.values())
        for contract in hooks
    ),
)
"""All of them."""


def problems(hooks: Iterable[Contract]) -> list[str]:
    """What does not hold in the installed vLLM, one phrase each."""
    return hookpoints.problems(hooks, LiveView("vllm"))
