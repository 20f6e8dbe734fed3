# SPDX-License-Identifier: Apache-2.0
"""Tensors with a row for each sequence, in memory that comes row by row.

A row pool is a list of tensors ``[layers, rows, ...]``, whatever they hold.  Their
addresses are reserved for all rows, so that graphs may be captured over them, and
memory is mapped behind the first rows only.

Kernels that take no strides want the rows of a layer behind each other: of such a
tensor, each layer is a part of its own.  All other tensors lie side by side in each
row, so that a row is not cut into blocks for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 128
"""Each layer of a tensor starts at a multiple of so many bytes of a row."""


@dataclass(frozen=True, slots=True)
class RowTensor:
    """One tensor of a row pool."""

    layers: int
    shape: tuple[int, ...]
    """Of a layer of a row."""
    dtype: torch.dtype
    apart: bool = False
    """Whether the rows of a layer must follow each other without a gap."""

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer of a row."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return size if self.apart else -(-size // _ALIGNMENT) * _ALIGNMENT


def apart_bytes(tensors: Sequence[RowTensor]) -> tuple[int, ...]:
    """Bytes of a row in each part whose rows follow each other without a gap."""
    return tuple(
        one.layer_bytes
        for one in tensors
        if one.apart and one.layer_bytes
        for _ in range(one.layers)
    )


def together_bytes(tensors: Sequence[RowTensor]) -> int:
    """Bytes of a row in all other tensors."""
    return sum(one.layer_bytes * one.layers for one in tensors if not one.apart)


def place(
    memory: torch.Tensor, rows: int, stride: int, tensors: Sequence[RowTensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Lay the tensors of a row pool out.

    Args:
        memory: ``[bytes]`` int8, of all rows; they are so many that each layer of a
            tensor whose rows lie apart is a whole number of its elements.
        rows: how many there are.
        stride: bytes from a row of the tensors that lie side by side to the next.
        tensors: of the pool.

    Returns:
        The tensors, ``[layers, rows, *shape]`` each; and the parts of the memory,
        ``[rows, bytes]`` int8, each a number of rows behind each other.

    Raises:
        ValueError: if the memory is not as large as the tensors.
    """
    placed: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    start = 0
    for one in tensors:
        if not one.apart:
            continue
        size = one.layers * rows * one.layer_bytes
        part = memory[start : start + size]
        if size:
            parts += part.view(one.layers, rows, one.layer_bytes).unbind()
        start += size
    side_by_side = memory[start:]
    if side_by_side.numel() != rows * stride or together_bytes(tensors) > stride:
        raise ValueError(f"{memory.numel()} bytes are not those of {rows} rows")
    if stride:
        parts.append(side_by_side.view(rows, stride))
    start = column = 0
    for one in tensors:
        shape = (one.layers, rows, *one.shape)
        if one.apart:
            size = one.layers * rows * one.layer_bytes
            placed.append(memory[start : start + size].view(one.dtype).view(shape))
            start += size
            continue
        size = one.layers * one.layer_bytes
        cells = parts[-1][:, column : column + size] if stride else memory[:0]
        placed.append(_of_rows(cells, one, rows))
        column += size
    return placed, parts


def _of_rows(cells: torch.Tensor, one: RowTensor, rows: int) -> torch.Tensor:
    """``[layers, rows, *shape]`` of what lies side by side in ``[rows, bytes]``."""
    size = torch.Size(one.shape).numel()
    width = one.layer_bytes // one.dtype.itemsize
    padded = cells.view(one.dtype).view(rows, one.layers, width)[:, :, :size]
    return padded.view(rows, one.layers, *one.shape).transpose(0, 1)
