# SPDX-License-Identifier: Apache-2.0
"""Models of the engines' own caches, by hand, and beside the plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tools.plan.estimate import AlignedBlocks, StaticPools
from hybrid_plugin.tools.simulate.agentic import AgenticStream
from hybrid_plugin.tools.simulate.arrivals import Pace
from hybrid_plugin.tools.simulate.known_costs import DEFAULT_COSTS
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.served_cache import ServedCache
from hybrid_plugin.tools.simulate.server import Server
from hybrid_plugin.tools.simulate.serving import serve
from hybrid_plugin.tools.simulate.stock_sglang import SglangModel
from hybrid_plugin.tools.simulate.stock_vllm import VllmModel
from tests.oneliners import fails_with_one_sentence
from tests.plan.configs import GEMMA3, QWEN3_NEXT, write
from tests.simulate.test_command import simulate
from tests.simulate.traces import request, tokens


def vllm(blocks: int, states: int = 3, unit: int = 100) -> VllmModel:
    return VllmModel(AlignedBlocks(unit, blocks, 1, 1, 1, states))


def sglang(slots: int, room: int) -> SglangModel:
    return SglangModel(StaticPools(slots, room, 0))


def hits(cache: ServedCache, *requests: Request, at_once: int = 1) -> list[int | None]:
    server = Server(cache, DEFAULT_COSTS.costs)
    jobs = serve(server, requests, Pace(concurrency=at_once))
    return [job.hit for job in sorted(jobs, key=lambda job: job.number)]


def asks(length: int, start: int = 0, own: int = 0) -> Request:
    """A prompt of `length` tokens that all have, and as many as `own` of its own."""
    return request(tokens(0, length) + tokens(start, start + own), answer=5)


class TestVllm:
    def test_a_prompt_is_resumed_at_its_last_whole_unit(self) -> None:
        assert hits(vllm(99), asks(250), asks(250), asks(201)) == [0, 200, 200]
        # Never all of it: the last unit's state would leave nothing to compute.
        assert hits(vllm(99), asks(200), asks(200)) == [0, 100]

    def test_the_third_one_resumes_where_two_part(self) -> None:
        three = [asks(350, 1000 * n, 400) for n in (1, 2, 3)]
        assert hits(vllm(99), *three) == [0, 0, 300]

    def test_states_push_each_other_out(self) -> None:
        """A prompt keeps two units and three blocks of states, and runs with more."""
        two = [request(tokens(n, n + 250)) for n in (0, 1000)]
        assert hits(vllm(16), *two, *two)[2:] == [200, 200]
        assert hits(vllm(9), *two, *two)[2:] == [0, 0]

    def test_without_states_every_unit_is_resumed(self) -> None:
        three = [asks(350, 1000 * n, 400) for n in (1, 2, 3)]
        assert hits(vllm(99, states=0), *three) == [0, 300, 300]

    def test_what_never_fits(self) -> None:
        assert hits(vllm(9), asks(900), asks(150)) == [None, 0]


class TestSglang:
    def test_a_prompt_is_resumed_at_its_last_tracked_state(self) -> None:
        assert hits(sglang(20, 9999), asks(250), asks(250), asks(193)) == [0, 192, 192]

    def test_the_third_one_resumes_where_two_part(self) -> None:
        three = [asks(350, 1000 * n, 400) for n in (1, 2, 3)]
        assert hits(sglang(20, 9999), *three) == [0, 0, 320]

    def test_an_answer_is_resumed_at_a_multiple_of_256(self) -> None:
        said = request(tokens(0, 250), answer=300)
        goes_on = request(said.make() + said.answer + tokens(2000, 2100))
        assert hits(sglang(20, 9999), said, goes_on) == [0, 512]

    def test_slots_limit_what_runs(self) -> None:
        server = Server(sglang(10, 9999), DEFAULT_COSTS.costs)
        requests = [request(tokens(n, n + 70), answer=9) for n in range(0, 900, 100)]
        for _ in serve(server, requests, Pace(concurrency=9)):
            pass
        assert server.peak_running == 10 // 5

    def test_states_are_evicted_by_recency(self) -> None:
        """Five slots, of which one that runs takes three: two states are left."""
        three = [request(tokens(n, n + 250)) for n in (0, 1000, 2000)]
        found = hits(sglang(5, 9999), *three, three[2], three[1], three[0])
        assert found == [0, 0, 0, 192, 192, 0]

    def test_what_never_fits(self) -> None:
        assert hits(sglang(5, 300), asks(400), asks(150)) == [None, 0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    size=st.integers(30, 300),
    concurrency=st.integers(1, 9),
)
def test_nothing_leaks(seed: int, size: int, concurrency: int) -> None:
    """When all have ended, what is free and what is cached is all that there is."""
    stream = AgenticStream(
        requests=30,
        system_tokens=200,
        document_tokens=200,
        message_tokens=60,
        longest_message=300,
        answer_tokens=40,
    )
    requests = stream.generate(seed)
    blocks = vllm(size, unit=64)
    hits(blocks, *requests, at_once=concurrency)
    cached = sum(map(blocks._blocks, blocks._unused))
    assert blocks._free + cached == size
    assert blocks._unused_blocks == cached
    assert set(blocks._users.values()) <= {0}
    tree = sglang(size, 64 * size)
    hits(tree, *requests, at_once=concurrency)
    nodes = tree._nodes.values()
    assert tree._tokens + 64 * len(nodes) == 64 * size
    assert tree._unlocked == 64 * len(nodes)
    assert tree._slots + sum(node.has_state for node in nodes) == size
    assert not any(node.users or node.state_users for node in nodes)
    assert all(node.children or node.has_state for node in nodes)


def test_with_room_for_everything_nobody_beats_the_prefix() -> None:
    """A hit is a prefix of something that was served before."""
    requests = AgenticStream(requests=60, system_tokens=300).generate(2)
    said: list[Tokens] = []
    longest = []
    for one in requests:
        prompt = one.make()
        longest.append(max((_shared(prompt, before) for before in said), default=0))
        said.append(prompt + one.answer)
    for cache in (vllm(10**6), sglang(10**5, 10**8)):
        found = hits(cache, *requests)
        assert all(
            hit is not None and hit <= most
            for hit, most in zip(found, longest, strict=True)
        )
        assert sum(hit or 0 for hit in found) > 0.5 * sum(longest)


def _shared(one: Tokens, two: Tokens) -> int:
    count = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        count += 1
    return count


class TestCommand:
    def flags(self, folder: Path, config: Any = QWEN3_NEXT) -> tuple[str, ...]:
        path = str(write(folder, config))
        memory = ("--gpu-memory", "6GB", "--weights", "1GB", "--concurrency", "6")
        return ("--model-config", path, *memory, "--requests", "80", "--compare")

    def test_all_serve_the_same_requests(self, tmp_path: Path) -> None:
        found = simulate(*self.flags(tmp_path), "--slo-ttft", "0.3", "--json")
        names = [one["name"] for one in found["compared"]]
        assert names == ["vLLM's, model", "SGLang's, model"]
        tokens_made = {one["times"]["answered_tokens"] for one in found["compared"]}
        assert tokens_made == {found["times"]["answered_tokens"]}
        assert all(0 < one["hit_rate"] < 1 for one in found["compared"])

    def test_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from hybrid_plugin.cli import main

        assert main(["simulate", *self.flags(tmp_path)]) == 0
        out = capsys.readouterr().out
        for name in ("the plugin", "vLLM's, model", "SGLang's, model"):
            assert sum(line.startswith(name) for line in out.splitlines()) == 1

    def test_refused(self, tmp_path: Path) -> None:
        fails_with_one_sentence(["simulate", "--compare"], "--compare needs")
        kv_only = [*self.flags(tmp_path), "--kv-only"]
        fails_with_one_sentence(["simulate", *kv_only], "--compare needs")
        flags = list(self.flags(tmp_path, GEMMA3))
        flags[flags.index("6GB")] = "80GB"
        sentence = "and nothing else: leave it out for this model"
        fails_with_one_sentence(["simulate", *flags], sentence)


def test_plan_recommends_settings(tmp_path: Path) -> None:
    from tests.oneliners import run_quietly

    lines = []
    for turn in range(3):
        for chat in range(4):
            prompt = [chat] * 64 + list(range(100, 300 + 200 * turn))
            name = f"chat {chat}"
            line = {"prompt": prompt, "answer": [7] * 9, "conversation": name}
            lines.append(json.dumps(line | {"pause": 1.0}))
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    config = str(write(tmp_path, QWEN3_NEXT))
    flags = ("--model-config", config, "--gpu-memory", "6GB", "--weights", "1GB")
    plan = ["plan", *flags, "--trace", str(trace), "--concurrency", "4"]
    status, out, error = run_quietly([*plan, "--json"])
    assert (status, error) == (0, "")
    found = json.loads(out)["recommended"]
    served = found["settings"]
    assert len(served) + len(found["refused"]) == 5
    slow = [one["times"]["ttft"]["p95"] for one in served]
    assert slow == sorted(slow)
    assert {one["page_size"] for one in served} == {16, 64}
    assert len(found["stock"]) == 2
    status, out, error = run_quietly([*plan, "--slo-ttft", "0.2"])
    assert status == 0 and 'best by goodput: HYBRID_CONFIG=\'{"page_size":' in out
    fails_with_one_sentence(["plan", *flags, "--rate", "3"], "give --trace")
    fails_with_one_sentence([*plan[:-2], "--rate", "-3"], "--rate must be more than 0")
