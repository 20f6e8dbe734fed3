# SPDX-License-Identifier: Apache-2.0
"""How memory becomes pools, on plain numbers: what fits, what is refused, and how."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.attention_windows import SlidingWindow
from hybrid_plugin.core.memory.layout import (
    AttentionGroup,
    CacheLayout,
    PoolSizes,
    StateGroup,
)
from hybrid_plugin.engine.sizing import (
    CachePlan,
    EngineLimits,
    FixedCount,
    asked_page_size,
    divide,
    with_fitting_length,
)

LOG = logging.getLogger("test")
KIB, MIB = 1 << 10, 1 << 20
PAGE = 8 * KIB
SLOT = 128 * KIB
LAYOUT = CacheLayout(
    page_size=16,
    attention=(AttentionGroup(("a", "b"), PAGE // 2),),
    states=(StateGroup(("s",), SLOT),),
)
WINDOW = AttentionGroup(("w",), 4 * KIB, SlidingWindow(64))
LIMITS = EngineLimits(max_model_len=512, max_sequences=4, block_bytes=16 * KIB)
LEAST = 33 * PAGE + 2 * SLOT
"""One sequence of 512 tokens, with the reserved ids."""


def divided(
    available: int,
    elastic: bool | None = False,
    layout: CacheLayout = LAYOUT,
    limits: EngineLimits = LIMITS,
    **options: Any,
) -> CachePlan:
    found = HybridConfig(elastic=elastic, **options)
    return divide(layout, available, found, limits, LOG)


# ------------------------------------------------------------------ the page size


@pytest.mark.parametrize(
    ("option", "flag", "asked"),
    [(None, None, None), (None, 32, 32), (64, None, 64), (64, 64, 64)],
)
def test_page_size(option: int | None, flag: int | None, asked: int | None) -> None:
    options = HybridConfig(page_size=option)
    assert asked_page_size(options, "--page-size", flag) == asked


def test_page_sizes_that_contradict() -> None:
    expected = "--page-size 16 and the option page_size 32 contradict each other"
    with pytest.raises(ConfigError, match=expected):
        asked_page_size(HybridConfig(page_size=32), "--page-size", 16)


# ---------------------------------------------------------- pools that keep memory


def test_a_fixed_split_is_the_layout_s() -> None:
    found = divided(8 * MIB, state_memory_ratio=0.5, elastic=None)
    assert found.shared is None
    assert found.sizes == PoolSizes(pages=512, slots=32)
    assert found.tokens == 511 * 16
    assert found.sequences(512) == 511 / 32


def test_the_budget_of_the_options_bounds_the_memory() -> None:
    limited = divided(8 * MIB, gpu_memory_budget=2 * MIB)
    assert limited.sizes == divided(2 * MIB).sizes


def test_one_sequence_must_fit_into_the_memory() -> None:
    assert divided(LEAST).sizes == PoolSizes(33, 2)
    with pytest.raises(ConfigError, match="cannot hold one sequence of 512 tokens"):
        divided(LEAST - 1)


def test_slots_of_a_flag_are_kept_and_pages_get_the_rest() -> None:
    limits = replace(LIMITS, slots=FixedCount(9, "--slots"))
    assert divided(2 * MIB, limits=limits).sizes == PoolSizes(256 - 9 * 16, 9)


def test_pages_of_a_flag_are_a_bound() -> None:
    for ids, pages in ((40, 40), (1 << 20, divided(2 * MIB).sizes.pages)):
        limits = replace(LIMITS, pages=FixedCount(ids, "--pages"))
        assert divided(2 * MIB, limits=limits).sizes.pages == pages


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"pages": FixedCount(32, "--pages")},
            "--pages leaves 32 pages, and one sequence of 512 tokens takes 33, the "
            "reserved ones included: change it, or lower the maximum model length.",
        ),
        ({"slots": FixedCount(1, "--slots")}, "--slots leaves 1 state slots, and one"),
        ({"slots": FixedCount(15, "--slots")}, "--slots leaves 16 pages, and one"),
        ({"slots": FixedCount(99, "--slots")}, "--slots leaves 0 pages, and one"),
    ],
)
def test_one_sequence_must_fit_into_pools_of_flags(
    flags: dict[str, FixedCount], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        divided(2 * MIB, limits=replace(LIMITS, **flags))
    assert str(refusal.value).startswith(sentence)


def test_slots_that_kernels_cannot_address_become_pages() -> None:
    reach = replace(LAYOUT, addressable_slot_bytes=5 * SLOT + 1)
    found = divided(8 * MIB, elastic=None, layout=reach, state_memory_ratio=0.9)
    assert found.sizes == PoolSizes(8 * MIB // PAGE - 5 * SLOT // PAGE, 5)


def test_models_without_states_have_pages_only() -> None:
    layout = replace(LAYOUT, states=(), attention=(*LAYOUT.attention, WINDOW))
    found = divided(MIB, layout=layout)
    (window,) = found.sizes.windows
    assert layout.bytes_of(found.sizes) <= MIB
    assert 64 // 16 < window < found.sizes.pages
    assert found.sequences(512) == min((found.sizes.pages - 1) / 32, (window - 1) / 5)


# ------------------------------------------------------- pools that share memory


def test_elastic_pools_leave_the_block_behind_holes_alone() -> None:
    found = divided(4 * MIB + 100, elastic=True)
    assert found.shared is not None
    assert found.shared.budget == 4 * MIB - 16 * KIB
    assert (found.sizes, found.layout) == (found.shared.sizes, found.shared.layout)
    assert found.sequences(512) == found.shared.sequences(512)


@pytest.mark.parametrize("available", [-MIB, 0, 16 * KIB, 32 * KIB - 1])
def test_elastic_pools_need_a_block_beside_that(available: int) -> None:
    with pytest.raises(ConfigError, match=r"do not fit: .* less than two blocks of"):
        divided(available, elastic=True)


def test_elastic_pools_have_windows_too() -> None:
    layout = replace(LAYOUT, attention=(*LAYOUT.attention, WINDOW))
    found = divided(4 * MIB, elastic=True, layout=layout)
    assert found.shared is not None and len(found.sizes.windows) == 1


@pytest.mark.parametrize(
    ("available", "layout", "limits", "sentence"),
    [
        (4 * MIB, LAYOUT, replace(LIMITS, hindrance="need a thing."), "need a thing"),
        (
            4 * MIB,
            replace(LAYOUT, states=()),
            LIMITS,
            "need layers with full attention",
        ),
        (LEAST + 16 * KIB, LAYOUT, LIMITS, "do not fit: .*; give the cache more"),
        (
            4 * MIB,
            replace(LAYOUT, addressable_slot_bytes=SLOT),
            LIMITS,
            "begin with .* state slots, and this model's kernels address only 1; set",
        ),
    ],
    ids=["engine", "one pool", "memory", "addresses"],
)
def test_elastic_pools_that_cannot_be_had_are_refused_only_if_asked_for(
    available: int,
    layout: CacheLayout,
    limits: EngineLimits,
    sentence: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match=f"^elastic pools {sentence}"):
        divided(available, True, layout, limits)
    with caplog.at_level(logging.INFO):
        found = divided(available, None, layout, limits)
    assert found.shared is None
    (line,) = caplog.messages
    assert line.startswith(
        "hybrid-plugin gives each pool its own memory: elastic pools"
    )


def test_elastic_pools_have_no_more_slots_than_kernels_address() -> None:
    for reached in (5, 12, 1000):
        layout = replace(LAYOUT, addressable_slot_bytes=reached * SLOT)
        found = divided(4 * MIB, elastic=True, layout=layout)
        assert found.shared is not None
        per = found.shared.pools[Pool.STATE].per_granule
        free = divided(4 * MIB, elastic=True).sizes.slots
        assert found.sizes.slots == min(free, reached // per * per)
        assert found.shared.build().slots.ids.capacity == found.sizes.slots


def test_an_error_of_ours_is_not_taken_for_too_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr("hybrid_plugin.engine.sizing.plan_elastic", broken)
    with pytest.raises(ValueError, match=r"^a defect$"):
        divided(4 * MIB, None, LAYOUT, LIMITS)


def test_pools_may_be_laid_out_otherwise_where_they_do_not_share() -> None:
    packed = replace(LAYOUT, states=(StateGroup(("s",), SLOT - 1),), slot_alignment=1)
    options = HybridConfig(elastic=False)
    found = divide(LAYOUT, MIB, options, LIMITS, LOG, fixed_layout=packed)
    assert found.layout == packed
    shared = divide(
        LAYOUT, 4 * MIB, HybridConfig(), LIMITS, LOG, fixed_layout=packed
    ).shared
    assert shared is not None and shared.layout.slot_bytes == SLOT


# ------------------------------------------------------------ the length that fits


@pytest.mark.parametrize("tokens", [16, 160, 496, 512])
def test_the_length_is_lowered_to_what_fits(tokens: int) -> None:
    options = HybridConfig(elastic=False)
    available = (tokens // 16 + 1) * PAGE + 2 * SLOT
    found = with_fitting_length(LAYOUT, available, options, LIMITS)
    assert found == replace(LIMITS, max_model_len=tokens)
    assert divided(available, limits=found).sizes == PoolSizes(tokens // 16 + 1, 2)


def test_at_least_one_token_is_asked_for() -> None:
    found = with_fitting_length(LAYOUT, SLOT, HybridConfig(elastic=False), LIMITS)
    assert found.max_model_len == 1


# ---------------------------------------------------------------------- the log


def test_fixed_pools_are_described_one_by_one() -> None:
    layout = replace(LAYOUT, attention=(*LAYOUT.attention, WINDOW))
    plan = CachePlan(layout, PoolSizes(256, 8, (64,)))
    assert list(plan.describe()) == [
        "hybrid-plugin pools: 256 KV pages of 16 tokens (2.0 MiB) and 8 state slots of "
        "128.0 KiB (1.0 MiB)",
        "hybrid-plugin pool of a sliding window of 64: 64 KV pages (0.2 MiB)",
    ]


def test_pools_that_share_memory_are_described_in_one_line() -> None:
    (line,) = divided(4 * MIB, elastic=True).describe()
    assert line.startswith(
        "hybrid-plugin pools share 4.0 MiB: memory moves in granules"
    )


# ------------------------------------------------------------------- host memory


@pytest.mark.parametrize("elastic", [True, False])
def test_host_memory_has_rows_as_large_as_the_device_s(elastic: bool) -> None:
    found = divided(4 * MIB, elastic=elastic, host_memory=32 * MIB)
    host = found.host
    assert host is not None
    assert host.row_bytes == {"kv": PAGE, "state": found.layout.slot_bytes}
    assert 32 * MIB - host.block_bytes < host.budget <= 32 * MIB
    *_, line = found.describe()
    assert line.startswith("hybrid-plugin keeps what the device evicts in 3")
    assert f"the KV of {host.rows('kv') * 16} tokens at most" in line
    assert divided(4 * MIB, elastic=elastic).host is None


def test_host_memory_for_windows_without_states() -> None:
    layout = replace(LAYOUT, states=(), attention=(*LAYOUT.attention, WINDOW))
    host = divided(MIB, layout=layout, host_memory=MIB).host
    assert host is not None and host.row_bytes == {"kv": PAGE, "window0": 4 * KIB}


@pytest.mark.parametrize(
    ("layout", "size", "sentence"),
    [
        (LAYOUT, 2 * SLOT, r"^host_memory is too little: .* needs 3; raise it\.$"),
        (
            replace(LAYOUT, states=()),
            MIB,
            r"^host_memory needs a model with state layers or .*: leave it out\.$",
        ),
        (
            replace(LAYOUT, attention=(WINDOW,)),
            MIB,
            r"^host_memory cannot be used: the model has no full .*; leave it out\.$",
        ),
        (
            replace(LAYOUT, attention=()),
            MIB,
            r"^host_memory cannot be used: the model has no full .*; leave it out\.$",
        ),
    ],
    ids=["too little", "attention alone", "no full attention", "states alone"],
)
def test_host_memory_that_cannot_be_used(
    layout: CacheLayout, size: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        divided(8 * MIB, layout=layout, host_memory=size)


@pytest.mark.parametrize("elastic", [None, False, True])
def test_states_alone_are_one_pool_with_all_memory(
    elastic: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    """There is nothing for memory to move to, whatever is asked for."""
    alone = replace(LAYOUT, attention=())
    with caplog.at_level(logging.INFO):
        found = divided(8 * MIB, elastic=elastic, layout=alone)
    assert found.shared is None
    assert found.sizes == PoolSizes(64 * 32 + 1, 64)
    assert (found.tokens, found.sequences(512)) == (64 * 512, 63)
    assert list(found.describe()) == [
        "hybrid-plugin pool: 64 state slots of 128.0 KiB (8.0 MiB), and no KV; 2049 "
        "pages of 16 tokens number what is cached"
    ]
    assert not caplog.messages, "elastic pools are neither here nor missed"
