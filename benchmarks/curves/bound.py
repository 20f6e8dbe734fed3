# SPDX-License-Identifier: Apache-2.0
"""An upper bound on hit tokens at equal bytes, however they are divided.

It knows the order of all requests, and which were in flight together.  To hit a prefix
of d tokens, a cache must have kept the KV of all d tokens since they were last in the
memory, and a state at d since a request passed there.  Time is counted in starts of
requests.  Keeping a page or a state from one start to a later one takes its bytes times
the starts between; all together cannot take more than the memory at every start.
Taking the hits that give most tokens for the byte-time, fractions allowed, bounds every
schedule (PFOO-U; Berger, Beckmann, Harchol-Balter, SIGMETRICS 2018).

What sequences in flight hold for themselves is subtracted: one state each, and the KV
of their prompts, pages that several hold once.  That assumes that a request starts when
the prompts of those before it have their memory, as in engines that prefill in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

Step = tuple[float, float]
"""Byte-time that more tokens take, and those tokens."""


@dataclass(frozen=True)
class Served:
    """A request, in the order of starts."""

    tokens: Sequence[int]
    """Prompt and answer, as far as they were computed."""
    prompt: int
    """Tokens of the prompt."""
    end: int
    """Requests that had started when it ended, itself included."""


@dataclass
class _Page:
    """A page of tokens behind one prefix."""

    kv_since: int = 0
    """First start at which nothing in flight holds its KV."""
    state_since: int = 0
    """First start at which a state at its end would have to be kept."""
    held_by: int = 0
    """Sequences in flight whose prompts have it."""
    after: dict[tuple[int, ...], _Page] = field(default_factory=dict)


def bound_hit_tokens(
    served: Sequence[Served],
    memory: int,
    *,
    page_size: int,
    page_bytes: int,
    state_bytes: int,
) -> int:
    """Prompt tokens that no cache can restore more of.

    Hits may end anywhere; what is inside a page costs nothing more than its begin.

    Args:
        served: all requests, in the order of their starts.
        memory: bytes.
        page_size: tokens that are counted together; a smaller one bounds tighter.
        page_bytes: KV of a page.
        state_bytes: states of one sequence.
    """
    root, budget, free = _Page(), 0.0, 0
    held: list[tuple[int, list[_Page]]] = []
    steps: list[Step] = []
    used = 0
    for start, request in enumerate(served):
        for end, pages in held:
            if end <= start:
                used -= state_bytes + page_bytes * _release(pages)
        held = [(end, pages) for end, pages in held if end > start]
        budget += max(memory - used, 0)
        path = list(_matched(root, request.tokens[: request.prompt - 1], page_size))
        within = _inside(root, path, request, page_size)
        gained, hull = _offers(start, path, within, page_size, page_bytes, state_bytes)
        free += gained
        steps += hull
        pages = _insert(root, request, start, page_size)
        whole = pages[: request.prompt // page_size]
        used += state_bytes + page_bytes * _hold(whole)
        held.append((request.end, whole))
    return free + _best(steps, budget)


def _matched(root: _Page, tokens: Sequence[int], size: int) -> Iterator[_Page]:
    """Pages of the longest prefix that was seen before."""
    page: _Page | None = root
    for begin in range(0, len(tokens) - size + 1, size):
        page = page.after.get(tuple(tokens[begin : begin + size])) if page else None
        if page is None:
            return
        yield page


def _inside(root: _Page, path: Sequence[_Page], request: Served, size: int) -> int:
    """Tokens behind a prefix of whole pages that were seen before, too."""
    last = path[-1] if path else root
    begin = len(path) * size
    rest = request.tokens[begin : min(begin + size, request.prompt - 1)]
    most = 0
    for other in last.after:
        if rest and other[0] == rest[0]:
            pairs = zip(rest, other, strict=False)
            equal = next((n for n, (a, b) in enumerate(pairs) if a != b), len(rest))
            most = max(most, min(equal, len(other)))
    return most


def _offers(
    start: int,
    path: Sequence[_Page],
    within: int,
    size: int,
    page_bytes: int,
    state_bytes: int,
) -> tuple[int, list[Step]]:
    """Tokens that a request may hit for nothing, and what more of them take."""
    longest = len(path) * size + within
    options: list[Step] = [(0.0, float(min(size - 1, longest)))]
    kv = 0
    for depth, page in enumerate(path, start=1):
        kv += page_bytes * max(start - page.kv_since + 1, 0)
        state = state_bytes * max(start - page.state_since + 1, 0)
        options.append((kv + state, min(depth * size + size - 1, longest)))
    hull: list[Step] = []
    for option in options:
        while hull and option[0] <= hull[-1][0]:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    base = hull[0]
    more = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(hull)]
    return int(base[1]), [step for step in more if step[1] > 0]


def _slope(left: Step, right: Step) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _insert(root: _Page, request: Served, start: int, size: int) -> list[_Page]:
    """Note when a request's pages and states will have to be kept."""
    page, pages = root, []
    tokens = request.tokens
    for begin in range(0, len(tokens), size):
        page = page.after.setdefault(tuple(tokens[begin : begin + size]), _Page())
        if begin + size > len(tokens):
            break
        pages.append(page)
        in_prompt = begin + size <= request.prompt
        page.kv_since = max(page.kv_since, request.end)
        # A state inside the prompt is a copy while the request runs on.
        since = start + 1 if in_prompt else request.end
        page.state_since = max(page.state_since, since)
    return pages


def _hold(pages: Sequence[_Page]) -> int:
    """Count a sequence in flight; returns the pages that it is the first to hold."""
    for page in pages:
        page.held_by += 1
    return sum(page.held_by == 1 for page in pages)


def _release(pages: Sequence[_Page]) -> int:
    """The opposite; returns the pages that nobody holds now."""
    for page in pages:
        page.held_by -= 1
    return sum(page.held_by == 0 for page in pages)


def _best(steps: Sequence[Step], budget: float) -> int:
    """Most tokens for the byte-time, rounded up."""
    if not steps:
        return 0
    cost, gain = np.array(steps).T
    order = np.argsort(-gain / cost, kind="stable")
    spent = np.cumsum(cost[order])
    whole = int(np.searchsorted(spent, budget, side="right"))
    best = float(gain[order][:whole].sum())
    if whole < len(order):
        before = float(spent[whole - 1]) if whole else 0.0
        best += (budget - before) / float(cost[order][whole]) * gain[order][whole]
    return int(np.ceil(best - 1e-6))
