# SPDX-License-Identifier: Apache-2.0
"""SGLang's GPU kernels that ours replace on a CPU, as data.

Symptom without them: the first forward pass fails, because Triton finds no driver.
Cause: models and attention backends import these functions by name; SGLang's
platform interface has no seam for them.
Fix: put a function of this package in the place of each.
Delete one when: SGLang asks its platform for it, or ships a PyTorch form.

Ours take exactly these parameters: a target that takes another one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_plugin.sglang_cpu.experts import EXPERTS
from hybrid_plugin.sglang_cpu.headless_models import DIVIDES_HEADS
from hybrid_plugin.upstream.hookpoints import HookPoint

_OPS = "sglang.kernels.ops"
_SRT = "sglang.srt"
_MIXER = "sglang.srt.layers.attention.mamba.mamba"


@dataclass(frozen=True, slots=True)
class Replacement:
    """A function of SGLang, and ours."""

    point: HookPoint
    ours: str
    """`module:function` within this package."""


@dataclass(frozen=True, slots=True)
class MissingName:
    """A global that SGLang's module binds on a GPU only, and our function for it."""

    point: HookPoint
    """Where it is read."""
    name: str
    ours: str
    """`module:function` within this package."""


def _replace(
    target: str, ours: str, *parameters: str, own: bool = False, root: str = _OPS
) -> Replacement:
    point = HookPoint(f"{root}.{target}", parameters, closed=True, own=own)
    return Replacement(point, ours)


_LINKS = (
    "retrieve_index",
    "retrieve_next_token",
    "retrieve_next_sibling",
)
_ROWS = ("req_pool_indices", "req_to_token", "start_offset", "end_offset")
_SPARSE = "sglang.srt.layers.attention.dsa"
_COMPRESSED = "sglang.srt.layers.attention.qsa"
_RING = ("tail_k", "tail_score")
_COMMIT = ("dst_indices_raw", "step_indices_raw")
_TRACK = (
    "cache_indices",
    "mamba_track_mask",
    "mamba_track_indices",
    "batch_size",
    "check_freed_slots",
)

REPLACEMENTS = (
    _replace(
        "mamba.causal_conv1d_triton:causal_conv1d_fn",
        "convolution:prefill",
        "x",
        "weight",
        "bias",
        "conv_states",
        "query_start_loc",
        "seq_lens_cpu",
        "cache_indices",
        "has_initial_state",
        "activation",
        "pad_slot_id",
        "validate_data",
        "block_table",
    ),
    _replace(
        "mamba.causal_conv1d_triton:causal_conv1d_update",
        "convolution:update",
        "x",
        "conv_state",
        "weight",
        "bias",
        "activation",
        "cache_seqlens",
        "conv_state_indices",
        "num_accept_tokens",
        "intermediate_conv_window",
        "intermediate_state_indices",
        "retrieve_next_token",
        "retrieve_next_sibling",
        "retrieve_parent_token",
        "pad_slot_id",
        "metadata",
        "validate_data",
    ),
    _replace(
        "attention.linear.fused_gdn_gating:fused_gdn_gating",
        "delta_rule:gates",
        "A_log",
        "a",
        "b",
        "dt_bias",
        "beta",
        "threshold",
    ),
    _replace(
        "attention.fla.chunk:chunk_gated_delta_rule",
        "delta_rule:prefill",
        "q",
        "k",
        "v",
        "g",
        "beta",
        "scale",
        "initial_state",
        "initial_state_indices",
        "cu_seqlens",
        "head_first",
        "use_qk_l2norm_in_kernel",
        "inplace_update",
    ),
    _replace(
        "attention.fla.fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode",
        "delta_rule:update",
        "mixed_qkv",
        "a",
        "b",
        "A_log",
        "dt_bias",
        "scale",
        "initial_state",
        "out",
        "ssm_state_indices",
        "use_qk_l2norm_in_kernel",
    ),
    *(
        _replace(
            f"attention.triton_gdn_fused_proj:fused_qkvzba_split_reshape_cat{kind}",
            f"projections:{ours}",
            "mixed_qkvz",
            "mixed_ba",
            "num_heads_qk",
            "num_heads_v",
            "head_qk",
            "head_v",
        )
        for kind, ours in (
            ("", "split_interleaved"),
            ("_contiguous", "split_in_order"),
        )
    ),
    _replace(
        "attention.fla.fused_norm_gate:FusedRMSNormGated.forward",
        "gates:gated_norm",
        "self",
        "x",
        "g",
        "residual",
        "prenorm",
        "residual_in_fp32",
    ),
    _replace(
        "attention.fla.layernorm_gated:layernorm_fn",
        "gates:norm_then_gate",
        "x",
        "weight",
        "bias",
        "z",
        "eps",
        "group_size",
        "norm_before_gate",
        "is_rms_norm",
        "activation",
    ),
    _replace(
        "elementwise.elementwise:fused_sigmoid_mul",
        "gates:gate_output",
        "attn_output",
        "gate",
        "inplace",
        "quant",
    ),
    _replace(
        "elementwise.elementwise:fused_gate_sigmoid_mul_add",
        "gates:add_shared_expert",
        "hidden_states",
        "gate_weight",
        "shared_output",
        "final_hidden_states",
    ),
    _replace(
        "activation.softcap:softcap_inplace_logits",
        "gates:soft_cap",
        "full_logits",
        "final_logit_softcapping",
    ),
    _replace(
        "activation.silu_and_mul_clamp:silu_and_mul_clamp",
        "gates:gate_within",
        "input",
        "output",
        "swiglu_limit",
    ),
    _replace(
        "mamba.triton_ops.ssd_combined:mamba_chunk_scan_combined",
        "mamba2:prefill",
        "x",
        "dt",
        "A",
        "B",
        "C",
        "chunk_size",
        "D",
        "z",
        "dt_bias",
        "initial_states",
        "seq_idx",
        "chunk_indices",
        "chunk_offsets",
        "cu_seqlens",
        "dt_softplus",
        "dt_limit",
        "out",
        "return_final_states",
        "return_varlen_states",
        "return_intermediate_states",
        "state_dtype",
        "return_track_states",
        "track_seq_idx",
        "track_end_locs",
    ),
    _replace(
        # Not the kernel: the scheduler makes the backend, which holds on to its
        # kernel, before SGLang calls `init_backend`.
        "mamba.triton_ops.ssu_dispatch:TritonSSUBackend.__call__",
        "mamba2:update",
        "self",
        "state",
        "x",
        "dt",
        "A",
        "B",
        "C",
        "D",
        "z",
        "dt_bias",
        "dt_softplus",
        "state_batch_indices",
        "pad_slot_id",
        "out",
        "disable_state_update",
        "intermediate_states_buffer",
        "cache_steps",
        "retrieve_parent_token",
        "intermediate_state_indices",
        # Its base class has an abstract one of the same signature.
        own=True,
    ),
    _replace(
        "mamba.mamba_state_scatter_triton:track_mamba_states_if_needed",
        "tracking:copy_tracked",
        "conv_states",
        "ssm_states",
        *_TRACK,
    ),
    _replace(
        "mamba.mamba_state_scatter_triton:track_mamba_states_all_layers",
        "tracking:copy_tracked_all_layers",
        "conv_states_pool",
        "ssm_states_pool",
        *_TRACK,
    ),
    # Kimi delta attention.
    _replace(
        "attention.fla.kda:chunk_kda",
        "kimi_delta:prefill",
        "q",
        "k",
        "v",
        "g",
        "beta",
        "scale",
        "initial_state",
        "initial_state_indices",
        "use_qk_l2norm_in_kernel",
        "cu_seqlens",
        "A_log",
        "dt_bias",
        "lower_bound",
        "output_intermediate_states",
        "track_state",
        "track_chunk_idx",
        "beta_is_raw",
        "chunk_indices",
        "chunk_offsets",
        "kwargs",
    ),
    _replace(
        "attention.fla.fused_recurrent:fused_recurrent_kda_packed_decode",
        "kimi_delta:step",
        "mixed_qkv",
        "a",
        "b",
        "A_log",
        "dt_bias",
        "scale",
        "initial_state",
        "out",
        "ssm_state_indices",
        "use_qk_l2norm_in_kernel",
        "lower_bound",
    ),
    # Sparse attention by pooled index keys.
    _replace(
        "kpool_fp8_index:kpool_decode_update_and_maybe_write_cache",
        "index_keys:step",
        "pool",
        "buf",
        *_RING,
        "key",
        "slot_score",
        "ape",
        "block_tables",
        "req_pool_indices",
        "positions",
        "seq_lens",
        "out_cache_loc",
        "round_scale",
        root=_SPARSE,
    ),
    _replace(
        "kpool_fp8_index:kpool_build_ragged_layout",
        "index_keys:ragged_layout",
        "full_page_table",
        "cu_pages_excl",
        "ragged_pool_pages",
        "cu_q_len_excl",
        "ragged_q_len",
        "pooled_seq_lens_expanded",
        "index_page_size",
        "total_pool_pages",
        "total_q",
        "kpool",
        root=_SPARSE,
    ),
    # Sparse attention by compressed index keys.
    _replace(
        "kernel:gather_qsa_compressed_keys",
        "compressed_keys:packed",
        "compressed",
        "token_slot_table",
        "cu_blocks",
        "total_blocks",
        "max_blocks",
        "compress_ratio",
        root=_COMPRESSED,
    ),
    _replace(
        "kernel:qsa_sparse_attention",
        "compressed_keys:attend",
        "q",
        "k_cache",
        "v_cache",
        "token_slots",
        "softmax_scale",
        root=_COMPRESSED,
    ),
    # Verification of drafts.
    _replace(
        "attention.linear.fused_sigmoid_gating_recurrent"
        ":fused_sigmoid_gating_delta_rule_update",
        "delta_rule:verify",
        "A_log",
        "a",
        "dt_bias",
        "softplus_beta",
        "softplus_threshold",
        "q",
        "k",
        "v",
        "b",
        "initial_state_source",
        "initial_state_indices",
        "scale",
        "use_qk_l2norm_in_kernel",
        "cu_seqlens",
        "is_kda",
        "lower_bound",
        "disable_state_update",
        "intermediate_states_buffer",
        "intermediate_state_indices",
        "cache_steps",
        "retrieve_parent_token",
        "cache_ring",
        "replayssm_rawv",
        "replayssm_rawk",
        "replayssm_g",
        "replayssm_beta",
        "match_cutedsl_decode",
    ),
    *(
        _replace(
            f"mamba.mamba_state_scatter_triton:{name}",
            "draft_states:commit",
            "dst",
            "src",
            *_COMMIT,
            "src_indices_raw",
        )
        for name in (
            "fused_mamba_state_scatter_with_mask",
            "fused_conv_window_scatter_with_mask",
        )
    ),
    _replace(
        "mamba.mamba_state_scatter_triton:fused_conv_window_scatter_multi",
        "draft_states:commit_windows",
        "pairs",
        *_COMMIT,
        "dst_indices2_raw",
        "step_indices2_raw",
    ),
    _replace(
        "speculative.spec_tree:build_tree_kernel_efficient_func",
        "draft_trees:build",
        "parent_list",
        "top_scores_index",
        "seq_lens",
        "tree_mask",
        "positions",
        *_LINKS,
        "topk",
        "spec_steps",
        "num_verify_tokens",
        "tree_mask_mode",
    ),
    _replace(
        "speculative.spec_tree:verify_tree_greedy_func",
        "draft_trees:accept",
        "predicts",
        "accept_index",
        "accept_token_num",
        "candidates",
        *_LINKS,
        "target_predict",
        "topk",
    ),
    *(
        _replace(
            f"speculative.draft_utils:DraftBackendFactory.create_{name}_backend",
            f"draft_models:{ours}",
            "self",
            root=_SRT,
        )
        for name, ours in (
            ("decode", "decode_backend"),
            ("draft_extend", "extend_backend"),
        )
    ),
    _replace(
        "speculative.reject_sampling:chain_speculative_sampling_triton",
        "draft_blocks:accept_chain",
        "predicts",
        "accept_index",
        "accept_token_num",
        "candidates",
        "retrive_index",
        "retrive_next_token",
        "retrive_next_sibling",
        "uniform_samples",
        "uniform_samples_for_final_sampling",
        "target_probs",
        "draft_probs",
        "threshold_single",
        "threshold_acc",
        "deterministic",
        "block_verification",
    ),
    _replace(
        "speculative.cache_locs:assign_draft_cache_locs_contiguous_func",
        "draft_tokens:positions_of_branches",
        "req_pool_indices",
        "req_to_token",
        "seq_lens",
        "out_cache_loc",
        "topk",
        "num_cols",
        "positions",
        "mrope",
    ),
    _replace(
        "speculative.cache_locs:fill_front_out_cache_loc_func",
        "draft_tokens:first_of_windows",
        "num_front",
        "out_cache_loc",
        "front_out_cache_loc",
    ),
    _replace(
        "speculative.eagle:fill_accept_out_cache_loc_func",
        "draft_tokens:accepted_positions",
        "accept_index",
        "out_cache_loc",
        "accept_out_cache_loc",
        "size",
    ),
    _replace(
        "speculative.eagle:fill_bonus_tokens_func",
        "draft_tokens:last_tokens",
        "accept_tokens",
        "accept_lens",
        "bonus_tokens",
        "accept_stride",
        "batch_size",
    ),
    _replace(
        "mem_cache.allocation:assign_req_to_token_pool_func",
        "draft_tokens:write_rows",
        *_ROWS,
        "out_cache_loc",
        "batch_size",
        root=_SRT,
    ),
    _replace(
        "mem_cache.memory_pool:MHATokenToKVPool._init_kv_copy_and_warmup",
        "draft_tokens:leave_copies_to_torch",
        "self",
        root=_SRT,
    ),
)

_FORWARD = HookPoint(
    f"{_MIXER}:MambaMixer2.forward",
    mentions=(
        "causal_conv1d_fn",
        "causal_conv1d_fn_triton",
        "causal_conv1d_update",
        "causal_conv1d_update_triton",
    ),
)
_SAMPLE = HookPoint(
    f"{_SRT}.speculative.eagle_utils:eagle_sample",
    mentions=("tree_speculative_sampling_target_only", "uniform_samples"),
)
_SAMPLE_BLOCKS = HookPoint(
    f"{_SRT}.speculative.dflash_utils:compute_dflash_sampling_correct_drafts_and_bonus",
    mentions=(
        "tree_speculative_sampling_target_only",
        "_DFLASH_SAMPLING_VERIFY_AVAILABLE",
    ),
)
MISSING_NAMES = (
    *(
        MissingName(_FORWARD, f"{name}{ending}", f"convolution:{ours}")
        for name, ours in (
            ("causal_conv1d_fn", "prefill"),
            ("causal_conv1d_update", "update"),
        )
        for ending in ("", "_triton")
    ),
    *(
        MissingName(one, "tree_speculative_sampling_target_only", "draft_trees:sample")
        for one in (_SAMPLE, _SAMPLE_BLOCKS)
    ),
)

_NATIVE = "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend"
_WINDOW_POOL = "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool"
WINDOWS = (
    HookPoint(f"{_NATIVE}.__init__", mentions=("use_sliding_window_kv_pool",)),
    HookPoint(
        f"{_NATIVE}.forward_extend",
        ("q", "k", "v", "layer"),
        mentions=("_run_sdpa_forward_extend",),
    ),
    HookPoint(
        f"{_NATIVE}.forward_decode",
        ("q", "k", "v", "layer"),
        mentions=("_run_sdpa_forward_decode",),
    ),
    HookPoint(f"{_WINDOW_POOL}.__init__", mentions=("layers_mapping",)),
    HookPoint(
        f"{_WINDOW_POOL}.translate_loc_from_full_to_swa",
        ("kv_indices",),
        mentions=("full_to_swa_index_mapping",),
    ),
)
"""What `window_attention` wraps and reads."""

TREE_MASKS = HookPoint(
    f"{_OPS}.speculative.reconstruct_tree:reconstruct_indices_from_tree_mask_func",
    (
        "tree_mask",
        "verified_seq_len",
        "positions",
        *_LINKS,
        "batch_size",
        "draft_token_num",
    ),
    closed=True,
    mentions=("reconstruct_indices_from_tree_mask",),
)
"""Imported with our function in the place of one of `sgl_kernel`."""

DRAFTS = (
    HookPoint(
        f"{_NATIVE}.forward_extend",
        ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        mentions=("set_kv_buffer", "swa_out_cache_loc"),
    ),
    HookPoint("sglang.srt.mem_cache.memory_pool:KVWriteLoc"),
    HookPoint(
        "sglang.srt.layers.radix_attention:AttentionType", mentions=("ENCODER_ONLY",)
    ),
    HookPoint("sglang.srt.arg_groups.choices:add_draft_attention_backend_choices"),
    HookPoint(
        "sglang.srt.speculative.dflash_utils:is_dflash_sampling_verify_available"
    ),
    HookPoint(
        f"{_OPS}.speculative.cache_locs:assign_extend_cache_locs_func",
        (*_ROWS, "batch_size", "draft_token_num", "device"),
        mentions=("_get_oot_speculative_cache_locs_fn",),
    ),
)
"""What `draft_attention`, `draft_blocks` and the platform rely on for drafts."""

SPARSE = (
    HookPoint(
        f"{_SPARSE}.dsa_indexer_kpool:IndexerKPool.forward_cuda",
        (
            "self",
            "x",
            "q_lora",
            "positions",
            "forward_batch",
            "layer_id",
            "return_indices",
            "use_cuda_graph",
        ),
        closed=True,
        own=True,  # its base class has one that raises
    ),
    HookPoint(
        f"{_SPARSE}.dsa_indexer_kpool:IndexerKPool.__init__",
        mentions=(
            "index_kpool_compress_ape",
            "index_kpool_compress_gate",
            "k_norm",
            "skip_rope",
            "softmax_scale",
            "weights_proj",
            "wq_b",
        ),
    ),
    HookPoint(
        f"{_SPARSE}.kpool_plan:init_kpool_extend_metadata",
        (
            "metadata",
            "forward_batch",
            "kpool",
            "physical_page_size",
            "index_page_size",
            "topk_transform_method",
            "full_real_page_table",
            "full_seqlens_expanded",
        ),
        mentions=("kpool_extend_plan",),
    ),
    HookPoint(f"{_SRT}.layers.attention.attention_registry:ATTENTION_BACKENDS"),
    HookPoint(f"{_SRT}.configs.model_config:is_deepseek_dsa", ("config",)),
    HookPoint(
        "sglang.kernels.fused_op:BaseFusedOp.register_oot_forward",
        ("op_cls", "fn", "platform_key"),
    ),
)
"""What `sparse_latents` takes the place of, and reads."""

EMBEDS = HookPoint(
    f"{_SRT}.model_executor.model_runner:ModelRunner._extend_forward_kwargs",
    ("self", "forward_batch", "pp_proxy_tensors"),
    mentions=("input_embeds", "replace_embeds"),
)
"""What `draft_blocks` wraps once a server with DFLASH is built: `install` runs before
there is such a class."""

HEADS = HookPoint(
    DIVIDES_HEADS,
    ("model_config", "load_config", "tp_size"),
    closed=True,
    mentions=("num_attention_heads",),
)
"""What `headless_models` wraps."""

INSTALLED = (
    *(r.point for r in REPLACEMENTS),
    _FORWARD,
    _SAMPLE,
    _SAMPLE_BLOCKS,
    *WINDOWS,
    TREE_MASKS,
    *DRAFTS,
    *SPARSE,
    HEADS,
    EXPERTS,
)
"""All that `kernels.install` relies on."""

HOOKS = (*INSTALLED, EMBEDS)
"""Every point, as the compatibility checks read them."""
