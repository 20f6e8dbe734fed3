# SPDX-License-Identifier: Apache-2.0
"""What a request carries from the server that computed its prompt to the next one.

Routers for prefill and decode servers take it from the answer of the one, as
`kv_transfer_params`, and give it unread to the other.  The names beside our own are
those of vLLM's NixlConnector.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.manifest import MAX_TOKENS
from hybrid_plugin.tiers.peers.channel import FORMAT
from hybrid_plugin.tiers.row_layout import integer, text

PARAMS: Final = "kv_transfer_params"
OWN: Final = "hybrid_peer"
"""Our entry in them."""
MOST_RANKS: Final = 1024
_DIGEST = re.compile("[0-9a-f]{64}")
_NAME = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """A prefix that a peer lets be read from its host memory.

    Raises:
        ValueError: for what no server says.
    """

    host: str
    """Address at which its ranks listen."""
    ports: tuple[int, ...]
    """One for each rank."""
    name: str
    """Of the offer: nobody guesses it."""
    key: str
    """Of the prefix: `KeyChain.key`."""
    fingerprint: str
    """`Identity.fingerprint`."""
    end: int
    """Tokens of the prefix."""
    token_seconds: float | None = None
    """What a token's prefill takes there, as measured; None where nothing was."""

    def __post_init__(self) -> None:
        ipaddress.ip_address(self.host)
        if not 0 < len(self.ports) <= MOST_RANKS:
            raise ValueError(f"{len(self.ports)} ports")
        if not all(0 < port < 1 << 16 for port in self.ports):
            raise ValueError(f"{self.ports!r:.60} are no ports")
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r:.60} names no offer")
        for digest in (self.key, self.fingerprint):
            if not _DIGEST.fullmatch(digest):
                raise ValueError(f"{digest!r:.80} is no SHA-256")
        if not 0 < self.end <= MAX_TOKENS:
            raise ValueError(f"{self.end} tokens")
        if self.token_seconds is not None and not 0 < self.token_seconds < math.inf:
            raise ValueError(f"{self.token_seconds} seconds a token")

    @property
    def is_local(self) -> bool:
        """Whether only processes of its machine reach it."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def text(self) -> str:
        """In one piece, as commands carry it."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, source: str) -> PeerOffer:
        """Read what `text` is.

        Raises:
            ValueError: for anything else.
        """
        return cls.from_value(json.loads(source))

    @classmethod
    def from_value(cls, value: Any) -> PeerOffer:
        """Read what `text` is, parsed from JSON; other entries may be there.

        Raises:
            ValueError: for anything else.
        """
        if not isinstance(value, Mapping):
            raise ValueError("no offer")
        found = {field.name: value.get(field.name) for field in fields(cls)}
        ports, end = found.pop("ports"), found.pop("end")
        if not isinstance(ports, list | tuple):
            raise ValueError("no ports")
        seconds = found.pop("token_seconds")
        return cls(
            ports=tuple([integer(port) for port in ports[: MOST_RANKS + 1]]),
            end=integer(end),
            token_seconds=None if seconds is None else _number(seconds),
            **{name: text(one) for name, one in found.items()},
        )

    def as_params(self) -> dict[str, Any]:
        """`kv_transfer_params` of the next server's request."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.name,
            "remote_host": self.host,
            "remote_port": self.ports[0],
            OWN: {"format": FORMAT, **asdict(self)},
        }


def _number(value: Any) -> float:
    """The value, if it is a number; a router may have written 1.0 as 1.

    Raises:
        ValueError: if it is none, or beyond all bounds.
    """
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} is no number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number beyond all bounds") from None


def wants_remote_decode(params: Any) -> bool:
    """Whether another server is to go on with a request, whose prompt is computed here.

    Args:
        params: `kv_transfer_params` of a request, any JSON value.
    """
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def wants_remote_prefill(params: Any) -> bool:
    """Whether another server has computed a request's prompt.

    Args:
        params: `kv_transfer_params` of a request, any JSON value.
    """
    return isinstance(params, Mapping) and params.get("do_remote_prefill") is True


def read_offer(entry: Any) -> PeerOffer | Failure:
    """What another server has said of a request's prompt.

    Args:
        entry: `OWN` in the request's parameters, any JSON value, or such a value as a
            text: SGLang lets no deeper one pass.
    """
    if isinstance(entry, str):
        try:
            entry = json.loads(entry)
        except (ValueError, RecursionError):
            entry = None
    if not isinstance(entry, Mapping):
        return Failure(Reason.PEER_MALFORMED, f"{OWN} is no object")
    if entry.get("format") != FORMAT:
        return Failure(Reason.PEER_VERSION, f"{entry.get('format')!r:.40}")
    try:
        return PeerOffer.from_value(entry)
    except ValueError as error:
        return Failure(Reason.PEER_MALFORMED, str(error))
