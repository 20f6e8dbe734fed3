# SPDX-License-Identifier: Apache-2.0
"""What a trace is a list of."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from hybrid_plugin.core.tree.tokens import Tokens


class TraceError(ValueError):
    """A trace that cannot be replayed; the message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Its tokens are made when they are needed: those of a whole trace may be
    more than fit into memory.
    """

    length: int
    """Tokens of the prompt."""
    make: Callable[[], Tokens]
    """Makes them."""
    answer: Tokens = field(default_factory=lambda: array("q"))
    """Tokens that the model generates."""
    namespace: Hashable = None
    snapshot_at: tuple[int, ...] = ()
    """Positions at which the application asks for a snapshot."""
    ttl: float | None = None
    """Seconds after its end within which the application promises to continue it; 0 if
    nobody will."""
    arrival: float | None = None
    """Seconds after the trace's start; None where a trace has no times."""
    key: int | None = None
    """Names it for those that go on after it; None if nobody does."""
    after: int | None = None
    """Key of the request after whose answer it comes, instead of at `arrival`."""
    pause: float = 0.0
    """Seconds between that answer and this request."""
