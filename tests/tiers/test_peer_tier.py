# SPDX-License-Identifier: Apache-2.0
"""Which offers count for a request, and what is offered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hybrid_plugin.core.tiers.outer_tier import StoredBundle
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.peers.leases import LEASE_SECONDS
from hybrid_plugin.tiers.peers.params import PeerOffer
from hybrid_plugin.tiers.peers.tier import PeerTier
from tests.tiers.support import IDENTITY, as_tokens

TOKENS = as_tokens(*range(20))
MORE = as_tokens(*range(21))


def tier(ranks: int = 1, weights: str = "tiny", mark: str = "m") -> PeerTier:
    identity = replace(IDENTITY, weights=weights, tensor_ranks=ranks)
    return PeerTier(identity, "127.0.0.1", range(7600, 7600 + ranks), mark)


def offered(own: PeerTier, namespace: Any = None, size: int = 100) -> PeerOffer:
    storing = own.begin_store(namespace, TOKENS, 0, size)
    assert storing is not None and not storing.discard
    return PeerOffer.from_text(storing.key)


def test_what_one_server_offers_another_one_finds() -> None:
    own, offer = tier(), offered(tier())
    assert own.find(None, MORE, 20) == ()
    before = own.version
    assert own.expect(None, MORE, offer) is None
    assert own.version > before
    found = [StoredBundle(offer.text, 0, 20)]
    assert list(own.find(None, MORE, 20)) == found
    assert list(own.find(None, as_tokens(*range(40)), 39)) == found
    assert not own.find(None, MORE, 19)
    assert not own.find(None, TOKENS[:19], 19)
    assert not own.find("salt", MORE, 20)
    assert not own.find(None, as_tokens(*range(19), 7, 8), 20)
    assert not own.find(None, as_tokens(9, *range(1, 21)), 20)


def test_an_offer_counts_until_no_request_has_it() -> None:
    own, offer = tier(), offered(tier())
    for _ in range(2):
        assert own.expect(None, MORE, offer) is None
    own.forget(offer)
    assert own.find(None, MORE, 20)
    before = own.version
    own.forget(offer)
    assert not own.find(None, MORE, 20) and own.version > before
    own.forget(offer)


def declines_what_nobody_reads(own: PeerTier) -> None:
    """Which offers their peers are told are not needed."""
    other = tier()

    def expected(requests: int = 1) -> PeerOffer:
        offer = offered(other)
        for _ in range(requests):
            assert own.expect(None, MORE, offer) is None
        return offer

    first, second = expected(2), expected()
    assert not own.forget(first), "another request has it"
    assert own.forget(first), "though there is another one of the same content"
    assert not own.forget(first), "its peer was told"
    assert own.find(None, MORE, 20) == (StoredBundle(second.text, 0, 20),)
    own.begin_fetch(second.text, 5)
    third = expected()
    assert not own.forget(second), "it is being read"
    own.fetched([second.text], 5, 1.0)
    assert not own.forget(second), "it was read"
    assert own.forget(third), "what it has came with the other one"
    failed = expected()
    own.begin_fetch(failed.text, 5)
    own.fetch_failed(failed.text, "why")
    assert not own.forget(failed), "its peer knows, or is gone"
    again = expected()
    own.begin_fetch(again.text, 5)
    own.clear()
    assert not own.forget(again)
    assert not own.forget(offered(other)), "nobody came with it"


def test_what_nobody_reads_is_declined() -> None:
    declines_what_nobody_reads(tier())


class NeverDeclines(PeerTier):
    def forget(self, offer: PeerOffer) -> bool:
        super().forget(offer)
        return False


class DeclinesWhatIsRead(PeerTier):
    def begin_fetch(self, key: str, size: int) -> None:
        """As if nothing was on its way."""


class DeclinesForTheFirstRequest(PeerTier):
    def expect(self, *args: Any) -> Failure | None:
        failure = super().expect(*args)
        self._expected[args[-1].name].requests = 1
        return failure


class DeclinesTwice(PeerTier):
    def forget(self, offer: PeerOffer) -> bool:
        super().forget(offer)
        return offer.name not in self._expected and offer.name not in self._fetching


@pytest.mark.parametrize(
    "broken",
    [NeverDeclines, DeclinesWhatIsRead, DeclinesForTheFirstRequest, DeclinesTwice],
)
def test_catches(broken: type[PeerTier]) -> None:
    with pytest.raises(AssertionError):
        declines_what_nobody_reads(broken(IDENTITY, "127.0.0.1", (7600,), "m"))


@pytest.mark.parametrize("end", ["fetched", "failed", "flushed", "closed"])
def test_an_offer_counts_once(end: str) -> None:
    own, offer = tier(), offered(tier())
    assert own.expect(None, MORE, offer) is None
    before = own.version
    match end:
        case "fetched":
            own.fetched([offer.text], 5, 1.0)
        case "failed":
            assert own.fetch_failed(offer.text, "why") == ()
        case "flushed":
            assert own.clear() == ()
        case _:
            own.close()
    assert not own.find(None, MORE, 20) and own.version > before
    own.forget(offer)


def test_the_longest_of_several_offers_is_found() -> None:
    own, other = tier(), tier()
    for end in (8, 20, 12):
        storing = other.begin_store(None, TOKENS[:end], 0, 1)
        assert storing is not None
        assert own.expect(None, MORE, PeerOffer.from_text(storing.key)) is None
    assert [one.end for one in own.find(None, MORE, 20)] == [20]
    assert [one.end for one in own.find(None, MORE, 19)] == [12]


@pytest.mark.parametrize(
    ("other", "tokens", "namespace", "reason"),
    [
        (tier(weights="others"), MORE, None, Reason.PEER_MODEL),
        (tier(ranks=2), MORE, None, Reason.PEER_RANKS),
        (tier(), as_tokens(9, *range(1, 21)), None, Reason.OTHER_TOKENS),
        (tier(), TOKENS[:19], None, Reason.OTHER_TOKENS),
        (tier(), MORE, "salt", Reason.OTHER_TOKENS),
        (tier(), MORE, 5, Reason.OTHER_TOKENS),
    ],
)
def test_offers_of_something_else_are_refused(
    other: PeerTier, tokens: Any, namespace: Any, reason: Reason
) -> None:
    own, offer = tier(), offered(other)
    failure = own.expect(namespace, tokens, offer)
    assert isinstance(failure, Failure) and failure.reason is reason
    assert not own.find(namespace, tokens, len(tokens))


def test_salts_and_adapters_have_offers_of_their_own() -> None:
    own = tier()
    offer = offered(tier(), ("adapter", "salt"))
    assert own.expect(("adapter", None), MORE, offer) is not None
    assert own.expect(("adapter", "salt"), MORE, offer) is None


def test_nothing_is_offered_that_has_no_name() -> None:
    own = tier()
    assert own.begin_store(5, TOKENS, 0, 100) is None
    assert own.begin_store(None, TOKENS, 4, 100) is None
    own.close()
    assert own.begin_store(None, TOKENS, 0, 100) is None
    failure = own.expect(None, MORE, offered(tier()))
    assert failure is not None and failure.reason is Reason.CLOSED


def test_ranks_name_offers_alike_and_nobody_else_does() -> None:
    names = [[offered(own).name for _ in range(2)] for own in (tier(), tier())]
    assert names[0] == names[1] and len(set(names[0])) == 2
    assert offered(tier(mark="another")).name not in names[0]


def test_a_request_waits_no_longer_than_computing_takes() -> None:
    assert [tier().patience(each) for each in (0.1, 99.0)] == [0.1, 99.0]
    assert tier().patience(math.inf) == LEASE_SECONDS, "nothing was computed yet"


def test_a_peer_says_what_computing_took_it() -> None:
    offer = offered(tier())
    assert tier().token_seconds(offer.text) is None
    assert tier().token_seconds(replace(offer, token_seconds=0.5).text) == 0.5


def test_it_counts_what_is_offered() -> None:
    own = tier(ranks=2)
    first, second = offered(own), offered(own, size=50)
    assert (own.offers, own.used_bytes) == (2, 300)
    own.stored(first.text, None)
    assert own.store_failed(second.text, "why") == ()
    assert (own.offers, own.used_bytes) == (0, 0)
