# SPDX-License-Identifier: Apache-2.0
"""KV cache specs of the two pools, registered with vLLM's spec registry.

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
    FullAttentionManager,
    MambaManager,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from hybrid_plugin.vllm.servable import UnservableError

# The registry takes a first entry for proof that vLLM's own are there.
register_all_kvcache_specs(get_current_vllm_config_or_none())


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


@register_kv_cache_spec(
    manager_class=_NoPageManager, uniform_type_base_spec=FullAttentionSpec
)
@dataclass(frozen=True, kw_only=True)
class PageSpec(FullAttentionSpec):
    """KV of one attention layer, in pages of the KV pool."""


@register_kv_cache_spec(
    manager_class=_NoPageManager, uniform_type_base_spec=FullAttentionSpec
)
@dataclass(frozen=True, kw_only=True)
class LatentPageSpec(MLAAttentionSpec):
    """Latent KV of one MLA layer, in pages of the KV pool."""


@register_kv_cache_spec(manager_class=_NoSlotManager, uniform_type_base_spec=MambaSpec)
@dataclass(frozen=True)
class SlotSpec(MambaSpec):
    """States of one state layer, a part of every slot of the state pool."""


_OURS: dict[type[KVCacheSpec], type[KVCacheSpec]] = {
    FullAttentionSpec: PageSpec,
    MLAAttentionSpec: LatentPageSpec,
    MambaSpec: SlotSpec,
}


def to_pool_spec(layer: str, spec: KVCacheSpec) -> KVCacheSpec:
    """Return our spec for what `layer` declares.

    Raises:
        UnservableError: for a kind of layer that the plugin has no pool for.
    """
    ours = _OURS.get(type(spec))
    if ours is None:
        raise UnservableError(
            f"the plugin cannot serve layer {layer}, which keeps its cache as "
            f"{type(spec).__name__}."
        )
    values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.init}
    if isinstance(spec, MambaSpec):
        values["page_size_padded"] = None
    return ours(**values)


def is_page_spec(spec: KVCacheSpec) -> bool:
    """Whether the spec's layers live in the KV pool."""
    return isinstance(spec, PageSpec | LatentPageSpec)


__all__ = [
    "LatentPageSpec",
    "PageSpec",
    "SlotSpec",
    "is_page_spec",
    "to_pool_spec",
]
