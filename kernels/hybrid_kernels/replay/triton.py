# SPDX-License-Identifier: Apache-2.0
"""Triton commit: one program folds drafts into a block of one layer and sequence."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from hybrid_kernels._common.linear_step import (
    SEPARATE_PRODUCTS,
    ancestor,
    depth_of,
    grow,
    shrink,
)
from hybrid_kernels._common.tables import two_strides

if TYPE_CHECKING:
    from hybrid_kernels.replay import Layers, States, Windows

# No sums over channels: a block's size changes no bits. As large as those that
# `state_copy` moves, so that a warp has several loads in flight.
_BLOCK = 4096
_CHANNELS = 512
_WARPS = 4
_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_FIELDS = tl.constexpr(9)


class _Shape(NamedTuple):
    """Of all states, in elements; where there are none, of some that are never met."""

    heads: int = 1
    group: int = 1
    width: int = 1
    depth: int = 1
    pool_head: int = 0
    pool_v: int = 0
    wide_decay: bool = False
    type: torch.dtype = torch.float32

    @property
    def rows(self) -> int:
        """Of a state in one block."""
        rows = _BLOCK // triton.next_power_of_2(self.depth)
        return int(min(rows, triton.next_power_of_2(self.width)))


class Blocks(NamedTuple):
    """What the programs of one sequence do: states first, then windows."""

    layers: torch.Tensor
    """`[layers, 9]` int64, see `_fields`."""
    table: torch.Tensor
    """`[blocks, 2]` int32: a row of `layers`, and the block within it."""
    states: int
    """How many blocks are of states."""
    aligned: bool
    """Whether all states lie on 16 bytes."""
    shape: _Shape
    """Of the states."""
    window_type: torch.dtype


@triton.jit
def _node(parents, last, hops, parents_draft, HAS_PARENTS: tl.constexpr):
    """The draft `hops` before the last accepted one; negative if there is none."""
    node = last - hops
    if HAS_PARENTS:
        node = ancestor(parents, last, hops, parents_draft)
    return node


@triton.jit
def _fold(
    pool,
    record,
    record_draft,
    parents,
    last,
    index,
    heads,
    group,
    parents_draft,
    pool_head,
    pool_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDE_DECAY: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
):
    """`BLOCK_V` rows of one head's state."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (index // blocks).to(tl.int64)
    channel = tl.arange(0, BLOCK_K)
    value = (index % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = channel < K
    in_v = value < V
    mask = in_v[:, None] & in_k[None, :]
    p_pool = pool + head * pool_head + value[:, None] * pool_v + channel[None, :]
    p_k = record + (head // group) * K + channel
    record += (heads // group) * K
    p_u = record + head * V + value
    p_decay = record + heads * V + head
    if WIDE_DECAY:
        p_decay = record + heads * V + head * K + channel
    b_state = tl.load(p_pool, mask=mask, other=0.0).to(tl.float32)
    depth = last + 1
    if HAS_PARENTS:
        depth = depth_of(parents, last, parents_draft)
    for number in range(depth):
        hops = depth - 1 - number
        at = _node(parents, last, hops, parents_draft, HAS_PARENTS) * record_draft
        b_k = tl.load(p_k + at, mask=in_k, other=0.0)
        b_u = tl.load(p_u + at, mask=in_v, other=0.0)
        if WIDE_DECAY:
            b_decay = tl.load(p_decay + at, mask=in_k, other=0.0)
        else:
            b_decay = tl.load(p_decay + at)
        b_state = grow(shrink(b_state, b_decay, WIDE_DECAY), b_u, b_k)
        b_state = b_state.to(pool.dtype.element_ty).to(tl.float32)
    tl.store(p_pool, b_state.to(pool.dtype.element_ty), mask=mask)


@triton.jit
def _input(
    pool,
    record,
    record_draft,
    parents,
    last,
    depth,
    channel,
    channels,
    inputs,
    parents_draft,
    pool_input,
    NUMBER: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
):
    """Input `NUMBER` of a window behind the accepted drafts."""
    hops = tl.maximum(inputs - 1 - NUMBER, 0)
    node = _node(parents, last, hops, parents_draft, HAS_PARENTS)
    wanted = tl.where(inputs > NUMBER, channels, 0)
    kept = channel < tl.where(node < 0, wanted, 0)
    old = tl.load(pool + (NUMBER + depth) * pool_input, mask=kept, other=0.0)
    given = channel < tl.where(node >= 0, wanted, 0)
    at = tl.maximum(node, 0) * record_draft
    fresh = tl.load(record + at, mask=given, other=0.0)
    return tl.where(node >= 0, fresh, old)


@triton.jit
def _shift(
    pool,
    record,
    record_draft,
    parents,
    last,
    index,
    channels,
    inputs,
    parents_draft,
    pool_channel,
    pool_input,
    CHANNELS: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
):
    """`CHANNELS` channels of one window."""
    channel = index * CHANNELS + tl.arange(0, CHANNELS)
    pool += channel * pool_channel
    record += channel
    depth = last + 1
    if HAS_PARENTS:
        depth = depth_of(parents, last, parents_draft)
    input0 = _input(
        pool,
        record,
        record_draft,
        parents,
        last,
        depth,
        channel,
        channels,
        inputs,
        parents_draft,
        pool_input,
        0,
        HAS_PARENTS,
    )
    input1 = _input(
        pool,
        record,
        record_draft,
        parents,
        last,
        depth,
        channel,
        channels,
        inputs,
        parents_draft,
        pool_input,
        1,
        HAS_PARENTS,
    )
    input2 = _input(
        pool,
        record,
        record_draft,
        parents,
        last,
        depth,
        channel,
        channels,
        inputs,
        parents_draft,
        pool_input,
        2,
        HAS_PARENTS,
    )
    input3 = _input(
        pool,
        record,
        record_draft,
        parents,
        last,
        depth,
        channel,
        channels,
        inputs,
        parents_draft,
        pool_input,
        3,
        HAS_PARENTS,
    )
    # A short path shifts the window: every thread reads before any writes.
    tl.debug_barrier()
    tl.store(pool, input0, mask=channel < channels)
    tl.store(
        pool + pool_input, input1, mask=channel < tl.where(inputs > 1, channels, 0)
    )
    tl.store(
        pool + 2 * pool_input, input2, mask=channel < tl.where(inputs > 2, channels, 0)
    )
    tl.store(
        pool + 3 * pool_input, input3, mask=channel < tl.where(inputs > 3, channels, 0)
    )


@triton.jit(do_not_specialize=["drafts", "blocks", "states"])
def _commit_kernel(
    layers,
    table,
    slots,
    accepted,
    parents,
    drafts,
    blocks,
    states,
    heads,
    group,
    parents_row,
    parents_draft,
    pool_head,
    pool_v,
    STATE: tl.constexpr,
    WINDOW: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE_DECAY: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    # Rows of padding may hold anything.
    last = tl.minimum(tl.load(accepted + row).to(tl.int32), drafts) - 1
    if HAS_PARENTS:
        last = last.to(parents.dtype.element_ty)
    if (slot >= 0) & (last >= 0):
        layer = layers + tl.load(table + block * 2) * _FIELDS
        index = tl.load(table + block * 2 + 1)
        address = tl.load(layer) + slot * tl.load(layer + 1)
        origin = tl.load(layer + 2)
        o_row = row * tl.load(layer + 3)
        record_draft = tl.load(layer + 4)
        if HAS_PARENTS:
            parents += row * parents_row
        if block < states:
            pool = address.to(tl.pointer_type(STATE))
            if ALIGNED:
                # Not known otherwise: elements would be loaded one by one.
                pool = tl.multiple_of(pool, 16)
            _fold(
                pool,
                origin.to(tl.pointer_type(tl.float32)) + o_row,
                record_draft,
                parents,
                last,
                index,
                heads,
                group,
                parents_draft,
                pool_head,
                pool_v,
                K,
                V,
                BLOCK_K,
                BLOCK_V,
                WIDE_DECAY,
                HAS_PARENTS,
            )
        else:
            _shift(
                address.to(tl.pointer_type(WINDOW)),
                origin.to(tl.pointer_type(WINDOW)) + o_row,
                record_draft,
                parents,
                last,
                index,
                tl.load(layer + 5),
                tl.load(layer + 6),
                parents_draft,
                tl.load(layer + 7),
                tl.load(layer + 8),
                CHANNELS,
                HAS_PARENTS,
            )


def blocks_of(states: Sequence[States], windows: Sequence[Windows]) -> Blocks:
    """Describe layers to the kernel."""
    shape = _shape_of(states[0]) if states else _Shape()
    layers: list[tuple[int, ...]] = []
    table: list[tuple[int, int]] = []
    for state in states:
        blocks = shape.heads * triton.cdiv(shape.width, shape.rows)
        table += [(len(layers), block) for block in range(blocks)]
        layers.append(_fields(state, (0, 0, 0, 0)))
    in_states = len(table)
    aligned = all(number % 16 == 0 for fields in layers for number in fields[:2])
    for window in windows:
        _, channels, inputs = window.pool.shape
        blocks = triton.cdiv(channels, _CHANNELS)
        table += [(len(layers), block) for block in range(blocks)]
        layers.append(_fields(window, (channels, inputs, *window.pool.stride()[1:])))
    pools = [x.pool for x in states] + [x.pool for x in windows]
    device = pools[0].device
    return Blocks(
        torch.tensor(layers, dtype=torch.int64).to(device),
        torch.tensor(table, dtype=torch.int32).view(-1, 2).to(device),
        in_states,
        aligned,
        shape,
        windows[0].pool.dtype if windows else torch.float32,
    )


def _shape_of(layer: States) -> _Shape:
    pool = layer.pool
    _, heads, width, depth = pool.shape
    return _Shape(
        heads,
        heads // layer.key_heads,
        width,
        depth,
        pool.stride(1),
        pool.stride(2),
        layer.wide_decay,
        pool.dtype,
    )


def _fields(layer: States | Windows, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Address and bytes between slots of a pool; address and strides of a record.

    Then, of a window, channels, inputs and their strides.
    """
    pool, record = layer.pool, layer.record
    slot = pool.stride(0) * pool.element_size()
    return (
        pool.data_ptr(),
        slot,
        record.data_ptr(),
        record.stride(0),
        record.stride(1),
        *shape,
    )


def commit(
    layers: Layers,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    parents: torch.Tensor | None,
) -> None:
    """One launch for all layers and sequences."""
    blocks, rows = layers.blocks, slots.numel()
    shape = blocks.shape
    count = len(blocks.table)
    if rows == 0 or layers.drafts == 0 or count == 0:
        return
    _commit_kernel[(rows * count,)](
        blocks.layers,
        blocks.table,
        slots,
        accepted,
        parents,
        layers.drafts if parents is None else parents.shape[1],
        count,
        blocks.states,
        shape.heads,
        shape.group,
        *two_strides(parents),
        shape.pool_head,
        shape.pool_v,
        STATE=_TYPES[shape.type],
        WINDOW=_TYPES[blocks.window_type],
        K=shape.depth,
        V=shape.width,
        BLOCK_K=triton.next_power_of_2(shape.depth),
        BLOCK_V=shape.rows,
        CHANNELS=_CHANNELS,
        WIDE_DECAY=shape.wide_decay,
        HAS_PARENTS=parents is not None,
        ALIGNED=blocks.aligned,
        num_warps=_WARPS,
        **SEPARATE_PRODUCTS,
    )
