# SPDX-License-Identifier: Apache-2.0
"""SGLang's layer of experts, with its choice of them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK
from torch import nn

from hybrid_models.kit import Routing
from hybrid_models.weights import EXPERTS

_PLACES = {"gate": ("w13", "w1"), "up": ("w13", "w3"), "down": ("w2", "w2")}
"""Where SGLang keeps a part of an expert, and what it calls it."""


class Experts(nn.Module):
    """Tokens ``[T, hidden]`` and logits of a router to ``[T, hidden]``."""

    def __init__(
        self,
        layer: int,
        hidden: int,
        inner: int,
        count: int,
        routing: Routing,
        quantisation: Any,
        *,
        name: str,
    ) -> None:
        """Build it as `Kit.experts` says."""
        super().__init__()
        self._choose = routing.choose
        self.topk = TopK(
            top_k=routing.top,
            layer_id=layer,
            renormalize=routing.renormalise,
            scoring_func=routing.scoring,
            use_grouped_topk=routing.groups is not None,
            num_expert_group=routing.groups,
            topk_group=routing.top_groups,
            correction_bias=None if routing.bias is None else routing.bias.data,
            routed_scaling_factor=routing.scale,
        )
        self.fused = get_moe_impl_class(quantisation)(
            layer_id=layer,
            top_k=routing.top,
            num_experts=count,
            hidden_size=hidden,
            intermediate_size=inner,
            reduce_results=True,
            quant_config=quantisation,
            routed_scaling_factor=routing.scale,
            inplace=False,
            prefix=name,
        )
        # On a GPU the choice comes in the form that the experts' kernels take.
        self.topk.bind_runner_backend(self.fused.runner_backend)
        setattr(self, EXPERTS, self._give)

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        result: torch.Tensor = self.fused(x, self._chosen(x, logits))
        return result

    def _chosen(self, x: torch.Tensor, logits: torch.Tensor) -> Any:
        if self._choose is None:
            return self.topk(x, logits)
        weights, experts = self._choose(logits)
        return StandardTopKOutput(weights.float(), experts.int(), logits)

    def _give(self, expert: int, part: str, kind: str, tensor: torch.Tensor) -> None:
        """A `weights.ExpertLoader`."""
        place, shard = _PLACES[part]
        name = f"{place}_{kind}"
        parameter = getattr(self.fused, name)
        parameter.weight_loader(parameter, tensor, name, shard, expert)
