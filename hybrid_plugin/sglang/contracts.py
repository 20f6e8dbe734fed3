# SPDX-License-Identifier: Apache-2.0
"""The places in SGLang that the adapter relies on; imports without SGLang."""

from __future__ import annotations

from hybrid_plugin.upstream.hookpoints import HookPoint

_SRT = "sglang.srt"
_ARGS = f"{_SRT}.server_args:ServerArgs"
_REGISTRY = f"{_SRT}.plugins.hook_registry:HookRegistry"
_OVERRIDES = f"{_SRT}.arg_groups.overrides"
_CONFIGURATOR = f"{_SRT}.mem_cache.kv_cache_configurator:KVCacheConfigurator"
_BASE = f"{_SRT}.mem_cache.base_prefix_cache:BasePrefixCache"
_PARAMS = f"{_SRT}.mem_cache.cache_init_params:CacheInitParams"
_EVENTS = f"{_SRT}.mem_cache.events:KVCacheEventRecorder"
_MATCH = f"{_SRT}.mem_cache.base_prefix_cache:MatchResult"
_ALLOCATOR = f"{_SRT}.mem_cache.allocator.base:BaseTokenToKVPoolAllocator"
_SLOTS = f"{_SRT}.mem_cache.allocator.mamba:MambaSlotAllocator"
_BUDGET = f"{_SRT}.mem_cache.prefill_budget:PrefillBudget"
_POOL = f"{_SRT}.mem_cache.memory_pool"
_SIZES = f"{_SRT}.model_executor.pool_configurator"
_WINDOW_SIZES = f"{_SIZES}:HybridSWAPoolConfigurator"
_WINDOW_ALLOCATOR = f"{_SRT}.mem_cache.allocator.swa:SWATokenToKVPoolAllocator"
_COMPONENTS = f"{_SRT}.managers.scheduler_components"
_GDN = f"{_SRT}.layers.attention.linear.gdn_backend:GDNAttnBackend"
_MAMBA2 = f"{_SRT}.layers.attention.mamba.mamba2_metadata:Mamba2Metadata"
_CONVOLUTION = f"{_SRT}.layers.attention.mamba.causal_conv1d"
_TRITON_CONVOLUTION = "sglang.kernels.ops.mamba.causal_conv1d_triton"
_ADDER = f"{_SRT}.managers.schedule_policy:PrefillAdder"
_BATCH = f"{_SRT}.managers.schedule_batch"
_SCHEDULER = f"{_SRT}.managers.scheduler:Scheduler"

COMMAND_LINE_HOOKS = (
    HookPoint(f"{_REGISTRY}.register", ("target", "hook", "hook_type")),
    HookPoint(f"{_REGISTRY}.apply_hooks"),
    HookPoint(f"{_REGISTRY}._patched"),
    HookPoint(f"{_ARGS}.add_cli_args", ("parser",)),
    HookPoint(f"{_ARGS}.from_cli_args", ("args",)),
)

ARGUMENT_HOOKS = (
    HookPoint(
        f"{_SRT}.arg_groups.resolution_hooks:register_resolution_hook", ("name",)
    ),
    HookPoint(
        f"{_SRT}.arg_groups.pipeline:run_resolution_pipeline",
        mentions=("handle_model_specific_adjustments",),
    ),
    HookPoint(f"{_OVERRIDES}:resolved_view"),
    HookPoint(f"{_OVERRIDES}:declare_resolution", ("server_args", "source")),
    HookPoint(f"{_OVERRIDES}:model_config_of"),
    HookPoint(
        f"{_SRT}.arg_groups.fields.memory:Memory",
        mentions=(
            "enable_hierarchical_cache",
            "hicache_size",
            "hicache_ratio",
            "hicache_storage_backend",
        ),
    ),
    HookPoint(f"{_SRT}.configs.hybrid_arch:mambaish_config", ("model_config",)),
    HookPoint(f"{_SRT}.configs.hybrid_arch:hybrid_gdn_config", ("model_config",)),
    HookPoint(f"{_SRT}.configs.hybrid_arch:hybrid_kda_config", ("model_config",)),
    HookPoint(f"{_SRT}.configs.model_config:AttentionArch", mentions=("MLA",)),
    HookPoint(f"{_SRT}.configs.model_config:is_deepseek_dsa"),
    HookPoint(
        f"{_SRT}.configs.model_config:ModelConfig",
        mentions=(
            "is_hybrid_swa",
            "swa_attention_layer_ids",
            "full_attention_layer_ids",
            "is_local_attention_model",
            "attention_chunk_size",
            "is_generation",
        ),
    ),
    HookPoint(f"{_SRT}.layers.attention.qsa.config:parse_qsa_profile", ("config",)),
    HookPoint(
        f"{_SRT}.arg_groups.mamba_hook:validate_mamba_no_buffer", ("view", "model_arch")
    ),
)

MEMORY_HOOKS = (
    HookPoint(
        f"{_CONFIGURATOR}._handle_max_mamba_cache",
        ("total_rest_memory",),
        mentions=("attn_dp_size",),
    ),
    HookPoint(
        f"{_SRT}.distributed.utils:get_pp_indices",
        ("num_hidden_layers", "pp_rank", "pp_size"),
    ),
    HookPoint(f"{_CONFIGURATOR}._calculate_mamba_ratio", ("self",)),
    HookPoint(f"{_CONFIGURATOR}._apply_token_constraints", ("token_capacity",)),
    HookPoint(
        f"{_CONFIGURATOR}._init_pools",
        ("sizes", "req_to_token_pool", "token_to_kv_pool_allocator"),
    ),
    HookPoint(
        f"{_SRT}.mem_cache.kv_cache_configurator:_InitializedPools"
        ".token_to_kv_pool_allocator"
    ),
    HookPoint(f"{_SIZES}:create_memory_pool_configurator"),
    HookPoint(f"{_SIZES}:DefaultPoolConfigurator", mentions=("_cell_size",)),
    HookPoint(
        f"{_SRT}.model_executor.model_runner_components.layer_setup:ModelLayerInfo",
        mentions=("start_layer", "end_layer"),
    ),
    HookPoint(f"{_ALLOCATOR}.__init__", ("size", "page_size", "kvcache", "need_sort")),
    HookPoint(f"{_ALLOCATOR}.create_prefill_budget", ("tree_cache",)),
    HookPoint(f"{_ALLOCATOR}.evict_to_free_tokens", ("tree_cache", "num_tokens")),
    HookPoint(f"{_ALLOCATOR}.check_decode_capacity", ("num_tokens",)),
    HookPoint(f"{_SLOTS}.alloc_group_begin", ("num_reqs",)),
    HookPoint(f"{_SLOTS}.available_size"),
    HookPoint(f"{_BUDGET}._available_and_evictable", ("self",)),
    HookPoint(
        f"{_POOL}:HybridReqToTokenPool.alloc",
        ("reqs",),
        mentions=("holds_mamba", "mamba_pool_idx"),
    ),
    HookPoint(f"{_CONFIGURATOR}._get_ple_req_pool_kwargs", ("self",)),
    HookPoint(
        f"{_POOL}:HybridReqToTokenPool._init_mamba_pool",
        ("mamba_size", "cache_params"),
        mentions=("mamba_pool_cls",),
    ),
    HookPoint(
        f"{_POOL}:MambaPool.__init__",
        ("size", "cache_params"),
        mentions=("mamba_cache", "conv", "temporal"),
    ),
    HookPoint(f"{_POOL}:MambaPool._conv_fuse_ok"),
    HookPoint(f"{_POOL}:MHATokenToKVPool._kv_buffer_shapes", ("self",)),
    HookPoint(
        f"{_POOL}:MHATokenToKVPool._create_buffers_normal",
        ("self",),
        mentions=("k_buffer", "v_buffer"),
    ),
    HookPoint(
        f"{_POOL}:MLATokenToKVPool._create_buffers",
        ("self",),
        mentions=("kv_buffer", "kv_cache_dim"),
    ),
    HookPoint(f"{_GDN}.__init__", ("model_runner",), mentions=("kernel_dispatcher",)),
    HookPoint(
        f"{_GDN}.forward_extend",
        mentions=("requires_contiguous_prefill_state", "_convolve_prefill"),
    ),
    # With `seq_lens_cpu` and tokens behind each other it takes the Triton kernel.
    HookPoint(f"{_GDN}._convolve_prefill", mentions=("causal_conv1d_fn", "transpose")),
    HookPoint(
        "sglang.kernels.ops.attention.fla.chunk:ChunkGatedDeltaRuleFunction.forward",
        ("ctx", "initial_state", "initial_state_indices", "inplace_update"),
        mentions=("chunk_gated_delta_rule_fwd",),
    ),
    HookPoint("sglang.kernels.ops.attention.fla.utils:input_guard", ("fn",)),
    HookPoint(
        "sglang.kernels.ops.attention.fla.chunk_delta_h:chunk_gated_delta_rule_fwd_h",
        mentions=("stride_init_state",),
    ),
    HookPoint(
        f"{_SRT}.layers.attention.linear.kernels.gdn_flashinfer"
        ":FlashInferGDNKernel.extend",
        ("ssm_states", "cache_indices"),
        mentions=("index_copy_",),
    ),
    HookPoint(
        f"{_CONVOLUTION}:causal_conv1d_fn",
        ("x", "conv_states", "cache_indices"),
        mentions=("causal_conv1d_fwd",),
    ),
    HookPoint(
        f"{_CONVOLUTION}:causal_conv1d_update",
        ("x", "conv_state", "conv_state_indices"),
        mentions=("causal_conv1d_update_kernel",),
    ),
    HookPoint(
        f"{_TRITON_CONVOLUTION}:causal_conv1d_fn",
        ("x", "conv_states", "query_start_loc", "seq_lens_cpu", "cache_indices"),
    ),
    HookPoint(
        f"{_TRITON_CONVOLUTION}:causal_conv1d_update",
        ("x", "conv_state", "cache_seqlens", "conv_state_indices", "pad_slot_id"),
    ),
    HookPoint(
        f"{_MAMBA2}.prepare_mixed",
        ("forward_metadata", "chunk_size", "forward_batch"),
        closed=True,
        mentions=(
            "extend_seq_lens_cpu",
            "extend_prefix_lens",
            "has_mamba_track_mask",
            "logical_forward_mode",
            "query_start_loc",
            "spec_info",
        ),
    ),
    HookPoint(
        f"{_MAMBA2}.prepare_decode",
        ("forward_metadata", "seq_lens", "is_target_verify", "draft_token_num"),
        closed=True,
    ),
    *(
        HookPoint(f"{_MAMBA2}.{field}")
        for field in (
            "num_prefills",
            "num_prefill_tokens",
            "num_decodes",
            "mixed_metadata",
            "MixedMetadata.has_initial_states",
            "MixedMetadata.prep_initial_states",
            "MixedMetadata.chunk_size",
            "MixedMetadata.seq_idx",
            "MixedMetadata.chunk_indices",
            "MixedMetadata.chunk_offsets",
            "MixedMetadata.extend_seq_lens_cpu",
        )
    ),
    HookPoint(
        f"{_SRT}.layers.attention.hybrid_linear_attn_backend"
        ":Mamba2AttnBackend.init_forward_metadata",
        mentions=("prepare_mixed",),
    ),
    HookPoint(
        f"{_SRT}.model_executor.forward_batch_info:ForwardBatch.extend_prefix_lens_cpu"
    ),
    HookPoint(f"{_SRT}.runtime_context:get_exec"),
    HookPoint(f"{_SRT}.runtime_context:get_server_args"),
    HookPoint(f"{_SRT}.arg_groups.fields.model:Model.model_path"),
    HookPoint(f"{_SRT}.arg_groups.fields.model:Model.revision"),
    HookPoint(f"{_SRT}.arg_groups.fields.model:Model.trust_remote_code"),
    HookPoint(f"{_SRT}.arg_groups.fields.serving:Serving.tokenizer_path"),
    HookPoint(f"{_POOL}:MambaPool._slot_siblings"),
    HookPoint(f"{_SRT}.arg_groups.fields.serving:Serving.chat_template"),
    HookPoint(f"{_POOL}:HybridLinearKVPool", mentions=("full_kv_pool",)),
    HookPoint(f"{_POOL}:MHATokenToKVPool", mentions=("k_buffer", "v_buffer")),
    HookPoint(f"{_POOL}:MLATokenToKVPool", mentions=("kv_buffer",)),
)

_SPARSE = f"{_SRT}.layers.attention.dsa"

INDEX_HOOKS = (
    HookPoint(
        f"{_SRT}.configs.model_config:is_deepseek_dsa",
        ("config",),
        mentions=("index_topk",),
    ),
    HookPoint(f"{_SRT}.configs.model_config:get_dsa_index_kpool", ("config",)),
    HookPoint(f"{_SRT}.configs.model_config:get_dsa_index_kpool_compress", ("config",)),
    HookPoint(f"{_SRT}.configs.model_config:get_dsa_index_head_dim", ("config",)),
    HookPoint(
        f"{_SRT}.configs.model_config:dsa_layer_skips_topk", ("config", "layer_id")
    ),
    HookPoint(
        f"{_SRT}.mem_cache.kv_cache_configurator:calculate_mla_kv_cache_dim",
        ("model_config", "kv_cache_dtype"),
    ),
    HookPoint(
        f"{_CONFIGURATOR}._build_hybrid_linear_kv_pool",
        mentions=("index_kpool", "skip_topk_layers", "tail_extra_slots"),
    ),
    # Keys of a page, then their scales; nothing for layers that do not choose.
    HookPoint(
        f"{_SRT}.mem_cache.index_key_cache:IndexKeyCache.__init__", mentions=("buffer",)
    ),
    HookPoint(
        f"{_SRT}.mem_cache.index_key_cache:IndexKeyCache._buffer_shape",
        mentions=("index_kpool", "quant_block_size"),
    ),
    HookPoint(
        f"{_POOL}:DSATokenToKVPool._init_kpool_compress_tail_buffers",
        mentions=(
            "kpool_use_compress",
            "_compress_tail_k",
            "_compress_tail_score",
            "tail_extra_slots",
        ),
    ),
    HookPoint(
        f"{_POOL}:DSATokenToKVPool.kpool_decode_update_index_cache",
        ("self", "req_pool_indices"),
    ),
    HookPoint(
        f"{_POOL}:HybridLinearKVPool.kpool_decode_update_index_cache",
        mentions=("full_kv_pool", "req_pool_indices"),
    ),
    HookPoint(
        f"{_POOL}:DSATokenToKVPool.set_compress_tail_for_request",
        ("self", "req_pool_idx"),
    ),
    HookPoint(
        f"{_POOL}:HybridLinearKVPool.set_compress_tail_for_request",
        mentions=("full_kv_pool", "req_pool_idx"),
    ),
    HookPoint(
        f"{_POOL}:HybridReqToTokenPool.get_mamba_indices",
        ("req_indices",),
        mentions=("req_index_to_mamba_index_mapping",),
    ),
    HookPoint(
        f"{_SPARSE}.kpool_plan:init_kpool_extend_metadata",
        ("metadata", "forward_batch"),
        mentions=("kpool_extend_plan",),
    ),
    HookPoint(f"{_SPARSE}.kpool_plan:KPoolExtendPlan", mentions=("writes", "tails")),
    HookPoint(f"{_SPARSE}.kpool_plan:PoolWriteRows", mentions=("req",)),
    HookPoint(f"{_SPARSE}.kpool_plan:TailWriteRows", mentions=("req",)),
    HookPoint(
        f"{_SPARSE}.kpool_plan:update_kpool_write_plan",
        ("metadata", "req_pool_indices"),
    ),
    HookPoint(
        f"{_SPARSE}.dsa_indexer_kpool:IndexerKPool._compress_write_extend",
        mentions=("kpool_extend_plan", "get_compress_tail_buffers"),
    ),
    HookPoint(
        f"{_SPARSE}.dsa_indexer_kpool:IndexerKPool._forward_cuda_target_verify",
        mentions=("kpool_write_plan", "get_compress_tail_buffers"),
    ),
)

_COMPRESSED = f"{_SRT}.layers.attention.qsa"
_BACKEND = f"{_SRT}.layers.attention.qwen_sparse_attn_backend:QwenSparseAttnBackend"
_QSA_POOL = f"{_SRT}.mem_cache.qsa_kv_pool"

COMPRESSED_HOOKS = (
    HookPoint(
        f"{_SRT}.arg_groups.model_overrides.qwen4_exp:_qwen4_exp_overrides",
        mentions=("parse_qsa_profile", "page_size"),
    ),
    HookPoint(
        f"{_COMPRESSED}.config:parse_qsa_profile",
        ("config",),
        mentions=("indexer_n_heads",),
    ),
    HookPoint(
        f"{_COMPRESSED}.config:QSAProfile",
        mentions=("kv_heads", "head_dim", "compress_ratio"),
    ),
    HookPoint(f"{_QSA_POOL}:resolve_qsa_indexer_dtype", ("name",)),
    # Keys by pages, rings by rows, and nothing else.
    HookPoint(
        f"{_QSA_POOL}:QSATokenToKVPool.__init__",
        mentions=(
            "qsa_compressed_k_buffer_pool",
            "qsa_compressed_capacity",
            "qsa_key_state_buffer_pool",
            "qsa_rope_position_buffer",
            "qsa_num_request_slots",
            "qsa_compress_ratio",
            "index_state_dtype",
        ),
    ),
    HookPoint(
        f"{_QSA_POOL}:QSATokenToKVPool.set_qsa_key_state_buffer",
        ("self", "layer_id", "loc", "token_k"),
        closed=True,
    ),
    HookPoint(
        f"{_QSA_POOL}:QSATokenToKVPool.set_qsa_rope_position_buffer",
        ("self", "loc", "positions"),
        closed=True,
    ),
    HookPoint(
        f"{_POOL}:HybridLinearKVPool._transfer_full_attention_id", ("self", "layer_id")
    ),
    HookPoint(
        f"{_SRT}.model_executor.pool_configurator"
        ":DefaultPoolConfigurator._compute_qsa_cell_size",
        ("hf_config", "num_layers"),
        closed=True,
    ),
    HookPoint(
        f"{_BACKEND}._qsa_build_write_plan",
        ("self", "forward_batch", "speculative_paged", "token_slot_table"),
        mentions=("_qsa_write_plan", "capacity"),
    ),
    HookPoint(
        f"{_BACKEND}._qsa_write_plan",
        ("token_slot_table", "start_blocks", "end_blocks", "capacity"),
        mentions=("row_token_starts", "prefix_lens", "compress_ratio"),
    ),
    HookPoint(
        f"{_BACKEND}._metadata_from_forward_batch",
        ("self", "forward_batch"),
        closed=True,
        mentions=("pending_ring_slots", "compress_group_ring_locs"),
    ),
    HookPoint(f"{_BACKEND}._replay_cuda_graph_metadata", ("self", "bs")),
    HookPoint(
        f"{_SRT}.model_executor.forward_batch_info:ForwardBatch.extend_seq_lens_cpu"
    ),
    # Where graphs are given rows of rings, in place.
    HookPoint(
        f"{_COMPRESSED}.graph_metadata:launch_graph_metadata",
        mentions=("pending_ring_slots", "graph_ring_group_locs"),
    ),
    HookPoint(
        f"{_COMPRESSED}.metadata:QSAIndexerMetadata",
        mentions=(
            "pending_ring_slots",
            "compress_group_ring_locs",
            "compress_member_rows",
            "extend_rope_matrix",
            "graph_ring_group_locs",
            "req_pool_indices",
            "token_to_kv_pool",
        ),
    ),
    HookPoint(
        f"{_COMPRESSED}.qsa_indexer:QSAIndexer.update_key_state_and_compress",
        (
            "self",
            "token_k",
            "logical_positions",
            "rope_positions",
            "metadata",
            "state_slots",
            "state_stored",
        ),
        closed=True,
        mentions=("compress_member_rows", "extend_rope_matrix", "compress_ratio"),
    ),
    HookPoint(
        f"{_SRT}.mem_cache.ple_state_pool:NGramPool.__init__",
        mentions=("context", "eos_token_id"),
    ),
    HookPoint(f"{_SRT}.mem_cache.ple_state_pool:NGramPool.clear", ("self",)),
    HookPoint(
        f"{_SRT}.mem_cache.ple_state_pool:NGramPool.reset_slots", ("self", "indices")
    ),
    HookPoint(
        f"{_SRT}.mem_cache.ple_state_pool:NGramPool.get_context", ("self", "indices")
    ),
    HookPoint(
        f"{_SRT}.mem_cache.ple_state_pool:NGramPool.set_context",
        ("self", "indices", "context"),
    ),
    HookPoint(
        f"{_SRT}.mem_cache.ple_state_pool:ShortConvPool.__init__",
        mentions=("conv_state",),
    ),
    HookPoint(
        f"{_POOL}:HybridReqToTokenPool._init_mamba_pool",
        mentions=("ngram_pool", "short_conv_pool", "register_slot_state"),
    ),
)

WINDOW_HOOKS = (
    HookPoint(f"{_CONFIGURATOR}.is_hybrid_swa"),
    HookPoint(f"{_CONFIGURATOR}.sliding_window_size"),
    HookPoint(f"{_CONFIGURATOR}.post_capture_kv_active"),
    HookPoint(
        f"{_CONFIGURATOR}.config_from_budget",
        ("budget_bytes",),
        mentions=("calculate_pool_sizes",),
    ),
    HookPoint(f"{_WINDOW_SIZES}._full_cell_bytes", ("self",)),
    HookPoint(f"{_WINDOW_SIZES}._swa_cell_bytes", ("self",)),
    HookPoint(
        f"{_WINDOW_ALLOCATOR}.__init__",
        ("size", "size_swa", "page_size", "kvcache"),
        mentions=("full_to_swa_index_mapping", "register_mapping"),
    ),
    HookPoint(f"{_WINDOW_ALLOCATOR}.size_full", own=True),
    HookPoint(f"{_WINDOW_ALLOCATOR}.size_swa"),
    HookPoint(
        f"{_WINDOW_ALLOCATOR}.swa_capacity_and_available",
        ("full_capacity", "swa_capacity"),
    ),
    HookPoint(
        f"{_SRT}.mem_cache.swa_memory_pool:SWAKVPool.__init__",
        mentions=("full_kv_pool", "swa_kv_pool", "full_to_swa_index_mapping"),
    ),
    HookPoint(
        f"{_SRT}.mem_cache.swa_memory_pool:SWAKVPool.translate_loc_from_full_to_swa",
        ("kv_indices",),
        mentions=("full_to_swa_index_mapping",),
    ),
    HookPoint(f"{_SRT}.runtime_context:attention_backends"),
    # What frees pages of windows there, for a cache that supports it; ours does not.
    HookPoint(f"{_BATCH}:ScheduleBatch.maybe_evict_swa", mentions=("supports_swa",)),
    HookPoint(f"{_BASE}.supports_swa"),
    HookPoint(f"{_BASE}.swa_evictable_size"),
    HookPoint(f"{_BASE}.swa_protected_size"),
    HookPoint(
        f"{_COMPONENTS}.pool_stats_observer:SchedulerPoolStatsObserver"
        "._get_swa_token_info",
        mentions=("swa_capacity_and_available", "swa_evictable_size"),
    ),
    HookPoint(
        f"{_COMPONENTS}.invariant_checker:SchedulerInvariantChecker._check_swa_pool",
        mentions=("swa_protected_size",),
    ),
    HookPoint(
        f"{_COMPONENTS}.pool_stats_observer:kv_private_swa_tokens",
        ("kv", "page_size"),
        mentions=("kv_allocated_len", "cache_protected_len"),
    ),
    HookPoint(
        f"{_SRT}.mem_cache.cache_init_params:CacheInitParams.chunked_prefill_size"
    ),
    HookPoint(f"{_SRT}.sampling.sampling_params:SamplingParams.max_new_tokens"),
)
"""For models with full attention and windows: `window_pools` and `window_map`."""

CACHE_HOOKS = (
    HookPoint(
        f"{_SRT}.mem_cache.registry:register_radix_cache_backend", ("name", "factory")
    ),
    HookPoint(f"{_BASE}.match_prefix", ("params",)),
    HookPoint(f"{_BASE}.checkpoint", ("req", "up_to")),
    HookPoint(f"{_BASE}.on_release", ("req", "checkpointed")),
    HookPoint(f"{_BASE}.release_aborted_request", ("handle",)),
    HookPoint(
        f"{_BASE}.finish", ("handle", "outcome"), mentions=("release_aborted_request",)
    ),
    HookPoint(f"{_BASE}.free_kv_row", ("kv", "ranges")),
    HookPoint(f"{_BASE}.reset"),
    HookPoint(f"{_BASE}.evict", ("params",)),
    HookPoint(f"{_BASE}.inc_lock_ref", ("node",)),
    HookPoint(f"{_BASE}.dec_lock_ref", ("node", "params")),
    HookPoint(f"{_BASE}.prefix_device_indices", ("req",)),
    HookPoint(f"{_BASE}.dfs_weight_order", ("node_handles",)),
    HookPoint(f"{_MATCH}.device_prefix_len"),
    HookPoint(f"{_MATCH}.cache_protected_len"),
    HookPoint(f"{_BASE}.take_events"),
    HookPoint(
        f"{_COMPONENTS}.kv_events_publisher:SchedulerKvEventsPublisher"
        ".publish_kv_events",
        mentions=("tree_cache", "take_events"),
    ),
    HookPoint(
        f"{_EVENTS}.__init__",
        ("enabled", "page_size", "dynamo_format", "lora_names"),
    ),
    HookPoint(
        f"{_EVENTS}.record_store",
        ("node",),
        mentions=("_node_event_hash_values", "_parent_block_hash", "key"),
    ),
    HookPoint(f"{_EVENTS}.record_remove", ("node",)),
    HookPoint(
        f"{_EVENTS}._parent_block_hash",
        ("node",),
        mentions=("parent", "hash_value", "event_hash_value"),
    ),
    HookPoint(f"{_EVENTS}.record_all_cleared"),
    HookPoint(f"{_EVENTS}.take"),
    HookPoint(
        f"{_SRT}.mem_cache.radix_cache:RadixKey.__init__",
        ("token_ids", "extra_key", "cache_salt"),
    ),
    HookPoint(f"{_PARAMS}.enable_metrics"),
    HookPoint(f"{_PARAMS}.enable_kv_cache_events"),
    HookPoint(f"{_PARAMS}.dynamo_kv_event_format"),
    HookPoint(f"{_PARAMS}.kv_event_lora_names"),
    HookPoint(
        f"{_SRT}.mem_cache.common:release_kv_cache",
        ("req", "tree_cache", "checkpoint"),
        mentions=("free_kv_row", "unlock", "on_release"),
    ),
    HookPoint(f"{_BATCH}:ReqKvInfo.kv_committed_len"),
    HookPoint(f"{_BATCH}:ReqKvInfo.kv_allocated_len"),
    HookPoint(f"{_BATCH}:ReqKvInfo.mamba_pool_idx"),
    HookPoint(
        f"{_BATCH}:Req.__init__",
        mentions=(
            "skip_radix_cache_insert",
            "extra_key",
            "cache_salt",
            "input_embeds",
            "positional_embed_overrides",
            "return_hidden_states",
            "multimodal_inputs",
            "cache_request_handle",
            "sampling_params",
            "cached_tokens_device",
            "cached_tokens_host",
            "cached_tokens_storage",
            "_cache_breakdown_computed",
        ),
    ),
    HookPoint(f"{_BATCH}:Req.finished", ("self",)),
    HookPoint(f"{_SRT}.sampling.sampling_params:SamplingParams.custom_params"),
)

SCHEDULER_HOOKS = (
    HookPoint(f"{_SCHEDULER}.get_prefill_adder_class", ("self",)),
    HookPoint(f"{_SCHEDULER}.get_next_batch_to_run", ("running_batch", "last_batch")),
    HookPoint(
        f"{_SCHEDULER}.get_next_disagg_prefill_batch_to_run",
        ("running_batch", "last_batch"),
        mentions=("process_prefill_chunk", "get_new_batch_prefill"),
    ),
    # Sends what a paused prompt has so far, and keeps what is sampled for it.
    HookPoint(
        f"{_SCHEDULER}.process_batch_result_disagg_prefill",
        ("batch", "result"),
        mentions=("inflight_middle_chunks", "tmp_end_idx", "send_kv_chunk"),
    ),
    # Builds the cache of a backend even where caches are switched off.
    HookPoint(
        f"{_SRT}.arg_groups.model_hook:handle_model_capability_adjustments",
        ("server_args",),
        mentions=("disable_radix_cache", "is_embedding", "chunked_prefill_size"),
    ),
    # Sends a hit's pages ahead of the pass, unless it is told not to.
    HookPoint(
        f"{_SCHEDULER}.maybe_send_cached_prefix_chunk",
        ("req", "allow_send"),
        mentions=("allow_send", "host_hit_length", "start_send_idx"),
    ),
    # The delay is for new requests, and `chunked_req` stands for those that go on.
    HookPoint(
        f"{_SCHEDULER}._get_new_batch_prefill_raw",
        mentions=("min_free_slots_delayer", "chunked_req"),
    ),
    HookPoint(f"{_SCHEDULER}.on_idle", ("self",), mentions=("maybe_sleep_on_idle",)),
    HookPoint(f"{_SCHEDULER}.maybe_sleep_on_idle", ("self",)),
    HookPoint(
        f"{_SCHEDULER}.is_disable_overlap_for_batch",
        ("batch", "last_batch"),
        mentions=("require_mlp_sync",),
    ),
    # Handles the last results before it launches a batch, if told to.
    HookPoint(
        f"{_SCHEDULER}.event_loop_overlap",
        mentions=("is_disable_overlap_for_batch", "result_queue", "run_batch"),
    ),
    HookPoint(
        f"{_SRT}.managers.scheduler_components.output_streamer"
        ":SchedulerOutputStreamer.stream_output",
        ("reqs", "return_logprob", "skip_req"),
    ),
    HookPoint(
        f"{_SRT}.managers.scheduler_components.output_streamer"
        ":SchedulerOutputStreamer._stream_output_generation",
        mentions=("finished_output",),
    ),
    HookPoint(f"{_BATCH}:release_req", ("req", "tree_cache")),
    HookPoint(
        f"{_BATCH}:retract_all",
        (
            "reqs",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "tree_cache",
            "hisparse_coordinator",
        ),
    ),
    HookPoint(
        f"{_COMPONENTS}.request_receiver:SchedulerRequestReceiver"
        "._broadcast_reqs_across_ranks",
        ("recv_reqs", "local_reqs"),
        mentions=("broadcast_pyobj", "attn_cp_tp_broadcast_pyobj"),
    ),
    HookPoint(
        f"{_COMPONENTS}.request_receiver:SchedulerRequestReceiver.recv_requests",
        mentions=("_broadcast_reqs_across_ranks",),
    ),
    # What comes from the stage before, and goes on to the next one.
    HookPoint(
        f"{_SCHEDULER}._pp_send_pyobj_to_next_stage",
        ("data", "async_send"),
        mentions=("point_to_point_pyobj",),
    ),
    HookPoint(
        f"{_SCHEDULER}.event_loop_pp",
        mentions=(
            "_pp_send_pyobj_to_next_stage",
            "last_mbs",
        ),
    ),
    # Every request that leaves the queue without being run passes through here.
    HookPoint(
        f"{_SCHEDULER}._release_aborted_request",
        ("req",),
        mentions=("finish", "cache_request_handle"),
    ),
    HookPoint(
        f"{_SCHEDULER}.abort_request",
        ("recv_req",),
        mentions=("_release_aborted_request", "to_finish"),
    ),
    HookPoint(
        f"{_SCHEDULER}._abort_on_queued_limit",
        ("recv_req",),
        mentions=("_release_aborted_request", "waiting_queue"),
    ),
    HookPoint(
        f"{_SCHEDULER}._poll_timeout_aborts", ("self",), mentions=("waiting_queue",)
    ),
    HookPoint(
        f"{_SCHEDULER}.pause_generation",
        ("recv_req",),
        mentions=("retract", "last_batch", "tmp_end_idx"),
    ),
    HookPoint(
        f"{_SCHEDULER}.process_pending_chunked_abort",
        ("self",),
        mentions=(
            "_pending_chunked_abort_req",
            "chunked_req",
            "_release_aborted_request",
        ),
    ),
    HookPoint(
        f"{_SRT}.managers.schedule_policy:SchedulePolicy.calc_priority",
        ("waiting_queue",),
        mentions=("tree_cache",),
    ),
    HookPoint(
        f"{_SRT}.managers.scheduler_components.invariant_checker"
        ":SchedulerInvariantChecker._get_total_uncached_sizes",
        mentions=("_requests_owning_rows", "kv_private_tokens"),
    ),
    HookPoint(f"{_BATCH}:ScheduleBatch.filter_batch", ("reqs_to_exclude",)),
    HookPoint(
        f"{_SRT}.managers.scheduler_components.batch_result_processor"
        ":SchedulerBatchResultProcessor.process_batch_result_prefill",
        ("batch", "result"),
        mentions=("inflight_middle_chunks",),
    ),
    HookPoint(
        f"{_ADDER}.add_one_req",
        ("req", "has_chunked_req"),
        mentions=("negotiate_should_allow_prefill",),
    ),
    HookPoint(f"{_ADDER}._select_prefill_admission", ("req", "total_tokens")),
    HookPoint(f"{_ADDER}._check_prefill_budget", ("req", "chunk_limit")),
    HookPoint(f"{_ADDER}._update_prefill_budget", ("prefix_len",)),
    HookPoint(f"{_ADDER}._account_prefill_cache_admission", ("req", "prefix_len")),
    HookPoint(
        f"{_SCHEDULER}.get_num_allocatable_reqs",
        ("running_bs", "num_held_rows"),
        mentions=("pp_max_micro_batch_size",),
    ),
    HookPoint(
        f"{_SRT}.managers.schedule_policy:_PrefillAdmission",
    ),
    HookPoint(f"{_SRT}.mem_cache.allocation:alloc_for_extend", ("batch",)),
    HookPoint(
        f"{_SRT}.mem_cache.allocation:alloc_for_decode", ("batch", "token_per_req")
    ),
    HookPoint(
        f"{_BATCH}:ScheduleBatch.prepare_for_extend",
        mentions=("prefix_lens", "extend_num_tokens", "_cache_breakdown_computed"),
    ),
    HookPoint(f"{_BATCH}:Req.init_next_round_input", ("tree_cache",)),
    HookPoint(
        f"{_SRT}.managers.tp_worker:TpModelWorker.forward_batch_generation", ("batch",)
    ),
    HookPoint(f"{_SRT}.runtime_context:get_disagg"),
    HookPoint(f"{_SRT}.runtime_context:get_memory"),
    HookPoint(f"{_SRT}.runtime_context:get_schedule"),
    HookPoint(f"{_SRT}.runtime_context:get_context"),
    HookPoint(f"{_SRT}.runtime_context:get_parallel"),
    HookPoint(f"{_SRT}.runtime_context:get_serving"),
)

_GDN = f"{_SRT}.layers.attention.linear.gdn_backend:GDNAttnBackend"
_GRAPHS = f"{_SRT}.model_executor.cuda_graph_config"
_KDA = f"{_SRT}.layers.attention.linear.kda_backend:KDAAttnBackend"
_LIGHTNING = (
    f"{_SRT}.layers.attention.linear.lightning_backend:LightningAttentionBackend"
)
_METADATA = f"{_SRT}.layers.attention.mamba.mamba2_metadata:ForwardMetadata"
_FORWARD_BATCH = f"{_SRT}.model_executor.forward_batch_info"
_UPDATER = f"{_COMPONENTS}.weight_updater:SchedulerWeightUpdaterManager"
_HYBRID = f"{_SRT}.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend"
_LINEAR_LAYER = f"{_SRT}.layers.radix_linear_attention:RadixLinearAttention"

KERNEL_HOOKS = (
    HookPoint(f"{_GRAPHS}:check_cuda_graph_backend", ("phase", "backend")),
    HookPoint(f"{_GRAPHS}:Phase.PREFILL"),
    HookPoint(f"{_GRAPHS}:Backend.FULL"),
    HookPoint(f"{_SRT}.configs.hybrid_arch:mamba2_config", ("model_config",)),
    *(
        HookPoint(f"{_SRT}.configs:{name}")
        for name in (
            "JetNemotronConfig",
            "JetVLMConfig",
            "Lfm2Config",
            "Lfm2MoeConfig",
            "Lfm2VlConfig",
            "ZayaConfig",
            "MambaConfig",
            "FalconMambaConfig",
            "InklingModelConfig",
            "InklingMMConfig",
            "FalconH1Config",
        )
    ),
    HookPoint(
        f"{_GDN}.forward_extend",
        ("layer", "forward_batch", "mixed_qkv", "a", "b"),
        mentions=("linear_attn_output", "mis_metadata", "mamba2_layer_cache"),
        own=True,
    ),
    HookPoint(
        f"{_GDN}.forward_decode",
        ("layer", "forward_batch", "mixed_qkv", "a", "b"),
        mentions=("fused_qkvzba_split_reshape_cat_contiguous", "mamba_cache_indices"),
        own=True,
    ),
    HookPoint(
        f"{_KDA}.forward_extend",
        ("layer", "forward_batch", "mixed_qkv", "a", "b"),
        mentions=("prefill_graph_metadata", "mamba2_layer_cache", "transpose"),
        own=True,
    ),
    HookPoint(
        f"{_KDA}.forward_decode",
        ("layer", "forward_batch", "mixed_qkv", "a", "b"),
        mentions=("mamba_cache_indices", "silu", "transpose"),
        own=True,
    ),
    HookPoint(f"{_GRAPHS}:Backend.BREAKABLE"),
    *(
        point
        for backend, own in ((_GDN, False), (_KDA, True))
        for point in (
            HookPoint(f"{backend}.supports_prefill_graph_extend", ("self",), own=own),
            HookPoint(f"{backend}.prefill_graph_extend_active", ("self",), own=own),
            HookPoint(
                f"{backend}.init_prefill_graph_metadata",
                ("self", "forward_batch"),
                closed=True,
                own=own,
            ),
            HookPoint(
                f"{backend}.refresh_prefill_graph_metadata",
                ("self", "meta", "forward_batch"),
                closed=True,
                own=own,
            ),
        )
    ),
    HookPoint(f"{_GDN}.__init__", ("self", "model_runner")),
    HookPoint(f"{_SRT}.environ:Envs.SGLANG_KDA_PREFILL_GRAPH_MAX_SEQS"),
    HookPoint(
        f"{_HYBRID}.__init__",
        mentions=(
            "supports_prefill_graph_extend",
            "prefill_graph_max_seqs",
            "prefill_cuda_graph_max_batch_size",
        ),
    ),
    HookPoint(
        f"{_HYBRID}.init_forward_metadata_out_graph",
        ("self", "forward_batch", "in_capture"),
        closed=True,
        own=True,
    ),
    HookPoint(f"{_HYBRID}._is_plain_extend", ("forward_batch",)),
    HookPoint(f"{_SRT}.runtime_context:attention_backends"),
    HookPoint(
        f"{_SRT}.model_executor.runner.prefill_cuda_graph_runner"
        ":PrefillCudaGraphRunner._prepare_forward_metadata_for_replay",
        mentions=("padded_view", "input_ids", "init_forward_metadata_out_graph"),
    ),
    HookPoint(
        f"{_HYBRID}.prepare_forward_metadata_for_breakable_cuda_graph_replay",
        mentions=("refresh_prefill_graph_metadata",),
    ),
    HookPoint(
        f"{_SRT}.layers.radix_linear_attention:RadixLinearAttention.forward",
        mentions=("_linear_extend_in_graph",),
    ),
    HookPoint(f"{_KDA}.accept_lens_pool"),
    *(
        HookPoint(
            f"{_LIGHTNING}.forward_{phase}",
            ("q", "k", "v", "layer", "forward_batch"),
            mentions=("seg_la", "temporal", "tp_q_head_num", "v_head_dim"),
            own=True,
        )
        for phase in ("extend", "decode")
    ),
    HookPoint(f"{_LIGHTNING}._linear_attention_entry", mentions=("tp_slope",)),
    HookPoint(f"{_SRT}.configs.hybrid_arch:hybrid_lightning_config", ("model_config",)),
    HookPoint(
        f"{_SRT}.layers.attention.linear.kernels.gdn_flashinfer"
        ":is_flashinfer_gdn_prefill_available",
        (),
    ),
    HookPoint(
        f"{_SRT}.layers.attention.linear.utils:resolve_linear_attn_backends",
        mentions=(
            "linear_attn_backend",
            "linear_attn_decode_backend",
            "linear_attn_prefill_backend",
        ),
    ),
    HookPoint(f"{_SRT}.configs.hybrid_arch:linear_attn_model_spec", ("model_config",)),
    *(
        HookPoint(
            f"{_SRT}.models.{target}.forward",
            ("self", "hidden_states", "forward_batch"),
            closed=True,
            own=True,
            mentions=(
                "conv_state_metadata",
                "in_proj",
                "conv_weight",
                "conv_bias",
                "out_proj",
            ),
        )
        for target in ("lfm2:Lfm2ShortConv", "lfm2_moe:Lfm2MoeShortConv")
    ),
    HookPoint(
        f"{_SRT}.layers.attention.linear.short_conv_backend"
        ":ShortConvAttnBackend.conv_state_metadata",
        ("layer_id", "forward_batch"),
        mentions=("cache_indices", "layer_cache"),
    ),
    HookPoint(
        f"{_SRT}.layers.attention.hybrid_linear_attn_backend"
        ":ShortConvHybridAttnBackend.__init__",
        mentions=("short_conv_backend",),
    ),
    HookPoint(f"{_SRT}.model_executor.forward_context:get_attn_backend"),
    HookPoint(
        f"{_LINEAR_LAYER}.__init__",
        mentions=(
            "conv_weights",
            "bias",
            "activation",
            "A_log",
            "dt_bias",
            "num_k_heads",
            "num_v_heads",
            "head_k_dim",
            "head_v_dim",
            "lower_bound",
        ),
    ),
    HookPoint(
        "sglang.kernels.ops.attention.triton_gdn_fused_proj"
        ":fused_qkvzba_split_reshape_cat_contiguous",
        (
            "mixed_qkvz",
            "mixed_ba",
            "num_heads_qk",
            "num_heads_v",
            "head_qk",
            "head_v",
        ),
    ),
    HookPoint(
        f"{_SRT}.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.forward",
        (
            "self",
            "mixer",
            "hidden_states",
            "output",
            "layer_id",
            "forward_batch",
            "mup_vector",
            "use_triton_causal_conv",
        ),
        closed=True,
        own=True,
        mentions=("mamba2_layer_cache", "forward_metadata"),
    ),
    HookPoint(
        f"{_SRT}.layers.attention.mamba.mamba:MambaMixer2.forward",
        mentions=(
            "in_proj",
            "conv1d",
            "norm",
            "out_proj",
            "intermediate_size",
            "conv_dim",
            "num_heads",
            "tp_size",
            "activation",
            "A",
            "D",
            "dt_bias",
            "num_prefills",
            "num_prefill_tokens",
            "num_decodes",
            "is_target_verify",
        ),
    ),
    HookPoint(
        _METADATA,
        mentions=(
            "query_start_loc",
            "mamba_cache_indices",
            "has_mamba_track_mask",
            "replayssm_write_pos",
            "logical_num_tokens",
        ),
        open=True,
    ),
    HookPoint(f"{_FORWARD_BATCH}:ForwardMode.is_extend_without_speculative"),
    HookPoint(
        f"{_FORWARD_BATCH}:ForwardBatch",
        mentions=(
            "extend_prefix_lens",
            "extend_prefix_lens_cpu",
            "extend_seq_lens_cpu",
            "mamba_track_mask",
            "tbo_parent_token_range",
        ),
    ),
    HookPoint(f"{_UPDATER}.record_weight_version_after_update"),
    HookPoint(
        f"{_UPDATER}.update_weights_from_disk",
        ("recv_req",),
        mentions=("record_weight_version_after_update",),
    ),
    HookPoint(f"{_UPDATER}.update_weights_from_ipc", ("recv_req",)),
    HookPoint(f"{_UPDATER}.begin_weight_update", ("recv_req",)),
    # Only between `begin_weight_update` and `end_weight_update`.
    HookPoint(f"{_UPDATER}.update_weights_from_tensor", mentions=("_session",)),
    HookPoint(f"{_UPDATER}.update_weights_from_distributed", mentions=("_session",)),
    HookPoint(f"{_UPDATER}.end_weight_update", ("recv_req",)),
    HookPoint(
        f"{_UPDATER}.release_memory_occupation",
        ("recv_req",),
        mentions=("flush_cache", "pause"),
    ),
    HookPoint(f"{_UPDATER}.resume_memory_occupation", ("recv_req",)),
)
"""For state layers on our kernels: `kernels`."""

_SPECULATIVE = f"{_SRT}.speculative"

DRAFT_HOOKS = (
    HookPoint(
        f"{_SPECULATIVE}.spec_info:SpeculativeAlgorithm.create_worker", ("server_args",)
    ),
    HookPoint(
        f"{_SPECULATIVE}.spec_registry:CustomSpecAlgo.create_worker", ("server_args",)
    ),
    HookPoint(f"{_SPECULATIVE}.spec_registry:get_spec", ("name",)),
    HookPoint(
        f"{_SRT}.managers.utils:GenerationBatchResult",
        mentions=("num_correct_drafts_per_req_cpu", "speculative_num_draft_tokens"),
    ),
    HookPoint(
        f"{_SPECULATIVE}.eagle_utils:eagle_sample",
        ("verify_input", "batch", "logits_output"),
        mentions=("accept_index", "accept_lens", "draft_token_num", "predict"),
    ),
    HookPoint(
        f"{_SPECULATIVE}.eagle_utils:_eagle_prefill_tail_tokens",
        ("batch", "next_token_ids"),
        closed=True,
        mentions=("chunked_req",),
    ),
    HookPoint(
        f"{_BATCH}:Req.__init__", mentions=("full_untruncated_fill_ids", "extend_end")
    ),
    # What follows the sampling commits states and moves tokens by what it returned.
    HookPoint(
        f"{_SPECULATIVE}.spec_utils:commit_mamba_states_after_verify",
        ("batch", "accept_lens", "accept_index"),
        mentions=("update_mamba_state_after_mtp_verify",),
    ),
    HookPoint(
        f"{_SPECULATIVE}.spec_utils:move_accept_tokens_to_target_kvcache",
        ("batch", "accept_index"),
        mentions=("fill_accept_out_cache_loc_func",),
    ),
    HookPoint(
        f"{_COMPONENTS}.batch_result_processor:SchedulerBatchResultProcessor"
        "._resolve_spec_v2_tokens",
        ("self", "result", "batch"),
        closed=True,
        mentions=("num_correct_drafts_per_req_cpu", "is_retracted", "kv_committed_len"),
    ),
    HookPoint(
        f"{_SRT}.mem_cache.allocation:alloc_for_spec_decode",
        ("tree_cache", "req_to_token_pool", "reqs", "nxt_kv_lens_cpu"),
        mentions=("kv_allocated_len",),
    ),
    HookPoint(
        f"{_SPECULATIVE}.eagle_utils:eagle_prepare_for_decode",
        mentions=("alloc_for_spec_decode", "decode_batch_idx"),
    ),
    HookPoint(f"{_BATCH}:Req.update_finish_state", mentions=("finished_len",)),
    HookPoint(
        f"{_BATCH}:Req._check_token_based_finish",
        mentions=(
            "ignore_eos",
            "stop_token_ids",
            "eos_token_ids",
            "additional_stop_token_ids",
        ),
    ),
    HookPoint(f"{_BATCH}:Req.reset_for_retract", mentions=("decode_batch_idx",)),
    HookPoint(
        f"{_POOL}:MambaPool.SpeculativeState",
        mentions=("intermediate_ssm", "intermediate_conv_window"),
    ),
    HookPoint(
        f"{_SRT}.layers.attention.hybrid_linear_attn_backend"
        ":HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        mentions=("scatter_mamba_states_after_mtp_verify",),
    ),
    # A row of the scratch is a request's place in its batch.
    HookPoint(
        f"{_SRT}.layers.attention.linear.utils:build_verify_intermediate_state_indices",
        mentions=("arange",),
    ),
    HookPoint(
        f"{_SRT}.mem_cache.unified_draft_pool:draft_state_layer_classes", ("model",)
    ),
    HookPoint(f"{_CONFIGURATOR}.model"),
    HookPoint(f"{_SRT}.runtime_context:get_spec"),
    HookPoint(f"{_SRT}.runtime_context:max_speculative_num_draft_tokens"),
    HookPoint(
        f"{_CONFIGURATOR}._init_pools",
        mentions=("is_draft_worker", "mamba_spec_state_size"),
    ),
    # What elastic pools hold for drafts, before SGLang builds it.
    HookPoint(
        f"{_POOL}:MambaPool.__init__",
        ("spec_state_size", "speculative_num_draft_tokens", "speculative_eagle_topk"),
        mentions=(
            "_intermediate_conv_window_phys",
            "conv_window_dedup_enabled",
            "disable_conv_window_dedup",
            "is_kda",
        ),
    ),
    HookPoint(
        f"{_POOL}:conv_window_dedup_enabled",
        ("is_npu", "is_cpu", "speculative_eagle_topk", "is_kda"),
    ),
    HookPoint(
        f"{_POOL}:MHATokenToKVPool._init_kv_copy_and_warmup",
        ("self",),
        mentions=("_kv_copy_config",),
    ),
    HookPoint(
        f"{_POOL}:MHATokenToKVPool._move_kv_cache_impl",
        mentions=("use_native_move_kv_cache",),
    ),
    HookPoint(
        f"{_SIZES}:DefaultPoolConfigurator._compute_cell_size", ("kvc", "num_layers")
    ),
    HookPoint(
        f"{_SRT}.mem_cache.kv_cache_configurator:calculate_mla_kv_cache_dim",
        ("model_config", "kv_cache_dtype"),
    ),
    HookPoint(f"{_CONFIGURATOR}.draft_attn_tp_size"),
    HookPoint(
        f"{_CONFIGURATOR}._build_hybrid_linear_kv_pool", mentions=("is_draft_worker",)
    ),
    HookPoint(
        f"{_SRT}.model_executor.model_runner_components.spec_aux_hidden_state"
        ":SpecAuxHiddenStateConfig",
        mentions=("draft_model_config", "draft_kv_num_layers"),
    ),
    HookPoint(
        f"{_SRT}.layers.attention.linear.utils:resolve_linear_attn_backends",
        mentions=("linear_attn_verify_backend",),
    ),
    # Batches are padded to the sizes of graphs, which write rows of the scratch.
    HookPoint(
        f"{_SRT}.model_executor.runner.base_cuda_graph_runner"
        ":get_batch_sizes_to_capture",
        mentions=("cuda_graph_config", "num_max_requests", "bs"),
    ),
)
"""For speculative decoding."""

_FLASH = f"{_SPECULATIVE}.dflash_worker_v2:DFlashWorkerV2"
_SPARK = f"{_SPECULATIVE}.dspark_components"

BLOCK_DRAFT_HOOKS = (
    HookPoint(
        f"{_FLASH}._accept_block",
        ("self", "candidates", "prefix_lens"),
        mentions=("accept_len", "commit_lens", "bonus", "out_tokens", "new_seq_lens"),
    ),
    # What it returns is what states, the draft model's KV and the next step begin with.
    HookPoint(
        f"{_FLASH}.forward_batch_generation",
        ("self", "batch"),
        mentions=(
            "_accept_block",
            "_update_target_mamba_state_after_verify",
            "_append_target_hidden_to_draft_kv_by_loc",
            "_make_next_draft_input_decode",
            "on_publish",
            "prefix_lens",
            "speculative_num_draft_tokens",
        ),
    ),
    HookPoint(
        f"{_FLASH}._update_target_mamba_state_after_verify",
        mentions=("update_mamba_state_after_mtp_verify", "commit_lens"),
    ),
    HookPoint(
        f"{_SPARK}.dspark_verify:TargetVerifyExecutor.accept_and_finalize",
        ("self", "prefix_lens"),
        mentions=("build_accept_outs", "folded_accept"),
    ),
    HookPoint(
        f"{_SPARK}.dspark_verify:AcceptOuts",
        mentions=(
            "correct_len",
            "bonus",
            "commit_lens",
            "new_seq_lens",
            "out_tokens",
        ),
    ),
    HookPoint(
        f"{_SPARK}.dspark_worker_v2:DSparkWorkerV2.__init__",
        # With numbers of drafts that are fixed, no graph accepts but DeepSeek's.
        mentions=("_verify_executor", "is_compact_mode", "static_epilogue_supported"),
    ),
    HookPoint(
        f"{_SPARK}.dspark_worker_v2:DSparkWorkerV2._forward_decode",
        mentions=(
            "_verify_executor",
            "accept_and_finalize",
            "_commit_target_mamba_states_after_verify",
            "commit_hidden",
            "make_next_draft_input",
            "on_publish",
            "prefix_lens",
        ),
    ),
    HookPoint(
        f"{_SPARK}.dspark_worker_v2:DSparkWorkerV2"
        "._commit_target_mamba_states_after_verify",
        mentions=("update_mamba_state_after_mtp_verify", "commit_lens"),
    ),
    HookPoint(
        f"{_SPECULATIVE}.ragged_verify:read_ragged_verify_mode",
        mentions=("SGLANG_RAGGED_VERIFY_MODE",),
    ),
    HookPoint(
        f"{_SPECULATIVE}.dflash_info_v2:DFlashDraftInputV2.prepare_for_decode",
        mentions=("alloc_for_spec_decode", "decode_batch_idx"),
    ),
    HookPoint(
        f"{_SRT}.model_executor.model_runner_components.spec_aux_hidden_state"
        ":_resolve_dflash_aux_hidden_state",
        mentions=("draft_model_config", "draft_kv_num_layers"),
    ),
    # Where no prefix cache is, KDA leaves the accepted state in the scratch.
    HookPoint(
        f"{_SRT}.layers.attention.linear.kda_backend"
        ":KDAAttnBackend._can_fuse_accept_state",
        mentions=("disable_radix_cache",),
    ),
)
"""For draft models that propose a block at once: DFLASH and DSPARK."""

REPLAY_HOOKS = (
    HookPoint(
        f"{_POOL}:HybridReqToTokenPool._init_mamba_pool",
        ("speculative_num_draft_tokens",),
        mentions=("mamba_map", "speculative_num_draft_tokens"),
    ),
    HookPoint(
        f"{_POOL}:HybridReqToTokenPool.__init__",
        mentions=("_init_mamba_pool", "speculative_num_draft_tokens"),
    ),
    HookPoint(
        f"{_POOL}:MambaPool.__init__",
        ("speculative_num_draft_tokens",),
        mentions=("State", "SpeculativeState"),
    ),
    HookPoint(
        f"{_SRT}.layers.attention.hybrid_linear_attn_backend"
        ":HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        ("self", "last_correct_step_indices"),
        mentions=("linear_attn_backend", "mamba_cache_indices"),
    ),
    HookPoint(
        _METADATA,
        mentions=(
            "query_start_loc",
            "mamba_cache_indices",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "retrieve_parent_token",
        ),
        open=True,
    ),
    HookPoint(
        f"{_SRT}.layers.attention.hybrid_linear_attn_backend"
        ":MambaAttnBackendBase.__init__",
        mentions=("is_draft_worker", "topk"),
    ),
    # Links and parents of trees lie at addresses that a graph knows.
    HookPoint(
        f"{_SRT}.layers.attention.hybrid_linear_attn_backend"
        ":MambaAttnBackendBase._replay_metadata",
        mentions=("retrieve_parent_token_list", "state_indices_list"),
    ),
    HookPoint(f"{_FORWARD_BATCH}:ForwardMode.is_target_verify"),
    HookPoint(f"{_FORWARD_BATCH}:ForwardMode.is_idle"),
    HookPoint(
        f"{_SRT}.configs.mamba_utils:BaseLinearStateParams",
        mentions=("is_kda", "layers", "dtype"),
    ),
    HookPoint(f"{_SRT}.utils.common:get_eager_max_batch_size", ("max_batch_size",)),
    HookPoint(
        f"{_SRT}.utils.common:get_cuda_graph_max_batch_size", ("max_batch_size",)
    ),
    HookPoint(
        f"{_SRT}.arg_groups.speculative_hook:_handle_ngram",
        mentions=("max_running_requests",),
    ),
)
"""For drafts that are recorded: `draft_states`."""

_MESSAGES = f"{_SRT}.managers.io_struct"
_SERVER = f"{_SRT}.entrypoints.http_server"

ORDER_HOOKS = (
    HookPoint(f"{_SRT}.managers.tokenizer_manager:TokenizerManager.__init__", own=True),
    HookPoint(f"{_SCHEDULER}.handle_dumper_control", ("self", "recv_req"), own=True),
    HookPoint(_SCHEDULER, mentions=("DumperControlReqInput", "handle_dumper_control")),
    HookPoint(
        f"{_SCHEDULER}.process_input_requests",
        mentions=("_request_dispatcher", "send_control_output"),
    ),
    HookPoint(f"{_MESSAGES}:DumperControlReqInput.method"),
    HookPoint(f"{_MESSAGES}:DumperControlReqInput.body"),
    HookPoint(f"{_MESSAGES}:DumperControlReqOutput.success"),
    HookPoint(f"{_MESSAGES}:DumperControlReqOutput.response"),
    HookPoint(f"{_MESSAGES}:DumperControlReqOutput.error"),
)
"""How orders about saved sessions get to the schedulers."""

SAVED_SESSION_HOOKS = (
    HookPoint(f"{_SERVER}:app"),
    HookPoint(f"{_SERVER}:get_global_state", ()),
    HookPoint(f"{_SERVER}:_GlobalState.tokenizer_manager"),
    HookPoint(
        f"{_SRT}.managers.tokenizer_control_mixin:TokenizerControlMixin.dumper_control",
        ("self", "obj"),
    ),
    HookPoint(
        f"{_SRT}.managers.tokenizer_manager:TokenizerManager",
        mentions=("model_config", "context_len"),
    ),
    HookPoint(f"{_SRT}.utils.auth:auth_level", ("level",)),
    HookPoint(f"{_SRT}.utils.auth:AuthLevel", mentions=("ADMIN_OPTIONAL",)),
    HookPoint(
        f"{_SRT}.utils.auth:_get_auth_level_from_app_and_scope",
        mentions=("endpoint", "_auth_level"),
    ),
    # What is asked of the server itself.
    HookPoint(f"{_SRT}.runtime_context:get_serving", ()),
    HookPoint(f"{_SERVER}:openai_v1_tokenize", ("request", "raw_request")),
    HookPoint(f"{_SRT}.entrypoints.openai.protocol:TokenizeRequest.prompt"),
    HookPoint(f"{_SRT}.entrypoints.openai.protocol:TokenizeRequest.messages"),
    HookPoint(f"{_SRT}.entrypoints.openai.protocol:TokenizeResponse.tokens"),
)
"""What endpoints for saved sessions rely on, in the process with the server."""

HIT_CHECK_HOOKS = (
    HookPoint(f"{_SCHEDULER}.handle_generate_request", ("self", "recv_req")),
    HookPoint(
        f"{_SRT}.managers.io_struct:TokenizedGenerateReqInput",
        mentions=(
            "input_text",
            "input_ids",
            "input_embeds",
            "mm_inputs",
            "token_type_ids",
            "sampling_params",
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
            "token_ids_logprob",
            "stream",
            "extra_key",
            "cache_salt",
        ),
    ),
    HookPoint(
        f"{_SRT}.sampling.sampling_params:SamplingParams.normalize",
        ("self", "tokenizer"),
    ),
    HookPoint(
        f"{_BATCH}:Req.__init__",
        mentions=("lora_id", "output_top_logprobs_idx", "output_top_logprobs_val"),
    ),
)
"""Requests of our own, and what comes of them."""

ENGINE_HOOKS = (
    COMMAND_LINE_HOOKS
    + ARGUMENT_HOOKS
    + MEMORY_HOOKS
    + INDEX_HOOKS
    + COMPRESSED_HOOKS
    + WINDOW_HOOKS
    + CACHE_HOOKS
    + SCHEDULER_HOOKS
    + KERNEL_HOOKS
    + DRAFT_HOOKS
    + REPLAY_HOOKS
    + ORDER_HOOKS
)
"""What every process of an engine with the plugin relies on."""

HOOKS = ENGINE_HOOKS + BLOCK_DRAFT_HOOKS + SAVED_SESSION_HOOKS + HIT_CHECK_HOOKS
"""Every point, as the compatibility checks read them."""
