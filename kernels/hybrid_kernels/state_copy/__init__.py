# SPDX-License-Identifier: Apache-2.0
"""Copy, clear and promote state slots: many slots in one launch.

A pool is a tensor whose dimension `slot_dim` counts slots:

* slot-major, `slot_dim=0`: ``[S, *item]``; usually one row of bytes per slot
  that holds the states of all layers.
* layer-major, `slot_dim=1`: ``[L, S, *item]``.

Strides along the layer and the slot dimension are free (also above 2**31
bytes); the dimensions after it must be dense in some order, so a transposed
convolution state is accepted. All element types are accepted; copies move bytes.

A pool that is several tensors is a `Parts`: each is slot-major with a type, row size
and stride of its own, and all of them move in one launch.

Slot lists are int32 or int64 tensors on the pool's device and are never read on
the host. A negative index skips its row. No operation allocates or waits for the
device, so all can be captured in a CUDA graph. An index at or above the number
of slots is undefined behaviour on a GPU and an IndexError on a CPU.
Offsets are computed in 64 bits throughout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common.checks import check_index, on_gpu, require
from hybrid_kernels.state_copy import reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hybrid_kernels.state_copy.triton import BlockTable

__all__ = [
    "Parts",
    "PartsPair",
    "fork",
    "fork_parts",
    "gather",
    "promote",
    "promote_swap",
    "scatter",
    "transfer_parts",
    "zero",
    "zero_parts",
]


class Parts:
    """Tensors whose rows make up slots: slot `i` is row `i` of each.

    Building one copies a table to the device once; using it reads nothing back.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Describe tensors, which must stay where they are.

        Args:
            tensors: ``[S, *item]`` each, of one device, with any types, items and
                strides between slots; items dense in some order.

        Raises:
            ValueError: if there are none, or an item is not dense.
        """
        require(bool(tensors), "a pool has at least one part")
        self.tensors = tuple(tensors)
        for tensor in tensors:
            _check_pair(tensor, tensor, 0)
        self._blocks: BlockTable | None = None
        if on_gpu(tensors[0]):
            from hybrid_kernels.state_copy import triton

            self._blocks = triton.block_table(tensors)

    @property
    def blocks(self) -> BlockTable:
        """What the kernels read; only where Triton runs them."""
        assert self._blocks is not None
        return self._blocks


class PartsPair:
    """Two pools of one device whose slots have the same parts.

    Building one copies two tables to the device once; using it reads nothing back.
    """

    def __init__(self, to: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
        """Describe tensors, which must stay where they are.

        Args:
            to: as for `Parts`; slots are copied to these.
            of: as many, each with the type and item of its counterpart; any strides
                between slots.

        Raises:
            ValueError: if there are none, an item is not dense, or two differ.
        """
        require(bool(to), "a pool has at least one part")
        require(len(to) == len(of), f"{len(to)} and {len(of)} parts are no pair")
        self.to, self.of = tuple(to), tuple(of)
        for one, other in zip(to, of, strict=True):
            _check_pair(one, other, 0)
        self._tables: tuple[BlockTable, BlockTable] | None = None
        if on_gpu(to[0]):
            from hybrid_kernels.state_copy import triton

            self._tables = triton.table_pair(to, of)

    @property
    def tables(self) -> tuple[BlockTable, BlockTable]:
        """What the kernels read; only where Triton runs them."""
        assert self._tables is not None
        return self._tables


def transfer_parts(
    pair: PartsPair, destinations: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy slots of one pool over slots of the other, in one launch.

    Args:
        pair: of the pools, which share no memory.
        destinations: ``[n]``, of `pair.to`, without repeats among the non-negative.
        sources: ``[n]``, of `pair.of`; repeats are allowed.

    Raises:
        ValueError: if the lists differ in length.
    """
    check_index("sources", sources, (sources.numel(),))
    check_index("destinations", destinations, (sources.numel(),))
    if on_gpu(pair.to[0]):
        from hybrid_kernels.state_copy import triton

        triton.transfer_parts(*pair.tables, destinations, sources)
    else:
        reference.transfer_parts(pair.to, pair.of, destinations, sources)


def fork_parts(parts: Parts, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy slot to slot in every part, in one launch.

    Args:
        parts: of the pool.
        sources: ``[n]``; repeats are allowed.
        destinations: ``[n]``, as for `fork`.

    Raises:
        ValueError: if the lists differ in length.
    """
    check_index("sources", sources, (sources.numel(),))
    check_index("destinations", destinations, (sources.numel(),))
    if on_gpu(parts.tensors[0]):
        from hybrid_kernels.state_copy import triton

        triton.copy_parts(parts.blocks, destinations, sources)
    else:
        reference.copy_parts(parts.tensors, destinations, sources)


def zero_parts(parts: Parts, slots: torch.Tensor) -> None:
    """Clear slots in every part, in one launch.

    Args:
        parts: of the pool.
        slots: ``[n]``.

    Raises:
        ValueError: if `slots` is not a list of indices.
    """
    check_index("slots", slots, (slots.numel(),))
    if on_gpu(parts.tensors[0]):
        from hybrid_kernels.state_copy import triton

        triton.zero_parts(parts.blocks, slots)
    else:
        reference.zero_parts(parts.tensors, slots)


def gather(
    out: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, *, slot_dim: int = 0
) -> None:
    """Copy slots into a packed buffer: ``out[i] = pool[slots[i]]``.

    Args:
        out: ``[n, *item]`` or ``[L, n, *item]``, the pool's type; the rows of
            negative slots keep their old contents.
        pool: ``[S, *item]`` or ``[L, S, *item]``.
        slots: ``[n]``.
        slot_dim: which dimension counts slots, 0 or 1.

    Raises:
        ValueError: if shapes, types or item layouts differ.
    """
    _check_pair(out, pool, slot_dim)
    check_index("slots", slots, (out.shape[slot_dim],))
    if on_gpu(pool):
        from hybrid_kernels.state_copy import triton

        triton.copy(out, None, pool, slots, slot_dim)
    else:
        reference.copy(out, None, pool, slots, slot_dim)


def scatter(
    pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, *, slot_dim: int = 0
) -> None:
    """Copy a packed buffer into slots: ``pool[slots[i]] = values[i]``.

    Args:
        pool: ``[S, *item]`` or ``[L, S, *item]``.
        slots: ``[n]``, without repeats among the non-negative.
        values: ``[n, *item]`` or ``[L, n, *item]``, the pool's type.
        slot_dim: which dimension counts slots, 0 or 1.

    Raises:
        ValueError: if shapes, types or item layouts differ.
    """
    _check_pair(pool, values, slot_dim)
    check_index("slots", slots, (values.shape[slot_dim],))
    if on_gpu(pool):
        from hybrid_kernels.state_copy import triton

        triton.copy(pool, slots, values, None, slot_dim)
    else:
        reference.copy(pool, slots, values, None, slot_dim)


def fork(
    pool: torch.Tensor,
    sources: torch.Tensor,
    destinations: torch.Tensor,
    *,
    slot_dim: int = 0,
) -> None:
    """Copy slot to slot: ``pool[destinations[i]] = pool[sources[i]]``.

    Args:
        pool: ``[S, *item]`` or ``[L, S, *item]``.
        sources: ``[n]``; repeats are allowed.
        destinations: ``[n]``, no repeats and none that is also a source: the
            pairs are copied in no order. A pair with a negative side is skipped.
        slot_dim: which dimension counts slots, 0 or 1.

    Raises:
        ValueError: if the lists differ in length or an item is not dense.
    """
    _check_pair(pool, pool, slot_dim)
    check_index("sources", sources, (sources.numel(),))
    check_index("destinations", destinations, (sources.numel(),))
    if on_gpu(pool):
        from hybrid_kernels.state_copy import triton

        triton.copy(pool, destinations, pool, sources, slot_dim)
    else:
        reference.copy(pool, destinations, pool, sources, slot_dim)


def zero(pool: torch.Tensor, slots: torch.Tensor, *, slot_dim: int = 0) -> None:
    """Clear slots: ``pool[slots[i]] = 0``.

    Args:
        pool: ``[S, *item]`` or ``[L, S, *item]``.
        slots: ``[n]``.
        slot_dim: which dimension counts slots, 0 or 1.

    Raises:
        ValueError: if `slots` is not a list of indices or an item is not dense.
    """
    _check_pair(pool, pool, slot_dim)
    check_index("slots", slots, (slots.numel(),))
    if on_gpu(pool):
        from hybrid_kernels.state_copy import triton

        triton.zero(pool, slots, slot_dim)
    else:
        reference.zero(pool, slots, slot_dim)


def promote(
    pool: torch.Tensor,
    table: torch.Tensor,
    accepted: torch.Tensor,
    *,
    slot_dim: int = 0,
) -> None:
    """Copy each sequence's last accepted draft state over its main state.

    ``pool[table[i, 0]] = pool[table[i, accepted[i]]]``. Use it where the engine
    wants the main state to stay in its slot; `promote_swap` moves no state.

    Args:
        pool: ``[S, *item]`` or ``[L, S, *item]``.
        table: ``[n, 1 + drafts]``; column 0 is the main slot, column ``1 + j``
            the slot of draft ``j``. Rows with a negative entry are skipped.
        accepted: ``[n]``, the column to promote: for a chain the number of
            accepted drafts, for a tree one more than the last accepted draft's
            index. 0 or a negative number leaves the row as it is.
        slot_dim: which dimension counts slots, 0 or 1.

    Raises:
        ValueError: if shapes do not fit.
    """
    _check_pair(pool, pool, slot_dim)
    _check_table(table, accepted)
    if on_gpu(pool):
        from hybrid_kernels.state_copy import triton

        triton.promote(pool, table, accepted, slot_dim)
    else:
        reference.promote(pool, table, accepted, slot_dim)


def promote_swap(table: torch.Tensor, accepted: torch.Tensor) -> None:
    """Make the accepted draft's slot the main slot by swapping two indices.

    Swaps ``table[i, 0]`` and ``table[i, accepted[i]]`` in place; the old main
    slot becomes a draft slot. No state moves.

    Args:
        table: ``[n, 1 + drafts]``, as for `promote`.
        accepted: ``[n]``, as for `promote`.

    Raises:
        ValueError: if shapes do not fit.
    """
    _check_table(table, accepted)
    if on_gpu(table):
        from hybrid_kernels.state_copy import triton

        triton.promote_swap(table, accepted)
    else:
        reference.promote_swap(table, accepted)


def _check_pair(first: torch.Tensor, second: torch.Tensor, slot_dim: int) -> None:
    require(slot_dim in (0, 1), f"slot_dim is {slot_dim}, expected 0 or 1")
    require(first.dtype == second.dtype, f"{first.dtype} and {second.dtype} differ")
    require(
        first.ndim == second.ndim and first.ndim > slot_dim + 1,
        f"{first.ndim} and {second.ndim} dimensions; expected the same number, "
        f"above {slot_dim + 1}",
    )
    same = first.shape[slot_dim + 1 :] == second.shape[slot_dim + 1 :]
    require(
        same and first.shape[:slot_dim] == second.shape[:slot_dim],
        f"{tuple(first.shape)} and {tuple(second.shape)} differ beyond the slots",
    )


def _check_table(table: torch.Tensor, accepted: torch.Tensor) -> None:
    require(table.ndim == 2, f"table has {table.ndim} dimensions, expected 2")
    check_index("table", table, (table.shape[0], table.shape[1]))
    check_index("accepted", accepted, (table.shape[0],))
