# SPDX-License-Identifier: Apache-2.0
"""How much memory addresses really have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hybrid_plugin.device.virtual_arena import AddressRange

_RANGE = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) .*\n(?:\w+: .*\n)*?Rss: +(\d+) kB$", re.MULTILINE
)
"""Start and end of addresses that are alike, and how much of them is resident."""


def resident(place: AddressRange) -> int:
    """Bytes of the range that have memory of their own, from the kernel."""
    return resident_each([place])[0]


def resident_each(places: Sequence[AddressRange]) -> list[int]:
    """The same of several ranges at the same time.

    The kernel merges ranges beside one another that are alike: of one that goes on
    beyond one of these, no more counts than lies within.
    """
    totals = [0] * len(places)
    for found in _RANGE.finditer(Path("/proc/self/smaps").read_text()):
        start, stop, bytes_here = int(found[1], 16), int(found[2], 16), int(found[3])
        for number, place in enumerate(places):
            last = place.address + place.size
            inside = max(min(stop, last) - max(start, place.address), 0)
            totals[number] += min(bytes_here << 10, inside)
    return totals
