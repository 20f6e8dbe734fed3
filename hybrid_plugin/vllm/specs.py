# SPDX-License-Identifier: Apache-2.0
"""KV cache specs of the pools, registered with vLLM's spec registry.

They are what the layers declare, less the padding and the alignment that a
single pool would force on them.  The registry wants a manager for each spec;
the managers are `HybridKVCacheManager`'s business, so what is registered here
only guards against a vLLM that would go on with its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NoReturn

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.core.single_type_kv_cache_manager import (
    CircularBufferManager,
    FullAttentionManager,
    MambaManager,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from hybrid_plugin.core.memory.attention_windows import (
    FULL_ATTENTION,
    AttentionWindow,
    ChunkedLocal,
    SlidingWindow,
)
from hybrid_plugin.vllm.servable import UnservableError

# The registry takes a first entry for proof that vLLM's own are there.
register_all_kvcache_specs(get_current_vllm_config_or_none())


@dataclass(frozen=True, kw_only=True)
class _InPages:
    """What the specs of pages have beside vLLM's fields."""

    page_ranks: int = 1
    """Ranks over which the tokens of a page are interleaved; each has `block_size` rows
    for its own."""


def tokens_in_page(spec: KVCacheSpec) -> int:
    """Tokens in a page of a spec of ours: the rows that all its ranks have."""
    return spec.block_size * (spec.page_ranks if isinstance(spec, _InPages) else 1)


def _refuse(spec: KVCacheSpec) -> NoReturn:
    raise RuntimeError(
        f"vLLM asked for its own manager of {type(spec).__name__}: it runs its own "
        "scheduler on the pools of hybrid-plugin. Check that VLLM_PLUGINS lets the "
        "plugin load in every process."
    )


class _NoPageManager(FullAttentionManager):
    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        _refuse(kv_cache_spec)


class _NoSlotManager(MambaManager):
    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        _refuse(kv_cache_spec)


class _NoRingManager(CircularBufferManager):
    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        _refuse(kv_cache_spec)


@register_kv_cache_spec(
    manager_class=_NoPageManager, uniform_type_base_spec=FullAttentionSpec
)
@dataclass(frozen=True, kw_only=True)
class PageSpec(_InPages, FullAttentionSpec):
    """KV of one attention layer, in pages of the KV pool."""


@register_kv_cache_spec(
    manager_class=_NoPageManager, uniform_type_base_spec=FullAttentionSpec
)
@dataclass(frozen=True, kw_only=True)
class LatentPageSpec(_InPages, MLAAttentionSpec):
    """Latent KV of one MLA layer, in pages of the KV pool."""


@register_kv_cache_spec(
    manager_class=_NoPageManager, uniform_type_base_spec=SlidingWindowSpec
)
@dataclass(frozen=True, kw_only=True)
class WindowPageSpec(SlidingWindowSpec):
    """KV of one layer with a sliding window, in pages of that window's pool."""


@register_kv_cache_spec(
    manager_class=_NoPageManager, uniform_type_base_spec=SlidingWindowMLASpec
)
@dataclass(frozen=True, kw_only=True)
class LatentWindowPageSpec(SlidingWindowMLASpec):
    """Latent KV of one MLA layer with a sliding window, in pages of its pool."""


@register_kv_cache_spec(
    manager_class=_NoPageManager, uniform_type_base_spec=ChunkedLocalAttentionSpec
)
@dataclass(frozen=True, kw_only=True)
class ChunkPageSpec(ChunkedLocalAttentionSpec):
    """KV of one layer that attends within chunks, in pages of that chunk's pool."""


@register_kv_cache_spec(manager_class=_NoSlotManager, uniform_type_base_spec=MambaSpec)
@dataclass(frozen=True)
class SlotSpec(MambaSpec):
    """States of one state layer, a part of every slot of the state pool."""


@register_kv_cache_spec(
    manager_class=_NoRingManager, uniform_type_base_spec=CircularBufferSpec
)
@dataclass(frozen=True, kw_only=True)
class RingSpec(CircularBufferSpec):
    """Tokens of one layer that no index key stands for yet, a part of every slot.

    Column 0 of its block table is the slot, as of state layers'.
    """


_OURS: dict[type[KVCacheSpec], type[KVCacheSpec]] = {
    FullAttentionSpec: PageSpec,
    MLAAttentionSpec: LatentPageSpec,
    SlidingWindowSpec: WindowPageSpec,
    SlidingWindowMLASpec: LatentWindowPageSpec,
    ChunkedLocalAttentionSpec: ChunkPageSpec,
    MambaSpec: SlotSpec,
    CircularBufferSpec: RingSpec,
}


def to_pool_spec(layer: str, spec: KVCacheSpec, page_ranks: int = 1) -> KVCacheSpec:
    """Return our spec for what `layer` declares.

    Args:
        layer: its name.
        spec: what it declares.
        page_ranks: over which vLLM interleaves the tokens of attention layers.

    Raises:
        UnservableError: for a kind of layer that the plugin has no pool for.
    """
    ours = _OURS.get(type(spec))
    if ours is None:
        raise UnservableError(
            f"the plugin cannot serve layer {layer}, which keeps its cache as "
            f"{type(spec).__name__}."
        )
    if isinstance(spec, SlidingWindowMLASpec) and (
        spec.bounded_replay or spec.model_version is not None
    ):
        raise UnservableError(
            f"the plugin cannot serve layer {layer}, whose window holds more than the "
            "KV of its tokens."
        )
    values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.init}
    if spec.dcp_sharded and page_ranks > 1:
        if not issubclass(ours, _InPages):
            raise UnservableError(
                f"vLLM has no decode context parallelism for layer {layer}, which has "
                "a window; drop --decode-context-parallel-size."
            )
        values["page_ranks"] = page_ranks
    if isinstance(spec, MambaSpec):
        values["page_size_padded"] = None
    return ours(**values)


def window_of(spec: KVCacheSpec) -> AttentionWindow | None:
    """How far back the layers of a spec of ours look; None for what is in slots."""
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindow(spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return ChunkedLocal(spec.attention_chunk_size)
    return FULL_ATTENTION if isinstance(spec, PageSpec | LatentPageSpec) else None


def is_page_spec(spec: KVCacheSpec) -> bool:
    """Whether the spec's layers keep KV in pages, of whichever pool."""
    return window_of(spec) is not None


__all__ = [
    "ChunkPageSpec",
    "LatentPageSpec",
    "LatentWindowPageSpec",
    "PageSpec",
    "RingSpec",
    "SlotSpec",
    "WindowPageSpec",
    "is_page_spec",
    "to_pool_spec",
    "tokens_in_page",
    "window_of",
]
