# SPDX-License-Identifier: Apache-2.0
"""What SGLang's layers of linear attention have alike: `RadixLinearAttention`."""

from __future__ import annotations

from typing import Any

import torch


def output_for(call: dict[str, Any], metadata: Any) -> torch.Tensor:
    """Where a pass over prompts writes, ``[1, T, HV, V]``, padding finite.

    Args:
        call: the arguments of SGLang's `forward_extend`, by name.
        metadata: of the pass.
    """
    given: torch.Tensor | None = call.get("linear_attn_output")
    if given is not None:
        return given
    mixed, layer = call["mixed_qkv"], call["layer"]
    out = mixed.new_empty(1, len(mixed), layer.num_v_heads, layer.head_v_dim)
    tokens = metadata.logical_num_tokens
    if tokens is not None and tokens < len(mixed):
        # Experts and norms that follow take padding too.
        out[:, tokens:].zero_()
    return out


def pools(backend: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of a layer in all slots: the convolution's, and the recurrent one."""
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    return cache.conv[0], cache.temporal
