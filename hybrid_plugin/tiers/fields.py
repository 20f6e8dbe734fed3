# SPDX-License-Identifier: Apache-2.0
"""Fields of rows, by the names under which engines find each other's.

Both engines order the channels of a convolution alike: queries, keys, values of gated
delta nets and Kimi delta attention; inputs, B, C of Mamba-2.  So a convolution is one
field, and only the order of its channels and taps differs.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_plugin.tiers.row_layout import ITEM_BYTES, Axis, Field

Sizes = Sequence[tuple[str, int]]
"""Axes with their sizes, outermost first."""


def dense(name: str, dtype: str, offset: int, sizes: Sizes) -> Field:
    """An array without gaps, its last axis contiguous.

    Args:
        name: of the field.
        dtype: its element type.
        offset: bytes from the start of the row.
        sizes: its axes.
    """
    axes: list[Axis] = []
    step = ITEM_BYTES[dtype]
    for axis, size in reversed(sizes):
        axes.insert(0, Axis(axis, size, step))
        step *= size
    return Field(name, dtype, offset, tuple(axes))


def convolution(
    layer: str,
    dtype: str,
    offset: int,
    *,
    channels: int,
    taps: int,
    channels_first: bool,
    columns: int | None = None,
    part: str = "conv",
) -> Field:
    """The inputs that a causal convolution still needs, the oldest first.

    Args:
        layer: name of its layer.
        dtype: its element type.
        offset: bytes from the start of the row.
        channels: of this rank.
        taps: tokens that it remembers, one less than its width.
        channels_first: whether the taps of a channel lie side by side, as in
            `[channels, taps]`, or the channels of a tap.
        columns: tokens for which there is room: `taps`, and with speculative decoding
            in vLLM one more for each draft.  The committed ones come first.
        part: name of the convolution, where a layer has several.
    """
    item, room = ITEM_BYTES[dtype], columns or taps
    if room < taps:
        raise ValueError(f"{room} columns for {taps} taps")
    if channels_first:
        axes = Axis("channel", channels, room * item), Axis("tap", taps, item)
    else:
        axes = Axis("tap", taps, channels * item), Axis("channel", channels, item)
    return Field(f"{layer}.{part}", dtype, offset, axes)


def delta_state(
    layer: str, dtype: str, offset: int, *, heads: int, values: int, keys: int
) -> Field:
    """The state of a gated delta net, or of Kimi delta attention: `[H, V, K]`."""
    sizes = (("head", heads), ("value", values), ("key", keys))
    return dense(f"{layer}.state", dtype, offset, sizes)


def lightning_state(
    layer: str, dtype: str, offset: int, *, heads: int, keys: int, values: int
) -> Field:
    """The state of lightning attention: `[H, K, V]` in both engines."""
    sizes = (("head", heads), ("key", keys), ("value", values))
    return dense(f"{layer}.state", dtype, offset, sizes)


def selective_state(
    layer: str, dtype: str, offset: int, *, heads: int, channels: int, states: int
) -> Field:
    """The state of Mamba-2, `[heads, channels of a head, states]`.

    That of Mamba-1, `[channels, states]`, has one channel for each head.
    """
    sizes = (("head", heads), ("channel", channels), ("state", states))
    return dense(f"{layer}.state", dtype, offset, sizes)
