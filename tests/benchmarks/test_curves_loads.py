# SPDX-License-Identifier: Apache-2.0
"""The workloads of the curves: what they share, and how many are in flight."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.curves.loads import Stream, own_loads, record
from benchmarks.curves.shapes import LEVELS, SHAPES, distinct_tokens, levels
from benchmarks.curves.traces import TraceError, mooncake, sessions

LOADS = own_loads()


@pytest.fixture(scope="module")
def streams() -> dict[str, Stream]:
    return {name: record(load, 0) for name, load in LOADS.items()}


@pytest.mark.parametrize("name", LOADS)
def test_as_many_are_in_flight_as_is_said(
    name: str, streams: dict[str, Stream]
) -> None:
    assert streams[name].concurrency == LOADS[name].concurrency
    assert 100 <= len(streams[name].prompts) <= 400


@pytest.mark.parametrize("name", ["chats", "agents+"])
def test_a_seed_makes_the_same_requests(name: str, streams: dict[str, Stream]) -> None:
    again = record(LOADS[name], 0)
    assert sorted(map(list, again.prompts)) == sorted(map(list, streams[name].prompts))
    assert record(LOADS[name], 1).prompts[0] != again.prompts[0]


def test_the_published_pattern_of_sglang(streams: dict[str, Stream]) -> None:
    stream = streams["system-10k"]
    assert {len(p) for p in stream.prompts} == {10_240 + 256}
    assert {len(a) for a in stream.answers} == {128}
    groups = [tuple(p[:10_240]) for p in stream.prompts]
    assert sorted(groups.count(g) for g in set(groups)) == [8] * 16
    assert len(set(groups[:8])) > 1, "shuffled"


def test_chats_contain_their_answers_and_thinking_does_not_return(
    streams: dict[str, Stream],
) -> None:
    def continued(name: str) -> list[float]:
        """Shares of the answers that a longer prompt repeats behind theirs."""
        stream, found = streams[name], []
        for prompt, answer in zip(stream.prompts, stream.answers, strict=True):
            later = [p for p in stream.prompts if len(p) > len(prompt)]
            later = [p for p in later if p[: len(prompt)] == prompt]
            if later:
                pairs = zip(later[0][len(prompt) :], answer, strict=False)
                found.append(sum(a == b for a, b in pairs) / len(answer))
        return found

    assert set(continued("chats")) == {1.0}
    assert max(continued("thinking")) < 0.1


def test_agents_have_the_lengths_that_are_said(streams: dict[str, Stream]) -> None:
    lengths = streams["agents"].lengths
    assert min(lengths) > 1600
    assert 9000 < max(lengths) < 14_000
    prompts = [tuple(p) for p in streams["agents"].prompts]
    assert len(prompts) - len(set(prompts)) > 10, "retries"


def test_one_offs_are_added_to_the_same_requests(streams: dict[str, Stream]) -> None:
    mixed = streams["system-2k+"]
    lengths = sorted(len(p) for p in mixed.prompts)
    starts = [tuple(p[:100]) for p in mixed.prompts]
    once = sum(starts.count(start) == 1 for start in starts)
    assert len(starts) - once == 160
    assert 0.2 < once / len(starts) < 0.4
    assert lengths[0] >= 100 and lengths[-1] <= 6000


@pytest.mark.parametrize("shape", SHAPES)
def test_levels_rise_by_equal_ratios(shape: str, streams: dict[str, Stream]) -> None:
    found = levels(shape, streams["chats"])
    ratios = [b / a for a, b in pairwise(found)]
    assert len(found) == LEVELS
    assert min(ratios) > 1 and max(ratios) == pytest.approx(min(ratios), rel=1e-6)


def test_distinct_tokens_count_a_shared_prefix_once() -> None:
    first, second = [*range(32)], [*range(16), *range(100, 116)]
    assert distinct_tokens(Stream([first, second], [[], []], 1)) == 48


def test_mooncake_has_the_traces_lengths_and_shares(tmp_path: Path) -> None:
    lines = [
        {"input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
        {"input_length": 1100, "output_length": 7, "hash_ids": [1, 3, 4]},
        {"input_length": 10, "output_length": 1, "hash_ids": [9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    stream = record(mooncake(path, requests=2), 0)
    assert [len(p) for p in stream.prompts] == [1000, 1100]
    assert [len(a) for a in stream.answers] == [5, 7]
    assert stream.prompts[0][:512] == stream.prompts[1][:512]
    assert stream.prompts[0][512:600] != stream.prompts[1][512:600]


def test_sessions_go_on_where_their_prompts_ended(tmp_path: Path) -> None:
    def turn(ids: list[int], length: int, answer: int) -> dict[str, object]:
        return {"hash_ids": ids, "in": length, "out": answer}

    turns = [turn(list(range(1, n + 1)), 64 * n + 10, 20) for n in range(1, 8)]
    session = {"block_size": 64, "requests": [*turns, {"in": 5, "out": 5}]}
    (tmp_path / "one.json").write_text(json.dumps(session))
    stream = record(sessions(tmp_path, count=1, concurrency=1), 0)
    assert [len(p) for p in stream.prompts] == [64 * n + 10 for n in range(1, 8)]
    pairs = zip(stream.prompts, stream.answers, stream.prompts[1:], strict=False)
    for prompt, answer, after in pairs:
        assert [*prompt, *answer] == after[: len(prompt) + len(answer)]


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no Mooncake trace at .*--mooncake"):
        mooncake(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match=r"has 0 sessions .* 12 are needed"):
        sessions(tmp_path)
