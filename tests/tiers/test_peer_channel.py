# SPDX-License-Identifier: Apache-2.0
"""What arrives on a rank's port may be anything; who is served goes on being served."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.peers.channel import (
    FORMAT,
    MOST_REQUEST,
    Conversation,
    PeerError,
)
from hybrid_plugin.tiers.peers.messages import Introduction, Opened, refusal_in
from hybrid_plugin.tiers.peers.server import MOST_STRANGERS
from tests.tiers.peer_pair import HOST, TOKENS, PeerPair, in_thread
from tests.tiers.support import IDENTITY, layouts

SECRET = b"only peers know this"
NUMBER = "5" * 32


@pytest.fixture
def two() -> Iterator[PeerPair]:
    """A rank that offers something, and one that reads when others were tried."""
    made = PeerPair(layouts(4), layouts(4), secrets=(SECRET, SECRET))
    offer, _ = made.offer(TOKENS)
    yield made
    assert isinstance(made.fetch(offer, TOKENS), tuple), "it serves no more"
    made.close()


def called(two: PeerPair) -> socket.socket:
    return socket.create_connection((HOST, two.server.port), 10.0)


def framed(body: bytes, code: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + body + code


def answer(connection: socket.socket) -> bytes:
    """All that comes until the other side hangs up, when nothing more is said."""
    connection.settimeout(20.0)
    found = b""
    with contextlib.suppress(OSError):  # it has hung up already
        connection.shutdown(socket.SHUT_WR)
    # What it has not read when it hangs up resets the connection.
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def greeting(**changes: Any) -> bytes:
    message = {"format": FORMAT, "number": NUMBER, **changes}
    return framed(json.dumps(message).encode())


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0",
        framed(b""),
        framed(b"[]"),
        framed(b"{"),
        framed(b"\xff" * 40),
        framed(b"[" * 1000),
        struct.pack(">I", 1 << 31) + b"much",
        greeting(number=None),
        greeting(number="z" * 32),
        greeting(number="5" * 31),
        greeting(number="\ud800" * 32),
        greeting()[:-3],
    ],
    ids=lambda said: repr(said[:24]),
)
def test_what_is_no_greeting_is_not_answered(two: PeerPair, said: bytes) -> None:
    with called(two) as connection:
        connection.sendall(said)
        assert answer(connection) == b""


def test_another_version_is_told_ours(two: PeerPair) -> None:
    with called(two) as connection:
        connection.sendall(greeting(format="hybrid-peer/3"))
        found = json.loads(answer(connection)[4:])
    assert found == {"format": FORMAT}


def greeted(two: PeerPair, secret: bytes = SECRET) -> tuple[socket.socket, bytes]:
    """A connection after the greeting, and its key."""
    connection = called(two)
    connection.sendall(greeting())
    (length,) = struct.unpack(">I", connection.recv(4, socket.MSG_WAITALL))
    theirs = json.loads(connection.recv(length, socket.MSG_WAITALL))
    text = f"{FORMAT} {NUMBER} {theirs['number']}".encode()
    return connection, hmac.digest(secret, text, "sha256")


def coded(key: bytes, body: bytes, place: int = 0, speaker: bool = False) -> bytes:
    said = struct.pack(">?Q", speaker, place) + body
    return framed(body, hmac.digest(key, said, "sha256"))


def meeting() -> bytes:
    who = {"rank": IDENTITY.rank_name, "fingerprint": IDENTITY.fingerprint()}
    return json.dumps({"do": "meet", **who}).encode()


def test_who_knows_the_secret_is_answered(two: PeerPair) -> None:
    connection, key = greeted(two)
    with connection:
        connection.sendall(coded(key, meeting()))
        assert b"layouts" in answer(connection)


@pytest.mark.parametrize(
    "said",
    [
        lambda key: coded(b"another key", meeting()),
        lambda key: coded(key, meeting(), place=1),
        lambda key: coded(key, meeting(), speaker=True),
        lambda key: coded(key, meeting())[:-1],
        lambda key: framed(meeting(), bytes(32)),
        lambda key: framed(b"x" * (MOST_REQUEST + 1), bytes(32)),
        lambda key: struct.pack(">I", (1 << 32) - 1),
    ],
    ids=["key", "place", "speaker", "cut", "no code", "long", "longest"],
)
def test_a_message_without_the_right_code_is_not_answered(
    two: PeerPair, said: Callable[[bytes], bytes]
) -> None:
    connection, key = greeted(two)
    with connection:
        connection.sendall(said(key))
        assert answer(connection) == b""


def test_what_was_said_before_is_not_taken_again(two: PeerPair) -> None:
    """Neither in the same conversation nor in another one."""
    connection, key = greeted(two)
    message = coded(key, meeting())
    with connection:
        connection.sendall(message + message)
        assert answer(connection).count(b"layouts") == 1
    connection, _ = greeted(two)
    with connection:
        connection.sendall(message)
        assert answer(connection) == b""


WHO = {"rank": IDENTITY.rank_name, "fingerprint": IDENTITY.fingerprint()}
PREFIX = {"key": "KEY", "end": 9}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"do": "dance"},
        {"do": 7},
        {"do": "meet"},
        {"do": "meet", "rank": 1, "fingerprint": None},
        {"do": "open", **WHO},
        {"do": "open", "offer": "THIS", "start": 0, **WHO},
        {"do": "open", "offer": 5, "start": 0, **PREFIX, **WHO},
        {"do": "open", "offer": "THIS", "start": -1, **PREFIX, **WHO},
        {"do": "open", "offer": "THIS", "start": 1 << 70, **PREFIX, **WHO},
        {"do": "open", "offer": "THIS", "start": "0", **PREFIX, **WHO},
        {"do": "open", "offer": "THIS", "start": True, **PREFIX, **WHO},
        {"do": "open", "offer": "THIS", "start": 0, **PREFIX, "key": 7, **WHO},
        {"do": "open", "offer": "THIS", "start": 0, **PREFIX, "end": "9", **WHO},
        {"do": "close"},
    ],
    ids=str,
)
def test_a_question_that_makes_no_sense_ends_a_conversation(
    two: PeerPair, asked: dict[str, Any]
) -> None:
    offer, done = two.offer(TOKENS[:9])
    said = json.dumps(asked).replace("THIS", offer.name).replace("KEY", offer.key)
    connection, key = greeted(two)
    with connection:
        connection.sendall(coded(key, said.encode()))
        assert b"refused" in answer(connection)
    assert not done.done(), "nobody has opened it"
    two.leases.decline(offer.name)
    assert done.done(), "it counts as open"


def test_an_offer_that_ended_is_refused_at_once(two: PeerPair) -> None:
    offer, _ = two.offer(TOKENS[:9])
    two.leases.withdraw([2])
    connection, key = greeted(two)
    prefix = {"key": offer.key, "end": offer.end, "start": 0}
    said = {"do": "open", "offer": offer.name, **prefix, **WHO}
    with connection:
        connection.sendall(coded(key, json.dumps(said).encode()))
        assert Reason.LEASE_OVER.value.encode() in answer(connection)


@pytest.mark.parametrize("greets", [False, True])
def test_callers_who_say_nothing_keep_nobody_waiting(
    two: PeerPair, greets: bool
) -> None:
    offer, _ = two.offer(TOKENS[:9])
    silent = [called(two) for _ in range(MOST_STRANGERS + 10)]
    for connection in silent if greets else ():
        with contextlib.suppress(OSError):  # the first ones were hung up on
            connection.sendall(greeting())
    assert isinstance(two.fetch(offer, TOKENS[:9]), tuple)
    for connection in silent:
        connection.close()


# ------------------------------------------------------ what a peer answers us


def peer_that_says(*answers: Any) -> tuple[int, Callable[[], None]]:
    """A port where whoever asks gets these answers, and what ends it."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            peer = Conversation(connection, b"", called=True)
            for each in answers:
                peer.hear(20.0)
                peer.say(each)

    thread = in_thread(serve)

    def end() -> None:
        thread.join()
        listener.close()

    return listener.getsockname()[1], end


def opened(**changes: Any) -> dict[str, Any]:
    """An answer that fits `layouts(4)` and 8 tokens, changed."""
    places = {"kv": [[4096, 64]], "state": [[8192, 24]]}
    return {"starts": {"kv": 0}, "places": places, **changes}


@pytest.mark.parametrize(
    "said",
    [
        {},
        opened(starts=None),
        opened(starts={}),
        opened(starts={"kv": 9}),
        opened(starts={"kv": -1}),
        opened(starts={"kv": 0, "more": 0}),
        opened(places=[]),
        opened(places={"kv": [[4096, 64]]}),
        opened(places={"kv": [[4096, 63]], "state": [[8192, 24]]}),
        opened(places={"kv": [[4096, 65]], "state": [[8192, 24]]}),
        opened(places={"kv": [[0, 64]], "state": [[8192, 24]]}),
        opened(places={"kv": [[4096, 128], [1, -64]], "state": [[8192, 24]]}),
        opened(places={"kv": [[(1 << 64) - 63, 64]], "state": [[8192, 24]]}),
        opened(places={"kv": [[4096.0, 64]], "state": [[8192, 24]]}),
        opened(places={"kv": [[True, 64]], "state": [[8192, 24]]}),
        opened(places={"kv": [4096, 64], "state": [[8192, 24]]}),
        opened(places={"kv": {"4096": 64}, "state": [[8192, 24]]}),
    ],
    ids=lambda said: json.dumps(said)[:60],
)
def test_places_that_make_no_sense_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Opened.read(said, 0, 8, layouts(4))
    assert Opened.read(opened(), 0, 8, layouts(4)).places["kv"] == [(4096, 64)]


@pytest.mark.parametrize(
    "change",
    [
        {"layouts": None},
        {"layouts": {"kv": 5}},
        {"layouts": {"kv": "[1]"}},
        {"layouts": {"kv": layouts(4).state.text}},  # type: ignore[union-attr]
        {"layouts": {"state": layouts(4).pages["kv"].text}},
        {"layouts": {str(n): layouts(4).pages["kv"].text for n in range(65)}},
        {"metadata": "!"},
        {"metadata": None},
        {"rank": 0},
        {"fingerprint": None},
    ],
    ids=lambda change: str(change)[:40],
)
def test_an_introduction_that_makes_no_sense_is_refused(change: Any) -> None:
    own = Introduction.of(IDENTITY, layouts(4), b"\0\1")
    assert Introduction.read(own.message()) == own
    with pytest.raises(ValueError):
        Introduction.read({**own.message(), **change})


def test_a_reason_that_there_is_not_is_no_reason() -> None:
    assert refusal_in({"refused": Reason.LEASE_OVER.value}) is not None
    assert refusal_in({}) is None
    for said in ({"refused": "because"}, {"refused": None}):
        with pytest.raises(ValueError):
            refusal_in(said)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (({"layouts": 5},), Reason.PEER_MALFORMED),
        (({"refused": "the peer's lease is over"},), Reason.LEASE_OVER),
        (("MEET", {"starts": 5}), Reason.PEER_MALFORMED),
        (("MEET", opened()), Reason.PEER_GONE),
        ((), Reason.PEER_GONE),
    ],
    ids=str,
)
def test_what_a_peer_answers_is_a_failure_where_it_makes_no_sense(
    answers: tuple[Any, ...], reason: Reason
) -> None:
    two = PeerPair(layouts(4), layouts(4))
    meet = two.server.introduction.message()
    port, end = peer_that_says(*[meet if one == "MEET" else one for one in answers])
    two.plane.before = lambda: None
    two.plane.read = lambda *_: None  # type: ignore[method-assign]
    tokens = TOKENS[:8]
    offer = two.name(tokens)
    found = two.fetch(type(offer)(HOST, (port,), *_rest(offer)), tokens)
    end()
    two.close()
    assert getattr(found, "reason", None) is reason, found


def _rest(offer: Any) -> tuple[Any, ...]:
    return offer.name, offer.key, offer.fingerprint, offer.end


def test_a_silent_peer_is_gone() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(greeting(proof="0" * 64))
        with pytest.raises(PeerError) as raised:
            Conversation(here, b"", called=False)
        assert raised.value.failure.reason is Reason.PEER_SECRET
    listener = socket.create_server((HOST, 0))
    thread = in_thread(lambda: listener.accept()[0].recv(1))
    with socket.create_connection(listener.getsockname()) as connection:
        with pytest.raises(PeerError) as raised:
            Conversation(connection, b"", called=False)
        assert raised.value.failure.reason is Reason.PEER_GONE
    thread.join()
    listener.close()
