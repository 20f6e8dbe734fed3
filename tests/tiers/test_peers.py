# SPDX-License-Identifier: Apache-2.0
"""What one rank offers and another one reads: bytes, leases, and what is refused."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.peers import agent
from hybrid_plugin.tiers.peers.channel import FORMAT
from hybrid_plugin.tiers.peers.params import (
    OWN,
    PeerOffer,
    read_offer,
    wants_remote_decode,
    wants_remote_prefill,
)
from hybrid_plugin.tiers.peers.ranges import paired
from tests.tiers.peer_pair import (
    HOST,
    MORE_RANKS,
    OTHER_MODEL,
    PATIENCE,
    TOKENS,
    PeerPair,
    in_thread,
    outcome,
    refused,
)
from tests.tiers.support import WINDOW, check_loaded, layouts, token_rows, view


@contextmanager
def pair(
    theirs: Layouts | None = None, own: Layouts | None = None, **more: Any
) -> Iterator[PeerPair]:
    made = PeerPair(theirs or layouts(4), own or theirs or layouts(4), **more)
    try:
        yield made
    finally:
        made.close()


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(
    "own",
    [{}, {"page": 3}, {"page": 8}, {"heads_first": True}, {"page": 2, "padding": 5}],
    ids=str,
)
def test_what_is_read_is_what_was_computed(own: Any, windows: bool) -> None:
    ours = layouts(**{"page": 4, "windows": windows, **own})
    with pair(layouts(4, windows=windows), ours) as two:
        offer, done = two.offer(TOKENS, "salt")
        found = two.fetch(offer, TOKENS)
        check_loaded(found, ours, "salt", TOKENS, len(TOKENS))
        assert outcome(done) is None
        assert len(two.leases) == 0


@pytest.mark.parametrize("page", [2, 4, 8])
@pytest.mark.parametrize("start", [8, 16])
def test_what_is_there_already_is_not_read_again(page: int, start: int) -> None:
    ours = layouts(page)
    with pair(layouts(4), ours) as two:
        offer, done = two.offer(TOKENS)
        found = two.fetch(offer, TOKENS, start)
        assert isinstance(found, tuple), found
        rows = found[0]["kv"]
        got = view(rows, ours.pages["kv"])
        wanted = token_rows("kv", None, TOKENS, start, len(TOKENS))
        assert np.array_equal(got[start : len(TOKENS)], wanted)
        assert not got[:start].any()
        assert outcome(done) is None


def test_equal_rows_are_read_in_place() -> None:
    with pair() as two:
        offer, _ = two.offer(TOKENS)
        # The memory of the test is not the plane's: each tensor is registered for it.
        two.plane.region = (1, 1 << 63)
        assert isinstance(two.fetch(offer, TOKENS), tuple)
        assert two.plane.scratches == 0


def test_other_rows_go_through_memory_of_their_own() -> None:
    with pair(layouts(4), layouts(4, heads_first=True)) as two:
        offer, _ = two.offer(TOKENS)
        two.fetch(offer, TOKENS)
        assert two.plane.scratches == 2  # KV is converted, the state lies elsewhere


def test_rows_that_cannot_be_converted_are_refused() -> None:
    with pair(layouts(4), Layouts(layouts(4).pages, None)) as two:
        offer, done = two.offer(TOKENS)
        assert refused(two.fetch(offer, TOKENS)) is Reason.LAYOUT
        lost = outcome(done)
        assert lost is not None and lost.failure.reason is Reason.DECLINED


def test_a_window_that_begins_behind_what_is_wanted_is_refused() -> None:
    with pair(layouts(4, windows=True)) as two:
        offer, _ = two.offer(TOKENS)
        found = two.fetch(offer, TOKENS, window_start=len(TOKENS) - WINDOW - 1)
        assert refused(found) is Reason.LAYOUT


def test_a_byte_that_changes_on_the_way_is_noticed() -> None:
    with pair() as two:
        offer, _ = two.offer(TOKENS)
        two.plane.is_bad = True
        assert refused(two.fetch(offer, TOKENS)) is Reason.CORRUPT


# --------------------------------------------------------------------- leases


def test_an_offer_is_read_once() -> None:
    with pair() as two:
        offer, _ = two.offer(TOKENS)
        assert isinstance(two.fetch(offer, TOKENS), tuple)
        assert refused(two.fetch(offer, TOKENS)) is Reason.LEASE_OVER


def test_a_peer_may_be_told_before_the_rank_is() -> None:
    with pair() as two:
        offer, found = two.name(TOKENS), []
        reading = in_thread(lambda: found.append(two.fetch(offer, TOKENS)))
        reading.join(0.05)
        assert reading.is_alive()
        done = two.make(offer, TOKENS)
        reading.join(PATIENCE)
        check_loaded(found[0], two.own, None, TOKENS, len(TOKENS))
        assert outcome(done) is None


def test_nothing_is_read_before_the_copies_are_over() -> None:
    with pair() as two:
        offer, copied, found = two.name(TOKENS), threading.Event(), []
        begun = threading.Event()
        two.plane.before = lambda: begun.set()
        two.make(offer, TOKENS, copies_over=lambda: copied.wait(PATIENCE) and None)
        reading = in_thread(lambda: found.append(two.fetch(offer, TOKENS)))
        assert not begun.wait(0.05)
        copied.set()
        reading.join(PATIENCE)
        assert begun.is_set() and isinstance(found[0], tuple)


def test_a_lease_that_ended_during_the_read_makes_it_worthless() -> None:
    for end in ("time", "withdrawn", "all withdrawn"):
        with pair() as two:
            offer, done = two.offer(TOKENS)

            def over(two: PeerPair = two, end: str = end) -> None:
                if end == "time":
                    two.clock.now += 30.0
                elif end == "withdrawn":
                    two.leases.withdraw([1])
                else:
                    two.leases.withdraw_all()

            two.plane.after = over
            assert refused(two.fetch(offer, TOKENS)) is Reason.LEASE_OVER
            lost = outcome(done)
            assert lost is not None


def test_leases_end_by_themselves() -> None:
    with pair() as two:
        _, first = two.offer(TOKENS)
        two.clock.now += 20.0
        _, second = two.offer(TOKENS[:20])
        two.leases.expire()
        assert len(two.leases) == 2
        two.clock.now += 10.0
        two.leases.expire()
        lost = outcome(first)
        assert lost is not None and lost.failure.reason is Reason.UNREAD
        assert len(two.leases) == 1 and not second.done()


def test_a_read_renews_its_lease() -> None:
    with pair() as two:
        offer, done = two.offer(TOKENS)
        two.source._renew_after = 0.0
        two.clock.now += 20.0

        def later() -> Failure | None:
            two.clock.now += 8.0
            return None

        two.plane.before = later  # twice: for KV, and for the state
        assert isinstance(two.fetch(offer, TOKENS), tuple)
        assert outcome(done) is None


def test_whoever_hangs_up_gets_nothing_kept() -> None:
    with pair() as two:
        offer, done = two.offer(TOKENS)
        two.plane.before = lambda: Failure(Reason.PEER_GONE)
        assert refused(two.fetch(offer, TOKENS)) is Reason.PEER_GONE
        lost = outcome(done)
        assert lost is not None and lost.failure.reason is Reason.DECLINED

        offer, done = two.offer(TOKENS)

        def die() -> Failure | None:
            raise KeyboardInterrupt

        two.plane.before = die
        with pytest.raises(KeyboardInterrupt):
            two.fetch(offer, TOKENS)
        lost = outcome(done)
        assert lost is not None and lost.failure.detail == "it hung up"


# ------------------------------------------------------------------- declining


def reason_of(done: Any) -> Reason | None:
    """Why an offer was of no use; None while it holds."""
    lost = outcome(done) if done.done() else None
    return None if lost is None else lost.failure.reason


def test_an_offer_that_is_not_needed_ends_at_once() -> None:
    with pair(secrets=(b"a" * 16, b"a" * 16)) as two:
        (offer, done), (_, other) = two.offer(TOKENS), two.offer(TOKENS)
        two.source.decline(offer.text, time.monotonic())
        assert reason_of(done) is Reason.DECLINED
        assert not other.done() and len(two.leases) == 1, "of the same content"
        two.source.decline(offer.text, time.monotonic())
        assert refused(two.fetch(offer, TOKENS)) is Reason.LEASE_OVER


def test_an_offer_may_be_declined_before_the_rank_hears_of_it() -> None:
    with pair() as two:
        offer = two.name(TOKENS)
        two.source.decline(offer.text, time.monotonic())
        assert refused(two.fetch(offer, TOKENS)) is Reason.LEASE_OVER, "at once"
        done = two.make(offer, TOKENS)
        assert reason_of(done) is Reason.DECLINED and not len(two.leases)
        two.leases.withdraw([1])
        _, later = two.offer(TOKENS)
        assert not later.done()


def test_what_another_peer_reads_goes_on() -> None:
    with pair() as two:
        offer, done = two.offer(TOKENS)

        def meanwhile() -> None:
            two.source.decline(offer.text, time.monotonic())
            assert not done.done()

        two.plane.before = meanwhile
        check_loaded(two.fetch(offer, TOKENS), two.own, None, TOKENS, len(TOKENS))
        assert outcome(done) is None


def test_an_offer_that_hears_nothing_ends_by_its_time() -> None:
    with pair() as two:
        offer, done = two.offer(TOKENS)
        two.source.decline(offer.text, time.monotonic() - 31.0)  # it is over by then
        assert not done.done()
        two.server.close()
        two.source.decline(offer.text, time.monotonic())
        assert not done.done()
        two.clock.now += 30.0
        two.leases.expire()
        assert reason_of(done) is Reason.UNREAD


@pytest.mark.parametrize(
    "more",
    [
        {"identity": OTHER_MODEL},
        {"identity": MORE_RANKS},
        {"secrets": (b"a" * 16, b"b" * 16)},
        {"secrets": (b"a" * 16, b"")},
        {"rank": 1},
    ],
    ids=str,
)
def test_only_who_could_read_an_offer_declines_it(more: Any) -> None:
    with pair(**more) as two:
        offer, done = two.offer(TOKENS)
        two.source.decline(offer.text, time.monotonic())
        assert not done.done() and len(two.leases) == 1
        two.source.decline(replace(offer, host="192.0.2.1").text, time.monotonic())


# ------------------------------------------------------------------- refusals


def test_a_peer_that_is_gone_is_a_failure() -> None:
    with pair() as two:
        offer, _ = two.offer(TOKENS)
        two.server.close()
        assert refused(two.fetch(offer, TOKENS)) is Reason.PEER_GONE


@pytest.mark.parametrize(
    ("identity", "reason"),
    [(OTHER_MODEL, Reason.PEER_MODEL), (MORE_RANKS, Reason.PEER_RANKS)],
)
def test_another_model_and_other_ranks_are_refused(
    identity: Any, reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(identity=identity) as two:
        offer, done = two.offer(TOKENS)
        for _ in range(2):
            assert refused(two.fetch(offer, TOKENS)) is reason
        assert not done.done() and len(two.leases) == 1
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 1 and told[0].startswith("hybrid-plugin refuses a peer: ")
    assert reason.value in told[0]


def test_updated_weights_are_no_other_servers() -> None:
    with pair() as two:
        offer, _ = two.offer(TOKENS)
        for side in (two.server, two.source):
            side.introduction = replace(side.introduction, fingerprint="")
            assert refused(two.fetch(offer, TOKENS)) is Reason.PEER_MODEL


def test_a_rank_reads_from_the_rank_of_its_place() -> None:
    with pair(rank=1) as two:
        offer, _ = two.offer(TOKENS)
        assert refused(two.fetch(offer, TOKENS)) is Reason.PEER_RANKS


@pytest.mark.parametrize("secrets", [(b"a" * 16, b"b" * 16), (b"", b"b" * 16)])
def test_another_secret_is_refused(secrets: tuple[bytes, bytes]) -> None:
    with pair(secrets=secrets) as two:
        offer, done = two.offer(TOKENS)
        assert refused(two.fetch(offer, TOKENS)) is Reason.PEER_SECRET
        assert not done.done()


def test_the_same_secret_is_taken() -> None:
    with pair(secrets=(b"a" * 16, b"a" * 16)) as two:
        offer, _ = two.offer(TOKENS)
        assert isinstance(two.fetch(offer, TOKENS), tuple)


def test_without_a_secret_nobody_connects_to_other_machines() -> None:
    with pair() as two:
        offer, _ = two.offer(TOKENS)
        far = replace(offer, host="192.0.2.1")
        assert refused(two.fetch(far, TOKENS)) is Reason.PEER_SECRET


def test_without_nixl_there_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_PACKAGES", ("no_such_package", "nor_this_one"))
    with pytest.raises(ConfigError, match="pip install nixl-cu12, or nixl-cu13"):
        agent.library()


@pytest.mark.parametrize("namespace", ["salt", None])
def test_no_client_has_one_prefix_read_as_another_one(namespace: Any) -> None:
    """Nor for itself: it may know keys and names, and gives them to the next server."""
    with pair(secrets=(b"a" * 16, b"a" * 16)) as two:
        others = TOKENS[::-1]
        offer, done = two.offer(others, namespace)
        wanted = two.name(TOKENS)
        assert offer.end == wanted.end
        for forged in (replace(offer, key=wanted.key), replace(offer, end=8)):
            assert refused(two.fetch(forged, TOKENS)) is Reason.OTHER_TOKENS
        assert not done.done()
        assert isinstance(two.fetch(offer, others), tuple), "it is there still"


# --------------------------------------------------------------------- params


def test_params_come_back_from_a_router() -> None:
    with pair() as two:
        offer = two.name(TOKENS)
    params = offer.as_params()
    assert wants_remote_prefill(params) and not wants_remote_decode(params)
    assert (params["remote_host"], params["remote_port"]) == (
        HOST,
        offer.ports[0],
    )
    assert read_offer(params[OWN]) == offer == PeerOffer.from_text(offer.text)
    assert read_offer(json.dumps(params[OWN])) == offer
    timed = replace(offer, token_seconds=2.5e-5)
    assert read_offer(timed.as_params()[OWN]) == timed
    assert read_offer(json.dumps(timed.as_params()[OWN])) == timed
    whole = {**params[OWN], "token_seconds": 1}
    assert read_offer(whole) == replace(offer, token_seconds=1.0)
    earlier = {k: v for k, v in params[OWN].items() if k != "token_seconds"}
    assert read_offer(earlier) == offer


@pytest.mark.parametrize(
    "change",
    [
        {"host": "peer.example"},
        {"host": 7},
        {"ports": []},
        {"ports": [0]},
        {"ports": [65536]},
        {"ports": [True]},
        {"ports": [1] * 1025},
        {"ports": "80"},
        {"name": "x" * 32},
        {"name": None},
        {"key": "0" * 63},
        {"fingerprint": 5},
        {"end": 0},
        {"end": -4},
        {"end": 1 << 60},
        {"end": 5.0},
        {"token_seconds": 0.0},
        {"token_seconds": -1e-5},
        {"token_seconds": math.inf},
        {"token_seconds": math.nan},
        {"token_seconds": True},
        {"token_seconds": 10**400},
        {"token_seconds": "1e-5"},
    ],
    ids=str,
)
def test_params_that_no_server_makes_are_refused(change: dict[str, Any]) -> None:
    with pair() as two:
        offer = two.name(TOKENS)
    entry = {**offer.as_params()[OWN], **change}
    found = read_offer(entry)
    assert isinstance(found, Failure) and found.reason is Reason.PEER_MALFORMED


def test_params_of_another_version_are_refused() -> None:
    for entry in ({"format": "hybrid-peer/1"}, {}, {"format": None}):
        found = read_offer(entry)
        assert isinstance(found, Failure) and found.reason is Reason.PEER_VERSION
    for entry in (None, 5, "hybrid-peer/1", [FORMAT], "[" * 9999, "7"):
        found = read_offer(entry)
        assert isinstance(found, Failure) and found.reason is Reason.PEER_MALFORMED
    assert not wants_remote_decode({"do_remote_decode": 1})
    assert not wants_remote_prefill([])


# --------------------------------------------------------------------- ranges


@given(st.lists(st.integers(1, 9)), st.lists(st.integers(1, 9)))
def test_ranges_of_one_side_fill_those_of_the_other(
    theirs: list[int], own: list[int]
) -> None:
    total = min(sum(theirs), sum(own))

    def cut(sizes: list[int], base: int) -> list[tuple[int, int]]:
        found, at, left = [], base, total
        for size in sizes:
            if left:
                found.append((at, min(size, left)))
                left -= min(size, left)
                at += size + 3  # they do not touch
        return found

    def places(ranges: list[tuple[int, int]]) -> list[int]:
        return [at for start, size in ranges for at in range(start, start + size)]

    here, there = cut(theirs, 1000), cut(own, 5000)
    pairs = list(paired(here, there))
    assert places([one for one, _ in pairs]) == places(here)
    assert places([other for _, other in pairs]) == places(there)
    assert all(one[1] == other[1] for one, other in pairs)
