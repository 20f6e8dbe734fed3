# SPDX-License-Identifier: Apache-2.0
"""Recorded conversations: what is read of them, and how they are served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.tools.simulate.request import Request, TraceError
from hybrid_plugin.tools.simulate.traces import format_of
from hybrid_plugin.tools.simulate.weka import SessionSample, read_weka
from tests.oneliners import fails_with_one_sentence
from tests.simulate.test_command import simulate

ALL = SessionSample()


def call(
    t: float, length: int, ids: Sequence[int], out: int = 0, api_time: float = 2.0
) -> dict[str, Any]:
    return {
        "t": t,
        "type": "n",
        "in": length,
        "out": out,
        "hash_ids": list(ids),
        "api_time": api_time,
    }


def write(path: Path, *requests: dict[str, Any], block_size: int = 64) -> Path:
    path.write_text(json.dumps({"block_size": block_size, "requests": requests}))
    return path


def read(folder: Path, *requests: dict[str, Any]) -> list[Request]:
    return read_weka(write(folder / "one.json", *requests), ALL)


class TestTokens:
    def test_equal_ids_are_equal_blocks(self, tmp_path: Path) -> None:
        one, two = read(tmp_path, call(0, 200, [7, 8, 9]), call(1, 130, [7, 5]))
        first, second = one.make(), two.make()
        assert (len(first), len(second)) == (one.length, two.length) == (200, 130)
        assert first[:64] == second[:64]
        assert len({*first, *second}) == 200 + 130 - 64

    def test_an_answer_lies_behind_its_prompt_in_the_next_one(
        self, tmp_path: Path
    ) -> None:
        """Across a block of which only the next request knows the number."""
        calls = (
            call(0, 100, [1], out=40),
            call(1, 150, [1, 2], out=100),
            call(2, 400, [1, 2, 3, 4, 5, 6], out=10),
        )
        first, second, third = read(tmp_path, *calls)
        assert first.make() + first.answer == second.make()[:140]
        assert second.make() + second.answer == third.make()[:250]
        assert len(third.answer) == 10
        assert not set(third.answer) & set(third.make())

    def test_what_the_next_prompt_leaves_out_is_answered_once(
        self, tmp_path: Path
    ) -> None:
        """It holds 20 tokens of the first answer, and nothing of the second."""
        calls = (
            call(0, 128, [1, 2], out=50),
            call(1, 148, [1, 2], out=50),
            call(2, 148, [1, 3]),
        )
        first, second, third = read(tmp_path, *calls)
        assert first.make() + first.answer[:20] == second.make()
        assert (len(first.answer), len(second.answer)) == (50, 50)
        seen = [*second.make(), *first.answer[20:], *second.answer, *third.make()[64:]]
        assert len(set(seen)) == len(seen) == 148 + 30 + 50 + 84

    def test_ids_are_local_to_a_conversation(self, tmp_path: Path) -> None:
        for name in ("a.json", "b.json"):
            write(tmp_path / name, call(0, 64, [1], out=64))
        one, two = read_weka(tmp_path, ALL)
        said = [*one.make(), *one.answer, *two.make(), *two.answer]
        assert len(set(said)) == 4 * 64


class TestTimes:
    def test_sub_agents_are_conversations_within(self, tmp_path: Path) -> None:
        nested = {
            "t": 10.0,
            "type": "subagent",
            "requests": [call(0, 128, [1, 8], out=64), call(3, 256, [1, 8, 9, 4])],
        }
        found = read(
            tmp_path, call(0, 64, [1], out=64), nested, call(11, 192, [1, 2, 3])
        )
        assert [(r.arrival, r.length) for r in found] == [
            (0.0, 64),
            (10.0, 128),
            (11.0, 192),
            (13.0, 256),
        ]
        parent, agent, next_turn, _ = found
        assert parent.make() + parent.answer == next_turn.make()[:128]
        assert agent.make()[:64] == parent.make()

    def test_each_follows_the_last_answer_that_had_been_given(
        self, tmp_path: Path
    ) -> None:
        """A sub-agent starts after the first answer; its parent goes on at 18."""
        nested = {"t": 10.0, "type": "subagent", "requests": [call(0, 128, [1, 8])]}
        unknown = call(18, 192, [1, 2, 3])
        del unknown["api_time"]
        calls = (call(0, 64, [1], api_time=7.5), nested, unknown, call(18.5, 64, [9]))
        first, agent, next_turn, beside = read(tmp_path, *calls)
        assert (first.after, first.arrival) == (None, 0.0)
        assert (agent.after, agent.pause) == (first.key, 2.5)
        assert (next_turn.after, next_turn.pause) == (agent.key, 18 - 12)
        # The answer at 18 came 1 s later by default, after this was sent.
        assert (beside.after, beside.pause) == (agent.key, 18.5 - 12)

    def test_sessions_start_as_a_poisson_process(self) -> None:
        starts = SessionSample(gap=30.0, seed=5).starts()
        times = [next(starts) for _ in range(4000)]
        assert times[0] == 0.0
        assert times == sorted(times)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert sum(gaps) / len(gaps) == pytest.approx(30.0, rel=0.05)
        # Of an exponential distribution, 1/e lie above the mean.
        assert sum(gap > 30.0 for gap in gaps) / len(gaps) == pytest.approx(
            0.368, abs=0.03
        )
        at_once = SessionSample(gap=0.0).starts()
        assert [next(at_once) for _ in range(3)] == [0.0, 0.0, 0.0]

    def test_samples_are_reproducible_and_disjoint(self, tmp_path: Path) -> None:
        for number in range(9):
            write(tmp_path / f"{number}.json", call(0, 65 + number, [1]))

        def lengths(**options: Any) -> list[int]:
            sample = SessionSample(gap=1.0, **options)
            return [r.length for r in read_weka(tmp_path, sample)]

        assert sorted(lengths()) == list(range(65, 74))
        assert lengths(sessions=4) + lengths(sessions=5, skip=4) == lengths()
        assert lengths(sessions=4) == lengths(sessions=4)
        assert lengths(seed=1) != lengths()


class TestCommand:
    def trace(self, folder: Path) -> str:
        for name in ("a.json", "b.json"):
            turns = [
                call(20.0 * n, 640 + 128 * n, range(10 + 2 * n), out=64)
                for n in range(4)
            ]
            write(folder / name, *turns)
        return str(folder)

    def test_a_folder_is_found_to_be_one(self, tmp_path: Path) -> None:
        trace = self.trace(tmp_path)
        assert format_of(Path(trace)) == "weka"
        assert format_of(Path(trace) / "a.json") == "weka"
        found = simulate(trace, "--kv-only", "--json")
        assert (found["requests"], found["waited"]) == (8, 0)
        # What the turn before computed: its prompt, and its answer but the last token.
        turns = [640 + 48 + 128 * n for n in range(3)]
        assert found["hit_tokens"] == 2 * sum(turns)

    def test_one_conversation_and_text(self, tmp_path: Path) -> None:
        trace = self.trace(tmp_path)
        one = simulate(trace, "--sessions", "1", "--kv-only", "--json")
        same = simulate(f"{trace}/a.json", "--kv-only", "--json")
        assert one["hit_tokens"] == same["hit_tokens"] > 0

    def test_those_that_wait_are_counted(self, tmp_path: Path) -> None:
        flags = ("--kv-only", "--session-gap", "0", "--kv-tokens", "1600", "--json")
        found = simulate(self.trace(tmp_path), *flags)
        assert found["waited"] == 2  # of four pairs, two do not fit side by side

    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            (("--sessions", "0"), "--sessions must lie between 1 and"),
            (("--skip-sessions", "-1"), "--skip-sessions must lie between 0 and"),
            (("--session-gap", "nan"), "--session-gap must lie between 0 and"),
            (("--skip-sessions", "2"), "has no requests among the conversations"),
            (("--format", "agentic"), "The agentic stream is generated"),
        ],
    )
    def test_refused(
        self, flags: tuple[str, ...], sentence: str, tmp_path: Path
    ) -> None:
        fails_with_one_sentence(["simulate", self.trace(tmp_path), *flags], sentence)

    def test_other_traces_have_no_sessions(self) -> None:
        fails_with_one_sentence(["simulate", "--sessions", "3"], "say --format weka")


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (3, "request 1 is no JSON object"),
        (call(0, 0, []), "in must be a whole number from 1"),
        (call(0, 64, [1], out=-1), "out must be a whole number from 0"),
        (call(0, 64, []), "hash_ids must be a list of 1 ids"),
        (call(0, 64, [-1]), "hash_ids must be whole numbers below"),
        (call(0, 64, [1 << 40]), "hash_ids must be whole numbers below"),
        (call(-1, 64, [1]), "t must be a number of seconds"),
        (call(float("nan"), 64, [1]), "t must be a number of seconds"),
        (call(0, 64, [1], api_time=float("inf")), "api_time must be a number"),
        ({"t": 0, "requests": 5}, "requests must be a list"),
    ],
)
def test_refused(entry: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=sentence):
        read(tmp_path, entry)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="block_size must be 64"):
        read_weka(write(tmp_path / "a.json", block_size=512), ALL)
    with pytest.raises(TraceError, match="in the order of their times"):
        read(tmp_path, call(5, 64, [1]), call(4, 64, [1]))
    with pytest.raises(TraceError, match="Cannot read the trace"):
        read_weka(tmp_path / "missing.json", ALL)
    for content in ("nonsense", "[1]"):
        path = tmp_path / "b.json"
        path.write_text(content)
        with pytest.raises(TraceError, match="is the trace's format weka"):
            read_weka(path, ALL)
