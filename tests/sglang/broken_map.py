# SPDX-License-Identifier: Apache-2.0
"""A deliberate fault, which comparisons of what attention reads must notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybrid_plugin.sglang.window_map import WindowMap


@contextmanager
def forgotten_hits() -> Iterator[None]:
    """A map in which the pages that a sequence resumes from are not written.

    Entries that are there from before would be right by chance, so they go.
    """
    write = WindowMap.write

    def forgetful(self: WindowMap, parts: Any) -> None:
        page_size = len(self._offsets)
        kept = []
        for sequence, first in parts:
            if first == 0:  # a new row: all that the sequence holds
                first = sequence.hit // page_size
                for page in sequence.pages[:first]:
                    self._by_page[page] = 0
            kept.append((sequence, first))
        write(self, kept)

    WindowMap.write = forgetful  # type: ignore[method-assign]
    try:
        yield
    finally:
        WindowMap.write = write  # type: ignore[method-assign]
