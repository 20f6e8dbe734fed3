# SPDX-License-Identifier: Apache-2.0
"""Sides, traffic and tables of the benchmark of host memory in an engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import host_memory, rounds
from benchmarks.host_tier import served, sides, table, traffic
from benchmarks.host_tier.served import Asked, Timed
from benchmarks.host_tier.sides import HOSTED, LARGE, PLUGIN, Tiers
from benchmarks.host_tier.traffic import AGENTS, ALONE, BESIDE, RETURN
from benchmarks.passes.log import Pass
from benchmarks.prefix_workloads import Reply
from hybrid_plugin.config import HybridConfig

SCALE = traffic.overflowing(traffic.GPU, "qwen3-next", 3 << 30)
TIERS = Tiers("qwen3-next", 3 << 10, 8.0, SCALE, on_gpu=True, experts=12)
STOCK = {"vllm": "vLLM", "sglang": "SGLang"}


def settings(engine: str, name: str, tiers: Tiers = TIERS) -> tuple[Any, Any]:
    """Arguments and environment of a side."""
    one = sides.configurations(engine, tiers)[name]
    variables = sides.variables(engine, tiers, one, 0)
    return sides.arguments(engine, tiers, one), variables


# --------------------------------------------------------------------------- sides


@pytest.mark.parametrize("engine", STOCK)
def test_the_plugin_has_host_memory_on_one_side_alone(engine: str) -> None:
    found = {}
    for name, one in sides.configurations(engine, TIERS).items():
        options = one.configuration.options
        assert name.startswith(PLUGIN) == (options is not None)
        if options is not None:
            found[name] = HybridConfig.from_mapping(dict(options)).host_memory
    assert found == {HOSTED: 8 * 10**9, PLUGIN: None, LARGE: None}


def test_vllm_has_equal_bytes_on_the_host_and_on_the_device() -> None:
    names = sides.configurations("vllm", TIERS)
    for name in names:
        given, variables = settings("vllm", name)
        device = given["kv_cache_memory_bytes"]
        if name == LARGE:
            assert 0 <= (3 << 30) + 8 * 10**9 - device < 1 << 20
        else:
            assert device == 3 << 30, name
        offloads = "offloading" in name
        assert offloads == ("kv_offloading_size" in given)
        if offloads:
            assert given["kv_offloading_size"] * 2**30 == 8 * 10**9
        assert ("VLLM_USE_SIMPLE_KV_OFFLOAD" in variables) == ("simple" in name)
        assert given["hf_overrides"]["num_experts"] == 12


def test_sglang_has_equal_bytes_on_the_host_and_on_the_device() -> None:
    for name, one in sides.configurations("sglang", TIERS).items():
        given, variables = settings("sglang", name)
        hosts = "HiCache" in name
        assert hosts == given.get("enable_hierarchical_cache", False)
        assert given.get("hicache_size") == (8 if hosts else None)
        if one.configuration.options is None:
            assert "max_total_tokens" in given and "HYBRID_CONFIG" not in variables
            continue
        told = json.loads(variables["HYBRID_CONFIG"])
        more = 8 * 10**9 >> 20 if name == LARGE else 0
        assert told["gpu_memory_budget"] == 3072 + more << 20


@pytest.mark.parametrize("engine", STOCK)
def test_engines_offload_on_gpus_only(engine: str) -> None:
    known = sides.configurations(engine, TIERS)
    usual = sides.usual(engine, TIERS)
    on_cpu = sides.usual(engine, replace(TIERS, on_gpu=False))
    assert on_cpu == [HOSTED, PLUGIN, STOCK[engine], LARGE]
    assert len(usual) == 5 and set(on_cpu) < set(usual) < set(known)


def test_a_cpu_has_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--on", "cpu", "--host-gb", "0.5", "--agents", "7", "--turns", "9"]
    monkeypatch.setattr("sys.argv", ["host_memory", *asked])
    found = host_memory.tiers(host_memory.parse(), "cpu")
    assert (found.model, found.cache_mib) == (host_memory.TINY, host_memory.CPU_MIB)
    assert found.host_bytes == 5 * 10**8 and not found.on_gpu
    assert (found.scale.agents, found.scale.turns) == (7, 9)
    assert found.scale.clients == traffic.CPU.clients
    given, _ = settings("vllm", LARGE, found)
    assert given["max_model_len"] >= found.scale.longest
    assert "compilation_config" not in given


def test_unknown_sides_and_workloads_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for option in ("--only", "--workloads"):
        monkeypatch.setattr("sys.argv", ["x", "--on", "cpu", option, "nobody"])
        with pytest.raises(SystemExit, match=f"{option}: 'nobody' is none of: "):
            host_memory.Run(host_memory.parse())


# ------------------------------------------------------------------------- traffic


SMALL = replace(traffic.CPU, others=5, pause_s=0.0)


class Engine:
    """Answers 7s; a request takes as many turns of the loop as it has tokens."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.running = self.most = 0

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Reply:
        self.asked.append((tuple(prompt), max_tokens))
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(max_tokens):
            await asyncio.sleep(0)
        self.running -= 1
        return Reply((7,) * max_tokens, len(prompt), 0, 0.0)

    def run(self, name: str, seed: int = 0) -> list[Reply]:
        run = traffic.workloads(SMALL)[name]
        return asyncio.run(run(self.ask, random.Random(seed)))


@pytest.mark.parametrize("name", traffic.workloads(SMALL))
def test_traffic_is_seeded_and_no_longer_than_engines_allow(name: str) -> None:
    engine, again, other = Engine(), Engine(), Engine()
    engine.run(name)
    again.run(name)
    other.run(name, seed=1)
    assert engine.asked == again.asked != other.asked
    longest = max(len(prompt) + answer for prompt, answer in engine.asked)
    assert longest <= SMALL.longest


def test_agents_say_all_that_was_said_and_come_back_later() -> None:
    engine = Engine()
    replies = engine.run(AGENTS)
    assert len(replies) == SMALL.agents * SMALL.turns
    assert engine.most == SMALL.clients
    turns: dict[tuple[int, ...], list[int]] = {}
    for number, (prompt, _) in enumerate(engine.asked):
        start = prompt[: SMALL.system + SMALL.opening[0]]
        turns.setdefault(start, []).append(number)
    assert len(turns) == SMALL.agents
    for numbers in turns.values():
        for before, after in pairwise(numbers):
            prompt, answer = engine.asked[before]
            said = (*prompt, *(7,) * answer)
            assert engine.asked[after][0][: len(said)] == said
    alone = [b - a == 1 for numbers in turns.values() for a, b in pairwise(numbers)]
    assert sum(alone) < len(alone) / 2  # others came between


def test_no_round_begins_as_the_warm_up_did() -> None:
    """It would be restored: `Random(-1)` is `Random(1)`."""
    first = {random.Random(seed).random() for seed in (*range(-5, 6), served.WARM_UP)}
    assert len(first) == 7  # 0 to 5, and the warm-up


def test_systems_are_those_of_the_agents_kind() -> None:
    engine = Engine()
    engine.run(AGENTS)
    assert len({prompt[: SMALL.system] for prompt, _ in engine.asked}) == SMALL.kinds


def test_prefixes_come_back_behind_other_content() -> None:
    engine, count = Engine(), SMALL.prefixes
    replies = engine.run(RETURN)
    prompts = [prompt for prompt, _ in engine.asked]
    assert len(prompts) == len(replies) == 2 * count + SMALL.others
    for first, last in zip(prompts[:count], prompts[-count:], strict=True):
        said = (*first, *(7,) * SMALL.answer[0])
        assert last[: len(said)] == said
        assert len(last) == len(said) + traffic.QUESTION
    assert len({prompt[0:8] for prompt in prompts}) == count + SMALL.others


@pytest.mark.parametrize("cache", [1 << 20, 3 << 30])
def test_other_content_overflows_the_cache(cache: int) -> None:
    found = traffic.overflowing(traffic.GPU, "qwen3-next", cache)
    kv = found.others * found.prefix * 24 * 1024  # bytes of a token
    assert 1.0 * cache < kv < 1.5 * cache + found.prefix * 24 * 1024


def test_prompts_come_beside_sequences_that_decode() -> None:
    alone, beside = Engine(), Engine()
    alone.run(ALONE)
    assert [answer for _, answer in alone.asked] == [SMALL.decoded] * SMALL.decoding
    beside.run(BESIDE)
    more = [prompt for prompt, answer in beside.asked if answer == 1]
    assert more and all(len(prompt) == SMALL.prompt for prompt in more)
    assert beside.most == SMALL.decoding + 1


# ------------------------------------------------------------------ what is told


def reply(tokens: int, ttft: float = 0.5, cached: int = 0) -> Reply:
    """To a prompt of 100 tokens."""
    return Reply((7,) * tokens, 100, cached, ttft)


def test_a_request_is_timed_from_its_first_token_on() -> None:
    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        await asyncio.sleep(0.02)
        return reply(max_tokens, ttft=0.0)

    async def workload(ask: Any, rng: random.Random) -> list[Reply]:
        return [await ask([1], 2)]

    timed = Timed(workload)
    asyncio.run(timed.run(ask, random.Random(0)))
    (one,) = timed.asked
    assert one.seconds >= 0.02 and timed.replies == [one.reply]
    assert timed.began < timed.ended
    assert Asked(reply(5), 2.5).ms_per_token == 500
    assert Asked(reply(1), 2.5).ms_per_token is None
    assert Asked(reply(0), 2.5).ms_per_token is None


def test_counters_of_the_host_are_found_by_their_names() -> None:
    sample = SimpleNamespace
    metrics = [
        sample(
            samples=[
                sample(name="hybrid_cache_host_hit_tokens_total", value=5.0),
                sample(name="hybrid_cache_host_hit_tokens_created", value=9.0),
                sample(name="hybrid_cache_hit_tokens_total", value=7.0),
            ]
        ),
        sample(samples=[sample(name="hybrid_cache_host_rows", value=1.0)]),
    ]
    assert served.totals(metrics) == {"hit_tokens": 5.0}
    assert served.totals([]) == {}


def test_decoding_is_told_without_the_prompts_beside_it() -> None:
    asked = [Asked(reply(5), 2.5), Asked(reply(5), 4.5), Asked(reply(1), 9.0)]
    assert served.of_decoding(asked, 5) == {"beside": 1, "token_ms": 750}
    assert served.of_decoding(asked[2:], 5) == {"beside": 1}


def test_prefixes_are_told_apart_from_what_came_between() -> None:
    replies = [reply(4, 1.0), reply(1, 9.0), reply(4, 0.25, 90)]
    assert served.of_prefixes(replies, 1) == {
        "first_ttft_ms": [1000.0],
        "back_ttft_ms": [250.0],
        "back_prompt_tokens": [100],
        "back_cached_tokens": [90],
    }


def test_agents_that_come_back_are_told_from_their_first_steps() -> None:
    order = [traffic.Step(agent, (), 1) for agent in (3, 5, 3, 5, 3)]
    times = (9.0, 8.0, 0.25, 0.5, 0.125)
    replies = [reply(1, one) for one in times]
    found = served.of_agents(replies, order)
    assert found == {"back": 3, "back_ttft_ms_p50": 250.0, "back_ttft_ms_p95": 250.0}
    with pytest.raises(ValueError, match="shorter"):
        served.of_agents(replies, order[:-1])


def test_passes_with_prompts_do_not_count_as_decodes() -> None:
    passes = [
        Pass(0.0, 0.1, 1.0, 50, 1, 2),
        Pass(1.0, 1.1, 1.2, 0, 0, 2),
        Pass(1.1, 1.2, 1.6, 0, 0, 2),
    ]
    assert served.of_passes(passes) == {
        "passes": 3,
        "decode_passes": 2,
        "decode_pass_ms_p50": pytest.approx(300),
        "decode_pass_ms_mean": pytest.approx(300),
    }
    assert served.of_passes([]) == {"passes": 0, "decode_passes": 0}


# -------------------------------------------------------------------------- tables


def told(seed: int, wall: float, **more: Any) -> dict[str, Any]:
    """A round of agents."""
    return {
        "seed": seed,
        "failed": 0,
        "prompt_tokens": 200,
        "cached_tokens": 50,
        "ttft_ms_p50": 10.0,
        "ttft_ms_p95": 20.0,
        "back_ttft_ms_p50": 12.0,
        "back_ttft_ms_p95": 24.0,
        "request_ms_mean": 100.0,
        "wall_s": wall,
        "host": {},
        **more,
    }


def back(seed: int, first: float, last: float) -> dict[str, Any]:
    """A round of prefixes that come back."""
    return told(
        seed,
        1.0,
        first_ttft_ms=[first],
        back_ttft_ms=[last],
        back_prompt_tokens=[100],
        back_cached_tokens=[80],
    )


HOST = {"hit_tokens": 40, "stored_bytes": 3e6, "loaded_bytes": 2e6}
RESULTS: dict[str, Any] = {
    HOSTED: {
        "workloads": {
            AGENTS: [told(0, 2.0, host=HOST), told(1, 3.0, host=HOST)],
            RETURN: [back(0, 400.0, 40.0)],
        }
    },
    "vLLM": {
        "workloads": {
            AGENTS: [told(0, 4.0), told(1, 4.0, failed=2)],
            RETURN: [back(0, 380.0, 400.0)],
        }
    },
    "vLLM, offloading": {"failed": True},
    LARGE: {"workloads": {}, "died in": RETURN},
}


def row(text: str, name: str, part: str) -> list[str]:
    """Cells of a side's first row behind a heading."""
    behind = text[text.index(f"## {part}") :]
    line = next(one for one in behind.splitlines() if one.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_table_tells_what_came_from_the_host() -> None:
    text = table.table(RESULTS, [AGENTS, RETURN, ALONE])
    measured = row(text, HOSTED, AGENTS)
    assert measured == [
        "25.0",
        "20.0",
        "10.0",
        "20.0",
        "12.0",
        "24.0",
        "100",
        "2.50",
        "",
        "3",
        "2",
        "2",
    ]
    assert row(text, "vLLM", AGENTS)[1] == "" == row(text, "vLLM", AGENTS)[-2]
    assert row(text, HOSTED, RETURN)[:4] == ["400.0", "40.0", "80.0", "0.100"]
    assert f"## {ALONE}" not in text


def test_ratios_are_to_host_memory_over_equal_rounds() -> None:
    text = table.table(RESULTS, [AGENTS, RETURN])
    ratios = text[text.index(f"| {HOSTED}, to |") :]
    assert "| vLLM | 1.00x | 1.00x | 1.00x | 1.00x | 1.00x | 0.62x |" in ratios
    assert "| vLLM | 0.10x |" in ratios


def test_the_table_says_what_failed() -> None:
    text = table.table(RESULTS, [AGENTS, RETURN])
    assert "vLLM, offloading: its engine did not start." in text
    assert f"{LARGE}: its engine died in `{RETURN}`." in text
    assert f"vLLM, {AGENTS}: 2 requests failed." in text


def test_more_rounds_have_other_contents() -> None:
    assert rounds.first_round({}, HOSTED) == 0
    assert rounds.first_round(RESULTS, HOSTED) == 2
    assert rounds.first_round(RESULTS, "vLLM, offloading") == 0
