# SPDX-License-Identifier: Apache-2.0
"""Triton slot copies. One program moves one block of one slot of one layer."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hybrid_kernels._common.checks import require

# Words per program. 16 KiB with 4-byte words: several 16-byte loads in flight in
# each of 256 threads, and still many programs for one slot of a few megabytes.
BLOCK = 4096
_WARPS = 8
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_WORD_TYPES = {1: tl.uint8, 2: tl.int16, 4: tl.int32}
_PROGRAMS = 2**31 - 1
"""In a grid, at most."""


class _Words(NamedTuple):
    """A pool as words: ``[layers, slots, length]`` with free outer strides."""

    data: torch.Tensor
    layers: int
    length: int
    layer_stride: int
    slot_stride: int


@triton.jit
def _place(words, layers, BLOCK: tl.constexpr):
    """Split the program id into row, layer and the block's first word."""
    blocks = tl.cdiv(words, BLOCK)
    program = tl.program_id(0)
    block = program % blocks
    rest = program // blocks
    return rest // layers, (rest % layers).to(tl.int64), block.to(tl.int64) * BLOCK


@triton.jit
def _move(destination, source, first, words, BLOCK: tl.constexpr):
    offsets = first + tl.arange(0, BLOCK)
    mask = offsets < words
    tl.store(destination + offsets, tl.load(source + offsets, mask=mask), mask=mask)


@triton.jit
def _copy_kernel(
    destination,
    source,
    destination_slots,
    source_slots,
    words,
    layers,
    destination_layer_stride,
    destination_slot_stride,
    source_layer_stride,
    source_slot_stride,
    HAS_DESTINATION_SLOTS: tl.constexpr,
    HAS_SOURCE_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, layer, first = _place(words, layers, BLOCK)
    to = row.to(tl.int64)
    start = row.to(tl.int64)
    if HAS_DESTINATION_SLOTS:
        to = tl.load(destination_slots + row).to(tl.int64)
    if HAS_SOURCE_SLOTS:
        start = tl.load(source_slots + row).to(tl.int64)
    if (to >= 0) & (start >= 0):
        destination += layer * destination_layer_stride + to * destination_slot_stride
        source += layer * source_layer_stride + start * source_slot_stride
        _move(destination, source, first, words, BLOCK)


@triton.jit
def _promote_kernel(
    pool,
    table,
    accepted,
    words,
    layers,
    layer_stride,
    slot_stride,
    table_stride,
    BLOCK: tl.constexpr,
):
    row, layer, first = _place(words, layers, BLOCK)
    column = tl.load(accepted + row)
    if column > 0:
        entries = table + row * table_stride
        to = tl.load(entries).to(tl.int64)
        start = tl.load(entries + column).to(tl.int64)
        if (to >= 0) & (start >= 0):
            base = pool + layer * layer_stride
            _move(
                base + to * slot_stride, base + start * slot_stride, first, words, BLOCK
            )


@triton.jit
def _zero_kernel(
    pool, slots, words, layers, layer_stride, slot_stride, BLOCK: tl.constexpr
):
    row, layer, first = _place(words, layers, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        offsets = first + tl.arange(0, BLOCK)
        base = pool + layer * layer_stride + slot * slot_stride
        nothing = tl.zeros((BLOCK,), pool.dtype.element_ty)
        tl.store(base + offsets, nothing, mask=offsets < words)


@triton.jit
def _swap_kernel(table, accepted, rows, table_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(accepted + row, mask=row < rows, other=0)
    mask = (row < rows) & (column > 0)
    main = table + row * table_stride
    old = tl.load(main, mask=mask)
    new = tl.load(main + column, mask=mask)
    tl.store(main, new, mask=mask)
    tl.store(main + column, old, mask=mask)


@triton.jit
def _row(entry, index, WORD: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a block of row `index` begins, and its words; see `block_table`."""
    address = tl.load(entry) + index * tl.load(entry + 2)
    words = tl.load(entry + 1)
    pointer = address.to(tl.pointer_type(WORD))
    if ALIGNED:
        # Not known otherwise: words would be loaded one by one.
        pointer = tl.multiple_of(pointer, 16)
        words = tl.multiple_of(words, 4)
    return pointer, words


@triton.jit(
    do_not_specialize=["blocks"],
    do_not_specialize_on_alignment=["destinations", "sources"],
)
def _copy_parts_kernel(
    table,
    destinations,
    sources,
    blocks,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    entry = table + (program % blocks) * 3
    to = tl.load(destinations + program // blocks).to(tl.int64)
    start = tl.load(sources + program // blocks).to(tl.int64)
    if (to >= 0) & (start >= 0):
        source, words = _row(entry, start, WORD, ALIGNED)
        destination, words = _row(entry, to, WORD, ALIGNED)
        _move(destination, source, 0, words, BLOCK)


@triton.jit(
    do_not_specialize=["blocks"],
    do_not_specialize_on_alignment=["destinations", "sources"],
)
def _transfer_parts_kernel(
    to_table,
    from_table,
    destinations,
    sources,
    blocks,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    block = (program % blocks) * 3
    to = tl.load(destinations + program // blocks).to(tl.int64)
    start = tl.load(sources + program // blocks).to(tl.int64)
    if (to >= 0) & (start >= 0):
        source, words = _row(from_table + block, start, WORD, ALIGNED)
        destination, words = _row(to_table + block, to, WORD, ALIGNED)
        _move(destination, source, 0, words, BLOCK)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["slots"])
def _zero_parts_kernel(
    table,
    slots,
    blocks,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    slot = tl.load(slots + program // blocks).to(tl.int64)
    if slot >= 0:
        row, words = _row(table + (program % blocks) * 3, slot, WORD, ALIGNED)
        offsets = tl.arange(0, BLOCK)
        tl.store(row + offsets, tl.zeros((BLOCK,), WORD), mask=offsets < words)


def copy(
    destination: torch.Tensor,
    destination_slots: torch.Tensor | None,
    source: torch.Tensor,
    source_slots: torch.Tensor | None,
    slot_dim: int,
) -> None:
    """Copy rows between pools; a missing slot list stands for 0, 1, 2, ..."""
    slots = destination_slots if source_slots is None else source_slots
    rows = 0 if slots is None else slots.numel()
    if rows == 0:
        return
    size = min(_word_size(destination, slot_dim), _word_size(source, slot_dim))
    to, start = _words(destination, slot_dim, size), _words(source, slot_dim, size)
    require(
        _order(destination, slot_dim) == _order(source, slot_dim),
        "the items of the two tensors are laid out in different orders",
    )
    grid = _grid(rows, to)
    _copy_kernel[grid](
        to.data,
        start.data,
        destination_slots,
        source_slots,
        to.length,
        to.layers,
        to.layer_stride,
        to.slot_stride,
        start.layer_stride,
        start.slot_stride,
        HAS_DESTINATION_SLOTS=destination_slots is not None,
        HAS_SOURCE_SLOTS=source_slots is not None,
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )


def zero(pool: torch.Tensor, slots: torch.Tensor, slot_dim: int) -> None:
    """Clear rows."""
    words = _words(pool, slot_dim, _word_size(pool, slot_dim))
    grid = _grid(slots.numel(), words)
    if grid[0] == 0:
        return
    _zero_kernel[grid](
        words.data,
        slots,
        words.length,
        words.layers,
        words.layer_stride,
        words.slot_stride,
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )


def promote(
    pool: torch.Tensor, table: torch.Tensor, accepted: torch.Tensor, slot_dim: int
) -> None:
    """Copy each row's accepted slot over its main slot."""
    require(table.stride(1) == 1, "the rows of table must be contiguous")
    words = _words(pool, slot_dim, _word_size(pool, slot_dim))
    grid = _grid(table.shape[0], words)
    if grid[0] == 0:
        return
    _promote_kernel[grid](
        words.data,
        table,
        accepted,
        words.length,
        words.layers,
        words.layer_stride,
        words.slot_stride,
        table.stride(0),
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )


def promote_swap(table: torch.Tensor, accepted: torch.Tensor) -> None:
    """Exchange each row's main and accepted entry."""
    require(table.stride(1) == 1, "the rows of table must be contiguous")
    rows = table.shape[0]
    if rows:
        _swap_kernel[(triton.cdiv(rows, 128),)](
            table, accepted, rows, table.stride(0), BLOCK=128
        )


class BlockTable(NamedTuple):
    """The blocks of one row of every part: what one program each moves."""

    table: torch.Tensor
    """`[blocks, 3]` int64: address in row 0, words, and bytes between rows."""
    size: int
    """Bytes of a word."""
    aligned: bool
    """Whether all rows lie on 16 bytes, and all blocks are multiples of them."""


def block_table(parts: Sequence[torch.Tensor], size: int | None = None) -> BlockTable:
    """Describe parts, each `[S, *item]`, for `copy_parts` and `zero_parts`.

    Args:
        parts: of one pool.
        size: bytes of a word that every row starts and ends on; by default the most.

    Raises:
        ValueError: if an item is not dense.
    """
    size = word_size(parts) if size is None else size
    rows, aligned = [], size == 4
    for part in parts:
        words = _words(part, 0, size)
        address, stride = part.data_ptr(), words.slot_stride * size
        blocks = range(0, words.length, BLOCK)
        rows += [
            [address + first * size, min(BLOCK, words.length - first), stride]
            for first in blocks
        ]
        everything = (address, stride, words.length * size)
        aligned &= all(number % 16 == 0 for number in everything)
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    return BlockTable(table.to(parts[0].device), size, aligned)


def word_size(parts: Sequence[torch.Tensor]) -> int:
    """The widest word, up to 4 bytes, that the rows of all parts start and end on."""
    return min(_word_size(part, 0) for part in parts)


def table_pair(
    to: Sequence[torch.Tensor], of: Sequence[torch.Tensor]
) -> tuple[BlockTable, BlockTable]:
    """Describe two pools with equal parts, in equal blocks, for `transfer_parts`.

    Raises:
        ValueError: if an item is not dense, or two are laid out in different orders.
    """
    require(
        [_order(part, 0) for part in to] == [_order(part, 0) for part in of],
        "the items of two parts are laid out in different orders",
    )
    size = min(word_size(to), word_size(of))
    one, other = block_table(to, size), block_table(of, size)
    aligned = one.aligned and other.aligned
    return one._replace(aligned=aligned), other._replace(aligned=aligned)


def copy_parts(
    blocks: BlockTable, destinations: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy row to row in every part."""
    for some in _launches(blocks, sources.numel()):
        to, start = destinations[some], sources[some]
        grid = (start.numel() * len(blocks.table),)
        _copy_parts_kernel[grid](
            blocks.table, to, start, len(blocks.table), **_options(blocks)
        )


def transfer_parts(
    to: BlockTable,
    of: BlockTable,
    destinations: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    """Copy rows of one pool over rows of another, by the tables of a `table_pair`."""
    for some in _launches(to, sources.numel()):
        into, start = destinations[some], sources[some]
        grid = (start.numel() * len(to.table),)
        _transfer_parts_kernel[grid](
            to.table, of.table, into, start, len(to.table), **_options(to)
        )


def zero_parts(blocks: BlockTable, slots: torch.Tensor) -> None:
    """Clear rows of every part."""
    for some in _launches(blocks, slots.numel()):
        rows = slots[some]
        grid = (rows.numel() * len(blocks.table),)
        _zero_parts_kernel[grid](
            blocks.table, rows, len(blocks.table), **_options(blocks)
        )


def _launches(blocks: BlockTable, rows: int) -> Iterator[slice]:
    """As many rows at once as a grid has programs for: nearly always all."""
    if len(blocks.table):
        most = max(_PROGRAMS // len(blocks.table), 1)
        yield from (slice(first, first + most) for first in range(0, rows, most))


def _options(blocks: BlockTable) -> dict[str, Any]:
    return {
        "WORD": _WORD_TYPES[blocks.size],
        "ALIGNED": blocks.aligned,
        "BLOCK": BLOCK,
        "num_warps": _WARPS,
    }


def _grid(rows: int, words: _Words) -> tuple[int]:
    return (rows * words.layers * triton.cdiv(words.length, BLOCK),)


def _order(pool: torch.Tensor, slot_dim: int) -> list[int]:
    """The item's dimensions of more than one element, slowest first."""
    dims = [d for d in range(slot_dim + 1, pool.ndim) if pool.shape[d] > 1]
    return sorted(dims, key=pool.stride, reverse=True)


def _geometry(pool: torch.Tensor, slot_dim: int) -> tuple[int, int]:
    """Elements between layers and between slots."""
    layer = pool.stride(0) if slot_dim == 1 else 0
    return layer, pool.stride(slot_dim)


def _word_size(pool: torch.Tensor, slot_dim: int) -> int:
    """The widest word, up to 4 bytes, that every row starts and ends on."""
    element = pool.element_size()
    count = pool.shape[slot_dim + 1 :].numel()
    layer, slot = _geometry(pool, slot_dim)
    everything = (pool.data_ptr(), element * count, element * layer, element * slot)
    for size in (4, 2):
        if all(number % size == 0 for number in everything):
            return size
    return 1


def _words(pool: torch.Tensor, slot_dim: int, size: int) -> _Words:
    """View a pool as words of `size` bytes.

    Raises:
        ValueError: if an item is not dense.
    """
    expected = 1
    for dim in reversed(_order(pool, slot_dim)):
        require(
            pool.stride(dim) == expected,
            f"an item of shape {tuple(pool.shape)} and strides {pool.stride()} is "
            "not dense",
        )
        expected *= pool.shape[dim]
    layer, slot = _geometry(pool, slot_dim)
    # Only the address and the word type of `data` matter to the kernels; the
    # rows behind it are reached by the strides below.
    data = pool.as_strided((expected,), (1,)).view(torch.uint8).view(_WORDS[size])
    scale = pool.element_size()
    return _Words(
        data=data,
        layers=pool.shape[0] if slot_dim == 1 else 1,
        length=expected * scale // size,
        layer_stride=layer * scale // size,
        slot_stride=slot * scale // size,
    )
