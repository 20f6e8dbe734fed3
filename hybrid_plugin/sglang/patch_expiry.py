# SPDX-License-Identifier: Apache-2.0
"""In which versions of SGLang each patch of the adapter is needed."""

from __future__ import annotations

from hybrid_plugin.upstream.hookpoints import HookPoint
from hybrid_plugin.upstream.patch_expiry import Need

_SRT = "sglang.srt"
_SCHEDULER = f"{_SRT}.managers.scheduler:Scheduler"
_CONFIGURATOR = f"{_SRT}.mem_cache.kv_cache_configurator:KVCacheConfigurator"


def _while_there(target: str, *mentions: str) -> Need:
    return Need(HookPoint(target, mentions=mentions))


NEEDED = {
    "patches._take_session_orders": _while_there(
        f"{_SCHEDULER}.handle_dumper_control", "handle_request"
    ),
    "patches.hook_command_line": _while_there(
        f"{_SRT}.server_args:ServerArgs.add_cli_args"
    ),
    "patches._settle_arguments": _while_there(
        f"{_SRT}.arg_groups.resolution_hooks:register_resolution_hook"
    ),
    "patches._allow_paged_overlap": _while_there(
        f"{_SRT}.arg_groups.mamba_hook:validate_mamba_no_buffer", "page_size"
    ),
    "patches._divide_memory": _while_there(f"{_CONFIGURATOR}._calculate_mamba_ratio"),
    "patches._share_memory": _while_there(
        f"{_SRT}.mem_cache.memory_pool:MHATokenToKVPool._create_buffers_normal"
    ),
    "patches._find_rings_by_slots": _while_there(
        f"{_SRT}.mem_cache.memory_pool:DSATokenToKVPool"
        ".kpool_decode_update_index_cache",
        "req_pool_indices",
    ),
    "patches._find_pending_keys_by_slots": _while_there(
        f"{_SRT}.layers.attention.qwen_sparse_attn_backend:QwenSparseAttnBackend"
        "._qsa_build_write_plan",
        "_assert_async",
    ),
    "patches._leave_states_in_place": _while_there(
        f"{_SRT}.layers.attention.linear.gdn_backend:GDNAttnBackend",
        "needs_state_gather",
    ),
    "patches._convolve_beyond_32_bits": _while_there(
        f"{_SRT}.layers.attention.mamba.causal_conv1d:causal_conv1d_update",
        "causal_conv1d_update_kernel",
    ),
    "patches._find_chunks_on_the_host": _while_there(
        f"{_SRT}.layers.attention.mamba.mamba2_metadata:Mamba2Metadata.prepare_mixed",
        "_query_start_loc_to_chunk_indices_offsets",
    ),
    "patches._send_time": _while_there(
        f"{_SRT}.managers.scheduler_components.request_receiver"
        ":SchedulerRequestReceiver._broadcast_reqs_across_ranks"
    ),
    "patches._admit_by_demand": _while_there(f"{_SCHEDULER}.get_prefill_adder_class"),
    "patches._park_paused_requests": _while_there(
        f"{_SCHEDULER}.process_pending_chunked_abort", "chunked_req"
    ),
    "patches._answer_before_going_on": _while_there(
        f"{_SCHEDULER}.is_disable_overlap_for_batch",
        "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP",
    ),
    "patches._place_tokens": _while_there(
        f"{_SRT}.mem_cache.allocation:alloc_for_extend"
    ),
    "patches._run_commands": _while_there(
        f"{_SRT}.managers.tp_worker:TpModelWorker.forward_batch_generation"
    ),
    "patches._send_restored_pages_late": _while_there(
        f"{_SCHEDULER}.maybe_send_cached_prefix_chunk", "allow_send"
    ),
    "patches._verify_drafts": _while_there(
        f"{_SRT}.speculative.eagle_utils:eagle_sample", "accept_index"
    ),
    "patches._run_state_layers": _while_there(
        f"{_SRT}.layers.attention.linear.gdn_backend:GDNAttnBackend.forward_extend"
    ),
    "patches._fold_drafts": _while_there(
        f"{_SRT}.layers.attention.hybrid_linear_attn_backend"
        ":HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        "forward_metadata",
    ),
    "patches._capture_prefills": _while_there(
        f"{_SRT}.layers.attention.hybrid_linear_attn_backend"
        ":MambaAttnBackendBase.supports_prefill_graph_extend"
    ),
    "patches._release_memory": _while_there(
        f"{_SRT}.managers.scheduler_components.weight_updater"
        ":SchedulerWeightUpdaterManager.release_memory_occupation",
        "memory_saver_adapter",
    ),
    "patches._follow_weights": _while_there(
        f"{_SRT}.managers.scheduler_components.weight_updater"
        ":SchedulerWeightUpdaterManager.record_weight_version_after_update"
    ),
}
