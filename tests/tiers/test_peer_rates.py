# SPDX-License-Identifier: Apache-2.0
"""How fast peers are read from, and when a slow one is tried again."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from hybrid_plugin.tiers.peers import rates
from hybrid_plugin.tiers.peers.params import PeerOffer
from hybrid_plugin.tiers.peers.rates import PeerRate, PeerRates
from tests.tiers.test_peer_tier import MORE, offered, tier

SIZE = 1000
"""Bytes of a read; computing takes a second in place of it."""


def lives_through_a_slow_spell(rate: PeerRate) -> None:
    """Ten seconds for a read, then half of one."""
    assert rate.seconds(SIZE) == 0.0, "the first read is allowed"
    rate.begin(SIZE)
    rate.read(SIZE, 10.0)
    assert rate.seconds(SIZE) == 10.0 and rate.seconds(2 * SIZE) == 20.0
    for _ in range(9):
        rate.computed(1.0)
        assert rate.seconds(SIZE) == 10.0, "it is slower than computing"
    rate.computed(1.0)
    assert rate.seconds(SIZE) == 0.0, "computing took as long as a read would"
    assert rate.seconds(2 * SIZE) == 20.0, "a longer one is not tried yet"
    rate.begin(SIZE)
    assert rate.seconds(SIZE) == 10.0, "one is tried, others are refused"
    rate.read(SIZE, 0.5)
    assert rate.seconds(SIZE) == 0.5, "what was before says nothing"
    rate.begin(SIZE)
    rate.read(SIZE, 1.5)
    assert rate.seconds(SIZE) == 1.0, "the last reads count together"


def test_a_rate_recovers_after_a_slow_spell() -> None:
    lives_through_a_slow_spell(PeerRate())


def test_a_trial_that_is_slow_again_is_the_last_for_as_long() -> None:
    rate = PeerRate()
    rate.begin(SIZE)
    rate.read(SIZE, 10.0)
    rate.computed(10.0)
    rate.begin(SIZE)
    rate.read(SIZE, 40.0)
    assert rate.seconds(SIZE) == 40.0
    rate.computed(39.0)
    assert rate.seconds(SIZE) == 40.0
    rate.computed(1.0)
    assert rate.seconds(SIZE) == 0.0


def test_a_trial_that_fails_leaves_the_rate() -> None:
    rate = PeerRate()
    rate.begin(SIZE)
    rate.read(SIZE, 10.0)
    rate.computed(10.0)
    rate.begin(SIZE)
    assert rate.seconds(SIZE) == 10.0


def test_a_slow_read_among_fast_ones_does_not_decide_alone() -> None:
    rate = PeerRate()
    for seconds in (*[0.1] * 15, 1.7):
        rate.begin(SIZE)
        rate.read(SIZE, seconds)
    assert rate.seconds(SIZE) == pytest.approx(0.2)
    for _ in range(16):
        rate.begin(SIZE)
        rate.read(SIZE, 0.3)
    assert rate.seconds(SIZE) == pytest.approx(0.3), "of the last sixteen"


# ------------------------------------------------------------- broken on purpose


class NeverMeasures(PeerRate):
    def read(self, size: int, seconds: float) -> None:
        """As where nobody measures."""


class NeverTriesAgain(PeerRate):
    def computed(self, seconds: float) -> None:
        """A peer that was slow once is slow for ever."""


class TriesForEver(PeerRate):
    def begin(self, size: int) -> None:
        computed = self._computed
        super().begin(size)
        self._computed = computed


class RemembersTheSlowSpell(PeerRate):
    def begin(self, size: int) -> None:
        super().begin(size)
        self._is_trial = False


class ForgetsEachRead(PeerRate):
    def begin(self, size: int) -> None:
        super().begin(size)
        self._is_trial = True


@pytest.mark.parametrize(
    "broken",
    [
        NeverMeasures,
        NeverTriesAgain,
        TriesForEver,
        RemembersTheSlowSpell,
        ForgetsEachRead,
    ],
)
def test_catches(broken: type[PeerRate]) -> None:
    with pytest.raises(AssertionError):
        lives_through_a_slow_spell(broken())


# ----------------------------------------------------------------- several peers


def of_port(port: int) -> PeerOffer:
    own = asdict(offered(tier()))
    return PeerOffer.from_text(json.dumps(own | {"ports": [port]}))


def test_each_peer_has_a_rate_of_its_own() -> None:
    found = PeerRates()
    slow, fast = of_port(1), of_port(2)
    assert found.of(slow).seconds(SIZE) == 0.0 and not len(found)
    found.read(slow, SIZE, 10.0)
    found.read(fast, SIZE, 0.1)
    assert found.of(slow).seconds(SIZE) == 10.0
    assert found.of(fast).seconds(SIZE) == pytest.approx(0.1)
    assert found.of(of_port(3)).seconds(SIZE) == 0.0


def test_peers_that_were_not_read_from_for_long_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rates, "_REMEMBERED", 2)
    found = PeerRates()
    for port in (1, 2, 1, 3):
        found.read(of_port(port), SIZE, 10.0)
    assert len(found) == 2
    seconds = [found.of(of_port(port)).seconds(SIZE) for port in (1, 2, 3)]
    assert seconds == [10.0, 0.0, 10.0]


# ----------------------------------------------------------------- of the tier


def test_the_tier_counts_what_was_computed_once_for_each_offer() -> None:
    own, other = tier(), tier()

    def refused(times: int, *, begun: bool = False, forgotten: bool = True) -> None:
        offer = offered(other)
        assert own.expect(None, MORE, offer) is None
        for _ in range(times):
            own.fetch_refused(offer.text, 1.0)
        if begun:
            own.begin_fetch(offer.text, 1)  # what takes nothing is no trial
        if forgotten:
            own.forget(offer)

    first = offered(other)
    assert own.expect(None, MORE, first) is None
    assert own.read_seconds(first.text, SIZE) == 0.0
    own.begin_fetch(first.text, SIZE)
    own.fetched([first.text], SIZE, None)
    assert own.read_seconds(first.text, SIZE) == 0.0, "nobody measured"
    own.fetched([first.text], SIZE, 2.0)
    for times, more in ((1, {"forgotten": False}), (0, {}), (5, {"begun": True})):
        refused(times, **more)
        assert own.read_seconds(first.text, SIZE) == 2.0
    refused(5)
    assert own.read_seconds(first.text, SIZE) == 2.0
    refused(1)
    assert own.read_seconds(first.text, SIZE) == 0.0
