# SPDX-License-Identifier: Apache-2.0
"""What the pools of one process are built on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.device.arena import Arena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.device.rows import rows_of
from hybrid_plugin.engine.sizing import CachePlan
from hybrid_plugin.sglang.compressed_keys import key_tensors
from hybrid_plugin.sglang.pending_keys import PendingKeys
from hybrid_plugin.sglang.pool_rows import (
    check_states,
    kv_tensors,
    page_rows,
    slot_rows,
)
from hybrid_plugin.sglang.rings import Rings

if TYPE_CHECKING:
    from hybrid_plugin.sglang.elastic import SharedPools


class PoolMemory:
    """What the pools of this process are built on, from planning to serving.

    SGLang plans, builds and serves in methods that see nothing of each other: the
    hooks in all of them share one of these.
    """

    def __init__(self) -> None:
        self.plan: CachePlan | None = None
        """Once the memory is divided."""
        self.shared: SharedPools | None = None
        """The memory of the pools, where they share it."""
        self.drafts: list[Any] = []
        """KV pools of draft models, whose pages are those of their target."""
        self.rings = Rings()
        """Of tokens that no index key stands for yet."""
        self.pending = PendingKeys()
        """Index keys that no compressed key stands for yet."""
        self._building = False
        self._executor: Executor | None = None

    @contextmanager
    def building(self) -> Iterator[None]:
        """Have the pools that SGLang builds meanwhile lie on what was planned."""
        self._building = True
        try:
            yield
        finally:
            self._building = False

    @property
    def lent(self) -> SharedPools | None:
        """The memory on which a pool that is being built must lie, or None."""
        return self.shared if self._building else None

    def executor(
        self,
        kv_pool: Any,
        state_pool: Any | None,
        page_size: int,
        interior: InteriorSnapshots | None = None,
        rings: Sequence[torch.Tensor] = (),
    ) -> Executor:
        """What runs commands on the pools that were built.

        Args:
            kv_pool: SGLang's `HybridLinearKVPool`, or `SWAKVPool`.
            state_pool: its `MambaPool`, None for the latter.
            page_size: tokens in a page.
            interior: as for `Executor`.
            rings: `[slots, bytes]` int8, more parts of each slot.

        Raises:
            ConfigError: for pools that keep more than is known, or lie elsewhere.
        """
        self._executor = self._built(kv_pool, state_pool, page_size, interior, rings)
        return self._executor

    def join(
        self, pages: Sequence[torch.Tensor], slots: Sequence[torch.Tensor] = ()
    ) -> None:
        """Have the executor copy more of each page and slot: what a draft model keeps.

        Args:
            pages: `[pages, bytes]` int8, as many as there are pages.
            slots: `[slots, bytes]` int8, as many as there are slots.
        """
        assert self._executor is not None, "a draft model is loaded after its target"
        self._executor.join(Pool.KV, pages)
        if slots:
            self._executor.join(Pool.STATE, slots)

    def _built(
        self,
        kv_pool: Any,
        state_pool: Any | None,
        page_size: int,
        interior: InteriorSnapshots | None,
        rings: Sequence[torch.Tensor],
    ) -> Executor:
        if self.shared is not None:
            kv_tensors(kv_pool.full_kv_pool)
            check_states(state_pool)
            return self.shared.start(interior)
        pages = page_rows(kv_pool.full_kv_pool, page_size)
        pages += [rows_of(one) for one in key_tensors(kv_pool)]
        if not pages:  # no layer of this rank has KV, and pages are but numbers
            count = kv_pool.size // page_size + 1
            pages = [torch.zeros((count, 0), dtype=torch.int8)]
        if state_pool is None:
            windows = page_rows(kv_pool.swa_kv_pool, page_size)
            return Executor({Pool.KV: Arena(pages), Pool.window(0): Arena(windows)})
        slots = [*slot_rows(state_pool), *rings]
        if not slots:  # other stages of the pipeline have all layers with states
            slots = [torch.zeros((state_pool.size + 1, 0), dtype=torch.int8)]
        arenas: dict[PoolId, Arena] = {
            Pool.KV: Arena(pages),
            Pool.STATE: Arena(slots),
        }
        return Executor(arenas, interior)
