# SPDX-License-Identifier: Apache-2.0
"""Conversations of two ranks over TCP: JSON messages with an authentication code each.

Both sides begin with a random number in clear.  The key of a conversation is made from
these and the shared secret, and every message has a code (HMAC with SHA-256) over its
direction, its place in the conversation, and its bytes.  So nobody without the secret
can speak, or repeat what was said before; messages are not encrypted.  Without a secret
the codes prove nothing, and only processes of one machine talk.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, TypeGuard

from hybrid_plugin.tiers.failure import Failure, Reason

FORMAT: Final = "hybrid-peer/2"
"""Name and version of the protocol."""
MOST_REQUEST: Final = 1 << 16
"""Bytes of a message to the one that was called."""
MOST_ANSWER: Final = 1 << 26
"""Bytes of a message from there: places of millions of rows."""
_GREETING: Final = 1024
_LENGTH = struct.Struct(">I")
_PLACE = struct.Struct(">?Q")
_CODE_BYTES = 32
_SERVER, _CLIENT = True, False


class PeerError(Exception):
    """A conversation that cannot go on."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        """Say why."""
        super().__init__(f"{reason}: {detail}")
        self.failure = Failure(reason, detail)


class Conversation:
    """One connection, on which both sides speak in turn.

    Raises:
        PeerError: by all methods, when the other side is gone, silent, or not to be
            understood.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, called: bool):
        """Greet.

        Args:
            connection: to the other side.
            secret: that both must know; empty for none.
            called: whether the other side began it.
        """
        self._socket = connection
        self._me = _SERVER if called else _CLIENT
        self._said = self._heard = 0
        self._most = MOST_REQUEST if called else MOST_ANSWER
        with contextlib.suppress(OSError):  # it is slower without
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._key = self._answer(secret) if called else self._call(secret)

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        body = json.dumps(message, separators=(",", ":")).encode()
        code = self._code(self._me, self._said, body)
        self._said += 1
        self._send(_LENGTH.pack(len(body)) + body + code)

    def hear(self, patience: float) -> dict[str, Any]:
        """Wait for the next message.

        Args:
            patience: seconds.
        """
        deadline = time.monotonic() + patience
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, deadline))
        if length > self._most:
            raise PeerError(Reason.PEER_MALFORMED, f"a message of {length} bytes")
        body, code = self._take(length, deadline), self._take(_CODE_BYTES, deadline)
        if not hmac.compare_digest(code, self._code(not self._me, self._heard, body)):
            raise PeerError(Reason.PEER_SECRET, "a message has another code")
        self._heard += 1
        return _object(body)

    # ---------------------------------------------------------------- internal

    def _call(self, secret: bytes) -> bytes:
        own = os.urandom(16).hex()
        self._greet({"format": FORMAT, "number": own})
        theirs = self._greeting()
        key = _key(secret, own, _number(theirs))
        proof = theirs.get("proof")
        if not _is_digits(proof, 64) or not hmac.compare_digest(proof, _proof(key)):
            raise PeerError(Reason.PEER_SECRET)
        return key

    def _answer(self, secret: bytes) -> bytes:
        theirs = self._greeting()
        own = os.urandom(16).hex()
        key = _key(secret, _number(theirs), own)
        self._greet({"format": FORMAT, "number": own, "proof": _proof(key)})
        return key

    def _greet(self, message: Mapping[str, str]) -> None:
        body = json.dumps(message).encode()
        self._send(_LENGTH.pack(len(body)) + body)

    def _greeting(self) -> dict[str, Any]:
        deadline = time.monotonic() + 5.0
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, deadline))
        if length > _GREETING:
            raise PeerError(Reason.PEER_MALFORMED, "its greeting is too long")
        theirs = _object(self._take(length, deadline))
        if theirs.get("format") != FORMAT:
            # It is told ours, so that both know.
            if self._me is _SERVER:
                self._greet({"format": FORMAT})
            raise PeerError(Reason.PEER_VERSION, f"{theirs.get('format')!r:.40}")
        return theirs

    def _code(self, speaker: bool, place: int, body: bytes) -> bytes:
        code = hmac.new(self._key, _PLACE.pack(speaker, place), sha256)
        code.update(body)
        return code.digest()

    def _send(self, content: bytes) -> None:
        try:
            self._socket.settimeout(10.0)
            self._socket.sendall(content)
        except OSError as error:
            raise PeerError(Reason.PEER_GONE, str(error)) from error

    def _take(self, count: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerError(Reason.PEER_GONE, "it is silent")
            try:
                self._socket.settimeout(left)
                part = self._socket.recv(min(count - len(content), 1 << 20))
            except OSError as error:
                raise PeerError(Reason.PEER_GONE, str(error)) from error
            if not part:
                raise PeerError(Reason.PEER_GONE, "it hung up")
            content += part
        return bytes(content)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise PeerError(Reason.PEER_MALFORMED, f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise PeerError(Reason.PEER_MALFORMED, "no JSON object")
    return found


def _number(greeting: Mapping[str, Any]) -> str:
    number = greeting.get("number")
    if not _is_digits(number, 32):
        raise PeerError(Reason.PEER_MALFORMED, "its greeting has no number")
    return number


def _is_digits(value: Any, count: int) -> TypeGuard[str]:
    """Whether something is a text of so many hexadecimal digits."""
    is_text = isinstance(value, str) and len(value) == count
    return is_text and all(one in "0123456789abcdef" for one in value)


def _key(secret: bytes, client: str, server: str) -> bytes:
    return hmac.digest(secret, f"{FORMAT} {client} {server}".encode(), "sha256")


def _proof(key: bytes) -> str:
    return hmac.digest(key, b"proof", "sha256").hex()
