# SPDX-License-Identifier: Apache-2.0
"""Traces as they are read, and what is wrong with those that are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_plugin.tools.simulate.agentic import AgenticStream
from hybrid_plugin.tools.simulate.mooncake import read_mooncake
from hybrid_plugin.tools.simulate.request import TraceError
from hybrid_plugin.tools.simulate.token_lists import read_token_lists
from hybrid_plugin.tools.simulate.traces import format_of
from tests.simulate.traces import mooncake_line, tokens


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


class TestMooncake:
    def test_equal_ids_are_equal_blocks_and_the_last_is_shorter(
        self, tmp_path: Path
    ) -> None:
        path = write(
            tmp_path, mooncake_line([7, 8], 700), "", mooncake_line([7, 9], 1024)
        )
        first, second = read_mooncake(path)
        assert (first.length, second.length) == (700, 1024)
        one, two = first.make(), second.make()
        assert (len(one), len(two)) == (700, 1024)
        assert one[:512] == two[:512]
        assert not set(one[512:]) & set(two[512:])
        assert len(set(two)) == 1024

    def test_answers_are_nobodys_prompt(self, tmp_path: Path) -> None:
        path = write(tmp_path, *[mooncake_line([1], 512, output=3)] * 2)
        first, second = read_mooncake(path)
        prompt = set(first.make())
        assert len(first.answer) == len(second.answer) == 3
        assert len({*prompt, *first.answer, *second.answer}) == 512 + 6

    def test_times_are_those_of_all_requests_or_of_none(self, tmp_path: Path) -> None:
        lines = [mooncake_line([1], 512, at=at) for at in (0, 1500)]
        found = read_mooncake(write(tmp_path, *lines))
        assert [request.arrival for request in found] == [0.0, 1.5]
        without = json.dumps({"input_length": 1, "hash_ids": [1]})
        found = read_mooncake(write(tmp_path, *lines, without))
        assert [request.arrival for request in found] == [None] * 3

    @pytest.mark.parametrize(
        ("line", "sentence"),
        [
            ("nonsense", "line 1 is no JSON; is the trace's format mooncake"),
            ("[1]", "line 1 is no JSON object"),
            (mooncake_line([1], 0), "input_length must be a whole number from 1"),
            (mooncake_line([1], 513), "hash_ids must be a list of 2 ids"),
            (mooncake_line([1], 512, output=-1), "output_length must be"),
            (json.dumps({"input_length": 5, "hash_ids": ["a"]}), "whole numbers"),
            (json.dumps({"input_length": 5, "hash_ids": [2**70]}), "whole numbers"),
            (json.dumps({"input_length": 5, "hash_ids": 3}), "must be a list of 1"),
            (mooncake_line([1], 512, at=-1), "timestamp must be milliseconds"),
        ],
    )
    def test_refused(self, tmp_path: Path, line: str, sentence: str) -> None:
        with pytest.raises(TraceError, match=sentence):
            read_mooncake(write(tmp_path, line))


class TestTokens:
    def test_lists_and_objects(self, tmp_path: Path) -> None:
        whole = {"prompt": [4, 5], "answer": [6], "namespace": "a", "keep": [1]}
        whole["ttl"] = 60
        plain, rich = read_token_lists(write(tmp_path, "[1, 2, 3]", json.dumps(whole)))
        assert (plain.length, plain.make(), plain.answer) == (
            3,
            tokens(1, 4),
            tokens(0, 0),
        )
        assert (plain.namespace, plain.snapshot_at) == (None, ())
        assert (rich.make(), rich.answer) == (tokens(4, 6), tokens(6, 7))
        assert (rich.namespace, rich.snapshot_at) == ("a", (1,))
        assert (plain.ttl, rich.ttl) == (None, 60.0)

    def test_conversations_go_on_after_their_answers(self, tmp_path: Path) -> None:
        lines: list[dict[str, object]] = [
            {"prompt": [1], "conversation": "a", "arrival": 3},
            {"prompt": [2], "conversation": "b"},
            {"prompt": [3], "conversation": "a", "pause": 0.5},
            {"prompt": [4]},
        ]
        one, two, three, four = read_token_lists(
            write(tmp_path, *map(json.dumps, lines))
        )
        assert (one.arrival, two.arrival) == (3.0, None)
        assert (one.after, two.after, four.after, four.key) == (None,) * 4
        assert (three.after, three.pause) == (one.key, 0.5)

    @pytest.mark.parametrize(
        ("line", "sentence"),
        [
            ('{"prompt": [1], "pause": 3}', "a pause needs a conversation"),
            ('{"prompt": [1], "conversation": 3}', "conversation must be a string"),
            ('{"prompt": [1], "arrival": -1}', "arrival must be seconds"),
            ('{"prompt": [1], "arrival": NaN}', "arrival must be seconds"),
            ('{"prompt": [1], "ttl": -1}', "ttl must be seconds"),
            ('{"prompt": [1], "ttl": 1e8}', "ttl must be seconds"),
            ("nonsense", "line 1 is no JSON; is the trace's format tokens"),
            ("[]", "a prompt has at least one token"),
            ("3", "neither a list of token ids nor an object"),
            ("[1.5]", "prompt must be a list of whole numbers"),
            ("[true]", "prompt must be a list of whole numbers"),
            ("[36893488147419103232]", "a number beyond 64 bits"),
            ('{"prompt": [1], "namespace": 3}', "namespace must be a string"),
            ("[" * 100_000, "is no JSON"),
        ],
    )
    def test_refused(self, tmp_path: Path, line: str, sentence: str) -> None:
        with pytest.raises(TraceError, match=sentence):
            read_token_lists(write(tmp_path, line))


def test_the_first_line_tells_the_format(tmp_path: Path) -> None:
    assert format_of(None) == "agentic"
    assert format_of(write(tmp_path, "", mooncake_line([1], 4))) == "mooncake"
    assert format_of(write(tmp_path, "[1, 2]", mooncake_line([1], 4))) == "tokens"


def test_an_empty_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has no requests"):
        read_token_lists(write(tmp_path, " ", ""))


class TestAgentic:
    def test_the_same_for_the_same_seed(self) -> None:
        stream = AgenticStream(requests=60)
        one, two, other = (stream.generate(seed) for seed in (1, 1, 2))
        assert [r.make() for r in one] == [r.make() for r in two]
        assert [r.answer for r in one] == [r.answer for r in two]
        assert [r.make() for r in one] != [r.make() for r in other]

    def test_sessions_go_on_branch_and_ask_again(self) -> None:
        """Prompts begin with earlier prompts and answers, some more than once."""
        requests = AgenticStream(requests=400).generate(0)
        assert all(len(r.make()) == r.length for r in requests)
        said = [bytes(r.make() + r.answer) for r in requests]
        prompts = [bytes(r.make()) for r in requests]
        followers = [
            sum(prompt.startswith(before) for prompt in prompts[index + 1 :])
            for index, before in enumerate(said)
        ]
        assert sum(count > 0 for count in followers) > 100
        assert sum(count > 1 for count in followers) > 10
        assert len(set(prompts)) < len(prompts)

    def test_lengths_differ_a_lot(self) -> None:
        lengths = sorted(r.length for r in AgenticStream(requests=400).generate(3))
        assert lengths[-20] > 5 * lengths[20]
