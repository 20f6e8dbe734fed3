# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tree.snapshot import SnapshotKind
from tests.core.support import NO_SNAPSHOTS

BRANCH, BODY = SnapshotKind.BRANCH, SnapshotKind.BODY
PROMPT_END = SnapshotKind.PROMPT_END


def stops(
    length: int,
    *,
    hit: int = 0,
    kv_length: int = 0,
    page_size: int = 16,
    branch: int = 1,
    prompt_end: int = 1,
    body: int = NO_SNAPSHOTS,
    grid: int = 0,
) -> tuple[int, ...]:
    """Positions where snapshots are planned that save at least so many tokens."""
    least = {BRANCH: branch, PROMPT_END: prompt_end, BODY: body}
    planned = SnapshotPolicy(page_size, grid=grid).prefill_positions(
        length=length,
        hit=hit,
        kv_length=kv_length,
        repays=lambda kind, saved: saved >= least[kind],
    )
    return tuple(planned)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(15, ()), (16, ()), (17, (16,)), (32, (16,)), (33, (32,)), (40, (32,))],
)
def test_the_prompt_end_is_floored_before_the_last_token(
    length: int, expected: tuple[int, ...]
) -> None:
    assert stops(length) == expected


@pytest.mark.parametrize(
    ("kv_length", "expected"),
    [(15, (96,)), (16, (16, 96)), (40, (32, 96)), (100, (96,)), (500, (96,))],
)
def test_a_branch_point_is_floored_to_a_page(
    kv_length: int, expected: tuple[int, ...]
) -> None:
    assert stops(100, kv_length=kv_length) == expected


@pytest.mark.parametrize(
    ("page_size", "grid", "step"),
    [(16, 0, 16), (16, 64, 64), (96, 64, 192), (16, 1, 16)],
)
def test_positions_inside_a_pass_suit_pages_and_kernels(
    page_size: int, grid: int, step: int
) -> None:
    policy = SnapshotPolicy(page_size, grid=grid)
    assert policy.step == step
    assert policy.is_interior(3 * step) == (grid > 0)
    assert not policy.is_interior(3 * step + page_size // 2)
    assert policy.align_chunk_end(0, 3 * step + step // 2, 9999) == 3 * step


@pytest.mark.parametrize(
    ("branch", "prompt_end", "expected"),
    [(33, 49, (128, 192)), (32, 49, (160, 192)), (33, 48, (128, 240))],
)
def test_inside_a_pass_positions_are_rounded_down_unless_a_pause_pays(
    branch: int, prompt_end: int, expected: tuple[int, ...]
) -> None:
    """The branch lies 32 tokens behind a boundary, the prompt's end 48."""
    found = stops(250, kv_length=170, grid=64, branch=branch, prompt_end=prompt_end)
    assert found == expected


def test_inside_a_pass_one_boundary_serves_both_kinds() -> None:
    assert stops(250, kv_length=200, grid=64, branch=99, prompt_end=99) == (192,)
    assert stops(250, hit=192, kv_length=200, grid=64, branch=9, prompt_end=99) == ()


def test_what_is_asked_for_costs_no_pause_where_a_boundary_is_near() -> None:
    def planned(grid: int, least: int) -> dict[int, SnapshotKind]:
        return SnapshotPolicy(16, grid=grid).prefill_positions(
            length=250,
            hit=0,
            kv_length=0,
            wanted={170: SnapshotKind.SYSTEM},
            repays=lambda kind, saved: kind is SnapshotKind.SYSTEM and saved >= least,
        )

    assert planned(0, least=1000) == {160: SnapshotKind.SYSTEM}
    assert planned(64, least=1000)[128] is SnapshotKind.SYSTEM
    assert planned(64, least=32)[160] is SnapshotKind.SYSTEM


def test_kinds_without_a_use_are_not_planned() -> None:
    policy = SnapshotPolicy(16, grid=64)
    planned = policy.prefill_positions(
        length=250, hit=0, kv_length=130, useless=(PROMPT_END, BODY)
    )
    assert planned == {128: BRANCH}


def test_no_stop_at_or_before_the_hit() -> None:
    assert stops(100, hit=32, kv_length=32) == (96,)
    assert stops(100, hit=40, kv_length=32) == (96,)
    assert stops(100, hit=96, kv_length=96) == ()
    assert stops(100, hit=99, kv_length=96) == ()


@pytest.mark.parametrize(
    ("branch", "expected"), [(32, (224, 288)), (33, (288,))], ids=["just", "too near"]
)
def test_a_branch_saves_what_lies_behind_the_hit(
    branch: int, expected: tuple[int, ...]
) -> None:
    assert stops(300, hit=192, kv_length=224, branch=branch) == expected


@pytest.mark.parametrize(
    ("prompt_end", "expected"), [(32, (64, 96)), (33, (64,))], ids=["just", "too near"]
)
def test_least_distance_of_a_prompt_end_counts_from_the_branch(
    prompt_end: int, expected: tuple[int, ...]
) -> None:
    assert stops(100, kv_length=64, prompt_end=prompt_end) == expected


def test_a_branch_too_near_does_not_hide_the_prompt_end() -> None:
    assert stops(400, hit=160, kv_length=176, branch=17, prompt_end=90) == (384,)


@pytest.mark.parametrize(
    ("length", "kv_length", "expected"),
    [(1, 0, ()), (2, 1, ()), (3, 1, (2,)), (3, 2, (2,)), (9, 1, (8,)), (9, 3, (3, 8))],
)
def test_page_size_one_never_stops_before_position_two(
    length: int, kv_length: int, expected: tuple[int, ...]
) -> None:
    assert stops(length, kv_length=kv_length, page_size=1) == expected


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_stops_ascend_between_the_hit_and_the_end(page_size: int) -> None:
    for length in range(1, 40):
        for hit in range(length):
            for kv_length in range(0, 45, page_size):
                found = stops(length, hit=hit, kv_length=kv_length, page_size=page_size)
                assert list(found) == sorted(set(found))
                assert all(max(hit, 1) < stop < length for stop in found)
                assert all(stop % page_size == 0 for stop in found)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 100, 96),
        (0, 96, 96),
        (90, 100, 96),
        (95, 100, 100),
        (96, 100, 100),
        (0, 9, 9),
    ],
)
def test_a_chunk_cut_short_ends_on_a_page_where_it_can(
    start: int, end: int, expected: int
) -> None:
    assert SnapshotPolicy(16).align_chunk_end(start, end, 9999) == expected


def test_a_chunk_end_counts_from_the_snapshot_before_it() -> None:
    policy = SnapshotPolicy(16, 64)
    assert policy.keeps_chunk_end(64, 0)
    assert not policy.keeps_chunk_end(64, 16)
    assert not policy.keeps_chunk_end(70, 0)


@pytest.mark.parametrize(
    ("length", "hit", "kv_length", "expected"),
    [
        (1000, 0, 0, ()),
        (2100, 0, 0, (1568,)),
        (5000, 0, 0, (3744, 4992)),
        (2100, 0, 2000, (2000,)),
        (5000, 0, 640, (640, 3744, 4992)),
        (5000, 3744, 3744, (4992,)),
    ],
)
def test_a_long_prompt_stops_after_its_body_too(
    length: int, hit: int, kv_length: int, expected: tuple[int, ...]
) -> None:
    found = stops(length, hit=hit, kv_length=kv_length, prompt_end=1024, body=1024)
    assert found == expected


def test_the_body_ends_where_prompts_were_seen_to_part() -> None:
    policy = SnapshotPolicy(16)
    for _ in range(4):
        policy.divergences.observe(250)
    planned = policy.prefill_positions(length=10_000, hit=0, kv_length=0)
    assert planned == {9744: BODY, 9984: PROMPT_END}


def test_kinds_and_what_each_would_save() -> None:
    asked = []

    def repays(kind: SnapshotKind, saved: int) -> bool:
        asked.append((kind, saved))
        return kind is not BRANCH

    planned = SnapshotPolicy(16).prefill_positions(
        length=1000,
        hit=64,
        kv_length=320,
        wanted={500: SnapshotKind.REQUESTED, 64: SnapshotKind.SYSTEM},
        repays=repays,
    )
    assert planned == {496: SnapshotKind.REQUESTED, 736: BODY, 992: PROMPT_END}
    assert asked == [(BRANCH, 256), (BODY, 240), (PROMPT_END, 256)]
