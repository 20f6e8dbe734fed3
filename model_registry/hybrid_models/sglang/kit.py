# SPDX-License-Identifier: Apache-2.0
"""SGLang's layers as a kit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_reduce
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from sglang.srt.model_executor.runner_utils.forward_batch import get_forward_batch
from sglang.srt.runtime_context import get_parallel, get_server_args, get_spec
from torch import nn

from hybrid_models.engine_kit import EngineKit, EngineLayers
from hybrid_models.kit import (
    LatentShape,
    Mix,
    Rope,
    Routing,
    StateTensor,
    own_part_of_keys,
    part,
)
from hybrid_models.sglang.configs import placement
from hybrid_models.sglang.experts import Experts
from hybrid_models.sglang.states import StateLayer

LAYERS = EngineLayers(
    embedding=VocabParallelEmbedding,
    column=MergedColumnParallelLinear,
    row=RowParallelLinear,
    replicated=ReplicatedLinear,
    qkv=QKVParallelLinear,
    norm=RMSNorm,
    centred_norm=GemmaRMSNorm,
    silu_gated=SiluAndMul,
)


class Attention(RadixAttention):
    """SGLang's, of the pass that runs."""

    keeps = True
    """Whether it writes keys and values to the cache, too."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Queries, keys and values ``[T, heads * head]`` to the output."""
        result: torch.Tensor = super().forward(
            q, k, v, get_forward_batch(), save_kv_cache=self.keeps
        )
        return result


class SglangKit(EngineKit):
    """A `hybrid_models.kit.Kit`."""

    def __init__(self, config: Any, quantisation: Any) -> None:
        """For one model.

        Args:
            config: of the model.
            quantisation: SGLang's; None without.

        Raises:
            ValueError: if replicas of attention share the other layers, drafts would
                be verified, adapters are asked for, or SGLang has added heads.
        """
        if get_spec().speculative_algorithm is not None:
            raise ValueError(
                "model classes of hybrid-plugin do not verify drafts yet: start the "
                "server without --speculative-algorithm"
            )
        refuse_adapters(get_server_args())
        refuse_padding(config)
        parallel = get_parallel()
        if parallel.attn_tp_size != parallel.tp_size:
            raise ValueError(
                "model classes of hybrid-plugin do not run with attention that is cut "
                "otherwise than the other layers: drop --enable-dp-attention"
            )
        super().__init__(LAYERS, placement(config), parallel.tp_rank, quantisation)
        self.dtype = torch.get_default_dtype()
        self.ranks = parallel.tp_size
        self.windows: set[int] = set()
        """Tokens before the token itself that layers with a window see."""

    def head(
        self, vocabulary: int, hidden: int, *, name: str, tied: nn.Module | None = None
    ) -> nn.Module:
        """SGLang's; an embedding is its own head."""
        if tied is not None:
            return tied
        return ParallelLMHead(
            vocabulary, hidden, quant_config=self._quantisation, prefix=name
        )

    def rope(
        self,
        head: int,
        parameters: Mapping[str, Any],
        longest: int,
        *,
        neox: bool = True,
    ) -> Rope:
        """SGLang's, which has one for all layers alike."""
        scaled = parameters.get("rope_type", "default") != "default"
        if not scaled:  # others depend on `longest`
            longest = get_server_args().context_length or longest
        rope: Rope = get_rope(
            head,
            rotary_dim=int(head * parameters.get("partial_rotary_factor", 1.0)),
            max_position=longest,
            base=parameters["rope_theta"],
            is_neox_style=neox,
            rope_scaling=dict(parameters) if scaled else None,
        )
        return rope

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
        """SGLang's, whose windows do not count the token itself.

        Where it reads the cache of another layer, it goes by that layer's number.
        """
        if window is not None:
            self.windows.add(window - 1)
        attention = Attention(
            part(self, heads),
            head,
            scale,
            own_part_of_keys(self, kv_heads),
            layer if source is None else source.layer_id,
            sliding_window_size=-1 if window is None else window - 1,
            quant_config=self._quantisation,
            prefix=name,
        )
        attention.keeps = source is None
        return attention

    def latent_attention(
        self,
        layer: int,
        shape: LatentShape,
        expand: nn.Module,
        *,
        scale: float,
        name: str,
    ) -> nn.Module:
        """Not here: SGLang has classes of its own for what needs it."""
        raise ValueError(
            "model classes of hybrid-plugin have no latent attention in SGLang: leave "
            'this one out of the option "models", for SGLang has a class of its own'
        )

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
        """SGLang's.

        Raises:
            ValueError: if ranks cannot share the channels of an expert.
        """
        part(self, inner)
        return Experts(
            layer, hidden, inner, count, routing, self._quantisation, name=name
        )

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
        """Ours, which SGLang captures no prompts of."""
        return StateLayer(layer, tensors, mix, width=width)

    def layers(
        self, count: int, build: Callable[[int, str], nn.Module], *, name: str
    ) -> nn.ModuleList:
        """All of them."""
        return nn.ModuleList(build(i, f"{name}.{i}") for i in range(count))

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """By SGLang's communicator."""
        return tensor_model_parallel_all_reduce(x)


def refuse_adapters(arguments: Any) -> None:
    """Require a server without LoRA, which no test of ours has run in SGLang.

    Args:
        arguments: of the server.

    Raises:
        ValueError: for one with it.
    """
    if arguments.enable_lora or arguments.lora_paths:
        raise ValueError(
            "model classes of hybrid-plugin take no LoRA adapters in SGLang: start "
            "the server without --enable-lora and --lora-paths"
        )


def refuse_padding(config: Any) -> None:
    """Require as many heads as the checkpoint has.

    On a CPU SGLang adds heads to configurations until ranks divide them, in which our
    classes would find other sizes than those of the checkpoint's tensors.

    Args:
        config: of the model, as SGLang has changed it.

    Raises:
        ValueError: if there are more.
    """
    for name, before in (
        ("num_attention_heads", "original_num_attention_heads"),
        ("num_key_value_heads", "original_total_num_kv_heads"),
    ):
        given = getattr(config, before, None)
        if given is not None and getattr(config, name, given) != given:
            raise ValueError(
                f"SGLang pads the {given} heads of this model ({name}) for so many "
                "ranks, which model classes of hybrid-plugin are not made for: use "
                "fewer ranks"
            )
