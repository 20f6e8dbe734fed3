# SPDX-License-Identifier: Apache-2.0
"""How a page, and a slot, of SGLang's pools lie in a row of host memory.

A row has the parts of its pool one behind the other (`device.host.slabs`).  Where a
tensor lies in it is found by its addresses, so that one rule holds for every layout:
SGLang's own pools, elastic ones packed or apart, and the KV of a draft model that
shares the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from sglang import __version__

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.sglang.pool_rows import index_tensors, kv_tensors, sibling_tensors
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.row_layout import ITEM_BYTES, TOKEN, Axis, Field, RowLayout

_AXES = {
    "nhd": (TOKEN, "head", "dim"),
    "hnd": ("head", TOKEN, "dim"),
}
"""Of a page's keys, and of its values, by SGLang's names of its layouts."""


@dataclass(frozen=True, slots=True)
class NamedRows:
    """One tensor of one layer, which lies in the rows of a pool."""

    name: str
    """As in `tiers.row_layout.Field`."""
    rows: torch.Tensor
    """`[ids, *axes]`."""
    axes: tuple[str, ...]
    dtype: torch.dtype
    """What its elements are; SGLang stores some types under another name."""


def layouts(
    parts: Mapping[PoolId, Sequence[torch.Tensor]],
    row_bytes: Mapping[PoolId, int],
    page_size: int,
    named: Mapping[PoolId, Sequence[NamedRows] | str],
) -> Layouts:
    """The layouts of all rows of a rank's host memory.

    Args:
        parts: `[ids, bytes]` int8 of each pool of the device.
        row_bytes: of a row on the host, by pool.
        page_size: tokens in a page.
        named: by pool, the tensors in its rows; a text where nobody can say, which is
            then equal for rows that are alike.

    Raises:
        ValueError: if a tensor lies in no part.
    """
    pages, state = {}, None
    for pool, size in row_bytes.items():
        if pool == Pool.STATE:
            state = _layout(parts[pool], size, 0, named[pool])
        else:
            pages[pool] = _layout(parts[pool], size, page_size, named[pool])
    return Layouts(pages, state)


def _layout(
    parts: Sequence[torch.Tensor],
    row_bytes: int,
    tokens: int,
    named: Sequence[NamedRows] | str,
) -> RowLayout:
    if isinstance(named, str):
        return RowLayout(row_bytes, tokens, opaque=named)
    return RowLayout(row_bytes, tokens, tuple(_field(one, parts) for one in named))


def _field(named: NamedRows, parts: Sequence[torch.Tensor]) -> Field:
    """Where a tensor is in a row."""
    rows, item = named.rows, named.rows.itemsize
    ends = accumulate(part.shape[1] for part in parts)
    for part, end in zip(parts, ends, strict=True):
        place = rows.data_ptr() - part.data_ptr()
        if 0 <= place < part.shape[1] and rows.stride(0) * item == part.stride(0):
            start = end - part.shape[1] + place
            axes = zip(named.axes, rows.shape[1:], rows.stride()[1:], strict=True)
            return Field(
                named.name,
                _type_name(named.dtype),
                start,
                tuple(Axis(name, size, step * item) for name, size, step in axes),
            )
    raise ValueError(f"{named.name} lies in no part of its pool")


def _type_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ValueError(f"elements of {name} are not known")
    return name


# ------------------------------------------------------------------------- pages


def key_value_rows(
    pool: Any, page_size: int, layers: Sequence[str]
) -> list[NamedRows] | str:
    """The tensors of a KV pool, by pages.

    Args:
        pool: SGLang's `MHATokenToKVPool` or `MLATokenToKVPool`.
        page_size: tokens in a page.
        layers: names of its layers, in order.

    Raises:
        ConfigError: for a kind of pool that keeps more than its tensors.
    """
    tensors, order = kv_tensors(pool), getattr(pool, "kv_cache_layout", "nhd")
    keys = index_tensors(pool)
    if keys:  # nobody else has them
        shapes = ", ".join(str(tuple(one.shape[1:])) for one in (*tensors, *keys))
        return f"SGLang {__version__}: latents, index keys, {pool.dtype} {shapes}"
    parts: tuple[str, ...] = ("key", "value")
    if len(tensors) == len(layers):
        parts = ("latent",)
    names = [f"{layer}.{part}" for part in parts for layer in layers]
    if len(names) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors for layers {layers}")
    if order not in _AXES:
        shapes = ", ".join(str(tuple(one.shape[1:])) for one in tensors)
        return f"SGLang {__version__}: KV, {order}, {pool.dtype} {shapes}"
    dtype = getattr(pool, "dtype", tensors[0].dtype)
    found = []
    for name, tensor in zip(names, tensors, strict=True):
        rows = tensor
        axes: tuple[str, ...] = _AXES[order]
        if order == "nhd":
            pages = len(tensor) // page_size
            rows = tensor[: pages * page_size].view(pages, page_size, *tensor.shape[1:])
        if parts == ("latent",):
            rows, axes = rows[:, :, 0], (TOKEN, "dim")
        found.append(NamedRows(name, rows, axes, dtype))
    return found


# ------------------------------------------------------------------------ states


def compressed_rows(keys: Sequence[torch.Tensor]) -> list[NamedRows] | str:
    """Compressed keys, by pages, which lie behind the KV; nobody else has any.

    Args:
        keys: of each layer, `[pages, keys, ...]`.
    """
    if not keys:
        return []
    shapes = ", ".join(f"{one.dtype} {tuple(one.shape[1:])}" for one in keys)
    return f"SGLang {__version__}: compressed keys, {shapes}"


def state_rows(
    pool: Any,
    taps_first: bool,
    axes: tuple[str, str, str] | None,
    rings: Sequence[torch.Tensor] = (),
) -> list[NamedRows] | str:
    """The tensors of a state pool, by slots.

    Args:
        pool: SGLang's `MambaPool`.
        taps_first: whether its convolution keeps `[taps, channels]`.
        axes: of the state behind it; None where nobody can say.
        rings: `[slots, ...]`, which lie behind the states; nobody else has any.
    """
    kept, layers = pool.mamba_cache, pool.mamba_layer_ids
    has_states = bool(kept.temporal.numel())
    beside = [one for pool in pool._slot_siblings for one in sibling_tensors(pool)]
    known = len(kept.conv) == 1 and not (has_states and axes is None)
    if not known or rings or beside:
        shapes = [*kept.conv, kept.temporal, *beside]
        texts = ", ".join(f"{one.dtype} {tuple(one.shape[2:])}" for one in shapes)
        texts += "".join(f", ring {tuple(one.shape[1:])}" for one in rings)
        return f"SGLang {__version__}: states of {len(layers)} layers, {texts}"
    order = ("tap", "channel") if taps_first else ("channel", "tap")
    found = list(_layers(kept.conv[0], layers, "conv", order))
    if has_states and axes is not None:
        found += _layers(kept.temporal, layers, "state", axes)
    return found


def _layers(
    states: torch.Tensor, layers: Sequence[int], part: str, axes: tuple[str, ...]
) -> Iterator[NamedRows]:
    for layer, state in zip(layers, states, strict=True):
        yield NamedRows(f"{layer}.{part}", state, axes, state.dtype)
