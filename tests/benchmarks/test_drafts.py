# SPDX-License-Identifier: Apache-2.0
"""Shapes, sides, traffic and tables of the benchmark of drafts in an engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.drafts import served, shapes, sides, table, traffic
from benchmarks.drafts.served import Verified
from benchmarks.drafts.sglang_pools import Sequence as Running
from benchmarks.drafts.sglang_pools import pools
from benchmarks.drafts.sides import CACHED, ELASTIC, FIXED, PLAIN, UNCACHED, Setup
from benchmarks.passes.log import Pass
from benchmarks.prefix_models import slot_bytes, token_bytes
from benchmarks.prefix_workloads import Reply
from hybrid_plugin.config import HybridConfig

MIB = 1 << 20


def setup(**changes: Any) -> Setup:
    """One on a GPU."""
    return Setup(
        **{
            "model": "qwen3.5-4b",
            "cache_mib": 16 << 10,
            "scale": traffic.GPU,
            "on_gpu": True,
            "acceptance": 2.5,
            **changes,
        }
    )


@pytest.fixture(autouse=True)
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both engines find the model."""
    monkeypatch.setattr(sides, "SCRATCH", dict.fromkeys(sides.ENGINES, tmp_path / "m"))
    shapes.write("qwen3.5-4b", tmp_path / "m")


# -------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("name", shapes.MTP)
def test_a_layer_of_drafts_is_written_and_counted(name: str, tmp_path: Path) -> None:
    shapes.write(name, tmp_path)
    where = shapes.folder(name, tmp_path)
    config = json.loads((where / "config.json").read_text())
    assert config.items() >= shapes.MTP[name].items()
    state, token = shapes.bytes_of(where, "float32")
    assert state == slot_bytes(name)
    attention = {"qwen3.5-4b": 8, "nemotron-h-8b": 4, "qwen3-next": 12, "tiny": 2}[name]
    assert token == token_bytes(name) * (attention + 1) / attention


def test_the_bundled_model_stays_where_it_is(tmp_path: Path) -> None:
    shapes.write(shapes.BUNDLED, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert (shapes.folder(shapes.BUNDLED, tmp_path) / "mtp.safetensors").exists()
    assert shapes.vocabulary(shapes.BUNDLED) == 264
    assert shapes.vocabulary("tiny") == 32768


# --------------------------------------------------------------------------- sides


@pytest.mark.parametrize("engine", sides.ENGINES)
def test_the_quick_sides_are_known_and_all_kinds_are_there(engine: str) -> None:
    known = sides.configurations(engine)
    assert set(sides.QUICK) <= set(known)
    assert known[CACHED].drafts and known[CACHED].cache
    assert known[UNCACHED].drafts and not known[UNCACHED].cache
    assert not known[PLAIN].drafts
    for name, one in known.items():
        assert name.startswith(sides.PLUGIN) == (one.options is not None)


@pytest.mark.parametrize("engine", sides.ENGINES)
def test_the_plugin_knows_the_options_of_its_sides(engine: str) -> None:
    for one in sides.configurations(engine).values():
        if one.options is not None:
            found = HybridConfig.from_mapping(dict(one.options))
            assert found.is_elastic == one.options["elastic"]
    replay = sides.configurations(engine)[sides.REPLAY].options
    assert replay is not None and replay["draft_states"] == "replay"


def test_vllm_forces_acceptance_only_where_it_drafts() -> None:
    known = sides.configurations("vllm")
    for name, one in known.items():
        found = sides.arguments("vllm", setup(), one)
        if not one.drafts:
            assert "speculative_config" not in found, name
            continue
        assert found["speculative_config"] == {
            "method": "mtp",
            "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.5,
        }
    free = sides.arguments("vllm", setup(acceptance=None), known[ELASTIC])
    assert set(free["speculative_config"]) == {"method", "num_speculative_tokens"}


def test_sglang_forces_acceptance_only_where_it_drafts() -> None:
    for name, one in sides.configurations("sglang").items():
        found = sides.arguments("sglang", setup(), one)
        variables = sides.variables("sglang", setup(), one, 0)
        assert ("speculative_algorithm" in found) == one.drafts, name
        assert ("SGLANG_SIMULATE_ACC_LEN" in variables) == one.drafts, name
        if one.drafts:
            assert found["speculative_num_draft_tokens"] == 4


def test_all_sides_have_equal_bytes() -> None:
    for name, one in sides.configurations("vllm").items():
        found = sides.arguments("vllm", setup(), one)
        assert found["kv_cache_memory_bytes"] == 16 << 30, name
    for name, one in sides.configurations("sglang").items():
        found = sides.arguments("sglang", setup(), one)
        if one.options is not None:
            told = json.loads(
                sides.variables("sglang", setup(), one, 0)["HYBRID_CONFIG"]
            )
            assert told["gpu_memory_budget"] == 16 << 30, name
            assert "max_total_tokens" not in found
            continue
        state, token = slot_bytes("qwen3.5-4b", 2), 36_864
        verified = 4 if one.drafts else 0
        taken = (found["max_mamba_cache_size"] + 1) * state
        taken += (found["max_running_requests"] + 1) * verified * state
        taken += found["max_total_tokens"] * token
        assert 0 <= (16 << 30) - taken < state + token, name


def test_only_fixed_pools_are_told_how_many_may_run() -> None:
    known = sides.configurations("sglang")
    fixed = sides.arguments("sglang", setup(), known[FIXED])["max_running_requests"]
    elastic = sides.arguments("sglang", setup(), known[ELASTIC])["max_running_requests"]
    assert elastic == 128 > fixed > 32


numbers = st.integers(1, 1 << 20)


@settings(deadline=None)
@given(
    st.builds(
        Running,
        state_bytes=numbers,
        token_bytes=st.integers(1, 1 << 12),
        tokens=st.integers(1, 4096),
        slots=st.integers(1, 5),
        verified=st.integers(0, 8),
    ),
    st.integers(1 << 10, 1 << 34),
    st.integers(1, 256),
)
def test_pools_fit_and_hold_what_runs(one: Running, budget: int, most: int) -> None:
    least = one.state_bytes + 2 * one.row_bytes + one.pool_bytes
    if budget < least:
        with pytest.raises(ValueError, match="do not hold one sequence"):
            pools(budget, one, most)
        return
    found = pools(budget, one, most)
    taken = (found.slots + 1) * one.state_bytes + found.tokens * one.token_bytes
    taken += (found.running + 1) * one.row_bytes
    assert taken <= budget
    assert 1 <= found.running <= most
    assert found.slots >= one.slots * found.running
    assert found.tokens >= one.tokens * found.running
    if found.running < most:
        assert taken + one.row_bytes + one.pool_bytes > budget


# ------------------------------------------------------------------------- traffic


SMALL = replace(traffic.GPU, crowd=12, prefix=100, decoding=(1, 32))


def asked(name: str, seed: int = 0) -> list[tuple[tuple[int, ...], int]]:
    """What a workload asks of a model that always says 7."""
    found: list[tuple[tuple[int, ...], int]] = []

    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        found.append((tuple(prompt), max_tokens))
        await asyncio.sleep(0)
        return Reply((7,) * max_tokens, len(prompt), 0, 0.0)

    run = traffic.workloads(SMALL)[name]
    asyncio.run(run(ask, random.Random(seed)))
    return found


@pytest.mark.parametrize("name", traffic.workloads(SMALL))
def test_no_sequence_is_longer_than_engines_allow(name: str) -> None:
    found = asked(name)
    assert found == asked(name) and found != asked(name, seed=1)
    assert max(len(prompt) + answer for prompt, answer in found) <= SMALL.longest


def test_turns_contain_what_was_said() -> None:
    scale, found = SMALL, asked(traffic.CHATS)
    assert len(found) == scale.chats * scale.turns
    by_start: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for prompt, _ in found:
        by_start.setdefault(prompt[: scale.opening], []).append(prompt)
    assert len(by_start) == scale.chats
    for turns in by_start.values():
        for before, after in pairwise(turns):
            assert after[: len(before)] == before
            assert after[len(before) :][: scale.answer] == (7,) * scale.answer


def test_steady_sequences_share_nothing() -> None:
    found = asked(f"{traffic.DECODE} 32")
    assert len(found) == 32 and len({prompt[:4] for prompt, _ in found}) == 32
    assert traffic.decoding(f"{traffic.DECODE} 32") == 32
    assert traffic.decoding(traffic.CROWD) is None


def test_a_model_of_few_tokens_gets_others_and_hears_its_own() -> None:
    heard: list[list[int]] = []

    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        heard.append(list(prompt))
        return Reply((263,), len(prompt), 0, 0.0)

    known = traffic.spelled_with(264, ask)
    reply = asyncio.run(known([5, 263, 264, 1000], 1))
    asyncio.run(known([*reply.tokens], 1))
    assert heard == [[5, 263, 0, 208], [263]]


# ------------------------------------------------------------------ what is told


def test_acceptance_is_of_what_was_verified_meanwhile() -> None:
    later, before = Verified(30, 75), Verified(10, 25)
    assert later.since(before) == Verified(20, 50)
    assert later.since(before).length == 2.5
    assert before.since(before).length is None


def test_sglang_counts_answers_that_were_verified() -> None:
    metas = [
        {"cached_tokens": 0, "completion_tokens": 21, "spec_verify_ct": 8},
        {"cached_tokens": 0, "completion_tokens": 1},
    ]
    steps = iter(metas)

    class Engine:
        async def async_generate(self, **request: Any) -> AsyncIterator[Any]:
            async def stream(meta: Any) -> AsyncIterator[Any]:
                yield {"output_ids": [1], "meta_info": {"cached_tokens": 0}}
                yield {"output_ids": [1, 2], "meta_info": meta}

            return stream(next(steps))

    counters = served.SglangCounters(SimpleNamespace(engine=Engine()))  # type: ignore[arg-type]
    for _ in metas:
        asyncio.run(counters.ask([1, 2], 2))
    assert counters.verified() == Verified(8, 20)


def test_passes_tell_how_many_ran_and_how_long_a_step_took() -> None:
    passes = [
        Pass(0.0, 0.1, 1.0, 50, 3, 1),  # a prefill beside a decode
        Pass(1.0, 1.1, 1.2, 0, 0, 4),
        Pass(1.2, 1.3, 1.6, 0, 0, 4),
        Pass(1.6, 1.7, 1.7, 0, 0, 2),
    ]
    found = served.of_passes(passes, 4)
    assert found["at_once"] == 4 and found["steps"] == 2
    assert found["step_ms"] == pytest.approx(300)
    assert found["decoding"] == pytest.approx(
        (1 + 4 * 0.2 + 4 * 0.4 + 2 * 0.1) / 1.7, 0.01
    )
    assert served.of_passes(passes, None)["step_ms"] == pytest.approx(200)
    assert served.of_passes(passes, 8)["step_ms"] == 0
    assert served.of_passes([], None)["at_once"] == 0


def test_tokens_a_second_are_of_all_answers() -> None:
    replies = [
        Reply((1, 2, 3), 9, 0, 0.1),
        Reply((), 9, 0, 0.1),
        Reply((4,), 9, 0, 0.1),
    ]
    assert served.of_answers(replies, 0.5) == {"generated": 4, "tokens_per_s": 8.0}


# -------------------------------------------------------------------------- tables


def told(seed: int, tokens: float, **more: Any) -> dict[str, Any]:
    """One round."""
    return {
        "seed": seed,
        "failed": 0,
        "prompt_tokens": 200,
        "cached_tokens": 50,
        "tokens_per_s": tokens,
        "ttft_ms_p50": 10.0,
        "ttft_ms_p95": 20.0,
        "request_ms_mean": 100.0,
        "at_once": 4,
        "decoding": 3.5,
        "acceptance": 2.5,
        "step_ms": 10.0,
        **more,
    }


def results() -> dict[str, Any]:
    """Two stock sides, one of which died, and the plugin."""
    crowd, steady = traffic.CROWD, "decode 4"
    return {
        CACHED: {"workloads": {crowd: [told(0, 100), told(1, 120)]}, "died in": steady},
        UNCACHED: {
            "workloads": {
                crowd: [told(0, 80), told(1, 200)],
                steady: [told(0, 50, step_ms=20.0)],
            }
        },
        ELASTIC: {
            "workloads": {
                crowd: [told(0, 200), told(1, 300)],
                steady: [told(0, 90, failed=1)],
            }
        },
        FIXED: {"failed": True},
    }


def row(text: str, *begins: str) -> list[str]:
    """Cells of the row that begins so, the first of them."""
    head = "| " + " | ".join(begins) + " | "
    line = next(line for line in text.splitlines() if line.startswith(head))
    return [
        cell.strip() for cell in line.removeprefix(head).removesuffix(" |").split(" | ")
    ]


def test_the_better_stock_side_has_the_better_median() -> None:
    column = {one.name: one for one in table.COLUMNS}
    found = results()
    # Medians are 110 and 140 tokens a second.
    rate = column["tokens/s"]
    assert table.better_stock(found, traffic.CROWD, rate) == UNCACHED
    found[UNCACHED]["workloads"][traffic.CROWD][0]["ttft_ms_p50"] = 90.0
    ttft = column["TTFT p50 ms"]
    assert table.better_stock(found, traffic.CROWD, ttft) == CACHED
    assert table.better_stock({ELASTIC: found[ELASTIC]}, traffic.CROWD, rate) is None


def test_ratios_are_medians_over_equal_rounds() -> None:
    text = table.table(results(), [traffic.CROWD, "decode 4"])
    # To the first 2.0 and 2.5, to the second 2.5 and 1.5.
    assert row(text, traffic.CROWD, ELASTIC, "tokens/s") == ["2.25x", "2.00x", "2.00x"]
    steady = row(text, "decode 4", ELASTIC, "steady tokens/s")
    assert steady == ["", "2.00x", "2.00x"]


def test_steady_tokens_come_from_a_step_of_all() -> None:
    assert table.steady(told(0, 1)) == 1000 * 4 * 2.5 / 10
    assert table.steady(told(0, 1, acceptance=None)) == 1000 * 4 / 10
    assert table.steady(told(0, 1, step_ms=0.0)) == 0


def test_the_table_has_all_sides_and_says_what_failed() -> None:
    text = table.table(results(), [traffic.CROWD, "decode 4", traffic.CHATS])
    assert row(text, traffic.CROWD, CACHED)[:5] == ["110", "10", "20", "100", "25.0"]
    assert row(text, "decode 4", ELASTIC)[-1] == "1000"
    assert f"{FIXED}: its engine did not start." in text
    assert f"{CACHED}: its engine died in `decode 4`." in text
    assert f"{ELASTIC}, decode 4: 1 requests failed." in text
    assert traffic.CHATS not in text
