# SPDX-License-Identifier: Apache-2.0
"""Upper bounds on hit tokens that hold for every policy, even an all-knowing one.

Both relax the real problem, so no policy can exceed them:

* *KV*: Belady's rule on single pages (evict what is needed last; Belady, 1966),
  which is optimal for pages of equal size, and more than any prefix cache can
  have: pages may go without those behind them, and nothing else takes room.
* *snapshots*: a hit needs a snapshot that was kept since an earlier request
  passed its position.  Keeping one from time s to t takes one slot for t - s
  requests; all together may not take more than slots x requests.  Taking the
  hits that give most tokens for the slot-time, fractions allowed, bounds every
  schedule (as in PFOO-U; Berger, Beckmann, Harchol-Balter, SIGMETRICS 2018).
  Snapshots may lie anywhere.

Hits may end inside a page, which pages do not tell: all but one token of a page
are granted to every request on top.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from hybrid_plugin.tools.simulate.request import Request


@dataclass(slots=True)
class PageTrace:
    """A trace as pages: one number per distinct prefix of whole pages."""

    page_size: int
    lengths: list[int] = field(default_factory=list)
    """Tokens of each prompt."""
    pages: list[list[int]] = field(default_factory=list)
    """Pages of each prompt and answer, by number."""
    _numbers: dict[int, int] = field(default_factory=dict)
    """By the hash of all that a prefix consists of; 64 bits do not collide."""

    @classmethod
    def of(cls, requests: Iterable[Request], page_size: int) -> PageTrace:
        """Number the pages of all requests."""
        trace = cls(page_size)
        for request in requests:
            trace._add(request)
        return trace

    def hittable(self, index: int) -> list[int]:
        """Pages of a prompt that can be restored: not what its last token is in."""
        return self.pages[index][: (self.lengths[index] - 1) // self.page_size]

    def _add(self, request: Request) -> None:
        self.lengths.append(request.length)
        # Nobody computes the last token that is generated.
        tokens = request.make() + request.answer[:-1]
        size, parent = self.page_size, hash(("namespace", request.namespace))
        path = []
        for start in range(0, len(tokens) - size + 1, size):
            parent = hash((parent, tokens[start : start + size].tobytes()))
            path.append(self._numbers.setdefault(parent, len(self._numbers)))
        self.pages.append(path)


def bound_hit_tokens(
    trace: PageTrace, *, pages: int, slots: int | None, first: int = 0
) -> int:
    """Hit tokens that no policy can exceed on the requests from `first` on.

    Args:
        trace: the whole trace.
        pages: pages of KV that can be kept.
        slots: snapshots that can be kept; None if none are needed.
        first: index of the first request that counts.
    """
    by_kv = _belady(trace, pages, first) * trace.page_size
    if slots is None:
        return by_kv
    measured = trace.lengths[first:]
    inside = sum(min(trace.page_size - 1, length - 1) for length in measured)
    return min(
        by_kv + inside,
        _by_slot_time(trace, slots, first) + inside,
        sum(measured) - len(measured),
    )


def _belady(trace: PageTrace, capacity: int, first: int) -> int:
    """Most pages that can be hit, by Belady's rule with free choice."""
    kept: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    for index, uses in enumerate(_next_uses(trace, first)):
        if index >= first:
            hits += sum(page in kept for page in trace.hittable(index))
        for page, use in zip(trace.pages[index], uses, strict=True):
            if use is None:
                kept.pop(page, None)
            else:
                kept[page] = use
                heapq.heappush(latest, (-use, page))
        while len(kept) > capacity:
            latest_use, page = heapq.heappop(latest)
            if kept.get(page) == -latest_use:
                del kept[page]
    return hits


def _next_uses(trace: PageTrace, first: int) -> list[list[int | None]]:
    """Per request and page, the next request that would hit it.

    None where nobody does, or where it is computed again before by a request
    whose hits do not count: keeping it until then gains nothing.
    """
    upcoming: dict[int, int | None] = {}
    uses: list[list[int | None]] = [[] for _ in trace.pages]
    for index in range(len(trace.pages) - 1, -1, -1):
        path = trace.pages[index]
        uses[index] = [upcoming.get(page) for page in path]
        upcoming.update(dict.fromkeys(path))
        if index >= first:
            upcoming.update(dict.fromkeys(trace.hittable(index), index))
    return uses


def _by_slot_time(trace: PageTrace, slots: int, first: int) -> int:
    """Tokens by the best use of slots x requests of slot-time, fractions allowed."""
    last_pass: dict[int, int] = {}
    offers: list[tuple[float, float]] = []
    for index, path in enumerate(trace.pages):
        if index >= first:
            offers += _hull(_options(trace, index, last_pass))
        last_pass.update(dict.fromkeys(path, index))
    if not offers:
        return 0
    cost, gain = np.array(offers).T
    order = np.argsort(-gain / cost, kind="stable")
    spent = np.cumsum(cost[order])
    total = float(slots) * len(trace.pages)
    whole = int(np.searchsorted(spent, total, side="right"))
    best = float(gain[order][:whole].sum())
    if whole < len(order):
        before = float(spent[whole - 1]) if whole else 0.0
        share = (total - before) / float(cost[order][whole])
        best += share * float(gain[order][whole])
    return int(best) + 1


def _options(
    trace: PageTrace, index: int, last_pass: dict[int, int]
) -> list[tuple[int, int]]:
    """(slot-time, tokens) of the snapshots that request `index` could resume from.

    The deeper, the longer ago somebody passed there: only the last position of
    each such stretch is worth considering.
    """
    options: list[tuple[int, int]] = []
    for depth, page in enumerate(trace.hittable(index), start=1):
        seen = last_pass.get(page)
        if seen is None:
            break
        option = (index - seen, depth * trace.page_size)
        if options and options[-1][0] == option[0]:
            options[-1] = option
        else:
            options.append(option)
    return options


def _hull(options: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Steps (slot-time, tokens) of the best mix of options, best first."""
    hull: list[tuple[int, int]] = [(0, 0)]
    for option in options:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
            hull.pop()
        if option[1] > hull[-1][1]:
            hull.append(option)
    return [(float(b[0] - a[0]), float(b[1] - a[1])) for a, b in pairwise(hull)]


def _slope(left: tuple[int, int], right: tuple[int, int]) -> float:
    return (right[1] - left[1]) / max(right[0] - left[0], 1e-9)
