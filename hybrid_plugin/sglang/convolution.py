# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefill convolution of gated delta nets, beside slot-major states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LEAST_ROWS = 16
"""Of the states that a convolution is given: few sizes, few kernels."""


def convolve(
    original: Callable[..., torch.Tensor],
    backend: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: torch.Tensor,
    conv_states: torch.Tensor,
    cache_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve a prefill; states that were gathered go in with rows added.

    SGLang gathers the states of a batch where a slot's are not side by side, and
    its kernel is compiled for the number of rows: once more for every number of
    requests that no batch had before.

    Args:
        original: SGLang's method, which updates `conv_states` in place.
        backend: whose method it is.
        layer: of the model.
        forward_batch: the batch.
        mixed_qkv: `[tokens, channels]`.
        conv_states: `[rows, channels, width - 1]`, the pool's or gathered.
        cache_indices: `[requests]`, each one's row.

    Returns:
        `[tokens, channels]`.
    """
    rows = len(conv_states)
    padded = 1 << (max(rows, _LEAST_ROWS) - 1).bit_length()
    gathered = rows == len(cache_indices) and conv_states.is_contiguous()
    if not gathered or padded == rows:
        return original(
            backend, layer, forward_batch, mixed_qkv, conv_states, cache_indices
        )
    room = conv_states.new_empty(padded, *conv_states.shape[1:])
    room[:rows] = conv_states
    out = original(backend, layer, forward_batch, mixed_qkv, room, cache_indices)
    conv_states.copy_(room[:rows])
    return out
