# SPDX-License-Identifier: Apache-2.0
"""The cache's commands on SGLang's own pools.

A run of equal commands that do not touch each other's rows is one indexed copy
per tensor, or a few where rows are large.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Command, Copy, Map, Pool, Unmap, Zero
from hybrid_plugin.device.arena import to_device
from hybrid_plugin.device.batching import batches
from hybrid_plugin.device.executor import Executor

_STATES_AT_ONCE = 4
"""States that are copied together; one may have 100 MiB."""


class SglangExecutor:
    """Runs command lists on the current stream, first to last."""

    def __init__(
        self,
        kv_pool: Any,
        state_pool: Any,
        page_size: int,
        mover: Executor | None = None,
    ) -> None:
        """Work on the pools of one rank.

        Args:
            kv_pool: SGLang's `HybridLinearKVPool`.
            state_pool: its `MambaPool`.
            page_size: tokens in a page.
            mover: moves memory between the pools, where they share it.

        Raises:
            ConfigError: for a KV pool whose tensors are not known.
        """
        self._states = state_pool
        self._mover = mover or Executor({})
        self._pages = [
            tensor.view(-1, page_size, *tensor.shape[1:])
            if tensor.shape[0] % page_size == 0
            else _whole_pages(tensor, page_size)
            for tensor in kv_tensors(kv_pool.full_kv_pool)
        ]
        self._device = state_pool.mamba_cache.temporal.device

    @property
    def move_seconds(self) -> float:
        """Time spent on moving memory so far."""
        return self._mover.moves.seconds

    def run(self, commands: Sequence[Command]) -> None:
        """Issue the commands; returns before a GPU has executed them.

        A GPU has done what was issued before when memory moves.
        """
        for batch in batches(commands):
            first = batch[0]
            match first:
                case Map() | Unmap():
                    self._mover.run(batch)
                case Zero(Pool.STATE, _):
                    self._states.clear_slots(self._ids(c.index for c in batch))
                case Copy(pool, _, _):
                    source = self._ids(c.source for c in batch)
                    destination = self._ids(c.destination for c in batch)
                    if pool == Pool.STATE:
                        self._copy_states(source, destination)
                    else:
                        self._copy_pages(source, destination)
                case _:
                    raise TypeError(f"{first!r} is no command for this pool")

    def _copy_states(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        # SGLang's pool gathers all that it is asked for before it scatters: memory
        # that nobody set aside.
        for begin in range(0, len(source), _STATES_AT_ONCE):
            some = slice(begin, begin + _STATES_AT_ONCE)
            self._states.copy_from(source[some], destination[some])

    def _copy_pages(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        for pages in self._pages:
            pages[destination] = pages[source]

    def _ids(self, ids: Iterable[int]) -> torch.Tensor:
        host = torch.tensor(list(ids), dtype=torch.int64)
        return to_device(host, self._device)


def kv_tensors(pool: Any) -> list[torch.Tensor]:
    """All tensors of a KV pool, each `[tokens, ...]`, one or two per layer.

    Raises:
        ConfigError: for a kind of pool that keeps more than these.
    """
    name = type(pool).__name__
    tensors: list[torch.Tensor]
    if name == "MHATokenToKVPool":
        tensors = [*pool.k_buffer, *pool.v_buffer]
        for scale in ("k_scale_buffer", "native_k_scale_buffer"):
            if getattr(pool, scale, None) is not None:
                raise ConfigError(
                    "quantised KV with scales beside it is not supported yet; drop "
                    "--kv-cache-dtype."
                )
    elif name == "MLATokenToKVPool":
        tensors = [*pool.kv_buffer]
    else:
        raise ConfigError(f"a KV cache of the kind {name} is not supported yet.")
    return tensors


def _whole_pages(tensor: torch.Tensor, page_size: int) -> torch.Tensor:
    rows = tensor.shape[0] // page_size * page_size
    return tensor[:rows].view(-1, page_size, *tensor.shape[1:])
