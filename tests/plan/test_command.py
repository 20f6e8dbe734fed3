# SPDX-License-Identifier: Apache-2.0
"""`hybrid-plugin plan`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_plugin.cli import main
from tests.oneliners import fails_with_one_sentence, run_quietly
from tests.plan.configs import GEMMA3, NEMOTRON_H, QWEN3_NEXT, write

QUIET = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def plan(path: Path, *flags: str) -> list[str]:
    return ["plan", "--model-config", str(path), "--gpu-memory", "80GB", *flags]


def test_text_shows_the_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, QWEN3_NEXT)
    assert main(plan(path, "--tensor-parallel", "4")) == 0
    text = capsys.readouterr().out
    for line in (
        "12 layers of full attention: 2 (K, V) x 1 heads x 256 x 2 bytes = 1,024",
        "GPU memory: 74.51 GiB x 0.9 = 67.06 GiB",
        "a sequence: 256 pages x 0.19 MiB + 1 slot x 9.42 MiB = 57.42 MiB",
        "a block: 16 x ceil(274,432 state bytes / (16 x 1,024 KV bytes)) = 272 tokens",
        "SGLang keeps states in another type: 18.42 MiB a sequence; --state-dtype",
        "states: 30.01 GiB x 0.9 / 1.9 / 18.42 MiB - 1 = 789 slots",
    ):
        assert line in text


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, QWEN3_NEXT)
    assert main(plan(path, "--weights", "20GiB", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cache_bytes"] == int(80e9 * 0.9) - 20 * 2**30
    schemes = [estimate["scheme"] for estimate in found["estimates"]]
    assert schemes == [
        "two pools",
        "two pools, SGLang's states",
        "vLLM, aligned blocks",
        "SGLang, static ratio",
    ]
    assert all(estimate["running"] > 0 for estimate in found["estimates"])


@pytest.mark.parametrize("field", [{}, {"mamba_ssm_dtype": "bfloat16"}])
def test_states_have_the_type_that_each_engine_chooses(
    field: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM the model's, SGLang 32 bits unless the configuration names one."""
    path = write(tmp_path, QWEN3_NEXT | field)
    found = []
    for flags in ((), ("--state-dtype", "float32")):
        assert main(plan(path, "--weights", "20GiB", "--json", *flags)) == 0
        found.append(json.loads(capsys.readouterr().out))
    chosen, wide = found
    own, there = (
        chosen[f"state_bytes_per_sequence{where}"] for where in ("", "_in_sglang")
    )
    assert (there == own) == bool(field)
    assert own < wide["state_bytes_per_sequence"]
    if not field:
        assert there == wide["state_bytes_per_sequence"]
        assert chosen["estimates"][-1] == wide["estimates"][-1]


def test_host_memory_is_one_more_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, QWEN3_NEXT)
    flags = ("--tensor-parallel", "4", "--host-memory", "64GiB", "--json")
    assert main(plan(path, *flags)) == 0
    host = json.loads(capsys.readouterr().out)["estimates"][-1]
    assert (host["scheme"], host["running"]) == ("host memory", 0)
    assert 0.95 * (64 << 30) < host["cached_sequences"] * 57.42 * 2**20 <= 64 << 30


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--weights", "20GiB", "--host-memory", "1MB"), "--host-memory: "),
        (("--weights", "20GiB", "--host-memory", "some"), "'some' is no size"),
        (("--weights", "90GB"), "leave nothing for the cache"),
        (("--weights", "many"), "'many' is no size"),
        (("--gpu-memory", "-1"), "expected one argument|is no size"),
        (("--gpu-memory", "0"), "leaves nothing to divide"),
        (("--page-size", "0"), "--page-size must lie between"),
        (("--sequence-tokens", "x"), "invalid int value: 'x'"),
        (("--tensor-parallel", "0"), "--tensor-parallel must lie between"),
        (("--gpu-utilization", "nan"), "--gpu-utilization must be more than 0"),
        (("--kv-dtype", "int3"), "'int3' is unknown"),
    ],
)
def test_options_that_make_no_sense(
    tmp_path: Path, flags: tuple[str, ...], sentence: str
) -> None:
    fails_with_one_sentence(plan(write(tmp_path, QWEN3_NEXT), *flags), sentence)


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    fails_with_one_sentence(plan(tmp_path / "none.json"), "Cannot read the model")
    fails_with_one_sentence(plan(tmp_path), "Cannot read the model")
    fails_with_one_sentence(plan(Path("a\0b")), "Cannot read the model")


@QUIET
@given(content=st.binary(max_size=200))
def test_random_bytes_as_a_configuration(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    fails_with_one_sentence(plan(path), "")


NUMBERS = st.integers() | st.floats() | st.booleans() | st.none()
VALUES = NUMBERS | st.text(max_size=5) | st.lists(NUMBERS | st.text(), max_size=4)


@QUIET
@given(
    config=st.sampled_from([QWEN3_NEXT, NEMOTRON_H, GEMMA3["text_config"]]),
    changes=st.dictionaries(
        st.sampled_from(sorted({*QWEN3_NEXT, *NEMOTRON_H, *GEMMA3["text_config"]})),
        VALUES | st.dictionaries(st.text(max_size=3), VALUES, max_size=2),
        min_size=1,
        max_size=4,
    ),
)
def test_random_fields(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Numbers or one sentence, never a traceback."""
    status, _, error = run_quietly(plan(write(tmp_path, {**config, **changes})))
    assert status == 0 or len(error.splitlines()) == 1


@QUIET
@given(
    flag=st.sampled_from(
        ["--gpu-memory", "--weights", "--gpu-utilization", "--page-size", "--kv-dtype"]
    ),
    value=st.text(max_size=12),
)
def test_random_options(tmp_path: Path, flag: str, value: str) -> None:
    flags = plan(write(tmp_path, QWEN3_NEXT), f"{flag}={value}")
    status, _, error = run_quietly(flags)
    assert status == 0 or len(error.splitlines()) == 1
