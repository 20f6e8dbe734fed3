# SPDX-License-Identifier: Apache-2.0
"""The bound on hit tokens is not below the best schedule, and no better than needed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from benchmarks.curves.bound import Served, bound_hit_tokens

PAGE_BYTES, STATE_BYTES = 1, 2
Item = tuple[str, tuple[int, ...]]
"""KV of the last token of a prefix, or the state behind it."""


def alone(*requests: tuple[str, int]) -> list[Served]:
    """One after the other: tokens as letters, and how many are the prompt."""
    return [
        Served([ord(c) for c in text], prompt, number)
        for number, (text, prompt) in enumerate(requests, start=1)
    ]


def bound(served: list[Served], memory: int, page: int = 1) -> int:
    return bound_hit_tokens(
        served,
        memory,
        page_size=page,
        page_bytes=page * PAGE_BYTES,
        state_bytes=STATE_BYTES,
    )


def best(served: list[Served], memory: int) -> int:
    """By trying all that can be kept from each request to the next."""
    schedules: dict[frozenset[Item], int] = {frozenset(): 0}
    for request in served:
        tokens = tuple(request.tokens)
        prefixes = [tokens[:end] for end in range(1, len(tokens) + 1)]
        after: dict[frozenset[Item], int] = {}
        for kept, hits in schedules.items():
            total = hits + _hit(kept, tokens[: request.prompt - 1])
            items = {(kind, p) for kind in ("kv", "state") for p in prefixes}
            for chosen in _subsets(kept | items, memory):
                after[chosen] = max(after.get(chosen, 0), total)
        schedules = after
    return max(schedules.values())


def _hit(kept: frozenset[Item], prompt: tuple[int, ...]) -> int:
    found = 0
    for end in range(1, len(prompt) + 1):
        if ("kv", prompt[:end]) not in kept:
            break
        if ("state", prompt[:end]) in kept:
            found = end
    return found


def _subsets(
    items: set[Item] | frozenset[Item], memory: int
) -> Iterator[frozenset[Item]]:
    """Those that fit, of KV that begins at the start and states with their KV."""
    for count in range(len(items) + 1):
        for chosen in combinations(sorted(items), count):
            size = {"kv": PAGE_BYTES, "state": STATE_BYTES}
            if sum(size[kind] for kind, _ in chosen) > memory:
                continue
            kv = {prefix for kind, prefix in chosen if kind == "kv"}
            whole = all(len(p) == 1 or p[:-1] in kv for p in kv)
            if whole and all(p in kv for kind, p in chosen if kind == "state"):
                yield frozenset(chosen)


@pytest.mark.parametrize("memory", [0, 2, 3, 5])
def test_it_is_not_below_the_best_schedule(memory: int) -> None:
    draw = random.Random(memory)
    reached = 0
    for _ in range(6):
        requests = [
            ("".join(draw.choices("ab", k=3)), draw.randint(2, 3)) for _ in range(4)
        ]
        served = alone(*requests)
        reached += best(served, memory)
        assert bound(served, memory) >= best(served, memory), requests
    assert reached or memory < PAGE_BYTES + STATE_BYTES


def test_without_memory_nothing_is_hit() -> None:
    assert bound(alone(("abcd", 4), ("abcd", 4)), 0) == 0


def test_with_all_memory_everything_seen_before_is_hit() -> None:
    served = alone(("abcdef", 4), ("abcdefgh", 8), ("abx", 3), ("q", 1))
    assert bound(served, 1000) == 6 + 2
    assert bound(served, 1000, page=4) == 6 + 2


def test_a_state_and_its_kv_must_fit_together() -> None:
    served = alone(("abcd", 4), ("abcd", 4))
    # Three pages and a state at the second start; the budget counts two starts.
    assert bound(served, 5) == 3
    assert bound(served, 1) == 2, "2 x 1 bytes x starts: 2 of 5, of 3 tokens"


def test_what_is_needed_twice_at_once_is_shared() -> None:
    first, second = (Served([*b"abcd"], 4, 2), Served([*b"abcd"], 4, 2))
    # The KV is held by the first, in flight; a state besides its own is not.
    held = 4 * PAGE_BYTES + STATE_BYTES
    assert bound([first, second], held // 2) == 3
    assert bound([first, second], 0) == 0


def test_a_page_costs_its_bytes_as_long_as_it_is_not_used() -> None:
    others = [(c * 3, 3) for c in "uvwxyz"]
    near = alone(("abcd", 4), ("abcd", 4), *others)
    far = alone(("abcd", 4), *others, ("abcd", 4))
    assert bound(near, 1) == 3
    assert bound(far, 1) < 3
