# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from hybrid_plugin.core.memory.layout import (
    AttentionGroup,
    CacheLayout,
    PoolSizes,
    StateGroup,
    TooLittleMemoryError,
)

LAYOUT = CacheLayout(
    page_size=16,
    attention=(AttentionGroup(("a0", "a1"), 1000), AttentionGroup(("w0",), 48)),
    states=(StateGroup(("s0", "s1", "s2"), 300), StateGroup(("c0",), 7)),
)
PAGE, SLOT = 2048, 1024


def test_bytes_are_summed_over_layers_and_slots_are_aligned() -> None:
    assert LAYOUT.page_bytes == 2 * 1000 + 48 == PAGE
    assert LAYOUT.slot_bytes == SLOT  # 3 * 300 + 7 = 907, rounded up to 256
    assert LAYOUT.bytes_of(PoolSizes(pages=3, slots=5)) == 3 * PAGE + 5 * SLOT


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert LAYOUT.pages_for(tokens) == pages


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.5, PoolSizes(pages=50, slots=100)),
        (0.1, PoolSizes(pages=90, slots=20)),
        (0.001, PoolSizes(pages=99, slots=2)),
        (0.999, PoolSizes(pages=3, slots=194)),
    ],
    ids=["half", "few slots", "least slots", "least pages"],
)
def test_split_with_a_ratio(ratio: float, expected: PoolSizes) -> None:
    sizes = LAYOUT.split(100 * PAGE, max_model_len=32, state_memory_ratio=ratio)
    assert sizes == expected


def test_automatic_split_gives_each_typical_sequence_two_slots() -> None:
    # A quarter of 8192 tokens: 128 pages and 2 slots, 129 pages' worth of bytes.
    sizes = LAYOUT.split(10 * 129 * PAGE, max_model_len=8192)
    assert sizes.slots == 2 * 10 + 1
    assert sizes.pages == 10 * 129 - 11  # 21 slots take ten and a half pages


@pytest.mark.parametrize("budget", range(4 * PAGE, 12 * PAGE, 777))
@pytest.mark.parametrize("ratio", [None, 0.2, 0.7])
def test_a_split_fits_and_holds_one_sequence(budget: int, ratio: float | None) -> None:
    sizes = LAYOUT.split(budget, max_model_len=32, state_memory_ratio=ratio)
    assert LAYOUT.bytes_of(sizes) <= budget
    assert sizes.slots >= 2
    assert sizes.pages >= 3
    assert budget - LAYOUT.bytes_of(sizes) < PAGE


def test_just_enough() -> None:
    least = PoolSizes(pages=3, slots=2)
    assert LAYOUT.split(LAYOUT.bytes_of(least), max_model_len=32) == least


def test_too_small_says_what_is_needed() -> None:
    layout = CacheLayout(
        page_size=16,
        attention=(AttentionGroup(("a",), 2**20),),
        states=(StateGroup(("s",), 2**21),),
    )
    with pytest.raises(TooLittleMemoryError) as caught:
        layout.split(6 * 2**20, max_model_len=33)
    assert str(caught.value) == (
        "The cache memory of 6.0 MiB cannot hold one sequence of 33 tokens, which "
        "takes 8.0 MiB (4 pages and 2 state slots, the reserved ones included). Give "
        "the cache more memory or lower the maximum model length."
    )
