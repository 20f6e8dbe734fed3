# SPDX-License-Identifier: Apache-2.0
"""Sizes of a page and of a slot of a model in SGLang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch

from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup
from hybrid_plugin.core.memory.scratch import ScratchLayout
from hybrid_plugin.sglang import addressing, compressed_keys, index_keys, side_states
from hybrid_plugin.sglang.pipeline import StageLayers, all_layers
from hybrid_plugin.sglang.slots import slot_bytes


def make_layout(
    model: Any,
    *,
    token_bytes: int,
    page_size: int,
    device_type: str,
    elastic: bool,
    layers: StageLayers | None = None,
    packed: bool = False,
    draft: AttentionGroup | None = None,
    draft_keys: index_keys.DraftKeys | None = None,
    scratch: ScratchLayout | None = None,
    drafts: int = 0,
) -> CacheLayout:
    """How the cache of one rank is laid out.

    Fixed pools have each layer's keys and values in tensors of their own.  So have
    elastic ones, which need to know every tensor because each is mapped in blocks,
    unless their pages are packed.

    Args:
        model: SGLang's `ModelConfig`.
        token_bytes: KV of one token, over these attention layers; of fixed pools with
            those of a draft model.  Index keys are not counted.
        page_size: tokens in a page.
        device_type: "cpu" or "cuda", as torch calls it.
        elastic: whether slots are elastic pools' own: all states of a slot side by
            side, each aligned.  SGLang's are layer-major, without padding.
        layers: of the model; None for all of them.
        packed: whether all layers of a page of elastic pools lie side by side.
        draft: of elastic pools, the layers of a draft model.
        draft_keys: what a draft model has of index keys, in pools of either kind.
        scratch: of elastic pools, the rows in which drafts are verified.
        drafts: tokens that a sequence verifies at most.
    """
    hybrid = mambaish_config(model)
    params = hybrid.mamba2_cache_params
    layers = layers or all_layers(model)
    tensors = tuple(map(str, layers.attention))
    if elastic:
        tensors = kv_tensors(model, layers)
    states = tuple(map(str, layers.states))
    slot = slot_bytes(params) if elastic else params.mamba_cache_per_req
    keys = index_keys.page_group(model, page_size)
    keys = keys or compressed_keys.page_group(model, page_size)
    rings = [index_keys.ring_group(model, drafts)]
    if draft_keys is not None:
        rings.append(draft_keys.rings)
    layout = CacheLayout(
        page_size=page_size,
        attention=(
            *_attention(tensors, token_bytes * page_size),
            *(() if keys is None else (keys,)),
            *(() if draft_keys is None else (draft_keys.keys,)),
        ),
        states=(
            StateGroup(states, slot // len(params.layers)),
            *(ring for ring in rings if ring is not None),
            *compressed_keys.ring_groups(model),
            *side_states.groups(hybrid),
        ),
    )
    if not elastic:
        return replace(layout, slot_alignment=1)
    pages = (*layout.attention, *(() if draft is None else (draft,)))
    layout = replace(layout, attention=pages, packed=packed, scratch=scratch)
    if device_type == "cpu":  # PyTorch's own operations reach all of it
        return layout
    reach = addressing.addressable_bytes(model, params)
    return replace(layout, addressable_slot_bytes=reach)


def keeps_states_alone(model: Any) -> bool:
    """Whether SGLang gives a model state slots and no KV, as it gives Mamba.

    Args:
        model: SGLang's `ModelConfig`.
    """
    found = mambaish_config(model)
    return found is not None and not found.full_attention_layer_ids


def _attention(tensors: tuple[str, ...], page_bytes: int) -> tuple[AttentionGroup, ...]:
    """The layers with full attention, if there are any."""
    if not tensors:
        return ()
    return (AttentionGroup(tensors, page_bytes // len(tensors)),)


def kv_tensors(model: Any, layers: StageLayers) -> tuple[str, ...]:
    """Names of the tensors in which SGLang keeps KV of full attention.

    Args:
        model: SGLang's `ModelConfig`.
        layers: of it.
    """
    names = tuple(map(str, layers.attention))
    if is_latent(model):
        return names
    return tuple(f"{n} {half}" for n in names for half in ("keys", "values"))


def is_latent(model: Any) -> bool:
    """Whether an attention layer keeps one tensor, and not keys and values.

    Args:
        model: SGLang's `ModelConfig`.
    """
    return bool(model.attention_arch == AttentionArch.MLA)
