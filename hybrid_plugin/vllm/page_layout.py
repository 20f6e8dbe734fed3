# SPDX-License-Identifier: Apache-2.0
"""Whether all layers of a page can lie side by side: as the attention kernels take.

vLLM asks each worker which layouts its backends take, and settles on one before it
plans.  With elastic pools a worker names the packed form of the layout it prefers
first, so that what vLLM settles on says how pages lie, in every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.worker.utils import select_common_block_size

from hybrid_plugin.vllm import elastic
from hybrid_plugin.vllm.activation import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

_STRIDED = ("CPU_ATTN", "FLASHINFER", "FLASH_ATTN", "TRITON_ATTN")
"""Backends whose kernels, that of the KV write included, take any stride between
pages, and multiply a page by it in 64 bits (`docs/kernels.md`)."""
_FLASH_ATTENTION = (2, 3)
"""Versions of which that is known; others are compiled for strides of their own."""
_UNDECLARED = ("CPU_ATTN",)
"""Of these, those that name no packed layout because of the order within a page."""


def supported(vllm_config: VllmConfig, names: list[str]) -> list[str]:
    """The layouts that a worker names, most preferred first.

    Args:
        vllm_config: of the engine, whose layers exist and whose page size is chosen.
        names: what the worker's backends take, likewise.
    """
    if not elastic.is_wanted(vllm_config):
        return names
    found = obstacle(vllm_config)
    if found is None:
        packed = _packed(names[0])
        return [packed.name, *(name for name in names if name != packed.name)]
    logger.info(
        "hybrid-plugin keeps the pages of each layer apart, so memory moves in larger "
        "granules: %s",
        found,
    )
    return names


def is_packed(vllm_config: VllmConfig) -> bool:
    """Whether vLLM settled on a layout with all layers of a page side by side."""
    return _is_packed(vllm_config.cache_config.get_resolved_kv_cache_layout())


def obstacle(vllm_config: VllmConfig) -> str | None:
    """Why the layers of a page cannot lie side by side, a sentence; None if they can.

    Args:
        vllm_config: of the engine, whose layers exist and whose page size is chosen.
    """
    from vllm.platforms import current_platform

    backends = current_platform._find_non_ssm_backends(vllm_config)
    preferred = get_supported_kv_cache_layouts(backends)[0].name
    if _is_packed(KVCacheLayout[preferred]):  # their kernels ask for it
        return None
    names = sorted({backend.get_name() for backend in backends})
    unknown = [name for name in names if name not in _STRIDED]
    if unknown:
        return (
            f"the kernels of {', '.join(unknown)} are not known to take other layers "
            "between their pages."
        )
    for layer in vllm_config.compilation_config.static_forward_context.values():
        impl = getattr(layer, "impl", None)
        version = getattr(impl, "vllm_flash_attn_version", None)
        if version not in (None, *_FLASH_ATTENTION):
            return (
                f"FlashAttention {version} is not known to take other layers between "
                "its pages."
            )
    if not KVCacheLayout[preferred].is_block_compact:
        return f"in the layout {preferred} a page of a layer is in several places."
    refusing = sorted({b.get_name() for b in backends if not _takes(b, preferred)})
    if refusing:
        return f"{', '.join(refusing)} takes no {_packed(preferred).name}."
    size = vllm_config.cache_config.block_size
    blocks = select_common_block_size(size, list(backends))
    if blocks != size:
        return (
            f"{', '.join(names)} divides pages of {size} tokens into blocks of "
            f"{blocks}, which must be evenly spaced."
        )
    return None


def _is_packed(layout: KVCacheLayout) -> bool:
    """Whether pages are outermost, then layers, each of them in one place."""
    return bool(layout.is_block_outermost and layout.is_block_compact)


def _packed(name: str) -> KVCacheLayout:
    """The same order within a page, with pages outermost."""
    layout = KVCacheLayout[name]
    if _is_packed(layout):
        return layout
    layers, pages, *within = layout.stride_order
    return KVCacheLayout((pages, layers, *within))


def _takes(backend: type[AttentionBackend], preferred: str) -> bool:
    """Whether a backend declares the packed form of a layout, or need not."""
    declared = backend.supported_kv_cache_layouts()
    if declared is None or backend.get_name() in _UNDECLARED:
        return True
    return _packed(preferred) in declared
