# SPDX-License-Identifier: Apache-2.0
"""What a page holds for a draft model, before SGLang builds the draft model's pool."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.mem_cache.kv_cache_configurator import calculate_mla_kv_cache_dim
from sglang.srt.runtime_context import get_spec

from hybrid_plugin.core.memory.layout import AttentionGroup
from hybrid_plugin.sglang import index_keys
from hybrid_plugin.sglang.index_keys import DraftKeys
from hybrid_plugin.sglang.layout import is_latent
from hybrid_plugin.sglang.speculation.scratch import drafts_per_step


def draft_group(configurator: Any, page_size: int) -> AttentionGroup | None:
    """The layers of the draft model, which has KV for the same tokens.

    Args:
        configurator: SGLang's `KVCacheConfigurator` of the target model.
        page_size: tokens in a page.

    Returns:
        A group of which each tensor counts as a layer; None without a draft model.
    """
    model = _draft_model(configurator)
    if model is None:
        return None
    count = _layers(configurator, model)
    item: int = configurator.kv_cache_dtype.itemsize
    if is_latent(model):
        dim = calculate_mla_kv_cache_dim(
            model_config=model, kv_cache_dtype=configurator.kv_cache_dtype
        )
        names = tuple(f"draft {n}" for n in range(count))
        return AttentionGroup(names, dim * item * page_size)
    heads = model.get_num_kv_heads(configurator.draft_attn_tp_size)
    halves = ("keys", "values")
    names = tuple(f"draft {n} {half}" for n in range(count) for half in halves)
    return AttentionGroup(names, heads * model.head_dim * item * page_size)


def token_bytes(draft: AttentionGroup | None, page_size: int) -> int:
    """KV of one token in the layers of a draft model; 0 without one."""
    return 0 if draft is None else draft.page_bytes * len(draft.layers) // page_size


def draft_keys(configurator: Any, page_size: int) -> DraftKeys | None:
    """What a draft model with index keys of its own has of them; arguments as above."""
    model = _draft_model(configurator)
    if model is None:
        return None
    layers = _layers(configurator, model)
    return index_keys.keys_of_draft(model, layers, page_size, drafts_per_step())


def _draft_model(configurator: Any) -> Any | None:
    """SGLang's `ModelConfig` of the draft model, if there is one."""
    if get_spec().speculative_algorithm is None:
        return None
    return configurator.spec_aux_config.draft_model_config


def _layers(configurator: Any, model: Any) -> int:
    """Layers of a draft model that have KV."""
    if mambaish_config(model) is not None:
        return 1  # SGLang's pool for the prediction layer of a model with states
    return int(configurator.spec_aux_config.draft_kv_num_layers)


def backends() -> tuple[str, ...]:
    """The attention backend of a draft model, if it has one of its own."""
    own = get_spec().speculative_draft_attention_backend
    return () if own is None else (own,)
