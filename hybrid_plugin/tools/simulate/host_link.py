# SPDX-License-Identifier: Apache-2.0
"""Copies from host memory in virtual time, and what an engine measures of itself.

Loads run one after the other, at the bandwidth of the link, beside the passes; a pass
that needs one waits until it is over.  Copies to the host cost nothing: they have the
link's other direction, and read a hundredth of what the passes read meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_plugin.core.commands import Await, Command, Load
from hybrid_plugin.core.policy.costs import PASS_TOKENS
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.engine.prefill_time import PrefillTime


class HostLink:
    """Times the loads that a cache orders, and tells it what prefills take."""

    def __init__(self, plan: HostPlan, rates: TransferRates) -> None:
        """Nothing is on its way.

        Args:
            plan: of the host's rows.
            rates: of the cache; its prefill time is kept up to date.
        """
        self.ready = 0.0
        """When all loads are over that a pass was made to wait for."""
        self._plan = plan
        self._rates = rates
        self._prefills = PrefillTime(PASS_TOKENS)
        self._free = 0.0
        """When the link has nothing left to copy."""
        self._over: dict[int, float] = {}
        """When the loads of a ticket are over that no pass has waited for."""

    def take(self, commands: Iterable[Command], now: float) -> None:
        """Begin and await loads.

        Args:
            commands: of a pass.
            now: when it could start.
        """
        for command in commands:
            if isinstance(command, Load):
                size = self._plan.bytes_of({command.pool: len(command.sources)})
                seconds = size / self._rates.load_bytes_per_second
                self._free = max(self._free, now) + seconds
                self._over[command.ticket] = self._free
            elif isinstance(command, Await):
                self.ready = max(self.ready, self._over.pop(command.ticket))

    def measure(self, prefill_tokens: int, seconds: float) -> None:
        """Note what a pass took.

        Args:
            prefill_tokens: tokens of prompts that it computed.
            seconds: that it ran.
        """
        self._prefills.observe(prefill_tokens, seconds)
        self._rates.prefill_seconds_per_token = self._prefills.token_seconds
