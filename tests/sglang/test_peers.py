# SPDX-License-Identifier: Apache-2.0
"""Requests of which another server has computed the prompt."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.runtime_context import get_context

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Fetch
from hybrid_plugin.engine.outer_side import OuterSide
from hybrid_plugin.engine.peers import Peers
from hybrid_plugin.engine.rank_peers import RanksWithPeers
from hybrid_plugin.sglang.arguments import _check_storable
from hybrid_plugin.sglang.outer_steps import OuterSteps
from hybrid_plugin.sglang.outer_tiers import TextOnlyPeers
from hybrid_plugin.tiers.agreement import Lost, Outcome
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.peers.params import OWN, PeerOffer
from hybrid_plugin.tiers.peers.tier import PeerTier
from tests.sglang.fakes import request
from tests.sglang.test_disk import FakeFiles
from tests.sglang.test_host_memory import LENGTH, HostBench

VOCABULARY = 1_000_000
IDENTITY = Identity("weights", "0" * 64, ("0 state", "1 full attention"), "bfloat16")


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


class PeerBench(HostBench):
    """With another server, whose bytes nobody has."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.rank: Any = FakeFiles()
        ranks = RanksWithPeers(IDENTITY, "127.0.0.1", (7600,), "mark")
        self.peers = Peers(
            ranks,
            logging.getLogger("hybrid test"),
            make=lambda *args: TextOnlyPeers(*args, vocabulary=VOCABULARY),
        )
        outer = OuterSide(self.core, peers=self.peers)
        self.cache._outer = OuterSteps(self.core, self.rank, outer, "mark")
        self.other = PeerTier(IDENTITY, "127.0.0.1", (7700,), "other")

    def offered(self, namespace: Any = (None, None)) -> str:
        """What another server says of the prompt of `LENGTH` tokens from 0 on."""
        tokens = array("q", range(LENGTH))
        storing = self.other.begin_store(namespace, tokens, 0, 1)
        assert storing is not None
        params = PeerOffer.from_text(storing.key).as_params()
        return json.dumps(params[OWN])

    def ask(self, rid: str = "d", told: Any = None, **fields: Any) -> Req:
        """Queue a request that another server has computed but for its last token."""
        told = self.offered() if told is None else told
        req = request(rid, [*range(LENGTH), 7], custom_params={OWN: told}, **fields)
        self.queue(req)
        return req

    def fetches(self) -> list[Fetch]:
        return [one for one in self.take() if isinstance(one, Fetch)]

    def end(self, fetch: Fetch, lost: Lost | None = None) -> None:
        self.rank.done.append(Outcome(fetch.ticket, lost, 1, 0.1))


@pytest.fixture
def bench() -> PeerBench:
    return PeerBench()


def test_it_is_fetched_when_the_request_comes(bench: PeerBench) -> None:
    """Also where nobody can be admitted."""
    bench.keep_busy()
    req = bench.ask()
    bench.cache.plan_waits(bench.scheduler.waiting_queue)
    (fetch,) = bench.fetches()
    assert fetch.source == "peer" and len(fetch.rows[-1].tokens) == LENGTH
    assert not bench.cache.may_sleep
    assert bench.step() == [] and not bench.fetches(), "it goes on"
    bench.end(fetch)
    bench.step()
    bench.take()
    bench.clock.now += 1000
    assert bench.step() == ["d"] and req.prefix_len == LENGTH
    assert bench.peers.tier.stats.hit_tokens == LENGTH
    bench.assert_conserved()


def test_a_peer_that_fails_costs_a_computation(bench: PeerBench) -> None:
    bench.keep_busy()
    req = bench.ask()
    assert bench.step() == []
    (fetch,) = bench.fetches()
    bench.end(fetch, Lost(0, Failure(Reason.PEER_GONE)))
    assert bench.step() == ["d"] and req.prefix_len == 0
    assert bench.peers.tier.stats.load_failures == {Reason.PEER_GONE: 1}
    bench.assert_conserved()


def test_a_peer_that_hangs_is_not_waited_for(bench: PeerBench) -> None:
    bench.keep_busy()
    req = bench.ask()
    assert bench.step() == []
    (fetch,) = bench.fetches()
    # Computing takes a second for each token, and the one that runs would wait as well.
    bench.clock.now += 2 * LENGTH - 1.0
    assert bench.step() == []
    bench.clock.now += 1.0
    assert bench.step() == ["d"] and req.prefix_len == 0
    bench.end(fetch)
    bench.step()
    bench.assert_conserved()


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("no JSON", Reason.PEER_MALFORMED),
        (5, Reason.PEER_MALFORMED),
        (["a", 5], Reason.PEER_MALFORMED),
        ({"format": "hybrid-peer/9"}, Reason.PEER_VERSION),
        ('{"format": "hybrid-peer/2"}', Reason.PEER_MALFORMED),
    ],
    ids=str,
)
def test_what_a_client_makes_up_is_computed(
    bench: PeerBench, told: Any, reason: Reason
) -> None:
    req = bench.ask(told=told)
    assert bench.step() == ["d"] and req.prefix_len == 0
    assert bench.peers.tier.stats.load_failures == {reason: 1}


@pytest.mark.parametrize("extra", [None, "text", ["list"], {}, {"hybrid_ttl": 1}])
def test_other_requests_are_left_alone(bench: PeerBench, extra: Any) -> None:
    req = request("d", [*range(LENGTH), 7])
    req.sampling_params.custom_params = extra
    bench.queue(req)
    assert bench.step() == ["d"]
    assert not bench.peers.tier.stats.load_failures


def test_salts_stay_apart(bench: PeerBench) -> None:
    req = bench.ask(told=bench.offered((None, "theirs")), cache_salt="mine")
    assert bench.step() == ["d"] and req.prefix_len == 0
    assert bench.peers.tier.stats.load_failures == {Reason.OTHER_TOKENS: 1}
    bench.finish(req)
    own = bench.ask("own", told=bench.offered((None, "mine")), cache_salt="mine")
    bench.cache.plan_waits(bench.scheduler.waiting_queue)
    assert own in bench.scheduler.waiting_queue


def test_a_request_that_is_aborted_needs_nothing_more(bench: PeerBench) -> None:
    bench.keep_busy()
    bench.ask()
    assert bench.step() == []
    (fetch,) = bench.fetches()
    bench.scheduler.abort_request(AbortReq(rid="d"))
    assert bench.cache.front_door.waiting == 0 and not bench.cache._told
    assert not bench.peers.tier._expected
    bench.end(fetch)
    bench.step()
    bench.assert_conserved()


def test_an_offer_is_read_once(bench: PeerBench) -> None:
    bench.keep_busy()
    bench.ask(told="no JSON")
    for _ in range(3):
        bench.cache.plan_waits(bench.scheduler.waiting_queue)
    assert bench.peers.tier.stats.load_failures == {Reason.PEER_MALFORMED: 1}


def test_images_are_numbered_otherwise_elsewhere(bench: PeerBench) -> None:
    tokens = array("q", [*range(LENGTH), VOCABULARY])
    offer = PeerOffer.from_text(
        bench.other.begin_store(None, tokens[:-1], 0, 1).key  # type: ignore[union-attr]
    )
    assert bench.peers.tier.expect(None, tokens[:-1], offer) is None
    failure = bench.peers.tier.expect(None, tokens, offer)
    assert failure is not None and failure.detail == "it has images"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dp_size": 2}, "peers serves one replica"),
        ({"nnodes": 2}, "peers serves one machine"),
        ({"enable_lora": True}, "peers cannot tell the weights of adapters"),
    ],
)
def test_what_other_servers_cannot_tell_is_refused(
    change: dict[str, Any], said: str
) -> None:
    plain = {"dp_size": 1, "attn_dp_size": None, "nnodes": 1}
    view = SimpleNamespace(**plain, enable_lora=False, lora_paths=None)
    _check_storable(view, "peers")
    view.__dict__.update(change)
    with pytest.raises(ConfigError, match=said):
        _check_storable(view, "peers")
