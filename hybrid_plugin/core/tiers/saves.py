# SPDX-License-Identifier: Apache-2.0
"""Saves: prefixes that somebody wants in the outer tier now, whatever they are worth.

What is cached is written anyway, sooner or later, if the host takes it and keeps it
until its turn.  A save has the host take it, holds it there, and has it written first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from hybrid_plugin.core.tiers.host_tier import HostSource, HostTier
from hybrid_plugin.core.tiers.outer_tier import OuterTier
from hybrid_plugin.core.tiers.writes import FLUSHED, Asked, Writes
from hybrid_plugin.core.tree.tokens import Tokens

HOST_FULL: Final = "all of the host's memory is in use"
"""Why the host does not take a prefix."""
GONE: Final = "it was evicted meanwhile"
"""Why what was written is not there."""


@dataclass(slots=True, eq=False)
class Saving:
    """One prefix on its way to the outer tier."""

    namespace: Hashable
    tokens: Tokens
    """Of the prefix."""
    is_over: bool = False
    """Whether it is there as a whole, or will not be."""
    reason: str = ""
    """Why it is not."""
    _source: HostSource | None = None
    """Its rows on the host, held until it is over."""
    _asked: Asked | None = None

    @property
    def length(self) -> int:
        """Tokens that can be resumed."""
        return len(self.tokens)


class Saves:
    """All saves of one cache."""

    def __init__(self, host: HostTier, tier: OuterTier, writes: Writes) -> None:
        """Begin with none.

        Args:
            host: through which all goes.
            tier: where to.
            writes: to that tier.
        """
        self._host = host
        self._tier = tier
        self._writes = writes
        self.running: list[Saving] = []

    def begin(
        self, namespace: Hashable, tokens: Tokens, on_device: int
    ) -> Saving | None:
        """Have the longest prefix that can be resumed in the outer tier.

        Args:
            namespace: of the sequence.
            tokens: of the sequence.
            on_device: tokens that can be resumed from the device.

        Returns:
            None if nothing of it can be resumed.
        """
        there = self._stored(namespace, tokens)
        host = self._host.match(namespace, tokens, len(tokens))
        end = max(on_device, host.length, there)
        if not end:
            return None
        saving = Saving(namespace, tokens[:end], is_over=there == end)
        if not saving.is_over:
            self.running.append(saving)
        return saving

    def go_on(self, store: Callable[[Hashable, Tokens], None]) -> None:
        """Hold what is to be written, and end what is over.

        Call it where the host may take what the device has.

        Args:
            store: has the host take a prefix that the device can resume.
        """
        for saving in self.running:
            if saving._asked is None:
                self._hold(saving, store)
        self.settle()

    def settle(self) -> None:
        """End the saves that are over."""
        for saving in self.running[:]:
            asked = saving._asked
            if asked is not None and asked.is_over:
                reason = asked.reason or self._missing(saving)
                self._end(saving, reason)

    def flush(self) -> None:
        """Save nothing; nothing is held any more."""
        for saving in self.running[:]:
            self._end(saving, FLUSHED)

    # ---------------------------------------------------------------- internal

    def _hold(self, saving: Saving, store: Callable[[Hashable, Tokens], None]) -> None:
        namespace, tokens = saving.namespace, saving.tokens
        match = self._host.match(namespace, tokens, len(tokens))
        if match.length < len(tokens):
            store(namespace, tokens)
            match = self._host.match(namespace, tokens, len(tokens))
        if match.length < len(tokens) or match.node is None:
            saving._asked = Asked(True, self._missing(saving) and HOST_FULL)
            return
        saving._source = self._host.hold_bundle(match.node, 0)
        saving._asked = self._writes.ask(match.node)

    def _missing(self, saving: Saving) -> str:
        """Why a prefix is not there; nothing if it is."""
        stored = self._stored(saving.namespace, saving.tokens)
        return "" if stored == len(saving.tokens) else GONE

    def _stored(self, namespace: Hashable, tokens: Tokens) -> int:
        found = self._tier.find(namespace, tokens, len(tokens))
        return found[-1].end if found else 0

    def _end(self, saving: Saving, reason: str) -> None:
        self.running.remove(saving)
        saving.is_over, saving.reason = True, reason
        if saving._source is not None:
            self._host.let_go(saving._source)
            saving._source = None
