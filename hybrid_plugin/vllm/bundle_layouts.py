# SPDX-License-Identifier: Apache-2.0
"""How the pages and slots of vLLM's layers lie in rows of host memory.

A row has the parts of its pool one behind the other, as the device's executor has them:
layer by layer, in the order in which they were placed.  A layer whose bytes nobody here
can name makes the rows of its pool opaque; they are read as they were written, by a
vLLM of the same version with the same kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVQuantMode, SparseCacheRole

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.engine.bundle_identity import layer_labels
from hybrid_plugin.tiers import fields, vllm_fields
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.row_layout import ITEM_BYTES, Field, RowLayout
from hybrid_plugin.tiers.vllm_fields import PageOrder
from hybrid_plugin.vllm.planning import HybridKVCacheConfig, PoolTensor
from hybrid_plugin.vllm.specs import LatentPageSpec, LatentWindowPageSpec, SlotSpec

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec

_KEYS_THEN_VALUES = ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN")
"""Backends that keep the value of a token and head behind its key."""
_CPU = "CPU_ATTN"
_PLAIN_CPU = ("vec", "vec16")
"""Instruction sets whose kernels keep KV as `vllm_fields.cpu_attention` says."""
LATENT = (LatentPageSpec, LatentWindowPageSpec)
"""Specs of layers that keep a latent vector in place of keys and values."""


@dataclass(frozen=True, slots=True)
class PageForm:
    """How the bytes of a page of a layer with attention are ordered."""

    backend: str
    """Name of its attention backend."""
    instructions: str = ""
    """On a CPU, those that its kernels are written for."""
    block: int = 0
    """Tokens of the blocks into which they divide a page; 0 for a whole page."""


def page_form(layer: Any, block: int | None) -> PageForm:
    """The form of a layer's pages.

    Args:
        layer: vLLM's, with its cache bound.
        block: tokens of its kernels' blocks.
    """
    backend = layer.get_attn_backend().get_name()
    return PageForm(backend, getattr(layer, "isa", ""), block or 0)


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    """A layer's part of a row."""

    name: str
    label: str
    """Its name in bundles."""
    spec: KVCacheSpec
    offset: int
    """Bytes of the row before it."""


def placed_layers(config: HybridKVCacheConfig) -> dict[PoolId, list[PlacedLayer]]:
    """The layers of each pool, in the order of their bytes in a row.

    Args:
        config: of the pools, in any process of the engine.
    """
    specs = {
        name: group.kv_cache_spec
        for group in config.kv_cache_groups
        for name in group.layer_names
    }
    tensors = [t for t in config.kv_cache_tensors if isinstance(t, PoolTensor)]
    labels: dict[str, str] = {}
    for is_state in (True, False):  # one layer of a model may have both
        some = [t.layers for t in tensors if (t.pool == Pool.STATE) is is_state]
        labels |= layer_labels(chain.from_iterable(some))
    found: dict[PoolId, list[PlacedLayer]] = {}
    used: Counter[PoolId] = Counter()
    for tensor in tensors:
        # Where layers lie side by side, the step from one to the next is the smaller.
        size = min(tensor.layer_stride, tensor.block_stride)
        for name in tensor.layers:
            layer = PlacedLayer(name, labels[name], specs[name], used[tensor.pool])
            found.setdefault(tensor.pool, []).append(layer)
            used[tensor.pool] += size
    return found


def layouts_of(
    config: HybridKVCacheConfig,
    order: KVCacheLayout,
    forms: Mapping[str, PageForm],
) -> Layouts:
    """The layouts of all rows of a rank.

    Args:
        config: of the pools.
        order: of the axes of a page, as vLLM resolved it.
        forms: by name of the layer, for those with attention.
    """
    layout, state = config.plan.layout, None
    pages: dict[PoolId, RowLayout] = {}
    for pool, layers in placed_layers(config).items():
        if pool == Pool.STATE:
            found = [_state_fields(layer) for layer in layers]
            state = _row(layout.row_bytes[pool], 0, found, _unnamed(layers))
            continue
        found = [_page_fields(layer, order, forms[layer.name]) for layer in layers]
        used = [order.name, *(forms[layer.name] for layer in layers)]
        pages[pool] = _row(
            layout.row_bytes[pool], layout.page_size, found, _unnamed(layers, used)
        )
    return Layouts(pages, state)


def _row(
    size: int, tokens: int, found: Sequence[list[Field] | None], unnamed: str
) -> RowLayout:
    fields = [one for some in found if some is not None for one in some]
    if None in found:
        return RowLayout(size, tokens, opaque=unnamed)
    return RowLayout(size, tokens, tuple(fields))


def _unnamed(layers: Sequence[PlacedLayer], used: Sequence[object] = ()) -> str:
    """What opaque rows are: whatever says how vLLM uses their bytes."""
    said = [f"{layer.label} {layer.spec} at {layer.offset}" for layer in layers]
    digest = sha256("\n".join([*said, *map(str, used)]).encode()).hexdigest()
    return f"vLLM {vllm.__version__} {digest}"


def _page_fields(
    layer: PlacedLayer, order: KVCacheLayout, form: PageForm
) -> list[Field] | None:
    """Keys and values of a layer, or its latent vectors; None where nobody can say."""
    spec: Any = layer.spec
    if not _is_plain(spec):
        return None
    place = layer.label, _dtype(spec.dtype), layer.offset
    tokens, heads = spec.block_size, spec.num_kv_heads
    if isinstance(spec, LATENT):
        if heads != 1 or spec.head_size_v:
            return None
        return [vllm_fields.latent(*place, tokens=tokens, dim=spec.head_size)]
    block = form.block or tokens
    if form.backend == _CPU:
        if form.instructions not in _PLAIN_CPU or spec.head_size != spec.head_size_v:
            return None
        return vllm_fields.cpu_attention(
            *place, tokens=tokens, heads=heads, dim=spec.head_size, block=block
        )
    if form.backend not in _KEYS_THEN_VALUES or not order.is_block_compact:
        return None
    return vllm_fields.attention(
        *place,
        tokens=tokens,
        heads=heads,
        key_dim=spec.head_size,
        value_dim=spec.head_size_v,
        order=PageOrder(order.name[-3:]),
        block=block,
    )


def _is_plain(spec: Any) -> bool:
    """Whether pages hold an element of KV for each that the model makes."""
    return (
        spec.kv_quant_mode is KVQuantMode.NONE
        and spec.num_head_slots is None
        and spec.state_content_bytes is None
        and spec.page_size_padded is None
        and spec.tokens_per_state == 1
        and getattr(spec, "cache_role", SparseCacheRole.SPARSE)
        is SparseCacheRole.SPARSE
        and _dtype(spec.dtype) in ITEM_BYTES
    )


def _state_fields(layer: PlacedLayer) -> list[Field] | None:
    """What a state layer keeps; None for a kind that nobody here knows, and for rings,
    which nobody else has."""
    spec: Any = layer.spec
    if not isinstance(spec, SlotSpec):
        return None
    kind, shapes = spec.mamba_type, spec.shapes
    dtypes = [_dtype(dtype) for dtype in spec.dtypes]
    if not ITEM_BYTES.keys() >= {*dtypes}:
        return None
    if kind is MambaAttentionBackendEnum.LINEAR and len(shapes) == 1:
        (heads, keys, values), (dtype,) = shapes[0], dtypes
        return [
            fields.lightning_state(
                layer.label,
                dtype,
                layer.offset,
                heads=heads,
                keys=keys,
                values=values,
            )
        ]
    if kind not in _CONVOLVED or len(shapes) != 1 + (kind in _WITH_STATE):
        return None
    found = [_convolution(layer, shapes[0], dtypes[0])]
    if kind in _WITH_STATE:
        start = layer.offset + prod(shapes[0]) * ITEM_BYTES[dtypes[0]]
        found.append(_WITH_STATE[kind](layer.label, dtypes[1], start, shapes[1]))
    return found


def _convolution(layer: PlacedLayer, shape: Sequence[int], dtype: str) -> Field:
    channels_first = is_conv_state_dim_first()
    columns, channels = reversed(shape) if channels_first else shape
    spec: Any = layer.spec
    drafts = 0 if spec.mamba_type in _WITHOUT_DRAFTS else spec.num_speculative_blocks
    return fields.convolution(
        layer.label,
        dtype,
        layer.offset,
        channels=channels,
        taps=columns - drafts,
        channels_first=channels_first,
        columns=columns,
    )


def _delta(label: str, dtype: str, start: int, shape: Sequence[int]) -> Field:
    heads, values, keys = shape
    return fields.delta_state(
        label, dtype, start, heads=heads, values=values, keys=keys
    )


def _selective(label: str, dtype: str, start: int, shape: Sequence[int]) -> Field:
    *heads, states = shape
    count, channels = heads if len(heads) > 1 else (heads[0], 1)
    return fields.selective_state(
        label, dtype, start, heads=count, channels=channels, states=states
    )


_WITH_STATE: dict[
    MambaAttentionBackendEnum, Callable[[str, str, int, Sequence[int]], Field]
] = {
    MambaAttentionBackendEnum.GDN_ATTN: _delta,
    MambaAttentionBackendEnum.MAMBA1: _selective,
    MambaAttentionBackendEnum.MAMBA2: _selective,
}
"""Kinds that keep a convolution's inputs, and behind these a state."""
_CONVOLVED = (*_WITH_STATE, MambaAttentionBackendEnum.SHORT_CONV)
_WITHOUT_DRAFTS = (MambaAttentionBackendEnum.MAMBA1,)
"""Kinds whose convolution has no columns for drafts."""


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
