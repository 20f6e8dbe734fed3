# SPDX-License-Identifier: Apache-2.0
"""vLLM's layers as a kit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from hybrid_models.engine_kit import EngineKit, EngineLayers
from hybrid_models.kit import (
    LatentShape,
    Mix,
    Placed,
    Rope,
    Routing,
    StateTensor,
    own_part_of_keys,
    part,
)
from hybrid_models.vllm.latent import ExpandedAttention, LatentAttention, stretched_rope
from hybrid_models.vllm.states import StateLayer
from hybrid_models.weights import EXPERTS


def _column(inner: int, outs: Sequence[int], **options: Any) -> nn.Module:
    """A projection of several parts; of one, the class that vLLM cuts as one.

    It takes the only part of a merged projection for two, when it cuts an adapter.
    """
    if len(outs) > 1:
        return MergedColumnParallelLinear(inner, outs, **options)
    return ColumnParallelLinear(inner, outs[0], **options)


LAYERS = EngineLayers(
    embedding=VocabParallelEmbedding,
    column=_column,
    row=RowParallelLinear,
    replicated=ReplicatedLinear,
    qkv=QKVParallelLinear,
    norm=RMSNorm,
    centred_norm=GemmaRMSNorm,
    silu_gated=SiluAndMul,
    linear_options={"return_bias": False},
)


def placement(vllm_config: Any) -> Placed:
    """How a model lies on a rank, from a configuration alone."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    conv, state = MambaStateDtypeCalculator.mamba2_state_dtype(
        model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return Placed(ranks, model.dtype, conv, state)


class VllmKit(EngineKit):
    """A `hybrid_models.kit.Kit`."""

    def __init__(self, vllm_config: Any) -> None:
        """For one model of an engine."""
        super().__init__(
            LAYERS,
            placement(vllm_config),
            get_tensor_model_parallel_rank(),
            vllm_config.quant_config,
        )
        self._config = vllm_config
        self.ranks = get_tensor_model_parallel_world_size()
        # Adapters are found by a token's row.
        self.goes_by_rows = vllm_config.lora_config is not None

    def head(
        self, vocabulary: int, hidden: int, *, name: str, tied: nn.Module | None = None
    ) -> nn.Module:
        """vLLM's."""
        head = ParallelLMHead(
            vocabulary, hidden, quant_config=self._quantisation, prefix=name
        )
        return head if tied is None else head.tie_weights(tied)

    def rope(
        self,
        head: int,
        parameters: Mapping[str, Any],
        longest: int,
        *,
        neox: bool = True,
    ) -> Rope:
        """vLLM's, which has one for all layers alike."""
        given = dict(parameters)
        if given.get("rope_type", "default") == "default":  # others depend on `longest`
            longest = self._config.model_config.max_model_len
        if is_stretched := "mscale_all_dim" in given:
            given["rope_type"] = "deepseek_yarn"
        rope: Rope = get_rope(
            head, max_position=longest, is_neox_style=neox, rope_parameters=given
        )
        return stretched_rope(head, rope) if is_stretched else rope

    def attention(
        self,
        layer: int,
        heads: int,
        kv_heads: int,
        head: int,
        *,
        scale: float,
        name: str,
        window: int | None = None,
        source: nn.Module | None = None,
    ) -> nn.Module:
        """vLLM's, whose windows count the token itself, as a kit's do.

        Raises:
            ValueError: if layers that read another one's cache would be given the last
                tokens of prompts alone, which no architecture here does.
        """
        if source is not None and self._config.cache_config.kv_sharing_fast_prefill:
            raise ValueError(
                "model classes of hybrid-plugin compute every layer for all tokens: "
                "start the server without --kv-sharing-fast-prefill"
            )
        return Attention(
            part(self, heads),
            head,
            scale,
            num_kv_heads=own_part_of_keys(self, kv_heads),
            cache_config=self._config.cache_config,
            quant_config=self._quantisation,
            per_layer_sliding_window=window,
            prefix=name,
            kv_sharing_target_layer_name=None if source is None else source.layer_name,
        )

    def latent_attention(
        self,
        layer: int,
        shape: LatentShape,
        expand: nn.Module,
        *,
        scale: float,
        name: str,
    ) -> nn.Module:
        """vLLM's, or over expanded vectors where vLLM keeps no latent ones."""
        if self._config.model_config.use_mla:
            return LatentAttention(
                shape, expand, self._config, self.ranks, scale=scale, name=name
            )
        heads = shape.heads
        attend = self.attention(layer, heads, heads, shape.head, scale=scale, name=name)
        return ExpandedAttention(shape, expand, attend)

    def experts(
        self,
        layer: int,
        hidden: int,
        inner: int,
        count: int,
        routing: Routing,
        *,
        name: str,
    ) -> nn.Module:
        """vLLM's.  On a CPU it has other scores than softmax, and biases, in groups
        only.

        Raises:
            ValueError: if ranks cannot share the channels of an expert.
        """
        part(self, inner)
        groups, top_groups = routing.groups, routing.top_groups
        if groups is None and (
            routing.scoring != "softmax" or routing.bias is not None
        ):
            groups, top_groups = 1, 1
        runner: nn.Module = FusedMoEFactory(
            num_experts=count,
            top_k=routing.top,
            hidden_size=hidden,
            intermediate_size=inner,
            renormalize=routing.renormalise,
            scoring_func=routing.scoring,
            routed_scaling_factor=routing.scale,
            use_grouped_topk=groups is not None,
            num_expert_group=groups,
            topk_group=top_groups,
            e_score_correction_bias=routing.bias,
            custom_routing_function=_choice(routing),
            quant_config=self._quantisation,
            prefix=name,
        )
        setattr(runner, EXPERTS, partial(_give_to_experts, runner))
        return runner

    def states(
        self,
        layer: int,
        tensors: Sequence[StateTensor],
        mix: Mix,
        *,
        width: int,
        name: str,
        captured: bool = False,
    ) -> nn.Module:
        """Ours."""
        return StateLayer(
            tensors,
            mix,
            width=width,
            name=name,
            vllm_config=self._config,
            captured=captured,
        )

    def layers(
        self, count: int, build: Callable[[int, str], nn.Module], *, name: str
    ) -> nn.ModuleList:
        """All of them."""
        return nn.ModuleList(build(i, f"{name}.{i}") for i in range(count))

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """By vLLM's communicator."""
        return tensor_model_parallel_all_reduce(x)


def _choice(routing: Routing) -> Callable[..., Any] | None:
    """`routing.choose` as vLLM calls it."""
    choose = routing.choose
    return None if choose is None else lambda gating_output, **_: choose(gating_output)


_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""Parts of an expert, as vLLM takes them by default."""


def _give_to_experts(
    runner: Any, expert: int, part: str, kind: str, tensor: torch.Tensor
) -> None:
    """A `weights.ExpertLoader`."""
    for _ in runner.load_weights([(f"{expert}.{_PARTS[part]}.{kind}", tensor)]):
        pass  # it yields names as it places them
