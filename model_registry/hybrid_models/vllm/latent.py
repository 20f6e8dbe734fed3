# SPDX-License-Identifier: Apache-2.0
"""Attention over latent vectors in vLLM, and how vLLM learns of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.attention import MLAAttention

from hybrid_models.blocks.expansion import expanded
from hybrid_models.kit import LatentShape, Rope


class LatentAttention(MLAAttention):
    """vLLM's, which keeps a vector of each token."""

    def __init__(
        self,
        shape: LatentShape,
        expand: nn.Module,
        vllm_config: Any,
        ranks: int,
        *,
        scale: float,
        name: str,
    ) -> None:
        """Build it for one of `ranks`."""
        expand.return_bias = True  # type: ignore[assignment] # it takes the first of two
        super().__init__(
            num_heads=shape.heads // ranks,
            scale=scale,
            qk_nope_head_dim=shape.plain,
            qk_rope_head_dim=shape.turned,
            v_head_dim=shape.value,
            q_lora_rank=None,
            kv_lora_rank=shape.latent,
            kv_b_proj=expand,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=name,
        )
        self._width = shape.heads // ranks * shape.value

    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, turned: torch.Tensor
    ) -> torch.Tensor:
        """As `Kit.latent_attention` says."""
        result: torch.Tensor = super().forward(
            q, latent, turned.unsqueeze(1), output_shape=(len(q), self._width)
        )
        return result


def stretched_rope(head: int, rope: Any) -> Rope:
    """vLLM's embedding for longer contexts of such models, as kits have it.

    Args:
        head: size of a head.
        rope: of vLLM, which takes heads as a dimension of their own.
    """

    def turn(
        positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_q, of_k = rope(positions, q.view(len(q), -1, head), k.view(len(k), -1, head))
        return of_q.reshape(q.shape), of_k.reshape(k.shape)

    return turn


class ExpandedAttention(nn.Module):
    """Over keys and values of every head, for devices whose attention over vectors
    takes whole prompts only, as a CPU's does."""

    def __init__(
        self, shape: LatentShape, expand: nn.Module, attend: nn.Module
    ) -> None:
        """Of attention with as many heads of keys as of queries."""
        super().__init__()
        # Not a module of this one, too: its weights would have two names.
        self._expand = [expand]
        self._shape, self.attend = shape, attend

    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, turned: torch.Tensor
    ) -> torch.Tensor:
        """As `Kit.latent_attention` says."""
        k, v = expanded(self._expand[0], self._shape, latent, turned)
        # vLLM's attention has values as wide as keys.
        wide = functional.pad(v, (0, self._shape.head - self._shape.value))
        found = self.attend(q.flatten(1), k.flatten(1), wide.flatten(1))
        heads = found.view(len(q), -1, self._shape.head)
        return heads[..., : self._shape.value].flatten(1)
