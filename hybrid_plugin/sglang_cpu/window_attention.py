# SPDX-License-Identifier: Apache-2.0
"""Window layers on a CPU: their KV is read where it was written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_APPLIED = "_hybrid_plugin_original"


def read_windows_in_their_pool() -> None:
    """Symptom: on a CPU, models with layers of sliding windows answer wrongly.

    Cause: PyTorch's attention writes the KV of a window layer at positions of that
    layer's own pool, and reads it at those of full attention's.
    Fix: translate what it reads as well.
    Delete when: `TorchNativeAttnBackend` does.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("forward_extend", "forward_decode"):
        original = getattr(TorchNativeAttnBackend, name)
        if not hasattr(original, _APPLIED):
            setattr(TorchNativeAttnBackend, name, _reading_there(original))


def _reading_there(original: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        with _positions_of(self, layer.layer_id):
            return original(self, q, k, v, layer, *args, **kwargs)

    setattr(forward, _APPLIED, original)
    return forward


@contextmanager
def _positions_of(backend: Any, layer: int) -> Iterator[None]:
    """Have the backend see positions of a window layer's pool meanwhile."""
    pool, rows = backend.token_to_kv_pool, backend.req_to_token_pool
    if not backend.use_sliding_window_kv_pool or not pool.layers_mapping[layer][1]:
        yield
        return
    backend.req_to_token_pool = _WindowPositions(rows.req_to_token, pool)
    try:
        yield
    finally:
        backend.req_to_token_pool = rows


class _WindowPositions:
    """`req_to_token` in positions of a window pool; translates what is asked for."""

    def __init__(self, positions: torch.Tensor, pool: Any) -> None:
        self._positions = positions
        self._pool = pool

    @property
    def req_to_token(self) -> _WindowPositions:
        """The table itself, as backends ask a pool for it."""
        return self

    def __getitem__(self, where: Any) -> torch.Tensor:
        found: torch.Tensor = self._pool.translate_loc_from_full_to_swa(
            self._positions[where]
        )
        return found
