# SPDX-License-Identifier: Apache-2.0
"""Other servers behind the host under random traffic.

They read what is offered to them, at any time or never, and offer it back; rows of what
is offered stay as they are until the report, and nothing is used that was withdrawn.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Command, Offer, Withdraw
from tests.core.elastic import ElasticEngine, random_elastic_setup, seeded_traffic
from tests.core.engine import FakeEngine
from tests.core.profiles import SOAK_FACTOR, machine_settings
from tests.core.support import Tiers
from tests.core.test_invariants import EngineMachine
from tests.core.test_outer_traffic import _Recorded
from tests.core.traffic import (
    Traffic,
    random_setup,
    with_drafts,
    with_host,
    with_peers,
    with_windows,
)

EPISODES = 24 * SOAK_FACTOR
OPERATIONS = 400
KINDS = ("fixed", "windows", "elastic", "elastic windows", "drafts", "elastic drafts")
EXERCISED = (
    "queried_tokens",
    "hit_tokens",
    "stores",
    "stores_refused",
    "store_failures",
    "loads",
    "load_failures",
)


def traffic_of(
    kind: str, seed: int, page_size: int, cache: type[HybridCache] = HybridCache
) -> Traffic:
    """Traffic on a random engine of a kind, with peers behind the host."""
    make = seeded_traffic if "elastic" in kind else Traffic.seeded
    windows, drafts = "windows" in kind, "drafts" in kind
    return make(
        seed, page_size, cache, windows=windows, drafts=drafts, host=True, peers=True
    )


@pytest.mark.parametrize("kind", KINDS)
def test_traffic(kind: str) -> None:
    totals = dict.fromkeys(EXERCISED, 0)
    for seed in range(EPISODES):
        traffic = traffic_of(kind, seed, (1, 4, 16)[seed % 3])
        try:
            traffic.run(OPERATIONS, check_every=10)
        except (AssertionError, ValueError) as error:
            setup = traffic.engine.setup
            raise AssertionError(f"seed {seed}, {setup}: {error}") from error
        tier = traffic.engine.cache.lower_tiers.outer[-1]
        done = tier.stats.as_dict("peer")
        for name in EXERCISED:
            totals[name] += done[f"peer_{name}"]
        totals["saved"] = totals.get("saved", 0) + traffic.engine.saved
    assert all(totals.values()), f"the traffic exercises too little: {totals}"


@pytest.mark.parametrize("kind", ["fixed", "elastic windows"])
def test_ranks_order_the_same(kind: str) -> None:
    seen: set[type] = set()
    for seed in range(8, 12):
        ranks = [traffic_of(kind, seed, 4, _Recorded) for _ in range(2)]
        for rank in ranks:
            rank.engine.watch_refusals = False
            for _ in range(400):
                rank.operate()
        first, second = [rank.engine.cache.__dict__["steps"] for rank in ranks]
        assert first == second
        seen |= {type(command) for step in first for command in step}
    assert seen >= {Offer, Withdraw}


class PeerMachine(EngineMachine):
    """Requests come, run and end; what is evicted comes from other servers."""

    @initialize(seed=st.integers(0, 10_000))
    def start(self, seed: int) -> None:
        rng = random.Random(seed)
        setup = random_setup(rng, self.page_size)
        if rng.random() < 0.4:
            setup = with_windows(rng, setup)
        if rng.random() < 0.3:
            setup = with_drafts(rng, setup)
        self.engine = FakeEngine(with_peers(with_host(setup)))

    @rule()
    def evict(self) -> None:
        self.engine.evict_all()


class ElasticPeerMachine(PeerMachine):
    """The same where memory moves on the device, too."""

    @initialize(seed=st.integers(0, 10_000), windows=st.booleans())
    def start(self, seed: int, windows: bool) -> None:  # type: ignore[override]
        setup = random_elastic_setup(
            random.Random(seed), self.page_size, windows=windows, drafts=seed % 3 == 0
        )
        self.engine = ElasticEngine(with_peers(with_host(setup)))


TestPeers = PeerMachine.TestCase
TestPeers.settings = machine_settings(50)
TestElasticPeers = ElasticPeerMachine.TestCase
TestElasticPeers.settings = machine_settings(50)


# ------------------------------------------------------------- broken on purpose


class _Broken(HybridCache):
    """Changes what is offered."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        outer = self.lower_tiers._outer
        assert outer is not None and outer._offers is not None
        self.change(outer._offers, outer._fetches, self.host)

    def change(self, offers: Any, fetches: Any, host: Any) -> None:
        """What is wrong."""
        raise NotImplementedError


class FreesWhatIsOffered(_Broken):
    """Lets the host reuse rows that are offered."""

    def change(self, offers: Any, fetches: Any, host: Any) -> None:
        begin = offers.begin

        def broken(*args: Any) -> Any:
            key = begin(*args)
            if key is not None:
                offering = list(offers.running.values())[-1]
                host.let_go(offering.source)
                offering.source = None
            return key

        offers.begin = broken


class NeverEndsALease(_Broken):
    """Keeps rows for ever."""

    def change(self, offers: Any, fetches: Any, host: Any) -> None:
        offers._end = lambda ticket: offers.running.pop(ticket)


class FlushesSilently(_Broken):
    """Frees rows at a flush, and tells no rank."""

    def change(self, offers: Any, fetches: Any, host: Any) -> None:
        send, withdraw = host._enqueue, offers.withdraw

        def broken() -> None:
            host.send_to(lambda command: None)
            withdraw()
            host.send_to(send)

        offers.withdraw = broken


class KeepsOffersThroughAFlush(_Broken):
    """Leaves rows in use at a flush."""

    def change(self, offers: Any, fetches: Any, host: Any) -> None:
        offers.withdraw = lambda: None


class OffersMoreThanThereIs(_Broken):
    """Offers the whole sequence, whatever the host has."""

    def change(self, offers: Any, fetches: Any, host: Any) -> None:
        match = host.match

        def broken(namespace: Any, tokens: Any, limit: int) -> Any:
            found = match(namespace, tokens, limit)
            if found.length and limit == len(tokens):
                object.__setattr__(found, "length", len(tokens))
            return found

        host.match = broken


class LeavesOutTooMuch(_Broken):
    """Fetches behind the KV that there is, by a page."""

    def change(self, offers: Any, fetches: Any, host: Any) -> None:
        whole = fetches._whole
        size = host.tree.page_size
        fetches._whole = lambda tokens: whole(tokens) + size


class OffersNoStates(_Broken):
    """Offers KV alone."""

    def change(self, offers: Any, fetches: Any, host: Any) -> None:
        send = host._enqueue

        def changed(command: Command) -> None:
            if isinstance(command, Offer):
                object.__setattr__(command.rows, "state", None)
            send(command)

        host.send_to(changed)


BREAKAGES = (
    FreesWhatIsOffered,
    NeverEndsALease,
    FlushesSilently,
    KeepsOffersThroughAFlush,
    OffersMoreThanThereIs,
    LeavesOutTooMuch,
    OffersNoStates,
)


@pytest.mark.parametrize("broken", BREAKAGES)
def test_catches(broken: type[HybridCache]) -> None:
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        for seed in range(60):
            kind = KINDS[seed % 3]
            traffic_of(kind, seed, 4, broken).run(OPERATIONS, check_every=10)
