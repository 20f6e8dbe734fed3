# SPDX-License-Identifier: Apache-2.0
"""Where vLLM 0.33 keeps keys and values within a page.

A page of a layer is `[heads, tokens, keys | values]` by name; in memory its tokens or
its heads come first.  Its CPU kernels use the same bytes in their own way.
"""

from __future__ import annotations

from enum import Enum

from hybrid_plugin.tiers.row_layout import ITEM_BYTES, TOKEN, Axis, Field


class PageOrder(Enum):
    """What comes first in a page."""

    TOKENS = "NHC"
    HEADS = "HNC"


def attention(
    layer: str,
    dtype: str,
    offset: int,
    *,
    tokens: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    order: PageOrder,
    block: int | None = None,
) -> list[Field]:
    """Keys and values of one layer.

    Args:
        layer: its name.
        dtype: element type.
        offset: bytes from the start of the row to the layer's page.
        tokens: in a page.
        heads: with keys and values, of this rank.
        key_dim: elements of a key.
        value_dim: elements of a value.
        order: of the page, or of each of its blocks.
        block: tokens of the blocks into which kernels divide a page; by default one.
    """
    item, block = ITEM_BYTES[dtype], block or tokens
    _check_block(tokens, block)
    content = (key_dim + value_dim) * item
    if order is PageOrder.HEADS:
        head, token = Axis("head", heads, block * content), content
    else:
        head, token = Axis("head", heads, content), heads * content
    places = (
        Axis(TOKEN, tokens // block, block * heads * content),
        Axis(TOKEN, block, token),
        head,
    )
    return [
        Field(f"{layer}.key", dtype, offset, (*places, Axis("dim", key_dim, item))),
        Field(
            f"{layer}.value",
            dtype,
            offset + key_dim * item,
            (*places, Axis("dim", value_dim, item)),
        ),
    ]


def cpu_attention(
    layer: str,
    dtype: str,
    offset: int,
    *,
    tokens: int,
    heads: int,
    dim: int,
    block: int | None = None,
) -> list[Field]:
    """Keys and values of one layer on a CPU without AMX.

    Of each head of a block all keys come first, `[dim, tokens]`, and then all values,
    `[tokens, dim]`.  AMX packs otherwise: such rows are opaque.

    Args:
        layer: its name.
        dtype: element type.
        offset: bytes from the start of the row to the layer's page.
        tokens: in a page.
        heads: with keys and values, of this rank.
        dim: elements of a key, and of a value.
        block: tokens of the blocks into which kernels divide a page; by default one.
    """
    item, block = ITEM_BYTES[dtype], block or tokens
    _check_block(tokens, block)
    half = block * dim * item
    places = (
        Axis(TOKEN, tokens // block, 2 * heads * half),
        Axis("head", heads, 2 * half),
    )
    keys = (*places, Axis("dim", dim, block * item), Axis(TOKEN, block, item))
    values = (*places, Axis(TOKEN, block, dim * item), Axis("dim", dim, item))
    return [
        Field(f"{layer}.key", dtype, offset, keys),
        Field(f"{layer}.value", dtype, offset + half, values),
    ]


def latent(layer: str, dtype: str, offset: int, *, tokens: int, dim: int) -> Field:
    """What multi-head latent attention keeps of each token, rotary part included."""
    item = ITEM_BYTES[dtype]
    axes = (Axis(TOKEN, tokens, dim * item), Axis("dim", dim, item))
    return Field(f"{layer}.latent", dtype, offset, axes)


def _check_block(tokens: int, block: int) -> None:
    if tokens % block:
        raise ValueError(f"pages of {tokens} tokens in blocks of {block}")
