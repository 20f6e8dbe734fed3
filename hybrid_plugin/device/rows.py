# SPDX-License-Identifier: Apache-2.0
"""Tensors of any shape and type as rows of bytes, one for each page or slot."""

from __future__ import annotations

import torch


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as `[ids, bytes]` int8, in the order of its addresses.

    Args:
        tensor: `[ids, *item]` of any type and any stride between ids; items dense in
            some order of their dimensions.

    Raises:
        ValueError: if items have holes.
    """
    item = [d for d in range(1, tensor.dim()) if tensor.shape[d] > 1]
    size = 1
    for dimension in sorted(item, key=tensor.stride):
        if tensor.stride(dimension) != size:
            raise ValueError(
                f"rows of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
                "are not dense"
            )
        size *= tensor.shape[dimension]
    flat = tensor.as_strided((len(tensor), size), (tensor.stride(0), 1))
    return flat.view(torch.int8)
