# SPDX-License-Identifier: Apache-2.0
"""Measures forward passes on the device without waiting for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

_MOST = 64
"""Passes that are remembered until they are over: engines launch one or two ahead."""


class PassTimer:
    """Times of passes, in the order in which they were launched."""

    def __init__(self, device: torch.device) -> None:
        """Nothing was launched.

        Args:
            device: of the passes.
        """
        self._device = device
        self._begun: Any = None
        self._launched: deque[tuple[int, Any, Any]] = deque(maxlen=_MOST)

    def begin(self) -> None:
        """Note that a pass is launched next, on the current stream."""
        self._begun = self._now()

    def end(self, tokens: int) -> None:
        """Note that the pass was launched.

        Args:
            tokens: of prompts in it.

        Raises:
            RuntimeError: if none was begun.
        """
        if self._begun is None:
            raise RuntimeError("no pass was begun")
        self._launched.append((tokens, self._begun, self._now()))
        self._begun = None

    def finished(self) -> Iterator[tuple[int, float]]:
        """Take the passes that are over: tokens of prompts, and seconds."""
        while self._launched and self._launched[0][2].query():
            tokens, begun, ended = self._launched.popleft()
            yield tokens, begun.elapsed_time(ended) / 1e3

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return _HostMoment()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


class _HostMoment:
    """In the place of an event: a CPU has done a pass when its call returns."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _HostMoment) -> float:
        return 1e3 * (later._seconds - self._seconds)
