# SPDX-License-Identifier: Apache-2.0
"""SGLang's map from positions of full attention to positions in a window pool.

Attention knows each token by one position, that of full attention, and finds its
place in the window pool by a table that all requests share.  Its entries are written
when a sequence gets its pages, and never cleared: of each KV page, all who read it
have the same window page (`core/memory/page_pairs.py`), and what has left a window is
masked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybrid_plugin.device.arena import to_device

if TYPE_CHECKING:
    from hybrid_plugin.core.sequence import LiveSequence


class WindowMap:
    """Writes SGLang's own tensor, which captured graphs hold on to."""

    def __init__(self, mapping: torch.Tensor, page_size: int) -> None:
        """Write to `mapping`.

        Args:
            mapping: int64 `[tokens + 1]`, by position; the last entry is SGLang's.
            page_size: tokens in a page of either pool.
        """
        self._by_page = mapping[:-1].view(-1, page_size)
        self._offsets = torch.arange(page_size, device=mapping.device)

    def write(self, parts: Iterable[tuple[LiveSequence, int]]) -> None:
        """Map the pages of sequences that they hold in the window.

        Args:
            parts: sequences, each with the index of its first page that may be new.
        """
        pages, windows = [], []
        for sequence, first in parts:
            table = sequence.windows[0]
            first = max(first, table.first)
            pages.append(np.array(sequence.pages[first:], np.int64))
            windows.append(np.array(table.pages[first:], np.int64))
        both = np.stack((np.concatenate(pages), np.concatenate(windows)))
        ids = to_device(torch.from_numpy(both), self._by_page.device)
        positions = ids[1, :, None] * len(self._offsets) + self._offsets
        self._by_page[ids[0]] = positions
