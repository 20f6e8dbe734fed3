# SPDX-License-Identifier: Apache-2.0
"""A server that answers prompts which another one computes: what it has fetched.

Each prompt's state comes from the other server, and so no sequence resumes from the
turn before.  Its KV is of use all the same: it need not be moved again.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Fetch, Pool
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.eviction import ExpectedSaving
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tiers.fetches import Fetches
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.outer_tier import StoredBundle
from hybrid_plugin.core.tiers.restores import Restores, TransferRates
from hybrid_plugin.core.tree.tokens import Tokens
from tests.core.audit import audit
from tests.core.outer import FakeTier

PAGE, TURN, ANSWER = 4, 12, 4
OPENING = 40
"""Tokens of a chat's first prompt, and of prompts that nobody goes on from."""


class Prefiller(FakeTier):
    """Has of every prompt all but the last token."""

    is_divisible = True

    def find(
        self, namespace: Hashable, tokens: Tokens, limit: int
    ) -> Sequence[StoredBundle]:
        """See `OuterTier`."""
        end = len(tokens) - 1
        return (StoredBundle(str(hash(bytes(tokens))), 0, end),) if end <= limit else ()


def policy() -> ExpectedSaving:
    return ExpectedSaving(token_bytes=1.0, slot_bytes=8.0)


class Server:
    """Answers one prompt after the other."""

    def __init__(self, slots: int, pages: int, blocks: int) -> None:
        plan = HostPlan({Pool.KV: 4, Pool.STATE: 8}, block_bytes=8, blocks=blocks)
        self.cache = HybridCache(
            PagePool(pages),
            SlotPool(slots),
            PAGE,
            SnapshotPolicy(PAGE, 1_000_000),
            eviction=policy(),
            host=HostTier(plan, PAGE, policy()),
            rates=TransferRates(1e9, prefill_seconds_per_token=1.0),
            tiers=(Prefiller(0),),
        )
        self.moved = 0
        """Tokens of KV that were fetched."""
        self._names = self._tokens = 0

    def text(self, count: int) -> list[int]:
        """Tokens that nobody has said."""
        self._tokens += count
        return list(range(self._tokens, self._tokens + count))

    def answer(self, prompt: list[int]) -> list[int]:
        """Fetch a prompt, and answer it."""
        cache = self.cache
        self._names += 1
        name = str(self._names)
        waits = None
        while True:
            found = cache.look_up(prompt)
            waits = cache.lower_tiers.restore(found, waits)
            if waits is None:
                break
            self._fetch()
            assert cache.lower_tiers.is_restored(waits), "nothing runs beside it"
        said = prompt + self.text(ANSWER)
        assert cache.admit(name, found, num_tokens=len(said)) is not None
        assert found.match.length == len(prompt) - 1
        cache.drain_commands()
        cache.advance(name, len(said) - 1)
        cache.finish(name, array("q", said), len(said) - 1)
        cache.drain_commands()
        return said

    def _fetch(self) -> None:
        for command in self.cache.drain_commands():
            if isinstance(command, Fetch):
                (rows,) = command.rows
                self.moved += len(rows.tokens) - rows.start
                self.cache.lower_tiers.done(command.ticket, True)


@dataclass(frozen=True)
class Served:
    """What chats took, among prompts that nobody goes on from and that fill the
    memory."""

    moved: int
    """Tokens that were fetched for the chats."""
    loaded: int
    """Bytes that went from the host to the device, of all."""


def served() -> Served:
    server = Server(slots=24, pages=200, blocks=200)
    for _ in range(60):
        server.answer(server.text(OPENING))
    moved = 0
    chats = [server.text(OPENING) for _ in range(8)]
    for _ in range(8):
        for i, said in enumerate(chats):
            before = server.moved
            chats[i] = server.answer(said) + server.text(TURN)
            moved += server.moved - before
            server.answer(server.text(OPENING))
        audit(server.cache)
    assert server.cache.host is not None
    return Served(moved, server.cache.host.stats.loaded_bytes)


def test_turns_move_less_where_what_they_build_on_counts_as_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = served()
    with monkeypatch.context() as patch:
        patch.setattr(Fetches, "_note_use", lambda self, match: None)
        assert found.moved < 0.8 * served().moved
    with monkeypatch.context() as patch:
        patch.setattr(Restores, "_note_use", lambda self, match: None)
        assert found.loaded < 0.95 * served().loaded
