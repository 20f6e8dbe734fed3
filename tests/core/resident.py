# SPDX-License-Identifier: Apache-2.0
"""How much memory addresses really have."""

from __future__ import annotations

from hybrid_plugin.device.virtual_arena import AddressRange


def resident(place: AddressRange) -> int:
    """Bytes of the range that have memory of their own, from the kernel.

    It merges ranges beside one another that are alike: of one that goes on beyond this
    one, no more counts than lies within.
    """
    total, inside = 0, 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            head = line.split(None, 1)[0]
            if "-" in head and not head.endswith(":"):
                start, stop = (int(part, 16) for part in head.split("-"))
                last = place.address + place.size
                inside = max(min(stop, last) - max(start, place.address), 0)
            elif inside and line.startswith("Rss:"):
                total += min(int(line.split()[1]) << 10, inside)
    return total
