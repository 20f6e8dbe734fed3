# SPDX-License-Identifier: Apache-2.0
"""What an application says with a request about the cache.

vLLM:   "vllm_xargs": {"hybrid_keep": [1200]}
SGLang: "custom_params": {"hybrid_keep": [1200]}  (among the sampling parameters)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

KEEP = "hybrid_keep"


def kept_positions(extra: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Positions in its tokens at which a request asks for a snapshot.

    Args:
        extra: what came with the request beside the engine's own parameters.

    Raises:
        ValueError: for anything but a list of whole numbers, none negative.
    """
    positions = (extra or {}).get(KEEP, ())
    if not isinstance(positions, list | tuple) or not all(
        isinstance(p, int) and not isinstance(p, bool) and p >= 0 for p in positions
    ):
        raise ValueError(
            f"{KEEP} takes a list of positions, whole numbers, got {positions!r}"
        )
    return tuple(positions)


class Hints:
    """Reads what requests ask for; a bad hint costs a warning, not a request."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._warned = False

    def keep(self, extra: Mapping[str, Any] | None) -> tuple[int, ...]:
        """`kept_positions`, none where they are no positions; the first is told of."""
        try:
            return kept_positions(extra)
        except ValueError as error:
            if not self._warned:
                self._logger.warning("hybrid-plugin ignores a hint: %s.", error)
                self._warned = True
            return ()
