# SPDX-License-Identifier: Apache-2.0
"""What the host tier takes of SGLang's steps: the time of prefills, and the stream.

What a restore saves is measured on every rank and sent by the first one (`clock`).
Commands run before a pass, on its stream; where no pass follows, they run behind the
last one, so that what the last requests left is stored before the next ones come.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.policy.costs import pass_tokens_of
from hybrid_plugin.device.pass_timer import PassTimer
from hybrid_plugin.engine.prefill_time import PrefillTime
from hybrid_plugin.sglang.clock import RankClock


class HostSteps:
    """The passes of one scheduler."""

    def __init__(
        self, cache: HybridCache, clock: RankClock, device: torch.device
    ) -> None:
        """No pass was launched.

        Args:
            cache: with a host tier.
            clock: gets what is measured, to send it.
            device: of the passes.
        """
        self._cache = cache
        self._clock = clock
        self._device = device
        self._timer = PassTimer(device)
        self._time = PrefillTime(pass_tokens_of(device.type))
        self._stream: Any = None
        """Of the last pass; a CPU has none."""
        clock.measured = self.token_seconds

    def plan(self, *, waiting: bool) -> None:
        """Let the time pass before a step is planned.

        A restore that begins needs the time of this moment, and one that runs the time
        of its end.

        Args:
            waiting: whether a request waits that may begin one.
        """
        self._cache.pass_time(self._clock())
        self._clock.is_fine = (
            waiting or self._cache.lower_tiers.restores_due is not None
        )
        if self._cache.rates is not None:
            self._cache.rates.prefill_seconds_per_token = self._clock.token_seconds

    def begins(self) -> None:
        """Note that a pass is launched next, on the current stream."""
        if self._device.type != "cpu":
            self._stream = torch.cuda.current_stream(self._device)
        self._timer.begin()

    def launched(self, tokens: int) -> None:
        """Note that it was launched.

        Args:
            tokens: of prompts in it.
        """
        self._timer.end(tokens)

    def token_seconds(self) -> float | None:
        """Prefill of one token in seconds, of the passes that are over; None before."""
        for tokens, seconds in self._timer.finished():
            self._time.observe(tokens, seconds)
        return self._time.token_seconds

    @contextmanager
    def behind_the_last(self) -> Iterator[None]:
        """Have what is launched meanwhile run behind the last pass."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Return when the device has done all that was launched behind that pass."""
        if self._stream is not None:
            self._stream.synchronize()
