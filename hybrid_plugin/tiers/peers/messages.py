# SPDX-License-Identifier: Apache-2.0
"""What ranks say to each other.

    meet   who they are: all that must be equal, how their rows lie, and NIXL's metadata
    open   where the rows of an offer are, from some token on
    renew  whether its lease goes on
    close  that it was read: whether the lease held, and checksums
    decline  that an offer is not needed: nothing

Each is asked by the one that reads, and answered.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.manifest import STATE, Run
from hybrid_plugin.tiers.peers.ranges import Range, read_ranges
from hybrid_plugin.tiers.row_layout import RowLayout, integer, text

MEET: Final = "meet"
OPEN: Final = "open"
RENEW: Final = "renew"
CLOSE: Final = "close"
DECLINE: Final = "decline"
REFUSED: Final = "refused"
"""Entry of an answer: one of `Reason`, in place of all others."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """Who a rank is."""

    rank: str
    """`Identity.rank_name`."""
    fingerprint: str
    """`Identity.fingerprint`; empty for weights that no other server has."""
    layouts: Layouts
    metadata: bytes
    """NIXL's."""

    @classmethod
    def of(cls, identity: Identity, layouts: Layouts, metadata: bytes) -> Introduction:
        """That of a rank."""
        return cls(identity.rank_name, identity.fingerprint(), layouts, metadata)

    def refusal(self, rank: str, fingerprint: str) -> Failure | None:
        """Why this rank cannot exchange anything with another one; None if it can."""
        if rank != self.rank:
            return Failure(Reason.PEER_RANKS, f"it is {rank:.40}, this one {self.rank}")
        if fingerprint != self.fingerprint or not fingerprint:
            return Failure(Reason.PEER_MODEL)
        return None

    def message(self) -> dict[str, Any]:
        """As it is sent."""
        layouts: dict[str, RowLayout] = dict(self.layouts.pages)
        if self.layouts.state is not None:
            layouts[STATE] = self.layouts.state
        return {
            "rank": self.rank,
            "fingerprint": self.fingerprint,
            "layouts": {name: layout.text for name, layout in layouts.items()},
            "metadata": base64.b64encode(self.metadata).decode(),
        }

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Introduction:
        """Read what `message` is.

        Raises:
            ValueError: for anything else.
        """
        listed = message.get("layouts")
        if not isinstance(listed, dict) or len(listed) > 64:
            raise ValueError("no layouts")
        layouts = {name: RowLayout.from_text(text(one)) for name, one in listed.items()}
        state = layouts.pop(STATE, None)
        if any(not layout.tokens for layout in layouts.values()):
            raise ValueError("pages of no tokens")
        if state is not None and state.tokens:
            raise ValueError("a state has no tokens")
        try:
            metadata = base64.b64decode(text(message.get("metadata")), validate=True)
        except binascii.Error as error:
            raise ValueError(f"no metadata: {error}") from None
        return cls(
            text(message.get("rank")),
            text(message.get("fingerprint")),
            Layouts(layouts, state),
            metadata,
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """Where the rows of an offer are; it says of them what a `Manifest` does."""

    start: int
    end: int
    runs: Sequence[Run]
    state: RowLayout | None
    places: Mapping[str, Sequence[Range]]
    """Of each tensor."""

    def message(self) -> dict[str, Any]:
        """As it is sent."""
        return {
            "starts": {run.pool: run.start for run in self.runs},
            "places": dict(self.places),
        }

    @classmethod
    def read(
        cls, message: Mapping[str, Any], start: int, end: int, layouts: Layouts
    ) -> Opened:
        """Read what `message` is.

        Args:
            message: of the peer.
            start: the first token that was asked for.
            end: of the offer.
            layouts: of the peer.

        Raises:
            ValueError: for anything that does not fit these.
        """
        starts, places = message.get("starts"), message.get("places")
        if not isinstance(starts, dict) or not isinstance(places, dict):
            raise ValueError("no places")
        if starts.keys() != layouts.pages.keys():
            raise ValueError("it has other pools than it said")
        runs, found = [], {}
        for pool, layout in layouts.pages.items():
            first = integer(starts[pool])
            if not 0 <= first <= end:
                raise ValueError(f"pool {pool} from token {first}")
            run = Run(pool, first, layout)
            runs.append(run)
            size = run.rows(end) * layout.row_bytes
            found[pool] = read_ranges(places.get(pool), size)
        if layouts.state is not None:
            size = layouts.state.row_bytes
            found[STATE] = read_ranges(places.get(STATE), size)
        return cls(start, end, tuple(runs), layouts.state, found)


def refusal_in(answer: Mapping[str, Any]) -> Failure | None:
    """Why a peer refuses what it was asked; None if it does not.

    Raises:
        ValueError: for a reason that there is not.
    """
    if REFUSED not in answer:
        return None
    return Failure(Reason(text(answer[REFUSED])), "so says the peer")
