# SPDX-License-Identifier: Apache-2.0
"""Copies of whole slots, and the bandwidth they can reach."""

from __future__ import annotations

import torch
from hybrid_kernels import state_copy

from .timing import OURS, ROTATE, Call, Point, measure

SIZES = ((1, 1), (8, 1), (64, 1), (64, 8), (64, 32))
"""MiB of a slot, and how many are copied at once."""


def fork(megabytes: int, pairs: int, layers: int) -> Point:
    """Slot to slot, slot-major or layer-major."""
    slots, item = 2 * pairs * ROTATE, megabytes * 2**20 // layers
    shape = (slots, item) if layers == 1 else (layers, slots, item)
    pool = torch.randint(0, 255, shape, device="cuda", dtype=torch.uint8)
    order = torch.randperm(slots, device="cuda").view(ROTATE, 2, pairs)
    half = pairs * megabytes * 2**18
    # As many bytes for each turn as ours, or a small copy would stay in the cache.
    flat = torch.randn(ROTATE, 2, half, device="cuda")

    def ours(index: int) -> torch.Tensor:
        state_copy.fork(pool, *order[index], slot_dim=0 if layers == 1 else 1)
        return pool

    def plain(index: int) -> torch.Tensor:
        return torch.neg(flat[index, 1], out=flat[index, 0])

    calls: dict[str, Call | None] = {OURS: ours, "torch.neg, one run": plain}
    layout = "slot-major" if layers == 1 else f"{layers} layers"
    size, moved = f"{pairs} x {megabytes} MiB", 2.0 * pairs * megabytes * 2**20
    return Point("state_copy.fork", layout, size, calls, pool, moved)


def bandwidth() -> float:
    """Gigabytes read and written per second by a large device copy.

    The better of `copy_`, which may go to the copy engine, and an elementwise kernel.
    """
    data = torch.randn(2, 2**29, device="cuda")
    calls: tuple[Call, ...] = (
        lambda index: data[0].copy_(data[1]),
        lambda index: torch.neg(data[1], out=data[0]),
    )
    return max(2.0 * 2**31 / measure(call)[0] / 1e3 for call in calls)
