# SPDX-License-Identifier: Apache-2.0
"""What a rank that ends still does, and what it drops."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybrid_plugin.core.commands import BundleRows, Discard, PageRows, Write
from hybrid_plugin.tiers.bundle import Bundle
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.transfers import RankTransfers


class Memory:
    """Rows of four bytes."""

    def row_bytes(self, pool: str) -> int:
        return 4

    def views(self, pool: str, rows: Sequence[int]) -> list[Any]:
        return [np.zeros((len(rows), 4), dtype=np.uint8)]

    def copies_over(self) -> Callable[[], None]:
        return lambda: None


class Slow:
    """A disk that writes when it is let go on."""

    at_once = 1

    def __init__(self) -> None:
        self.started, self.goes_on = threading.Event(), threading.Event()
        self.did: list[str] = []

    def write(self, bundle: Bundle) -> Failure:
        self.started.set()
        self.goes_on.wait()
        self.did.append(f"write {bundle.key}")
        return Failure(Reason.IO)

    def fetch(self, bundles: Sequence[Bundle]) -> None:
        raise AssertionError("nothing is fetched")

    def discard(self, keys: Sequence[str]) -> None:
        self.did += [f"discard {key}" for key in keys]


def test_what_is_to_be_discarded_is_gone_when_the_rank_has_ended() -> None:
    """A flush is ordered, and the server ends at once: nobody may find it again."""
    disk = Slow()
    transfers = RankTransfers(Memory(), disk, {"disk": disk})
    for ticket, key in enumerate(("one", "two")):
        rows = BundleRows(
            key, None, array("q", [5]), 0, {"kv": PageRows(0, (1,))}, None
        )
        transfers.run(Write(ticket, rows))
    transfers.run(Discard(("one", "two")))
    assert disk.started.wait(20)
    letting_go = threading.Timer(0.05, disk.goes_on.set)
    letting_go.start()
    transfers.close()
    letting_go.join()
    assert disk.did == ["write one", "discard one", "discard two"]
