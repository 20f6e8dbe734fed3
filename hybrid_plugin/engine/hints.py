# SPDX-License-Identifier: Apache-2.0
"""What an application says with a request about the cache.

vLLM:   "vllm_xargs": {"hybrid_keep": [1200], "hybrid_ttl": 60}
SGLang: "custom_params": {"hybrid_keep": [1200], "hybrid_ttl": 60}
        (among the sampling parameters)

A client may send any JSON value in either place.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Mapping
from typing import TypeVar

KEEP = "hybrid_keep"
TTL = "hybrid_ttl"
MAX_POSITIONS = 64
"""Positions that one request may name: each costs a forward pass and a slot."""
MAX_TTL = 366 * 24 * 3600
"""Seconds of the longest TTL: about a year, for what is never to be given up."""

T = TypeVar("T")


def kept_positions(extra: object) -> tuple[int, ...]:
    """Positions in its tokens at which a request asks for a snapshot.

    Args:
        extra: what came with the request beside the engine's own parameters.  Only
            a mapping can hold a hint; anything else is not meant for the plugin.

    Raises:
        ValueError: for anything but a list of at most `MAX_POSITIONS` whole numbers,
            none negative.
    """
    positions = extra.get(KEEP) if isinstance(extra, Mapping) else None
    if positions is None:
        return ()
    if not isinstance(positions, list | tuple) or not all(
        isinstance(p, int) and not isinstance(p, bool) and p >= 0
        for p in positions[:MAX_POSITIONS]
    ):
        raise ValueError(
            f"{KEEP} takes a list of positions, whole numbers, got "
            f"{reprlib.repr(positions)}"
        )
    if len(positions) > MAX_POSITIONS:
        raise ValueError(
            f"{KEEP} takes at most {MAX_POSITIONS} positions, got {len(positions)}"
        )
    return tuple(positions)


def ttl_of(extra: object) -> float | None:
    """Seconds after its end within which a request's conversation will go on.

    Args:
        extra: as for `kept_positions`.

    Returns:
        0 if nobody will continue it; None if the request says nothing.

    Raises:
        ValueError: for anything but a number from 0 to `MAX_TTL`.
    """
    ttl = extra.get(TTL) if isinstance(extra, Mapping) else None
    if ttl is None:
        return None
    number = isinstance(ttl, int | float) and not isinstance(ttl, bool)
    if not number or not 0 <= ttl <= MAX_TTL:
        raise ValueError(
            f"{TTL} takes a number of seconds from 0 to {MAX_TTL}, got "
            f"{reprlib.repr(ttl)}"
        )
    return float(ttl)


class Hints:
    """Reads what requests ask for; a bad hint costs a warning, not a request."""

    def __init__(self, logger: logging.Logger, *, knows_time: bool = True) -> None:
        """Nobody was warned yet.

        Args:
            logger: where the first bad hint is told of.
            knows_time: whether TTLs other than 0 can be kept.
        """
        self._knows_time = knows_time
        self._logger = logger
        self._warned = False

    def keep(self, extra: object) -> tuple[int, ...]:
        """`kept_positions`, none where they are no positions; the first is told of."""
        return self._read(kept_positions, extra, ())

    def ttl(self, extra: object) -> float | None:
        """`ttl_of`, None where it is no TTL; the first bad hint is told of."""
        return self._read(self._ttl_of, extra, None)

    def _ttl_of(self, extra: object) -> float | None:
        ttl = ttl_of(extra)
        if ttl and not self._knows_time:
            raise ValueError(
                f"{TTL} needs one scheduler, or a time that all ranks agree on; the "
                "schedulers that an external launcher starts have none"
            )
        return ttl

    def _read(self, read: Callable[[object], T], extra: object, nothing: T) -> T:
        try:
            return read(extra)
        except ValueError as error:
            if not self._warned:
                self._logger.warning("hybrid-plugin ignores a hint: %s.", error)
                self._warned = True
            return nothing
