# SPDX-License-Identifier: Apache-2.0
"""How fast a rank copies to its host and back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hybrid_plugin.core.commands import Await, Load, PoolId, Store

_REPEATS = 5
_TICKET = -1
"""None of the core's."""

Ordered: TypeAlias = Store | Load | Await


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Of one rank; where they must agree, the least of all counts."""

    store_bytes_per_second: float
    """From the device to the host."""
    load_bytes_per_second: float
    """From the host to the device."""


def measure(
    order: Callable[[Ordered], None],
    finish: Callable[[], None],
    pool: PoolId,
    rows: int,
    row_bytes: int,
) -> Bandwidth:
    """Store the reserved page to each row of a block, and load it back over itself.

    Args:
        order: runs commands.
        finish: has the host wait for them.
        pool: of the device.
        rows: of a block; nothing else was stored there.
        row_bytes: bytes of each.
    """
    reserved, all_rows = (0,) * rows, tuple(range(rows))
    store: list[Ordered] = [Store(pool, reserved, all_rows)]
    load: list[Ordered] = [Load(pool, all_rows, reserved, _TICKET), Await(_TICKET)]
    _seconds(order, finish, [*store, *load])  # the first also finds memory
    times = [
        (_seconds(order, finish, store), _seconds(order, finish, load))
        for _ in range(_REPEATS)
    ]
    size = rows * row_bytes
    stores, loads = zip(*times, strict=True)
    return Bandwidth(size / statistics.median(stores), size / statistics.median(loads))


def _seconds(
    order: Callable[[Ordered], None],
    finish: Callable[[], None],
    commands: Sequence[Ordered],
) -> float:
    finish()
    begin = time.perf_counter()
    for command in commands:
        order(command)
    finish()
    return time.perf_counter() - begin
