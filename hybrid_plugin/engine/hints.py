# SPDX-License-Identifier: Apache-2.0
"""What an application says with a request about the cache.

vLLM:   "vllm_xargs": {"hybrid_keep": [1200]}
SGLang: "custom_params": {"hybrid_keep": [1200]}  (among the sampling parameters)

A client may send any JSON value in either place.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping

KEEP = "hybrid_keep"
MAX_POSITIONS = 64
"""Positions that one request may name: each costs a forward pass and a slot."""


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


class Hints:
    """Reads what requests ask for; a bad hint costs a warning, not a request."""

    def __init__(self, logger: logging.Logger) -> None:
        """Nobody was warned yet.

        Args:
            logger: where the first bad hint is told of.
        """
        self._logger = logger
        self._warned = False

    def keep(self, extra: object) -> tuple[int, ...]:
        """`kept_positions`, none where they are no positions; the first is told of."""
        try:
            return kept_positions(extra)
        except ValueError as error:
            if not self._warned:
                self._logger.warning("hybrid-plugin ignores a hint: %s.", error)
                self._warned = True
            return ()
