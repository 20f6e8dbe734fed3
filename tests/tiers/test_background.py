# SPDX-License-Identifier: Apache-2.0
"""The thread of a folder: order, refusals, and that every ticket comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_plugin.tiers.background import BackgroundFolder, Done, Part
from hybrid_plugin.tiers.bundle import Destination
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.folder import BundleFolder
from hybrid_plugin.tiers.manifest import Manifest
from tests.tiers.support import (
    IDENTITY,
    STATE_BYTES,
    Unsynced,
    as_tokens,
    bundle,
    content,
    layouts,
)

OWN = layouts()
TOKENS = as_tokens(*range(40))
PATIENCE = 60.0
"""Seconds after which a ticket counts as lost."""


class Gated(BundleFolder):
    """A folder whose jobs wait until they may run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 1 << 20, IDENTITY, OWN, files=Unsynced())
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.order: list[str] = []

    def _wait(self, what: str) -> None:
        self.begun.set()
        assert self.gate.wait(PATIENCE)
        self.order.append(what)

    def store(self, made: Any) -> Any:
        self._wait(f"store {len(made.tokens)}")
        return super().store(made)

    def load(self, manifest: Any, tokens: Any, destination: Any) -> Any:
        self._wait(f"load {manifest.end}")
        return super().load(manifest, tokens, destination)


@pytest.fixture
def gated(tmp_path: Path) -> Gated:
    return Gated(tmp_path)


@pytest.fixture
def tier(gated: Gated) -> Iterator[BackgroundFolder]:
    made = BackgroundFolder(gated, capacity=3)
    yield made
    gated.gate.set()
    made.close()


def collected(tier: BackgroundFolder, count: int) -> list[Done]:
    done: list[Done] = []
    deadline = time.monotonic() + PATIENCE
    while len(done) < count and time.monotonic() < deadline:
        done += tier.poll()
        time.sleep(0.001)
    return done


def part(manifest: Manifest) -> tuple[Part, np.ndarray[Any, Any]]:
    first = manifest.start // 4
    rows = list(np.zeros((-(-manifest.end // 4) - first, 32), np.uint8))
    state = np.zeros(STATE_BYTES, np.uint8)
    return Part(manifest, Destination({"kv": rows}, state)), state


def test_stores_and_loads(tier: BackgroundFolder, gated: Gated) -> None:
    gated.gate.set()
    tickets = [
        tier.store(bundle(OWN, None, TOKENS[:9])),
        tier.store(bundle(OWN, None, TOKENS[:20], 9)),
    ]
    assert [(d.ticket, d.failure) for d in collected(tier, 2)] == [
        (ticket, None) for ticket in tickets
    ]
    found = tier.folder.find(None, TOKENS)
    assert found is not None
    parts = [part(manifest) for manifest in found.path]
    ticket = tier.load(TOKENS, [each for each, _ in parts])
    assert collected(tier, 1) == [Done(ticket, None)]  # type: ignore[arg-type]
    ends = [bytes(state) for _, state in parts]
    assert ends == [content("state", None, TOKENS, end) for end in (9, 20)]


def test_loads_go_before_stores_and_stores_keep_their_order(
    tier: BackgroundFolder, gated: Gated
) -> None:
    gated.gate.set()
    tier.store(bundle(OWN, None, TOKENS[:9]))
    collected(tier, 1)
    gated.gate.clear()
    gated.begun.clear()
    gated.order.clear()
    found = tier.folder.find(None, TOKENS)
    assert found is not None
    tier.store(bundle(OWN, None, TOKENS[:20], 9))
    assert gated.begun.wait(PATIENCE)  # it is being stored
    tier.store(bundle(OWN, None, TOKENS[:30], 20))
    tier.load(TOKENS, [part(found.path[0])[0]])
    gated.gate.set()
    assert all(done.failure is None for done in collected(tier, 3))
    assert gated.order == ["store 20", "load 9", "store 30"]


def test_what_does_not_fit_the_queue_is_refused(
    tier: BackgroundFolder, gated: Gated
) -> None:
    tier.store(bundle(OWN, None, TOKENS[:9]))
    assert gated.begun.wait(PATIENCE)
    for length in (20, 21, 22):
        assert isinstance(tier.store(bundle(OWN, None, TOKENS[:length])), int)
    assert tier.store(bundle(OWN, None, TOKENS[:23])) == Failure(Reason.BUSY)
    assert tier.load(TOKENS, []) == Failure(Reason.BUSY)
    assert tier.poll() == []
    gated.gate.set()
    assert len(collected(tier, 4)) == 4
    assert isinstance(tier.load(TOKENS, []), int)


def test_a_load_fails_as_a_whole(tier: BackgroundFolder, gated: Gated) -> None:
    gated.gate.set()
    tier.store(bundle(OWN, None, TOKENS[:9]))
    tier.store(bundle(OWN, None, TOKENS[:20], 9))
    collected(tier, 2)
    found = tier.folder.find(None, TOKENS)
    assert found is not None
    (gated.path / f"{found.path[0].key}.bundle").unlink()
    gated.order.clear()
    tier.load(TOKENS, [part(manifest)[0] for manifest in found.path])
    (done,) = collected(tier, 1)
    assert done.failure is not None and done.failure.reason is Reason.MISSING
    assert gated.order == ["load 9"]


def test_the_thread_survives_its_own_faults(
    tier: BackgroundFolder, gated: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    gated.gate.set()
    wrong = bundle(layouts(8), None, TOKENS[:9])
    tier.store(wrong)
    tier.store(bundle(OWN, None, TOKENS[:9]))
    first, second = collected(tier, 2)
    assert first.failure is not None and first.failure.reason is Reason.INTERNAL
    assert second.failure is None
    assert "Traceback" in caplog.text


def test_closing_finishes_the_job_at_hand_and_fails_the_others(gated: Gated) -> None:
    tier = BackgroundFolder(gated, capacity=3)
    first = tier.store(bundle(OWN, None, TOKENS[:9]))
    assert gated.begun.wait(PATIENCE)
    second = tier.store(bundle(OWN, None, TOKENS[:20], 9))
    closing = threading.Thread(target=tier.close)
    closing.start()
    while not isinstance(tier.store(bundle(OWN, None, TOKENS[:9])), Failure):
        time.sleep(0.001)
    gated.gate.set()
    closing.join(PATIENCE)
    outcome = {done.ticket: done.failure for done in tier.poll()}
    assert outcome[first] is None  # type: ignore[index]
    assert outcome[second] == Failure(Reason.CLOSED)  # type: ignore[index]
    assert tier.load(TOKENS, []) == Failure(Reason.CLOSED)
    BundleFolder(gated.path.parent, 1 << 20, IDENTITY, OWN).close()  # it is let go


def test_look_ups_do_not_wait_for_the_disk(
    tier: BackgroundFolder, gated: Gated
) -> None:
    gated.gate.set()
    for end in range(5, 30):
        start = end - 1 if end > 5 else 0
        while isinstance(tier.store(bundle(OWN, None, TOKENS[:end], start)), Failure):
            found = tier.folder.find(None, TOKENS)
            if found is not None:
                assert [m.end for m in found.path] == list(range(5, found.end + 1))
    assert all(done.failure is None for done in collected(tier, 25))
    found = tier.folder.find(None, TOKENS)
    assert found is not None and found.end == 29


def test_a_flush_fails_what_waits_and_what_is_under_way(
    tier: BackgroundFolder, gated: Gated
) -> None:
    gated.gate.set()
    tier.store(bundle(OWN, None, TOKENS[:9]))
    collected(tier, 1)
    gated.gate.clear()
    gated.begun.clear()
    tier.store(bundle(OWN, None, TOKENS[:20], 9))
    assert gated.begun.wait(PATIENCE)
    waiting = tier.store(bundle(OWN, None, TOKENS[:30], 20))
    tier.clear()
    assert tier.folder.find(None, TOKENS) is None
    assert tier.poll() == [Done(waiting, Failure(Reason.CLEARED))]  # type: ignore[arg-type]
    gated.gate.set()
    (done,) = collected(tier, 1)
    assert done.failure is not None
    assert done.failure.reason in (Reason.CLEARED, Reason.NO_PARENT)
    after = tier.store(bundle(OWN, None, TOKENS[:12]))
    assert collected(tier, 1) == [Done(after, None)]  # type: ignore[arg-type]
    found = tier.folder.find(None, TOKENS)
    assert found is not None and found.end == 12
    assert tier.folder.count == 1
