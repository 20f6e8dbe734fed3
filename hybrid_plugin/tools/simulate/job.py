# SPDX-License-Identifier: Apache-2.0
"""A request while it is served, as the front door sees it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.engine.hints import KEEP, TTL
from hybrid_plugin.tools.simulate.request import Request


@dataclass(slots=True, eq=False)
class Job:
    """An `IncomingRequest`, how far it has come, and when."""

    request: Request
    number: int
    """Place among all requests, by arrival."""
    arrival: float
    """When it came, in virtual seconds like all times here."""
    generated: int = 0
    """Tokens of the answer that are known."""
    computed: int = 0
    """Tokens that the passes scheduled so far compute."""
    prefill_end: int = 0
    """Tokens that have to be computed before the next one is generated."""
    resumed: bool = False
    """Whether it ran before and was preempted."""
    hit: int | None = None
    """Tokens restored at its first admission."""
    steps: int = 0
    """Passes that had a part of its prompt."""
    waited: bool = False
    """Whether others had to end, or go on, to make room for it."""
    admitted: float = inf
    first_token: float = inf
    end: float = inf
    _all: Tokens | None = field(default=None, repr=False)

    @property
    def seq_id(self) -> str:
        """Name of its sequence."""
        return str(self.number)

    @property
    def length(self) -> int:
        """Tokens of its prompt."""
        return self.request.length

    @property
    def answer(self) -> int:
        """Tokens it generates; at least one comes out of a prefill."""
        return max(len(self.request.answer), 1)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return self.request.length + min(self.generated, len(self.request.answer))

    @property
    def max_tokens(self) -> int:
        """Tokens that it has when it ends."""
        return self.length + self.answer

    @property
    def is_prefilling(self) -> bool:
        """Whether the next pass computes a part of its prompt."""
        return self.computed < self.prefill_end

    @property
    def has_ended(self) -> bool:
        """Whether all of its answer is known."""
        return self.generated >= self.answer

    def tokens(self) -> Tokens:
        """Those that are known."""
        if self._all is None:
            self._all = self.request.make() + self.request.answer
        return self._all[: self.num_tokens]

    def namespace(self) -> Hashable:
        """What it must have in common with another."""
        return self.request.namespace

    @property
    def cacheable(self) -> bool:
        """True: tokens say all about it."""
        return True

    @property
    def may_hit(self) -> bool:
        """True."""
        return True

    @property
    def is_check(self) -> bool:
        """False."""
        return False

    @property
    def may_pause(self) -> bool:
        """True."""
        return True

    @property
    def hint(self) -> object:
        """Positions that the application names, and when it goes on."""
        positions, ttl = self.request.snapshot_at, self.request.ttl
        said = {KEEP: list(positions) or None, TTL: ttl}
        return {name: value for name, value in said.items() if value is not None}

    @property
    def is_over(self) -> bool:
        """Whether it ended, with all of its answer or before."""
        return self.end < inf

    def forget(self) -> None:
        """Drop the tokens of a request that has ended."""
        self._all = None
