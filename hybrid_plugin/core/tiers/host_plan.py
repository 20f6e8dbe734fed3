# SPDX-License-Identifier: Apache-2.0
"""How host memory is cut into blocks that all pools of the tier can share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.core.memory.attention_windows import AttentionWindow
from hybrid_plugin.core.memory.elastic import ElasticBroker, PoolBudget
from hybrid_plugin.core.memory.elastic_plan import ElasticPools
from hybrid_plugin.core.memory.layout import CacheLayout, TooLittleMemoryError
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.memory.window_tables import WindowGroup

_MOST_MULTIPLE = 8
"""Blocks of more than so many times the least size are not looked at: with blocks, what
is unused of a pool's last one grows."""
_ROWS_IN_BLOCK = 16
"""The pages of a block, at least, where there are blocks enough: to store
10,000 tokens, a page to a block, took 11 ms of the scheduler's time, with 16 pages in
each 0.8 ms."""
_BLOCKS_ENOUGH = 256


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The rows of a host tier; equal on every rank.

    The tier is a buffer of `blocks` blocks.  A granule of a host pool is one block, and
    has as many rows as fit; row `i` of a pool is row `i % rows_per_block` of the block
    behind granule `i // rows_per_block`, and begins at a multiple of `row_bytes` there.
    Which block is behind which granule is every rank's own choice.  Granule 0 of each
    pool has a block from the start, and its row 0 is nobody's.
    """

    row_bytes: Mapping[PoolId, int]
    """Bytes of a row, by the device pool whose pages or slots it holds."""
    block_bytes: int
    blocks: int

    @property
    def budget(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    def rows_per_block(self, pool: PoolId) -> int:
        """Rows in a granule.

        Args:
            pool: of the device.
        """
        return self.block_bytes // self.row_bytes[pool]

    def rows(self, pool: PoolId) -> int:
        """Ids of a host pool: as many as if it had all blocks to itself.

        Args:
            pool: of the device.
        """
        return self.blocks * self.rows_per_block(pool)

    def bytes_of(self, counts: Mapping[PoolId, int]) -> int:
        """Bytes of so many rows, by the device pool."""
        return sum(self.row_bytes[pool] * count for pool, count in counts.items())

    def build(self, windows: Sequence[AttentionWindow] = ()) -> ElasticPools:
        """The tier's pools, which are named like those of the device.

        Args:
            windows: of the cache's window groups, in order.
        """
        return ElasticPools(
            pages=self._pages(Pool.KV),
            slots=SlotPool(self.rows(Pool.STATE), self.rows_per_block(Pool.STATE))
            if Pool.STATE in self.row_bytes
            else NoSlots(),
            windows=tuple(
                WindowGroup(window, self._pages(Pool.window(index)))
                for index, window in enumerate(windows)
            ),
            broker=ElasticBroker(
                self.budget,
                {pool: PoolBudget(self.block_bytes) for pool in self.row_bytes},
                moves_cost=False,
            ),
        )

    def _pages(self, pool: PoolId) -> PagePool:
        return PagePool(self.rows(pool), self.rows_per_block(pool))


def rows_of(layout: CacheLayout) -> dict[PoolId, int]:
    """Bytes of a page or slot of every pool that a host tier keeps rows of."""
    rows = {pool: size for pool, size in layout.row_bytes.items() if size}
    if Pool.KV not in rows:
        raise ValueError("the model has no full attention, whose pages carry the tree")
    return rows


def plan_host(row_bytes: Mapping[PoolId, int], budget: int) -> HostPlan:
    """Cut host memory into blocks, such that the rows waste the least.

    Lost is what no row fills of a block, of the pool that fills them worst, and the
    one block per pool that is not full.

    Args:
        row_bytes: bytes of a page or slot, by pool; at least 1 each.
        budget: bytes for the tier.

    Raises:
        TooLittleMemoryError: if there is no block left beside the first of each pool.
    """
    several = min(_ROWS_IN_BLOCK * row_bytes[Pool.KV], budget // _BLOCKS_ENOUGH)
    least = max(*row_bytes.values(), several)
    sizes = {
        -(-(count * least) // row) * row
        for row in row_bytes.values()
        for count in range(1, _MOST_MULTIPLE + 1)
    }

    def lost(block: int) -> float:
        unused = max(block % row for row in row_bytes.values()) / block
        return unused + len(row_bytes) * block / budget

    block = min(sorted(sizes), key=lost)
    blocks = budget // block
    if blocks <= len(row_bytes):
        raise TooLittleMemoryError(
            f"{budget} bytes of host memory are {blocks} blocks of {block}, but the "
            f"tier needs {len(row_bytes) + 1}"
        )
    return HostPlan(dict(row_bytes), block, blocks)
