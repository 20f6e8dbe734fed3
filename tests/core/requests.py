# SPDX-License-Identifier: Apache-2.0
"""What a fake engine knows of a request, and what its steps generate for one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from hybrid_plugin.core.tiers.outer import Awaited
from tests.core.support import Tokens


class Access(Enum):
    """How a request uses the cache."""

    NORMAL = "normal"
    WRITE_ONLY = "write only"
    """Must compute everything itself, but others may use it."""
    PRIVATE = "private"
    """Its tokens do not say all about it: neither reads nor writes."""


@dataclass(slots=True, eq=False)
class Request:
    """What the fake engine knows of a sequence."""

    seq_id: str
    tokens: Tokens
    """Its prompt and all it will ever generate."""
    namespace: Hashable
    access: Access
    history: list[int]
    known: int
    limit: int | None = None
    ttl: float | None = None
    """Seconds within which it is said to be continued."""
    named: tuple[int, ...] = ()
    """Positions at which it asks for a snapshot."""
    computed: int = 0
    unseen: int = 0
    """Tokens that were generated but not received."""
    preemptions: int = 0
    refused_alone: tuple[int, int] = 0, -1
    """Tokens in all for which it found no room last, with nothing else running, and
    its preemptions until then."""
    table: list[int] = field(default_factory=list)
    slot: int = 0
    columns: list[int] = field(default_factory=list)
    """Slots of its drafts, as far as the engine wrote them into its table."""
    selected: int = 0
    """Column with its state: on the device, known to nobody else."""
    counted: int = 0
    """Tokens that the engine counts as computed: with all drafts in flight."""
    final: int = 0
    """Tokens computed by steps that are noted and whose outputs came."""
    heard: bool = False
    """Whether any of these outputs came."""
    last_pass: int = 0
    """The last forward pass that verified its drafts."""
    trimmed: int = 0
    """Final tokens, as the cache was told last."""
    restore: Awaited | None = None
    """What it waits for, or waited for last."""

    @property
    def known_tokens(self) -> Tokens:
        return self.tokens[: self.known]


@dataclass(frozen=True, slots=True)
class Output:
    """What a step generates for one request."""

    request: Request
    drafts: int | None = None
    """Drafts that it verified; None if the step was not noted."""
    steps: tuple[int, ...] = ()
    """Steps of the scratch, or columns, with the states after its accepted drafts."""

    @property
    def tokens(self) -> int:
        """Number of tokens generated."""
        return 1 + len(self.steps)
