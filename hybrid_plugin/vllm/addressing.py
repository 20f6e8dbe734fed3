# SPDX-License-Identifier: Apache-2.0
"""Slots beyond what a model's kernels address: there are no more than they reach.

vLLM's CUDA scan of Mamba-1 multiplies a slot by its stride in 32 bits, where all
its other kernels of state layers use 64; `docs/kernels.md` lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

LIMIT = 1 << 31
"""Elements that are certain to be addressed."""


def addressable_bytes(groups: list[KVCacheGroupSpec], device_type: str) -> int | None:
    """Bytes of slots that the kernels of all groups reach; None for no limit.

    Args:
        groups: of the state layers.
        device_type: "cpu" or "cuda", as torch calls it.
    """
    if device_type == "cpu":  # PyTorch's own operations
        return None
    sizes: list[int] = []
    for group in groups:
        kind = getattr(group.kv_cache_spec, "mamba_type", None)
        if getattr(kind, "name", str(kind)).lower() == "mamba1":
            dtypes: tuple[torch.dtype, ...] = getattr(group.kv_cache_spec, "dtypes", ())
            sizes += [dtype.itemsize for dtype in dtypes]
    return LIMIT * min(sizes) if sizes else None
