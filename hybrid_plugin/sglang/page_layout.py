# SPDX-License-Identifier: Apache-2.0
"""Whether all layers of a page can lie side by side: as the attention kernels take.

SGLang numbers tokens, not pages, so packed pages are token-major: all layers' keys and
values of a token, then those of the next.  SGLang's own unified memory lies likewise,
and names the backends that read each layer by its strides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from hybrid_plugin.core.memory.layout import AttentionGroup
from hybrid_plugin.sglang.layout import kv_tensors
from hybrid_plugin.sglang.log import logger
from hybrid_plugin.sglang.pipeline import StageLayers, all_layers

_STRIDED = ("fa3", "flashinfer", "torch_native", "triton")
"""Of those that SGLang names, and PyTorch's, the ones that multiply a token's number by
its stride in 64 bits (`docs/kernels.md`)."""
ALIGNMENT = 16
"""Bytes: kernels load and store the keys of a token, and its values, in vectors."""


def can_pack(
    model: Any,
    backends: Collection[str | None],
    token_bytes: int,
    draft: AttentionGroup | None = None,
    page_size: int = 1,
    layers: StageLayers | None = None,
) -> bool:
    """Whether the layers of a page can lie side by side; the log says if they cannot.

    Args:
        model: SGLang's `ModelConfig`.
        backends: names of its attention backends.
        token_bytes: KV of one token, over these attention layers.
        draft: layers of a draft model, if there is one.
        page_size: tokens in a page.
        layers: of the model; None for all of them.
    """
    tensors = kv_tensors(model, layers or all_layers(model))
    found = obstacle(backends, token_bytes // len(tensors))
    if draft is not None:
        found = found or obstacle(backends, draft.page_bytes // page_size)
    if found is not None:
        logger.info(
            "hybrid-plugin keeps the pages of each layer apart, so memory moves in "
            "larger granules: %s",
            found,
        )
    return found is None


def obstacle(backends: Collection[str | None], row_bytes: int) -> str | None:
    """Why the layers of a page cannot lie side by side, a sentence; None if they can.

    Args:
        backends: names of SGLang's attention backends.
        row_bytes: what a token has in one tensor: its keys, its values or its latent.
    """
    unknown = sorted({str(name) for name in backends if name not in _STRIDED})
    if unknown:
        return (
            f"the kernels of {', '.join(unknown)} are not known to take other layers "
            "between their tokens."
        )
    if row_bytes % ALIGNMENT:
        return (
            f"a token has {row_bytes} bytes in each tensor, no multiple of {ALIGNMENT}."
        )
    return None


def views(
    rows: torch.Tensor,
    page_size: int,
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    start: int = 0,
) -> list[torch.Tensor] | None:
    """One tensor of each shape, side by side in every token.

    Args:
        rows: `[pages, bytes]` int8, contiguous: `page_size` tokens of equal bytes each,
            the padding behind their layers included.
        page_size: tokens in a page.
        shapes: each `[tokens, ...]`.
        dtype: of all.
        start: where they begin in each token, in bytes.

    Returns:
        None where they do not fit, or their parts of a token are not aligned.
    """
    tokens = rows.view(len(rows) * page_size, -1)
    tensors = []
    for shape in shapes:
        size = torch.Size(shape[1:]).numel() * dtype.itemsize
        part = tokens[:, start : start + size]
        if shape[0] != len(tokens) or part.shape[1] != size or size % ALIGNMENT:
            return None
        tensors.append(part.view(dtype).view(*shape))
        start += size
    return tensors
