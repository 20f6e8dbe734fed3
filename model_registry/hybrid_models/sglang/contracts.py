# SPDX-License-Identifier: Apache-2.0
"""Everything in SGLang that the model classes rely on.

Importing this module does not import SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_plugin.upstream import hookpoints
from hybrid_plugin.upstream.hookpoints import Contract, HookPoint, LiveView

_SRT = "sglang.srt"
_LAYERS = f"{_SRT}.layers"
_LINEAR = f"{_LAYERS}.linear"
_RUNNER_PARTS = f"{_SRT}.model_executor.model_runner_components"
_COMMON = ("bias", "quant_config", "prefix")
_SHORT_CONV = f"{_LAYERS}.attention.linear.short_conv_backend"
_HYBRID = f"{_LAYERS}.attention.hybrid_linear_attn_backend"

CONFIG_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_SRT}.configs.linear_attn_model_registry:register_linear_attn_model",
        ("spec",),
    ),
    *(
        HookPoint(f"{_SRT}.configs.linear_attn_model_registry:LinearAttnModelSpec.{n}")
        for n in (
            "config_class",
            "arch_names",
            "backend_class_name",
            "hybrid_backend_class_name",
        )
    ),
    HookPoint(
        f"{_SRT}.configs.hybrid_arch:mambaish_config",
        mentions=("_get_linear_attn_registry_result",),
    ),
    HookPoint(f"{_SRT}.utils.hf_transformers.common:_CONFIG_REGISTRY"),
    HookPoint(f"{_SRT}.environ:Envs.SGLANG_EXTERNAL_MODEL_PACKAGE"),
)
"""How our configurations are named to SGLang: looked at in every process."""

REGISTRY_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_SRT}.utils.hf_transformers.config:HfModelConfigParser.parse",
        mentions=("_CONFIG_REGISTRY",),
    ),
    HookPoint(f"{_SRT}.models.registry:import_model_classes", mentions=("EntryClass",)),
    HookPoint(f"{_SRT}.models.registry:_ModelRegistry.models"),
    HookPoint(
        f"{_SRT}.model_loader.utils:get_model_architecture",
        ("model_config",),
        mentions=("resolve_model_cls",),
    ),
)
"""How it finds them, and our classes: looked at when it asks for one."""

LAYER_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_LINEAR}:MergedColumnParallelLinear.__init__",
        ("input_size", "output_sizes", *_COMMON),
        mentions=("_initialize_partition",),
    ),
    HookPoint(
        f"{_LINEAR}:RowParallelLinear.__init__",
        ("input_size", "output_size", *_COMMON),
    ),
    HookPoint(
        f"{_LINEAR}:ReplicatedLinear.__init__",
        ("input_size", "output_size", *_COMMON),
    ),
    HookPoint(
        f"{_LINEAR}:QKVParallelLinear.__init__",
        ("hidden_size", "head_size", "total_num_heads", "total_num_kv_heads", *_COMMON),
    ),
    HookPoint(f"{_LAYERS}.layernorm:RMSNorm.__init__", ("hidden_size", "eps")),
    HookPoint(f"{_LAYERS}.layernorm:GemmaRMSNorm.__init__", ("hidden_size", "eps")),
    HookPoint(f"{_LAYERS}.layernorm:RMSNorm.forward_cuda", ("self", "x", "residual")),
    HookPoint(
        f"{_LAYERS}.layernorm:GemmaRMSNorm.forward_cuda", ("self", "x", "residual")
    ),
    HookPoint(f"{_LAYERS}.activation:SiluAndMul.forward_cuda", ("self", "x")),
    HookPoint(
        f"{_LAYERS}.rotary_embedding.factory:get_rope",
        (
            "head_size",
            "rotary_dim",
            "max_position",
            "base",
            "is_neox_style",
            "rope_scaling",
        ),
    ),
    HookPoint(f"{_LAYERS}.rotary_embedding:get_rope"),
    HookPoint(
        f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding.__init__",
        ("num_embeddings", "embedding_dim", "quant_config", "prefix"),
    ),
    HookPoint(
        f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead.__init__",
        ("num_embeddings", "embedding_dim", "bias", "quant_config", "prefix"),
    ),
    HookPoint(
        f"{_LAYERS}.radix_attention:RadixAttention.__init__",
        (
            "num_heads",
            "head_dim",
            "scaling",
            "num_kv_heads",
            "layer_id",
            "sliding_window_size",
            "quant_config",
            "prefix",
        ),
        mentions=("layer_id",),
    ),
    HookPoint(
        f"{_LAYERS}.radix_attention:RadixAttention.forward",
        ("self", "q", "k", "v", "forward_batch", "save_kv_cache"),
        mentions=("save_kv_cache",),
    ),
    HookPoint(f"{_LAYERS}.moe.ep_moe.layer:get_moe_impl_class", ("quant_config",)),
    HookPoint(
        f"{_LAYERS}.moe.fused_moe_triton.layer:FusedMoE.__init__",
        (
            "layer_id",
            "top_k",
            "num_experts",
            "hidden_size",
            "intermediate_size",
            "reduce_results",
            "quant_config",
            "routed_scaling_factor",
            "inplace",
            "prefix",
        ),
        mentions=("runner_backend",),
    ),
    HookPoint(
        f"{_LAYERS}.moe.topk:TopK.__init__",
        (
            "top_k",
            "layer_id",
            "renormalize",
            "scoring_func",
            "use_grouped_topk",
            "num_expert_group",
            "topk_group",
            "correction_bias",
            "routed_scaling_factor",
        ),
    ),
    HookPoint(
        f"{_LAYERS}.moe.topk:TopK.bind_runner_backend", ("self", "runner_backend")
    ),
    HookPoint(f"{_LAYERS}.moe.topk:StandardTopKOutput"),
    HookPoint(
        f"{_SRT}.model_executor.model_runner_components.load_model_utils:"
        "resolve_sliding_window_size",
        mentions=("get_attention_sliding_window_size",),
    ),
    HookPoint(
        f"{_LAYERS}.logits_processor:LogitsProcessor.__init__",
        ("config", "logit_scale"),
        mentions=("final_logit_softcapping",),
    ),
    HookPoint(
        f"{_LAYERS}.logits_processor:LogitsProcessor.forward",
        ("input_ids", "hidden_states", "lm_head", "logits_metadata"),
    ),
    HookPoint(
        f"{_SRT}.distributed.communication_op:tensor_model_parallel_all_reduce",
        ("input_",),
    ),
    HookPoint(f"{_SRT}.runtime_context:get_parallel", ()),
    HookPoint(f"{_SRT}.runtime_context:get_server_args", ()),
    HookPoint(f"{_SRT}.runtime_context:get_spec", ()),
)
"""The layers that `kit` hands out."""

PATCH_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_SRT}.model_executor.model_runner:ModelRunner.get_cuda_graph_layers",
        ("self", "layer_model"),
        closed=True,
    ),
    *(
        HookPoint(f"{_RUNNER_PARTS}.layer_setup:AttentionAndMoeLayers.{name}")
        for name in ("attention_layers", "mha_companion_layers")
    ),
    HookPoint(
        f"{_RUNNER_PARTS}.cuda_graph_setup:capture_prefill_graph",
        mentions=("get_cuda_graph_layers", "has_standard_gqa_for_all_local_layers"),
    ),
    HookPoint(
        f"{_RUNNER_PARTS}.cuda_graph_setup:has_standard_gqa_for_all_local_layers",
        ("attention_layer_count", "start_layer", "end_layer"),
    ),
)
"""What `patches` relies on."""

STATE_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_SHORT_CONV}:ShortConvAttnBackend.conv_state_metadata",
        ("self", "layer_id", "forward_batch"),
        mentions=("mamba2_layer_cache", "cache_indices"),
    ),
    HookPoint(f"{_SHORT_CONV}:ShortConvAttnBackend.needs_extend_host_mirrors"),
    HookPoint(
        f"{_SHORT_CONV}:ShortConvAttnBackend.init_forward_metadata",
        mentions=("needs_extend_host_mirrors",),
    ),
    HookPoint(f"{_SHORT_CONV}:ShortConvMetadata.cache_indices"),
    HookPoint(f"{_SHORT_CONV}:ShortConvMetadata.layer_cache"),
    HookPoint(
        f"{_HYBRID}:ShortConvHybridAttnBackend.__init__",
        mentions=("short_conv_backend",),
    ),
    HookPoint(f"{_SRT}.model_executor.forward_context:get_attn_backend", ()),
    HookPoint(
        f"{_SRT}.model_executor.runner_utils.forward_batch:get_forward_batch", ()
    ),
    HookPoint(
        f"{_SRT}.model_executor.runner_utils.forward_batch:set_forward_batch",
        ("forward_batch",),
    ),
    HookPoint(
        f"{_SRT}.configs.mamba_utils:mamba2_state_dtype",
        ("config",),
        mentions=("SGLANG_MAMBA_CONV_DTYPE",),
    ),
    *(
        HookPoint(f"{_SRT}.configs.mamba_utils:{name}")
        for name in ("Mamba2CacheParams", "Mamba2StateDType", "Mamba2StateShape")
    ),
    HookPoint(
        f"{_SRT}.mem_cache.memory_pool:MambaPool.__init__",
        mentions=("conv", "temporal"),
    ),
)
"""What `states` and `configs` rely on."""

STATES_ALONE_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_SRT}.configs.model_config:ModelConfig._derive_model_shapes",
        ("self",),
        mentions=("PURE_SSM_ARCHITECTURES", "SSM"),
    ),
    HookPoint(f"{_SRT}.configs.model_config:PURE_SSM_ARCHITECTURES"),
    HookPoint(
        f"{_RUNNER_PARTS}.attention_backend_setup:build_attention_backends",
        mentions=("SSM", "Mamba2AttnBackend"),
    ),
    HookPoint(
        f"{_HYBRID}:Mamba2AttnBackend.init_forward_metadata",
        mentions=("forward_metadata",),
    ),
    HookPoint(
        f"{_HYBRID}:Mamba2AttnBackend.forward",
        mentions=("req_to_token_pool", "mamba2_layer_cache"),
    ),
)
"""What models without attention rely on: looked at where one is asked for."""

BUILD_HOOKS = (*REGISTRY_HOOKS, *LAYER_HOOKS, *PATCH_HOOKS, *STATE_HOOKS)
"""What a model needs, once SGLang asks for its class."""
HOOKS = (*CONFIG_HOOKS, *BUILD_HOOKS, *STATES_ALONE_HOOKS)
"""All of them."""


def problems(hooks: Iterable[Contract]) -> list[str]:
    """What does not hold in the installed SGLang, one phrase each."""
    return hookpoints.problems(hooks, LiveView("sglang"))
