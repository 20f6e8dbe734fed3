# SPDX-License-Identifier: Apache-2.0
"""The benchmark of prefill and decode servers: sides, traffic, counters, tables."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import disaggregation
from benchmarks.host_tier.served import Asked
from benchmarks.prefill_decode import counters, models, sides, table, traffic
from benchmarks.prefill_decode.client import Client, Question, digest, outcome
from benchmarks.prefill_decode.servers import FailedError, Server, last_words
from benchmarks.prefill_decode.sides import (
    BOTH,
    DECODE,
    HOST_BUFFER,
    NO_CACHE,
    PLUGIN,
    PLUGIN_ONE,
    PLUGIN_PAIR,
    PREFILL,
    STOCK_ONE,
    STOCK_PAIR,
    Setup,
)
from benchmarks.prefill_decode.traffic import CHATS, PROMPTS
from benchmarks.prefix_workloads import VOCABULARY, Reply
from hybrid_plugin.config import HybridConfig

GPU = Setup("qwen3-next", 6 << 10, 16 << 10, traffic.GPU, on_gpu=True, experts=12)
CPU = Setup(models.BUNDLED, 24, 64, traffic.SMALL, on_gpu=False)


def flags(name: str, setup: Setup = GPU) -> dict[str, Any]:
    """Of a side's servers, by name; True where a flag has no value."""
    given = sides.arguments(setup, sides.deployments(setup)[name])
    found: dict[str, Any] = {}
    for flag in given:
        key, _, value = flag.partition("=")
        found[key.removeprefix("--")] = value or True
    return found


# --------------------------------------------------------------------------- sides


def test_servers_of_all_sides_differ_in_what_is_compared_alone() -> None:
    own = {"additional-config", "kv-transfer-config"}
    shared = []
    for name in sides.deployments(GPU):
        found = flags(name)
        assert ("additional-config" in found) == name.startswith(PLUGIN)
        stock_pair = name.startswith(STOCK_PAIR)
        assert ("kv-transfer-config" in found) == stock_pair
        no_cache = found.pop("no-enable-prefix-caching", None)
        assert no_cache == (True if name == NO_CACHE else None)
        shared.append({key: one for key, one in found.items() if key not in own})
    assert all(one == shared[0] for one in shared)
    (one, *_) = shared
    assert one["kv-cache-memory-bytes"] == str(6 << 30)
    assert one["max-num-seqs"] == "32"
    assert one["enable-prompt-tokens-details"] is True
    assert json.loads(one["hf-overrides"])["num_experts"] == 12
    assert "skip-tokenizer-init" not in one, "answers are streamed as text, too"


def test_the_plugin_has_peers_where_there_are_two_servers() -> None:
    for name, peers in ((PLUGIN_PAIR, True), (PLUGIN_ONE, False)):
        options = json.loads(flags(name)["additional-config"])["hybrid_plugin"]
        config = HybridConfig.from_mapping(options)
        assert config.host_memory == 16 << 30
        assert (config.peers is not None) == peers


def test_stock_pairs_move_from_device_to_device_unless_they_are_told_otherwise() -> (
    None
):
    for name, setup, buffer in (
        (STOCK_PAIR, GPU, None),
        (NO_CACHE, GPU, None),
        (HOST_BUFFER, GPU, "cpu"),
        (STOCK_PAIR, CPU, "cpu"),
    ):
        found = json.loads(flags(name, setup)["kv-transfer-config"])
        assert found["kv_connector"] == "NixlConnector"
        assert found.get("kv_buffer_device") == buffer


def test_prefill_and_decode_have_a_gpu_each_and_single_servers_either() -> None:
    usual = {name: sides.deployments(GPU)[name] for name in sides.USUAL}
    found = {
        (name, role): sides.variables(GPU, one, role, lane, 5600 + lane)
        for lane, (name, one) in enumerate(usual.items())
        for role in one.roles
    }
    devices = {key: one["CUDA_VISIBLE_DEVICES"] for key, one in found.items()}
    assert devices == {
        (PLUGIN_PAIR, PREFILL): "0",
        (PLUGIN_PAIR, DECODE): "1",
        (STOCK_PAIR, PREFILL): "0",
        (STOCK_PAIR, DECODE): "1",
        (PLUGIN_ONE, BOTH): "0",
        (STOCK_ONE, BOTH): "1",
    }
    caches = [one["VLLM_CACHE_ROOT"] for one in found.values()]
    assert len(set(caches)) == len(caches)
    for (name, _), one in found.items():
        assert one["HYBRID_PLUGIN"] == ("1" if name.startswith(PLUGIN) else "0")
        layout = one.get("VLLM_SSM_CONV_STATE_LAYOUT")
        assert layout == ("DS" if name == STOCK_PAIR else None)
        port = one.get("VLLM_NIXL_SIDE_CHANNEL_PORT")
        assert port == ("5601" if name == STOCK_PAIR else None)


def test_variables_of_the_command_line_are_everywhere() -> None:
    setup = replace(CPU, variables={"UCX_TLS": "tcp,self"}, flags=("--one=1",))
    for name, one in sides.deployments(setup).items():
        assert sides.variables(setup, one, BOTH, 0, 1)["UCX_TLS"] == "tcp,self"
        assert sides.arguments(setup, one)[-1] == "--one=1", name
        assert "CUDA_VISIBLE_DEVICES" not in sides.variables(setup, one, BOTH, 0, 1)


@pytest.mark.parametrize(
    ("concurrency", "sizes"),
    [(1, [1, 2, 4]), (20, [1, 2, 4, 8, 16, 20]), (32, [1, 2, 4, 8, 16, 24, 32])],
)
def test_batches_that_decode_have_graphs(concurrency: int, sizes: list[int]) -> None:
    assert sides.captured(concurrency) == sizes


def test_a_model_with_weights_is_loaded_as_it_is() -> None:
    found = flags(STOCK_ONE, CPU)
    assert "load-format" not in found and "hf-overrides" not in found
    assert found["enforce-eager"] is True
    assert flags(STOCK_ONE)["load-format"] == "dummy"


def test_other_models_have_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr(models, "SCRATCH", tmp_path)
    models.write("tiny")
    file = models.folder("tiny") / "tokenizer.json"
    found = tokenizers.Tokenizer.from_file(str(file))
    assert found.get_vocab_size() == VOCABULARY
    assert found.decode([10, VOCABULARY - 1]) == f"t10 t{VOCABULARY - 1} "


# ------------------------------------------------------------------------- traffic


class Echo:
    """Answers with tokens that a prompt does not have, and remembers prompts."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.wanted: list[int] = []
        self.running = self.most = 0

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Reply:
        self.prompts.append(list(prompt))
        self.wanted.append(max_tokens)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return Reply((1,) * max_tokens, len(prompt), 0, 0.1)


def replay(scale: traffic.Scale, name: str, seed: int = 0) -> Echo:
    """What a workload asks."""
    echo = Echo()
    asyncio.run(traffic.workloads(scale)[name](echo.ask, random.Random(seed)))
    return echo


@pytest.mark.parametrize("scale", [traffic.GPU, traffic.SMALL])
def test_prompts_have_the_lengths_and_share_system_prompts_alone(
    scale: traffic.Scale,
) -> None:
    echo = replay(scale, PROMPTS)
    assert len(echo.prompts) == scale.prompts
    assert echo.most == scale.concurrency
    lengths = [len(prompt) for prompt in echo.prompts]
    assert scale.prompt[0] <= min(lengths) and max(lengths) <= scale.prompt[1]
    assert all(scale.answer[0] <= n <= scale.answer[1] for n in echo.wanted)
    systems = {tuple(prompt[: scale.system]) for prompt in echo.prompts}
    assert len(systems) == scale.systems
    further = {tuple(prompt[: scale.system + 8]) for prompt in echo.prompts}
    assert len(further) == scale.prompts


@pytest.mark.parametrize("scale", [traffic.GPU, traffic.SMALL])
def test_a_turn_contains_the_turns_before_it(scale: traffic.Scale) -> None:
    echo = replay(scale, CHATS)
    assert len(echo.prompts) == scale.chats * scale.turns
    longest = max(
        len(prompt) + wanted
        for prompt, wanted in zip(echo.prompts, echo.wanted, strict=True)
    )
    assert longest <= scale.longest
    by_chat: dict[tuple[int, ...], list[list[int]]] = {}
    for prompt in echo.prompts:
        by_chat.setdefault(tuple(prompt[: scale.system + 8]), []).append(prompt)
    assert len(by_chat) == scale.chats
    for turns in by_chat.values():
        for earlier, later in pairwise(turns):
            assert later[: len(earlier)] == earlier
            assert later[len(earlier)] == 1, "the answer comes next"


def test_rounds_differ_and_are_the_same_for_all_sides() -> None:
    for name in (PROMPTS, CHATS):
        first = replay(traffic.SMALL, name, 0).prompts
        assert sorted(replay(traffic.SMALL, name, 0).prompts) == sorted(first)
        assert replay(traffic.SMALL, name, 1).prompts[0][:8] != first[0][:8]


def test_the_bundled_model_is_asked_for_facts_that_it_was_told() -> None:
    for name in (PROMPTS, CHATS):
        for prompt in replay(traffic.SMALL, name).prompts:
            said = bytes(prompt[traffic.SMALL.system :]).decode()
            last = said.rindex(" The code for ")
            fact = said[last + 1 :]
            assert fact.endswith(" is ") and said.index(fact) < last
    dummies = replace(traffic.SMALL, speaks=False)
    tokens = {t for prompt in replay(dummies, PROMPTS).prompts for t in prompt}
    assert min(tokens) >= 10 and max(tokens) > 256


@pytest.mark.parametrize("count", [1, 20, 64, 70, 500])
def test_text_has_the_tokens_that_are_asked_for(count: int) -> None:
    assert len(traffic.text(random.Random(0), traffic.SMALL, count)) == count


# ----------------------------------------------------------------- a client's view


def question(
    tokens: int = 5,
    *,
    wanted: int = 5,
    ttft: float = 1.0,
    seconds: float = 3.0,
    error: str | None = None,
    prompt: str = "p",
) -> Question:
    """One of a prompt of 100 tokens, 40 of which were cached."""
    reply = Reply((7,) * tokens, 100, 40, ttft)
    return Question(prompt, wanted, Asked(reply, seconds), error)


def test_times_are_those_of_whole_answers() -> None:
    found = outcome(
        [
            question(ttft=1, seconds=3),
            question(ttft=3, seconds=11),
            question(3, ttft=9, seconds=99),
            question(0, ttft=0, seconds=0, error="ReadError: gone"),
        ],
        12.3456,
        answers=False,
    )
    assert found == {
        "requests": 4,
        "failed": 2,
        "prompt_tokens": 200,
        "cached_tokens": 80,
        "generated": 10,
        "wall_s": 12.346,
        "ttft_ms_p50": 2000,
        "ttft_ms_p95": 1000,
        "token_ms_p50": 1250,
        "token_ms_p95": 500,
        "request_ms_p50": 7000,
        "request_ms_p95": 3000,
        "errors": ["ReadError: gone"],
    }


def test_a_round_in_which_all_fails_has_no_times() -> None:
    found = outcome([question(0, error="x")], 1, answers=True)
    assert found["failed"] == 1 and found["answers"] == {}
    assert not any("_ms_" in name for name in found)


def test_answers_go_by_their_prompts() -> None:
    found = outcome(
        [question(prompt="a"), question(4, wanted=4, prompt="b"), question(1)],
        1,
        answers=True,
    )
    assert found["answers"] == {"a": digest([7] * 5), "b": digest([7] * 4)}
    assert digest([1, 23]) != digest([12, 3])


def streamed(*events: Any) -> httpx.AsyncClient:
    """A server that sends these events whatever it is asked."""

    async def body() -> AsyncIterator[bytes]:
        for event in events:
            await asyncio.sleep(0.01)
            text = event if isinstance(event, str) else json.dumps(event)
            yield f"data: {text}\n\n".encode()

    def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        assert asked["prompt"] == [3, 4] and asked["max_tokens"] == 3
        assert asked["temperature"] == 0 and asked["ignore_eos"] is True
        return httpx.Response(200, content=body())

    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


def asked(http: httpx.AsyncClient) -> tuple[Reply, Question]:
    """What a client makes of a server."""
    client = Client("http://server", http)
    reply = asyncio.run(client.ask([3, 4], 3))
    (found,) = client.questions
    assert found.asked.reply == reply and found.prompt == digest([3, 4])
    return reply, found


def test_the_first_token_is_the_first_that_comes() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 1}}
    reply, found = asked(
        streamed(
            {"choices": [{"token_ids": []}]},
            {"choices": [{"token_ids": [5]}]},
            {"choices": [{"token_ids": [6, 7]}]},
            {"choices": [], "usage": usage},
            "[DONE]",
        )
    )
    assert reply.tokens == (5, 6, 7)
    assert (reply.prompt_tokens, reply.cached_tokens) == (2, 1)
    assert 0.02 <= reply.ttft_s <= found.asked.seconds - 0.02
    assert found.is_whole


def test_answers_that_break_off_have_failed() -> None:
    _, found = asked(streamed({"choices": [{"token_ids": [5, 6]}]}, "[DONE]"))
    assert not found.is_whole and found.error is None
    _, found = asked(streamed({"error": {"message": "out of slots"}}))
    assert found.error is not None and "out of slots" in found.error
    down = httpx.MockTransport(lambda _: httpx.Response(502, text="no answer"))
    _, found = asked(httpx.AsyncClient(transport=down))
    assert found.error == "RuntimeError: 502: no answer"


# ------------------------------------------------------------------------- servers

METRICS = """
# HELP vllm:prompt_tokens_by_source_total by source
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 12.0
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 3.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 90.0
vllm:prompt_tokens_by_source_created{engine="0",source="local_compute"} 1.7e+09
vllm:nixl_bytes_transferred_bucket{le="1024.0"} 1.0
vllm:nixl_bytes_transferred_sum{engine="0"} 4096.0
hybrid_cache_peer_loaded_bytes_total 2048.0
hybrid_cache_peer_load_failures_total{reason="peer_gone"} 2.0
hybrid_cache_peer_loads_refused_total 1.0
hybrid_cache_peer_offers 5.0
vllm:generation_tokens_total{engine="0"} 77.0
"""


def test_counters_are_told_apart_by_source_and_by_reason() -> None:
    found = counters.read(METRICS)
    assert found == {
        "vllm:prompt_tokens_by_source{local_compute}": 15,
        "vllm:prompt_tokens_by_source{external_kv_transfer}": 90,
        "vllm:nixl_bytes_transferred_sum": 4096,
        "hybrid_cache_peer_loaded_bytes": 2048,
        "hybrid_cache_peer_load_failures{peer_gone}": 2,
        "hybrid_cache_peer_loads_refused": 1,
    }
    assert found[counters.COMPUTED] == 15
    assert counters.moved(found) == 4096 + 2048
    assert counters.failed(found) == 3


def test_counted_is_what_was_counted_meanwhile() -> None:
    assert counters.since({"a": 1, "b": 2}, {"a": 4, "b": 2, "c": 5}) == {
        "a": 3,
        "c": 5,
    }


def test_the_cause_stands_before_the_end_of_a_log() -> None:
    log = [
        "INFO starting",
        "AssertionError: no states",
        *(f"  frame {n}" for n in range(30)),
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    shown = last_words("\n".join(log), 3).splitlines()
    assert shown == [log[1], *log[-3:]]
    assert last_words("\n".join(log[:2]), 3).splitlines() == log[:2]
    assert last_words("") == ""


def server(tmp_path: Path, script: str) -> Server:
    """A process that runs a script."""
    command = [sys.executable, "-c", script]
    return Server(DECODE, command, {"SAID": "states are odd"}, 1, tmp_path / "log")


def test_a_server_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    script = "import os; raise SystemExit('ValueError: ' + os.environ['SAID'])"
    one = server(tmp_path, script)
    with pytest.raises(FailedError) as failure:
        one.wait_until_ready(time.monotonic() + 30)
    one.stop()
    said = "decode: it ended with status 1\nValueError: states are odd"
    assert str(failure.value) == said


def test_a_server_that_does_not_answer_in_time_is_given_up(tmp_path: Path) -> None:
    one = server(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(FailedError, match="did not answer in time"):
        one.wait_until_ready(time.monotonic() + 0.1)
    one.check()
    one.end()
    one.stop()
    one.stop()
    with pytest.raises(FailedError, match="status -15"):
        one.check()


# ------------------------------------------------------------------------- tables


def measured(seed: int, ttft: float, computed: int, **more: Any) -> dict[str, Any]:
    """A round of a pair."""
    return {
        "seed": seed,
        "requests": 2,
        "failed": 0,
        "ttft_ms_p50": ttft,
        "counters": {
            PREFILL: {counters.COMPUTED: 900.0},
            DECODE: {counters.COMPUTED: float(computed), counters.MOVED[0]: 3e6},
        },
    } | more


def test_rows_tell_both_servers_apart() -> None:
    one = {"seed": 0, "requests": 2, "failed": 1, "ttft_ms_p50": 50.0}
    results = {
        PLUGIN_PAIR: {"workloads": {PROMPTS: [measured(0, 10, 2), measured(1, 30, 2)]}},
        STOCK_PAIR: {"workloads": {PROMPTS: [measured(0, 20, 9)]}},
        STOCK_ONE: {
            "workloads": {
                PROMPTS: [one | {"counters": {BOTH: {counters.COMPUTED: 800.0}}}]
            }
        },
    }
    lines = table.table(results, [PROMPTS, CHATS]).splitlines()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in lines
        if line.startswith("| ")
    ]
    head, pair, stock, single = rows[:4]
    assert dict(zip(head, pair, strict=True)) == dict.fromkeys(head, "") | {
        "side": PLUGIN_PAIR,
        "TTFT p50 ms": "20.0",
        "computed by prefill": "900",
        "by the server that answers": "2",
        "moved MB": "3.0",
        "failed moves": "0",
        "failed requests": "0",
        "rounds": "2",
    }
    assert dict(zip(head, stock, strict=True))["by the server that answers"] == "9"
    alone = dict(zip(head, single, strict=True))
    assert alone["by the server that answers"] == "800"
    assert alone["computed by prefill"] == alone["moved MB"] == ""
    assert alone["failed requests"] == "1"
    # Ratios are those of rounds with equal contents.
    ratios = dict(zip(rows[4], rows[5], strict=True))
    assert ratios[f"{PLUGIN_PAIR}, to"] == STOCK_PAIR
    assert (ratios["TTFT p50"], ratios["moved bytes"]) == ("0.50x", "1.00x")
    assert f"## {CHATS}" not in "\n".join(lines)
    assert "answers to equal" not in "\n".join(lines), "dummies answer nothing"


def test_answers_are_compared_where_prompts_are_equal() -> None:
    base = [measured(0, 1, 1, answers={"a": "1", "b": "2", "c": "3"})]
    ours = [
        measured(0, 1, 1, answers={"a": "1", "b": "9", "d": "4"}),
        measured(1, 1, 1, answers={"a": "1"}),
    ]
    assert table.equal_answers(ours, base) == (1, 2)
    results = {
        PLUGIN_PAIR: {"workloads": {CHATS: ours}},
        STOCK_ONE: {"workloads": {CHATS: base}},
    }
    said = f"* {PLUGIN_PAIR}: 1 of 2 answers to equal prompts are those of {STOCK_ONE}"
    assert said in table.table(results, [CHATS])


def test_failures_are_told() -> None:
    failed = measured(0, 1, 1, failed=1, errors=["ReadError: gone"])
    results = {
        STOCK_PAIR: {"failed": True, "log": ["AssertionError: no states"]},
        PLUGIN_PAIR: {
            "died in": CHATS,
            "log": ["it hangs"],
            "workloads": {CHATS: [failed]},
        },
    }
    text = table.table(results, [CHATS])
    assert f"{STOCK_PAIR}: did not start.\n\n    AssertionError: no states" in text
    assert f"{PLUGIN_PAIR}: died in `{CHATS}`.\n\n    it hangs" in text
    assert f"{PLUGIN_PAIR}, {CHATS}: ReadError: gone" in text


# -------------------------------------------------------------------- command line


def parsed(monkeypatch: pytest.MonkeyPatch, *given: str) -> argparse.Namespace:
    """The command line as the benchmark reads it."""
    monkeypatch.setattr(sys, "argv", ["disaggregation", *given])
    return disaggregation.parse()


def test_what_the_command_line_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(
        monkeypatch,
        *("--concurrency=16", "--cache-mib=4096", "--model=nemotron-h-8b"),
        *("--variable", "UCX_TLS=tcp,self", "--flag=--seed=1"),
    )
    found = disaggregation.setup(args, "gpu")
    assert found.scale == replace(traffic.GPU, concurrency=16)
    assert (found.cache_mib, found.model) == (4096, "nemotron-h-8b")
    assert found.variables == {"UCX_TLS": "tcp,self"}
    assert found.flags == ("--seed=1",)
    on_cpu = disaggregation.setup(parsed(monkeypatch), "cpu")
    assert on_cpu.model == models.BUNDLED and on_cpu.scale == traffic.SMALL
    bundled = disaggregation.setup(parsed(monkeypatch, "--model=bundled"), "gpu")
    assert bundled.scale == traffic.SMALL and bundled.on_gpu
    tiny = disaggregation.setup(parsed(monkeypatch, "--model=tiny"), "cpu")
    assert tiny.scale == replace(traffic.SMALL, speaks=False)


def test_sides_that_are_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for option, given in (("--only", "SGLang"), ("--workloads", "crowd")):
        args = parsed(monkeypatch, "--on=cpu", option, given)
        with pytest.raises(SystemExit, match=f"{option}: {given!r} is none of"):
            disaggregation.Run(args)
