# SPDX-License-Identifier: Apache-2.0
"""The tool that compares logprobs bit for bit, without an engine."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu import deterministic
from tests.gpu.determinism import settings as settings_of_vllm
from tests.gpu.determinism.prompts import ANSWER, LONGEST, prompts
from tests.gpu.determinism.record import Answer, differences, load, save, told

FLOATS = st.floats(-30, 0, width=32)
ROWS = st.dictionaries(st.integers(0, 300), FLOATS, min_size=1, max_size=5)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    """With logprobs of different widths."""
    rows = draw(st.lists(ROWS, min_size=1, max_size=4))
    return Answer(tuple(min(row) for row in rows), tuple(rows), draw(st.integers(0, 9)))


@settings(deadline=None)
@given(found=st.lists(answers(), min_size=1, max_size=5))
def test_files_keep_every_bit(
    tmp_path_factory: pytest.TempPathFactory, found: list[Answer]
) -> None:
    path = tmp_path_factory.mktemp("bits") / "a.npz"
    save(path, found)
    assert load(path) == found
    assert differences(found, load(path)) == []


def test_answers_without_logprobs_are_refused(tmp_path: Path) -> None:
    for answer in (Answer((1,), (), 0), Answer((), (), 0)):
        with pytest.raises(ValueError, match="logprobs"):
            save(tmp_path / "a.npz", [answer])


ROW = {3: -0.5, 4: -1.25}
ANSWERED = [Answer((3, 3), (ROW, ROW), 0), Answer((4,), (ROW,), 16)]


def test_the_last_bit_is_seen() -> None:
    next_float = float(np.nextafter(np.float32(-0.5), np.float32(0)))
    moved = replace(ANSWERED[0], logprobs=(ROW, {3: next_float, 4: -1.25}))
    (found,) = differences(ANSWERED, [moved, ANSWERED[1]])
    assert (found.prompt, found.position, found.tokens_too) == (0, 1, False)
    assert found.largest == 2.0**-25
    assert "1 of 2 differ; 1 were restored in part; by at most 2.98e-08" in told(
        "crowd", [found], ANSWERED
    )


def test_zeros_of_either_sign_differ() -> None:
    plus, minus = (Answer((1,), ({1: zero},), 0) for zero in (0.0, -0.0))
    assert len(differences([plus], [minus])) == 1


def test_other_tokens_and_lengths_differ() -> None:
    other = replace(ANSWERED[1], logprobs=({3: -0.5, 5: -1.25},))
    shorter = Answer((3,), (ROW,), 0)
    first, second = differences(ANSWERED, [shorter, other])
    assert (first.position, first.tokens_too) == (1, True)
    assert math.isinf(first.largest) and math.isinf(second.largest)
    same_logprobs = replace(ANSWERED[1], tokens=(3,))  # of a tie, say
    (tie,) = differences(ANSWERED[1:], [same_logprobs])
    assert tie.tokens_too and tie.largest == 0


def test_how_many_were_restored_does_not_matter() -> None:
    assert differences(ANSWERED, [replace(one, cached=99) for one in ANSWERED]) == []


def test_files_of_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError):
        differences(ANSWERED, ANSWERED[:1])


def compare(folder: Path, different: bool) -> int:
    """The tool's exit status."""
    return deterministic.compare(
        argparse.Namespace(out=folder, expect_different=different)
    )


def test_the_status_says_whether_all_are_equal(tmp_path: Path) -> None:
    save(tmp_path / f"{deterministic.BASE}.npz", ANSWERED)
    with pytest.raises(SystemExit):
        compare(tmp_path, False)
    save(tmp_path / "chunk-256-start-0-crowd.npz", ANSWERED)
    assert [compare(tmp_path, wanted) for wanted in (False, True)] == [0, 1]
    changed = replace(ANSWERED[0], logprobs=(ROW, {3: -0.75, 4: -1.25}))
    save(tmp_path / "chunk-256-start-1-crowd.npz", [changed, ANSWERED[1]])
    assert [compare(tmp_path, wanted) for wanted in (False, True)] == [1, 0]


def test_the_base_is_among_what_all_makes() -> None:
    made = {
        f"chunk-{chunk}-start-{start}-{mode}"
        for chunk, start, modes in deterministic.RUNS
        for mode in modes
    }
    assert deterministic.BASE in made and len(made) == 10


def test_processes_get_what_all_was_told() -> None:
    words = ["--engine", "vllm", "--requests", "7", "--options", '{"a": 1}', "--stock"]
    args = deterministic.parse(["all", "--out", "x", *words])
    again = deterministic.parse(["run", *deterministic.passed_on(args)])
    kept = ("engine", "model", "dtype", "requests", "top", "out", "options", "flags")
    for name in (*kept, "stock"):
        assert getattr(again, name) == getattr(args, name)


def test_prompts_are_seeded_and_share_beginnings_off_any_grid() -> None:
    found = prompts(300)
    assert found == prompts(300) and found != prompts(300, seed=1)
    assert all(0 < len(one.tokens) <= LONGEST for one in found)
    assert all(0 < one.answer <= ANSWER for one in found)
    shared = []
    for number, one in enumerate(found):
        longest = 0
        for earlier in found[:number]:
            pairs = zip(one.tokens, earlier.tokens, strict=False)
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
            longest = max(longest, same)
        shared.append(longest)
    assert sum(length >= 64 for length in shared) > 200
    assert len({length % 64 for length in shared}) > 32
    assert max(len(one.tokens) for one in found) > 1024 > 256


def written(folder: Path, **answers: list[Answer]) -> Path:
    """Answers of a setting, as its process leaves them; `ANSWERED` where not given."""
    folder.mkdir()
    for mode in settings_of_vllm.MODES:
        path = folder / f"chunk-8192-start-0-{mode}.npz"
        save(path, answers.get(mode, ANSWERED))
    return folder


def test_a_setting_that_changes_bits_is_told_from_one_that_does_not(
    tmp_path: Path,
) -> None:
    good = written(tmp_path / "enforce_eager")
    line, differ = settings_of_vllm.report(good, None)
    assert differ == 0
    assert line.startswith("enforce_eager: of 2 differ: warm 0; crowd 0; groups-of-2 0")
    changed = replace(ANSWERED[0], logprobs=(ROW, {3: -0.75, 4: -1.25}))
    bad = written(tmp_path / "PIECEWISE", crowd=[changed, ANSWERED[1]])
    line, differ = settings_of_vllm.report(bad, good)
    assert differ == 1
    assert "crowd 1 (1 at token 1; 0.25 nats)" in line
    assert line.endswith("alone beside enforce_eager 0")


def test_a_setting_whose_answers_alone_are_others_is_told(tmp_path: Path) -> None:
    first = written(tmp_path / "enforce_eager")
    moved = [ANSWERED[0], replace(ANSWERED[1], logprobs=({3: -0.5, 4: -1.5},))]
    other = written(tmp_path / "FULL", **dict.fromkeys(settings_of_vllm.MODES, moved))
    line, differ = settings_of_vllm.report(other, first)
    assert differ == 1
    assert line.endswith("alone beside enforce_eager 1 (1 at token 0; 0.25 nats)")


def test_each_setting_is_asked_for_in_vllms_own_words() -> None:
    assert len({one.name for one in settings_of_vllm.SETTINGS}) == 9
    args = deterministic.parse(
        ["settings", "--out", "x", "--engine", "vllm", "--only", "PIECEWISE"]
    )
    (chosen,) = [one for one in settings_of_vllm.SETTINGS if one.name in args.only]
    assert chosen.flags == {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in fields(AsyncEngineArgs)}
    assert all(known >= set(one.flags) for one in settings_of_vllm.SETTINGS)
