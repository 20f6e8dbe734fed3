# SPDX-License-Identifier: Apache-2.0
"""In which versions of SGLang each patch of the CPU platform is needed."""

from __future__ import annotations

from hybrid_plugin.sglang_cpu.experts import COMPUTES_EXPERTS
from hybrid_plugin.sglang_cpu.headless_models import DIVIDES_HEADS
from hybrid_plugin.upstream.hookpoints import HookPoint
from hybrid_plugin.upstream.patch_expiry import Need

_SRT = "sglang.srt"
_SCHEDULER = f"{_SRT}.managers.scheduler:Scheduler"


def _while_there(target: str, *mentions: str) -> Need:
    return Need(HookPoint(target, mentions=mentions))


NEEDED = {
    "cpu.keep_inputs_in_float32": _while_there(
        f"{_SRT}.configs.mamba_utils:mamba2_state_dtype", "SGLANG_MAMBA_CONV_DTYPE"
    ),
    "cpu.HybridCpu.get_device": _while_there(
        f"{_SRT}.platforms.cpu:CpuDeviceMixin.get_device", "torch", "device"
    ),
    "cpu.leave_a_core": _while_there(
        f"{_SRT}.distributed.bootstrap:_init_cpu_threads_env", "sgl_kernel"
    ),
    "cpu.save_no_memory_of_sglang_s": _while_there(
        f"{_SRT}.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter.create",
        "_TorchMemorySaverAdapterReal",
    ),
    "adapters.adapt_in_torch": _while_there(
        f"{_SRT}.arg_groups.fields.lora:Lora", "csgmv"
    ),
    "adapters.adapt_in_plain_memory": _while_there(
        f"{_SRT}.lora.backend.torch_backend:TorchNativeLoRABackend.prepare_lora_batch",
        "pin_memory",
    ),
    "cpu.leave_the_cores_when_idle": _while_there(_SCHEDULER, "sleep_on_idle"),
    "cpu.wait_for_no_gpu_s_dump": _while_there(
        f"{_SRT}.managers.tokenizer_manager:TokenizerManager.dump_requests_before_crash",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH",
    ),
    "transfers.send_prefixes_with_the_rest": _while_there(
        f"{_SCHEDULER}.maybe_send_cached_prefix_chunk", "Event", "forward_stream"
    ),
    "transfers.register_memory_of_the_cpu": _while_there(
        f"{_SRT}.disaggregation.nixl.conn:NixlKVManager.register_buffer_to_engine",
        "VRAM",
    ),
    "experts.leave_experts_to_their_rank": _while_there(
        COMPUTES_EXPERTS, "topk_ids", "scatter_"
    ),
    "headless_models.leave_models_without_heads": _while_there(
        DIVIDES_HEADS, "num_attention_heads"
    ),
    "torch_shims.answer_with_the_cpu_module": _while_there(
        f"{_SRT}.models.qwen3_next:Qwen3GatedDeltaNet", "get_device_module"
    ),
    "torch_shims.leave_memory_unpinned": _while_there(
        f"{_SRT}.managers.schedule_batch:ScheduleBatch.prepare_for_decode",
        "pin_memory",
    ),
    "kernels.import_tree_masks": _while_there(
        "sglang.kernels.ops.speculative.reconstruct_tree"
        ":reconstruct_indices_from_tree_mask_func",
        "reconstruct_indices_from_tree_mask",
    ),
    "cpu.mix_streams_in_torch": _while_there(
        "sglang.kernels.ops.layernorm.mhc:_use_tilelang_mhc_pre",
        "SGLANG_OPT_USE_TILELANG_MHC_PRE",
    ),
    "sparse_latents.read_chosen_latents": _while_there(
        f"{_SRT}.layers.attention.dsa_backend:DeepseekSparseAttnBackend"
    ),
    "sparse_latents.plan_in_plain_memory": _while_there(
        f"{_SRT}.layers.attention.dsa.kpool_plan:_kpool_plan_to_gpu", "pin_memory"
    ),
    "compressed_keys.choose_in_torch": _while_there(
        f"{_SRT}.layers.attention.qsa.qsa_indexer:QSAIndexer._forward_impl"
    ),
    "compressed_keys.choose_as_few_as_asked": _while_there(
        f"{_SRT}.layers.attention.qsa.config:_parse_compressed",
        "_COMPRESSED_BLOCK_TOPK",
    ),
    "compressed_keys.keep_waiting_keys_in_float32": _while_there(
        f"{_SRT}.mem_cache.qsa_kv_pool:QSATokenToKVPool", "index_state_dtype"
    ),
    "residual_streams.mix_in_the_models_type": _while_there(
        f"{_SRT}.layers.hyperconnection:GatedResidual.__init__",
        "params_dtype",
        "compile",
    ),
    "residual_streams.embed_in_the_models_type": _while_there(
        f"{_SRT}.models.qwen4_exp:Qwen4ExpNGramEmbedding.__init__", "bfloat16"
    ),
    "torch_shims.name_no_gpu": _while_there(
        f"{_SRT}.arg_groups.overrides:_dsa_kv_cache_dtype_default",
        "get_device_capability",
    ),
    "draft_attention.verify_with_a_mask": _while_there(
        f"{_SRT}.layers.attention.torch_native_backend:TorchNativeAttnBackend"
        ".forward_extend",
        "extend_prefix_lens",
    ),
    "draft_blocks.take_dspark": _while_there(
        f"{_SRT}.arg_groups.speculative_hook:_handle_dspark", "xpu", "resolving_view"
    ),
    "draft_blocks.attend_in_torch": _while_there(
        f"{_SRT}.speculative.draft_worker_common"
        ":resolve_draft_worker_attention_backend",
        "DRAFT_ATTENTION_BACKEND_CHOICES",
    ),
    "draft_blocks.embed_in_the_models_type": _while_there(
        f"{_SRT}.model_executor.model_runner:ModelRunner._extend_forward_kwargs",
        "bfloat16",
    ),
    "draft_blocks.sample_blocks": _while_there(
        f"{_SRT}.speculative.dflash_utils:is_dflash_sampling_verify_available",
        "_DFLASH_SAMPLING_VERIFY_AVAILABLE",
    ),
    "torch_shims.record_no_streams": _while_there(
        f"{_SRT}.speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation",
        "record_stream",
    ),
    "torch_shims.wait_for_no_gpu": _while_there(
        f"{_SRT}.models.qwen3_next:Qwen3NextForCausalLM.set_embed_and_head",
        "cuda",
        "synchronize",
    ),
    "window_attention.read_windows_in_their_pool": _while_there(
        f"{_SRT}.layers.attention.torch_native_backend:TorchNativeAttnBackend"
        ".forward_decode",
        "req_to_token_pool",
    ),
}
