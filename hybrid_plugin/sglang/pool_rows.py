# SPDX-License-Identifier: Apache-2.0
"""The tensors of SGLang's own pools as rows, one for each page or slot.

Pages are layer-major: each layer's keys, and its values, are a part.  States are
too: each layer's state of each kind is a part.
"""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.config import ConfigError
from hybrid_plugin.device.rows import rows_of

_KEPT = ("conv", "temporal")
_REWRITTEN = ("intermediate_ssm", "intermediate_conv_window")
"""Written by each verification of drafts before it is read."""
_SIBLINGS = {"ShortConvPool": "conv_state", "RelativeContexts": "context"}
"""Pools beside a state pool that have a row for each of its slots, and their tensor."""


def page_rows(pool: Any, page_size: int) -> list[torch.Tensor]:
    """`[pages, bytes]` int8 for each tensor of a KV pool, those of index keys last.

    Args:
        pool: SGLang's pool of the attention layers.
        page_size: tokens in a page.

    Raises:
        ConfigError: for a kind of pool that keeps more than its tensors.
    """
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        return [rows_of(tensor) for tensor in kv_tensors(pool)]
    rows = []
    for tensor in kv_tensors(pool):
        pages = tensor.shape[0] // page_size
        tokens = tensor[: pages * page_size]
        rows.append(rows_of(tokens.view(pages, page_size, *tensor.shape[1:])))
    return rows + [rows_of(tensor) for tensor in index_tensors(pool)]


def slot_rows(pool: Any) -> list[torch.Tensor]:
    """`[slots, bytes]` int8 for each layer and each kind of state of a pool.

    Args:
        pool: SGLang's `MambaPool`, its tensors `[layers, slots, ...]`.

    Raises:
        ConfigError: for a pool with more beside its states.
    """
    check_states(pool)
    kept = pool.mamba_cache
    beside = [
        one for sibling in pool._slot_siblings for one in sibling_tensors(sibling)
    ]
    return [
        rows_of(layer)
        for states in (*kept.conv, kept.temporal, *beside)
        for layer in states
        if layer.numel()
    ]


def sibling_tensors(sibling: Any) -> list[torch.Tensor]:
    """What a pool beside a state pool keeps, each `[layers, slots, ...]`.

    Args:
        sibling: SGLang's `ShortConvPool`, or `RelativeContexts`; nothing of others.
    """
    kept = getattr(sibling, _SIBLINGS.get(type(sibling).__name__, ""), None)
    if kept is None:
        return []
    return [kept[None] if type(sibling).__name__ == "RelativeContexts" else kept]


def check_states(pool: Any) -> None:
    """Refuse a state pool that keeps what snapshots would not.

    Args:
        pool: SGLang's `MambaPool`.

    Raises:
        ConfigError: naming what it keeps.
    """
    names = [type(sibling).__name__ for sibling in pool._slot_siblings]
    beside = [name for name in names if name not in _SIBLINGS]
    beside += [
        name
        for name, states in vars(pool.mamba_cache).items()
        if name not in (*_KEPT, *_REWRITTEN) and states is not None
    ]
    if beside:
        raise ConfigError(
            f"states with {', '.join(beside)} beside them are not supported yet."
        )


def kv_tensors(pool: Any) -> list[torch.Tensor]:
    """All tensors of a KV pool, each `[tokens, ...]`, one or two per layer.

    Raises:
        ConfigError: for a kind of pool that keeps more than these.
    """
    name = type(pool).__name__
    tensors: list[torch.Tensor]
    if name == "MHATokenToKVPool":
        tensors = [*pool.k_buffer, *pool.v_buffer]
        for scale in ("k_scale_buffer", "native_k_scale_buffer"):
            if getattr(pool, scale, None) is not None:
                raise ConfigError(
                    "quantised KV with scales beside it is not supported yet; drop "
                    "--kv-cache-dtype."
                )
    elif name in ("MLATokenToKVPool", "DSATokenToKVPool"):
        tensors = [*pool.kv_buffer]
    else:
        raise ConfigError(f"a KV cache of the kind {name} is not supported yet.")
    return tensors


def index_tensors(pool: Any) -> list[torch.Tensor]:
    """The index keys of a KV pool, each `[pages, bytes]`, one per layer with some.

    Args:
        pool: SGLang's pool of the attention layers.
    """
    kept = getattr(pool, "index_key_cache", None)
    return [] if kept is None else [keys for keys in kept.buffer if len(keys)]
