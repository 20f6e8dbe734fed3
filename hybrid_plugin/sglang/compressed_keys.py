# SPDX-License-Identifier: Apache-2.0
"""What SGLang keeps for sparse attention by compressed keys (Qwen4-Exp).

A compressed key stands for several tokens in turn, a mean of their index keys.  Pages
are a multiple of these tokens, and a key lies where its tokens do: that of the tokens
at positions `p` to `p + size - 1` of the pool has number `p / size`.  So a page carries
its keys as it does its KV.  Index keys of tokens that no compressed key stands for yet
wait in a ring, with their coordinates (`pending_keys`).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.attention.qsa.config import parse_qsa_profile
from sglang.srt.mem_cache.qsa_kv_pool import (
    QSATokenToKVPool,
    resolve_qsa_indexer_dtype,
)
from sglang.srt.runtime_context import get_model

from hybrid_plugin.core.memory.layout import AttentionGroup, StateGroup

PAGE_TOKENS = 64
"""Of a page, as SGLang sets it for such models."""
_COORDINATES = 3 * 8
"""Bytes of a waiting token's coordinates: time, height and width, int64."""


def has_compressed_keys(model: Any) -> bool:
    """Whether attention layers choose what they read by compressed keys.

    Args:
        model: SGLang's `ModelConfig`.
    """
    return parse_qsa_profile(model.hf_config) is not None


def page_group(model: Any, page_size: int) -> AttentionGroup | None:
    """The compressed keys of a page, a tensor for each attention layer.

    Args:
        model: SGLang's `ModelConfig`.
        page_size: tokens in a page.
    """
    profile = parse_qsa_profile(model.hf_config)
    if profile is None:
        return None
    item = resolve_qsa_indexer_dtype(get_model().qsa_indexer_dtype).itemsize
    keys = page_size // profile.compress_ratio
    names = tuple(f"{n} compressed keys" for n in _layers(model))
    return AttentionGroup(names, keys * profile.kv_heads * profile.head_dim * item)


def ring_groups(model: Any) -> tuple[StateGroup, ...]:
    """The rings of a slot: a tensor of keys for each layer, and one of coordinates.

    Args:
        model: SGLang's `ModelConfig`.
    """
    profile = parse_qsa_profile(model.hf_config)
    if profile is None:
        return ()
    item = QSATokenToKVPool.index_state_dtype.itemsize
    ring = profile.compress_ratio * profile.kv_heads * profile.head_dim * item
    return (
        StateGroup(tuple(f"{n} waiting keys" for n in _layers(model)), ring),
        StateGroup(("coordinates",), profile.compress_ratio * _COORDINATES),
    )


def token_bytes(model: Any, configurator: Any) -> int:
    """Bytes that SGLang counts for the compressed keys of a token.

    Args:
        model: SGLang's `ModelConfig`.
        configurator: SGLang's `DefaultPoolConfigurator`.
    """
    found: int = configurator._compute_qsa_cell_size(
        hf_config=model.hf_config, num_layers=len(_layers(model))
    )
    return found


def key_tensors(kv_pool: Any) -> list[torch.Tensor]:
    """The compressed keys of a pool, each `[pages, keys, ...]`, one per layer.

    Args:
        kv_pool: of attention layers; others than `QSATokenToKVPool` have none.
    """
    if not isinstance(kv_pool, QSATokenToKVPool):
        return []
    keys = kv_pool.qsa_compressed_page_size
    pages = kv_pool.qsa_compressed_capacity // keys
    return [
        one[: pages * keys].view(pages, keys, *one.shape[1:])
        for one in kv_pool.qsa_compressed_k_buffer_pool
    ]


def _layers(model: Any) -> tuple[int, ...]:
    return tuple(mambaish_config(model).full_attention_layer_ids)
