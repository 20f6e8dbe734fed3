# SPDX-License-Identifier: Apache-2.0
"""How long prefills take in a worker, for what a restore from host memory saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hybrid_plugin.core.policy.costs import pass_tokens_of
from hybrid_plugin.device.pass_timer import PassTimer
from hybrid_plugin.engine.prefill_time import PrefillTime

if TYPE_CHECKING:
    import torch


class PrefillMeasure:
    """Times the forward passes that compute tokens of prompts."""

    def __init__(self, device: torch.device) -> None:
        """Nothing was measured.

        Args:
            device: of the worker.
        """
        self._timer = PassTimer(device)
        self._time = PrefillTime(pass_tokens_of(device.type))

    @contextmanager
    def pass_of(self, tokens: int) -> Iterator[None]:
        """Around the launch of a pass on the current stream.

        Args:
            tokens: of prompts in it.
        """
        self._timer.begin()
        yield
        self._timer.end(tokens)

    def token_seconds(self) -> float | None:
        """Seconds by token, of the passes that are over; None before the first."""
        for tokens, seconds in self._timer.finished():
            self._time.observe(tokens, seconds)
        return self._time.token_seconds
