# SPDX-License-Identifier: Apache-2.0
"""Where SGLang 0.5.23 keeps keys and values.

They are tensors of their own, `[tokens, heads, dim]`.  In elastic pools with packed
pages all tensors of a token lie side by side, so tokens have a step of their own.
"""

from __future__ import annotations

from hybrid_plugin.tiers.row_layout import ITEM_BYTES, TOKEN, Axis, Field


def tensor(
    name: str,
    dtype: str,
    offset: int,
    *,
    tokens: int,
    heads: int,
    dim: int,
    token_bytes: int | None = None,
) -> Field:
    """The keys, or the values, of one layer.

    Args:
        name: `"3.key"` or `"3.value"`.
        dtype: element type.
        offset: bytes from the start of the row to the first token's.
        tokens: in a page.
        heads: with keys and values, of this rank.
        dim: elements of a key, or of a value.
        token_bytes: from one token to the next; by default they are side by side.
    """
    item = ITEM_BYTES[dtype]
    step = heads * dim * item if token_bytes is None else token_bytes
    axes = (
        Axis(TOKEN, tokens, step),
        Axis("head", heads, dim * item),
        Axis("dim", dim, item),
    )
    return Field(name, dtype, offset, axes)


def latent(
    layer: str,
    dtype: str,
    offset: int,
    *,
    tokens: int,
    dim: int,
    token_bytes: int | None = None,
) -> Field:
    """What multi-head latent attention keeps of each token, rotary part included."""
    item = ITEM_BYTES[dtype]
    step = dim * item if token_bytes is None else token_bytes
    axes = (Axis(TOKEN, tokens, step), Axis("dim", dim, item))
    return Field(f"{layer}.latent", dtype, offset, axes)
