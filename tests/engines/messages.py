# SPDX-License-Identifier: Apache-2.0
"""What goes to a server and what comes back, in no engine's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    tokens: tuple[int, ...]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_from: Mapping[str, int] = field(default_factory=dict)
    """Those tokens by the tier that had them, where the engine says it."""
    ttft_s: float = 0.0
    logprobs: tuple[Mapping[int, float], ...] = ()
    """For each token of the answer, the likeliest token ids and their logprobs."""
    aborted: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Ask:
    """One request, answered greedily."""

    prompt: tuple[int, ...]
    max_tokens: int
    abort_after: int | None = None
    """Drop the connection after so many tokens of the answer."""
    logprobs: int = 0
    """How many of the likeliest tokens come with each token of the answer."""
    salt: str | None = None
    """Keeps what is cached for it apart."""
    snapshot_at: tuple[int, ...] = ()
    """Positions at which it asks for a snapshot."""
    ttl: float | None = None
    """Seconds within which it says that it is continued; 0 for never."""

    @property
    def hints(self) -> dict[str, object]:
        """What it says about the cache, in the words of both engines."""
        keep = {"hybrid_keep": list(self.snapshot_at)} if self.snapshot_at else {}
        return keep | ({} if self.ttl is None else {"hybrid_ttl": self.ttl})


@dataclass(frozen=True)
class Launch:
    """How to start a server."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    imports: Sequence[str] = ()
    """What the process it is forked from has imported; none for a cold start."""
    constants: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By module: what the environment would have set at import."""
