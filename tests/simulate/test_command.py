# SPDX-License-Identifier: Apache-2.0
"""`hybrid-plugin simulate`, as a user calls it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_plugin.tools.plan.model import load_shape
from tests.oneliners import fails_with_one_sentence, run_quietly
from tests.plan.configs import GEMMA3, QWEN3_NEXT, write
from tests.simulate.traces import write_mooncake

QUIET = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TRACE_VARIABLE = "HYBRID_MOONCAKE_TRACE"
SMALL = ("--requests", "60", "--json")
IN_ORDER = ("--concurrency", "1", "--prompts-only")
"""One prompt after the other, whatever times a trace has."""


def simulate(*flags: str) -> dict[str, Any]:
    status, out, error = run_quietly(["simulate", *flags])
    assert (status, error) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


class TestMooncake:
    PROMPTS = ((1, 2, 3), (4, 5), (1, 2, 6), (4, 7), (1, 2, 3))

    def test_plain_lru_over_whole_blocks(self, tmp_path: Path) -> None:
        """Room for three blocks: 1 stays throughout, the others make way."""
        trace = write_mooncake(tmp_path / "t.jsonl", self.PROMPTS)
        flags = ("--format", "mooncake", "--kv-only", "--policy", "lru", "--json")
        found = simulate(str(trace), *flags, *IN_ORDER, "--kv-tokens", str(3 * 512))
        assert found["capacity"] == {"page_size": 512, "pages": 3, "slots": 0}
        # Of the third prompt 1, of the fourth nothing, of the fifth 1.
        hits = 1 + 0 + 1
        assert found["hit_tokens"] == hits * 512
        assert found["queried_tokens"] == 13 * 512
        assert found["recomputed_tokens"] == (13 - hits) * 512
        assert found["hit_rate"] == hits / 13

    def test_without_a_limit(self, tmp_path: Path) -> None:
        trace = write_mooncake(tmp_path / "t.jsonl", self.PROMPTS)
        found = simulate(str(trace), "--kv-only", *IN_ORDER, "--json")
        # Of the last one the last block too, but never a whole prompt.
        assert found["hit_tokens"] == (2 + 1 + 2) * 512
        assert found["evictions"] == 0

    def test_the_last_half(self, tmp_path: Path) -> None:
        trace = write_mooncake(tmp_path / "t.jsonl", self.PROMPTS)
        flags = ("--kv-only", "--measure", "last-half", "--json")
        found = simulate(str(trace), *flags, *IN_ORDER)
        assert (found["requests"], found["measured_requests"]) == (5, 3)
        assert found["queried_tokens"] == 8 * 512

    @pytest.mark.skipif(
        TRACE_VARIABLE not in os.environ, reason=f"{TRACE_VARIABLE} names no trace"
    )
    @pytest.mark.parametrize(
        ("room", "percent"),
        [
            (("--kv-tokens", "1000000"), 22.2),
            (("--kv-tokens", "4000000"), 54.8),
            (("--kv-tokens", "16000000"), 84.6),
            ((), 86.4),
        ],
    )
    def test_an_independent_tools_figures(
        self, room: tuple[str, ...], percent: float
    ) -> None:
        """On Mooncake's published synthetic trace."""
        flags = ("--format", "mooncake", "--kv-only", "--policy", "lru")
        found = simulate(
            os.environ[TRACE_VARIABLE],
            *flags,
            *IN_ORDER,
            *room,
            "--measure",
            "last-half",
            "--json",
        )
        assert 100 * found["hit_rate"] == pytest.approx(percent, abs=0.3)


class TestOptions:
    def test_the_same_seed_gives_the_same(self) -> None:
        flags = ("--kv-tokens", "60000", "--state-slots", "20", *SMALL)
        one, two, other = (simulate(*flags, "--seed", seed) for seed in "112")
        for found in (one, two, other):
            del found["seconds"]
        assert one == two != other

    @pytest.mark.parametrize("policy", ["lru", "expected-saving"])
    def test_policies(self, policy: str, tmp_path: Path) -> None:
        config = str(write(tmp_path, QWEN3_NEXT))
        memory = ("--model-config", config, "--gpu-memory", "4GB", "--weights", "1GB")
        found = simulate(*memory, "--policy", policy, *SMALL)
        assert found["policy"] == policy
        assert 0 < found["hit_rate"] < 1
        assert found["peak_memory_bytes"] <= int(4e9 * 0.9) - 10**9
        assert found["evictions"] > 0

    def test_the_plugins_policy_is_the_default(self) -> None:
        assert simulate(*SMALL)["policy"] == "expected-saving"

    def test_a_model_with_windows(self, tmp_path: Path) -> None:
        config = str(write(tmp_path, GEMMA3))
        memory = ("--model-config", config, "--gpu-memory", "80GB", "--weights", "50GB")
        assert simulate(*memory, *SMALL)["hit_rate"] > 0.5

    def test_options_of_an_engine(self) -> None:
        fine = simulate(*SMALL)
        coarse = simulate("--hybrid-config", json.dumps({"page_size": 512}), *SMALL)
        assert coarse["hit_tokens"] != fine["hit_tokens"]

    def test_options_divide_the_memory(self, tmp_path: Path) -> None:
        config = write(tmp_path, QWEN3_NEXT)
        layout = load_shape(config).layout(16)
        budget = int(4e9 * 0.9) - 10**9
        model = ("--model-config", str(config), "--gpu-memory", "4GB")
        flags = (*model, "--weights", "1GB", *SMALL)

        def run(**options: object) -> dict[str, Any]:
            return simulate(*flags, "--hybrid-config", json.dumps(options))

        ratios = (0.05, 0.1, 0.2, 0.5)
        found = {ratio: run(state_memory_ratio=ratio) for ratio in ratios}
        assert {r: found[r]["capacity"]["slots"] for r in ratios} == {
            ratio: int(budget * ratio) // layout.slot_bytes - 1 for ratio in ratios
        }
        assert len({found[ratio]["hit_tokens"] for ratio in ratios}) == len(ratios)
        fixed = simulate(*flags, "--no-elastic")
        assert fixed["memory_moves"] is None
        both = (simulate(*flags), simulate(*flags, "--elastic"))
        for elastic in both:
            del elastic["seconds"]
            assert elastic["memory_moves"] > 0
            assert elastic["capacity"]["slots"] > fixed["capacity"]["slots"]
        assert both[0] == both[1]

    def test_the_bound(self) -> None:
        flags = ("--kv-tokens", "200000", "--state-slots", "20")
        found = simulate(*flags, "--bound", *SMALL)
        assert found["hit_tokens"] <= found["bound_hit_tokens"]
        assert found["gap"] == 1 - found["hit_tokens"] / found["bound_hit_tokens"]

    def test_text(self) -> None:
        status, out, _ = run_quietly(["simulate", "--requests", "40"])
        assert status == 0
        for word in ("hit rate", "recomputed tokens", "evictions", "peak"):
            assert word in out

    def test_a_picture(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        picture = tmp_path / "run.png"
        simulate("--plot", str(picture), *SMALL)
        assert picture.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            (("--kv-tokens", "0"), "--kv-tokens must lie between 1 and"),
            (("--kv-tokens", "5", "--kv-only"), "KV pool of 0 pages"),
            (("--kv-tokens", "5000"), "say --kv-only .* or --state-slots"),
            (("--state-slots", "5"), "--state-slots goes with --kv-tokens"),
            (("--gpu-memory", "80GB"), "--gpu-memory needs --model-config"),
            (("--kv-tokens", "9", "--gpu-memory", "1GB"), "give one"),
            (("--seed", "-3"), "--seed must not be negative"),
            (("--policy", "magic"), "invalid choice: 'magic'"),
            (("--format", "tokens"), "--format tokens reads a trace: name its file"),
            (("nowhere.jsonl",), "Cannot read the trace 'nowhere.jsonl'"),
            (("a\0b",), "Cannot read the trace"),
            (("--hybrid-config", "{"), "--hybrid-config takes JSON: "),
            (("--hybrid-config", "[]"), "--hybrid-config takes a JSON object"),
            (("--hybrid-config", '{"x": 1}'), "Unknown hybrid_plugin option 'x'"),
            (("--plot", "picture.jpg"), "does not end in .png"),
            (("--plot", "no/such/folder/x.png"), "cannot write"),
        ],
    )
    def test_that_make_no_sense(self, flags: tuple[str, ...], sentence: str) -> None:
        fails_with_one_sentence(["simulate", *flags], sentence)

    def test_a_stream_is_not_read(self, tmp_path: Path) -> None:
        trace = str(write_mooncake(tmp_path / "t.jsonl", [(1,)]))
        flags = ["simulate", trace, "--format", "agentic"]
        fails_with_one_sentence(flags, "The agentic stream is generated")


class TestRandomBytes:
    @QUIET
    @given(
        content=st.binary(max_size=300),
        form=st.sampled_from(["mooncake", "tokens", "weka"]),
    )
    def test_as_a_trace(self, tmp_path: Path, content: bytes, form: str) -> None:
        path = tmp_path / "trace"
        path.write_bytes(content)
        flags = ["simulate", str(path), "--format", form]
        fails_with_one_sentence(flags, "")

    @QUIET
    @given(
        value=st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=8,
        ),
        form=st.sampled_from(["mooncake", "tokens", "weka"]),
    )
    def test_as_json(self, tmp_path: Path, value: object, form: str) -> None:
        """A list of whole numbers is a trace; anything else is refused."""
        path = tmp_path / "trace"
        path.write_text(json.dumps(value))
        status, _, error = run_quietly(["simulate", str(path), "--format", form])
        assert status == 0 or len(error.splitlines()) == 1

    @QUIET
    @given(content=st.binary(max_size=100))
    def test_as_a_configuration(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "config.json"
        path.write_bytes(content)
        flags = ["--model-config", str(path), "--gpu-memory", "80GB"]
        fails_with_one_sentence(["simulate", *flags, *SMALL], "")

    @QUIET
    @given(
        flag=st.sampled_from(
            [
                *("kv-tokens", "state-slots", "page-size", "seed", "policy"),
                *("measure", "format", "chunk", "concurrency", "hybrid-config"),
                *("max-running", "rate", "slo-ttft", "slo-tpot", "cost-model"),
                *("device-tflops", "device-bandwidth", "calibrate"),
                *("sessions", "skip-sessions", "session-gap"),
            ]
        ),
        value=st.text(max_size=8),
    )
    def test_as_an_option(self, flag: str, value: str) -> None:
        flags = ["simulate", "--requests", "3", f"--{flag}={value}"]
        status, _, error = run_quietly(flags)
        assert status == 0 or len(error.splitlines()) == 1
