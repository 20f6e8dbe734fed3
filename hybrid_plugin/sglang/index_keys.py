# SPDX-License-Identifier: Apache-2.0
"""What SGLang keeps for sparse attention over latents, beside the latents.

An indexer has a key of its own for each token, or for each few in turn, with which it
chooses the tokens that a query reads.  Those keys lie by pages, so a page carries them
as it does its latents.  Where a key stands for several tokens, those that none stands
for yet wait in a ring (`rings`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    dsa_layer_skips_topk,
    get_dsa_index_head_dim,
    get_dsa_index_kpool,
    get_dsa_index_kpool_compress,
    is_deepseek_dsa,
)

from hybrid_plugin.core.memory.layout import AttentionGroup, StateGroup

_SCALE_BYTES = 4
"""Of an index key's scale; one for each `_BLOCK` channels."""
_BLOCK = 128
_RING_ITEM = 2
"""Bytes of a channel of a waiting token's key, and of its score."""


@dataclass(frozen=True, slots=True)
class DraftKeys:
    """What a draft model has of index keys, beside its latents."""

    keys: AttentionGroup
    """Of a page."""
    rings: StateGroup | None
    """Of a slot; None where a key stands for one token."""


def has_index_keys(model: Any) -> bool:
    """Whether attention layers choose what they read by index keys.

    Args:
        model: SGLang's `ModelConfig`.
    """
    return bool(is_deepseek_dsa(model.hf_config))


def tokens_of_key(model: Any) -> int:
    """Tokens that an index key stands for, 1 without any.

    Args:
        model: SGLang's `ModelConfig`.
    """
    if not has_index_keys(model):
        return 1
    return int(get_dsa_index_kpool(model.hf_config))


def layers_with_index_keys(model: Any) -> tuple[int, ...]:
    """Of the model's attention layers, those that choose anew.

    Args:
        model: SGLang's `ModelConfig`.
    """
    if not has_index_keys(model):
        return ()
    layers = mambaish_config(model).full_attention_layer_ids
    config = model.hf_config
    return tuple(n for n in layers if not dsa_layer_skips_topk(config, n))


def page_group(model: Any, page_size: int) -> AttentionGroup | None:
    """The index keys of a page, a tensor for each layer that has some.

    Args:
        model: SGLang's `ModelConfig`.
        page_size: tokens in a page.
    """
    layers = layers_with_index_keys(model)
    if not layers:
        return None
    names = tuple(f"{n} index keys" for n in layers)
    return AttentionGroup(names, page_bytes(model, page_size))


def page_bytes(model: Any, page_size: int) -> int:
    """Bytes of one layer's index keys of a page.

    Args:
        model: SGLang's `ModelConfig`, of a model with index keys.
        page_size: tokens in a page.
    """
    width = int(get_dsa_index_head_dim(model.hf_config))
    return page_size // tokens_of_key(model) * (width + width // _BLOCK * _SCALE_BYTES)


def ring_group(model: Any, drafts: int = 0) -> StateGroup | None:
    """The rings of a slot, for the layers that have some.

    Args:
        model: SGLang's `ModelConfig`.
        drafts: tokens that a sequence verifies at most.
    """
    return _rings(model, tuple(map(str, layers_with_index_keys(model))), drafts)


def keys_of_draft(
    model: Any, layers: int, page_size: int, drafts: int
) -> DraftKeys | None:
    """What a draft model has, each of whose layers chooses anew; None without keys.

    Args:
        model: SGLang's `ModelConfig` of the draft model.
        layers: that have KV.
        page_size: tokens in a page.
        drafts: tokens that a sequence verifies at most.
    """
    if not has_index_keys(model):
        return None
    names = tuple(f"draft {n}" for n in range(layers))
    keys = tuple(f"{name} index keys" for name in names)
    return DraftKeys(
        AttentionGroup(keys, page_bytes(model, page_size)),
        _rings(model, names, drafts),
    )


def _rings(model: Any, layers: tuple[str, ...], drafts: int) -> StateGroup | None:
    """Those of some layers, each with room for the tokens of a key and for drafts."""
    size = tokens_of_key(model)
    if not layers or size == 1 or not get_dsa_index_kpool_compress(model.hf_config):
        return None
    width = int(get_dsa_index_head_dim(model.hf_config))
    ring = 2 * (size + drafts) * width * _RING_ITEM
    return StateGroup(tuple(f"{name} ring" for name in layers), ring)
