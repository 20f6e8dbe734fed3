# SPDX-License-Identifier: Apache-2.0
"""Everything in vLLM that the model classes rely on.

Importing this module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_plugin.upstream import hookpoints
from hybrid_plugin.upstream.hookpoints import Contract, HookPoint, LiveView

_LINEAR = "vllm.model_executor.layers.linear"
_ADAPTED = "vllm.lora.layers.column_parallel_linear"
_MAMBA = "vllm.model_executor.layers.mamba"
_BACKENDS = "vllm.v1.attention.backends"
_COMMON = ("bias", "quant_config", "prefix", "return_bias")
_CONVERTORS = "vllm.transformers_utils.model_arch_config_convertor"
_METADATA = f"{_BACKENDS}.mamba_attn:BaseMambaAttentionMetadata"

REGISTRY_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        "vllm.model_executor.models.registry:_ModelRegistry.register_model",
        ("self", "model_arch", "model_cls"),
    ),
    HookPoint(
        "vllm.model_executor.models.registry:_ModelRegistry.get_supported_archs",
        ("self",),
    ),
    HookPoint("vllm.model_executor.models.registry:_LazyRegisteredModel.module_name"),
    HookPoint("vllm.platforms.interface:Platform.is_cpu", ("self",)),
    HookPoint("vllm.config.compilation:CompilationConfig._attention_ops"),
    HookPoint(f"{_CONVERTORS}:MODEL_ARCH_CONFIG_CONVERTORS"),
    *(
        HookPoint(f"{_CONVERTORS}:ModelArchConfigConvertorBase.{name}", ("self",))
        for name in ("is_deepseek_mla", "get_head_size", "get_total_num_kv_heads")
    ),
    HookPoint(f"{_CONVERTORS}:MambaModelArchConfigConvertor"),
    HookPoint("vllm.model_executor.models.config:MambaModelConfig"),
    HookPoint("vllm.model_executor.models.config:MODELS_CONFIG_MAP"),
    HookPoint(
        "vllm.config.vllm:VllmConfig.try_verify_and_update_config",
        ("self",),
        mentions=("MODELS_CONFIG_MAP",),
    ),
    HookPoint(
        "vllm.config.compilation:CompilationConfig.set_splitting_ops_for_v1",
        mentions=("_attention_ops",),
    ),
    HookPoint(
        "vllm.engine.arg_utils:EngineArgs.create_model_config", ("self",), closed=True
    ),
    HookPoint("vllm.engine.arg_utils:EngineArgs.additional_config"),
)
"""How our classes are named to vLLM."""

LAYER_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_LINEAR}:MergedColumnParallelLinear.__init__",
        ("input_size", "output_sizes", *_COMMON),
    ),
    HookPoint(
        f"{_LINEAR}:ColumnParallelLinear.__init__",
        ("input_size", "output_size", *_COMMON),
    ),
    HookPoint(
        f"{_LINEAR}:RowParallelLinear.__init__",
        ("input_size", "output_size", "reduce_results", *_COMMON),
    ),
    HookPoint(
        f"{_LINEAR}:ReplicatedLinear.__init__",
        ("input_size", "output_size", *_COMMON),
        mentions=("create_weights",),
    ),
    HookPoint(
        f"{_LINEAR}:QKVParallelLinear.__init__",
        ("hidden_size", "head_size", "total_num_heads", "total_num_kv_heads", *_COMMON),
    ),
    HookPoint(
        "vllm.model_executor.layers.layernorm:RMSNorm.__init__", ("hidden_size", "eps")
    ),
    HookPoint(
        "vllm.model_executor.layers.layernorm:GemmaRMSNorm.__init__",
        ("hidden_size", "eps"),
    ),
    *(
        HookPoint(
            f"vllm.model_executor.layers.layernorm:{name}", mentions=("residual",)
        )
        for name in ("RMSNorm", "GemmaRMSNorm")
    ),
    HookPoint("vllm.model_executor.layers.activation:SiluAndMul"),
    HookPoint(
        "vllm.model_executor.layers.rotary_embedding:get_rope",
        ("head_size", "max_position", "is_neox_style", "rope_parameters"),
    ),
    HookPoint(
        "vllm.model_executor.layers.vocab_parallel_embedding"
        ":VocabParallelEmbedding.__init__",
        ("num_embeddings", "embedding_dim", "quant_config", "prefix"),
    ),
    HookPoint(
        "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead.__init__",
        ("num_embeddings", "embedding_dim", "bias", "quant_config", "prefix"),
    ),
    HookPoint(
        "vllm.model_executor.layers.vocab_parallel_embedding"
        ":ParallelLMHead.tie_weights",
        ("self", "embed_tokens"),
    ),
    HookPoint(
        "vllm.model_executor.layers.attention.attention:Attention.__init__",
        (
            "num_heads",
            "head_size",
            "scale",
            "num_kv_heads",
            "cache_config",
            "quant_config",
            "per_layer_sliding_window",
            "prefix",
            "kv_sharing_target_layer_name",
        ),
        mentions=("layer_name",),
    ),
    HookPoint(
        "vllm.model_executor.layers.attention.attention:Attention.forward",
        ("self", "query", "key", "value"),
        mentions=("kv_sharing_target_layer_name", "unified_kv_cache_update"),
    ),
    *(
        HookPoint(target, mentions=("kv_sharing_target_layer_name",))
        for target in (
            "vllm.v1.worker.gpu.attn_utils:get_kv_cache_spec",
            "vllm.v1.worker.gpu.attn_utils:get_shared_kv_cache_layers",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_kv_cache_spec",
        )
    ),
    HookPoint("vllm.config.cache:CacheConfig.kv_sharing_fast_prefill"),
    HookPoint("vllm.model_executor.layers.attention:Attention"),
    HookPoint(
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention.__init__",
        (
            "num_heads",
            "scale",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "q_lora_rank",
            "kv_lora_rank",
            "kv_b_proj",
            "cache_config",
            "quant_config",
            "prefix",
        ),
    ),
    HookPoint(
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward",
        ("self", "q", "kv_c_normed", "k_pe", "output_shape"),
    ),
    HookPoint("vllm.model_executor.layers.attention:MLAAttention"),
    HookPoint("vllm.config.model:ModelConfig.use_mla"),
    HookPoint(
        "vllm.model_executor.layers.fused_moe.layer:FusedMoEFactory",
        (
            "num_experts",
            "top_k",
            "hidden_size",
            "intermediate_size",
            "renormalize",
            "scoring_func",
            "routed_scaling_factor",
            "use_grouped_topk",
            "num_expert_group",
            "topk_group",
            "e_score_correction_bias",
            "custom_routing_function",
            "quant_config",
            "prefix",
        ),
    ),
    HookPoint("vllm.model_executor.layers.fused_moe:FusedMoEFactory"),
    HookPoint(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor.__init__",
        ("vocab_size", "scale", "soft_cap"),
    ),
    HookPoint("vllm.distributed.parallel_state:get_tensor_model_parallel_rank", ()),
    HookPoint(
        "vllm.distributed.parallel_state:get_tensor_model_parallel_world_size", ()
    ),
    HookPoint(
        "vllm.distributed.communication_op:tensor_model_parallel_all_reduce",
        ("input_",),
    ),
)
"""The layers that `kit` hands out."""

STATE_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        f"{_MAMBA}.abstract:MambaBase.bind_kv_cache",
        mentions=("get_state_shape", "get_state_dtype"),
    ),
    HookPoint(
        f"{_MAMBA}.abstract:MambaBase.get_kv_cache_spec",
        ("self", "vllm_config"),
        mentions=("get_state_shape", "get_state_dtype", "mamba_type"),
    ),
    HookPoint(
        f"{_MAMBA}.mamba_utils:MambaStateDtypeCalculator.mamba2_state_dtype",
        ("model_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
    ),
    HookPoint(f"{_MAMBA}.mamba_utils:get_temporal_copy_spec"),
    HookPoint(f"{_BACKENDS}.registry:MambaAttentionBackendEnum.SHORT_CONV"),
    HookPoint(f"{_BACKENDS}.short_conv_attn:ShortConvAttentionMetadataBuilder"),
    *(
        HookPoint(f"{_METADATA}.{name}")
        for name in (
            "num_decodes",
            "num_decode_tokens",
            "num_prefills",
            "num_prefill_tokens",
            "state_indices_tensor_d",
            "state_indices_tensor_p",
            "query_start_loc_p",
            "has_initial_states_p",
        )
    ),
    HookPoint("vllm.forward_context:get_forward_context", ()),
    HookPoint("vllm.forward_context:ForwardContext.no_compile_layers"),
    HookPoint("vllm.forward_context:ForwardContext.attn_metadata"),
    HookPoint(
        "vllm.utils.torch_utils:direct_register_custom_op",
        ("op_name", "op_func", "mutates_args", "fake_impl"),
    ),
    HookPoint(
        "vllm.config.compilation:CompilationConfig.static_forward_context",
    ),
)
"""What `states` relies on."""

MODEL_HOOKS: tuple[Contract, ...] = (
    HookPoint(
        "vllm.compilation.decorators:support_torch_compile", ("cls", "dynamic_arg_dims")
    ),
    *(
        HookPoint(f"vllm.model_executor.models.interfaces:{name}")
        for name in (
            "HasInnerState",
            "IsAttentionFree",
            "IsHybrid",
            "SupportsLoRA",
            "SupportsQuant",
        )
    ),
    HookPoint(
        "vllm.model_executor.models.interfaces"
        ":IsHybrid.get_mamba_state_shape_from_config",
        ("vllm_config",),
    ),
    HookPoint(
        "vllm.model_executor.models.interfaces:IsHybrid.get_mamba_state_copy_func",
        (),
    ),
    HookPoint("vllm.model_executor.models.utils:maybe_prefix", ("prefix", "name")),
    HookPoint("vllm.model_executor.models.utils:WeightsMapper.orig_to_new_substr"),
    HookPoint("vllm.config.vllm:VllmConfig.num_speculative_tokens"),
    *(
        HookPoint(f"vllm.config.cache:CacheConfig.{name}")
        for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
    ),
)
"""What `model` relies on."""

ADAPTER_HOOKS: tuple[Contract, ...] = (
    HookPoint("vllm.config.vllm:VllmConfig.lora_config"),
    HookPoint(
        "vllm.lora.model_manager:LoRAModelManager._create_lora_modules",
        ("self",),
        mentions=("packed_modules_mapping", "from_layer"),
    ),
    HookPoint(
        "vllm.model_executor.utils:get_packed_modules_mapping",
        ("model",),
        mentions=("packed_modules_mapping",),
    ),
    HookPoint(
        f"{_ADAPTED}:ColumnParallelLinearWithLoRA.slice_lora_b",
        ("self", "lora_b"),
        mentions=("is_merged_col_linear", "tp_rank"),
    ),
    HookPoint(
        f"{_ADAPTED}:MergedColumnParallelLinearVariableSliceWithLoRA.set_lora",
        mentions=("output_sizes",),
    ),
)
"""What `adapters` relies on: looked at where adapters are asked for."""

BUILD_HOOKS = (*LAYER_HOOKS, *STATE_HOOKS, *MODEL_HOOKS)
"""What a model needs, once vLLM asks for its class."""
HOOKS = (*REGISTRY_HOOKS, *BUILD_HOOKS, *ADAPTER_HOOKS)
"""All of them."""


def problems(hooks: Iterable[Contract]) -> list[str]:
    """What does not hold in the installed vLLM, one phrase each."""
    return hookpoints.problems(hooks, LiveView("vllm"))
