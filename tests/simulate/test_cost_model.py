# SPDX-License-Identifier: Apache-2.0
"""Costs: their file, their estimate from a device, and their fit to measured times."""

from __future__ import annotations

import json
from dataclasses import astuple
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.config import ConfigError
from hybrid_plugin.tools.plan.model import load_shape
from hybrid_plugin.tools.simulate.calibration import Equation, fit, non_negative
from hybrid_plugin.tools.simulate.cost_model import (
    COEFFICIENTS,
    CostModel,
    Costs,
    Work,
)
from hybrid_plugin.tools.simulate.known_costs import DEFAULT_COSTS, estimate
from tests.oneliners import fails_with_one_sentence
from tests.plan.configs import QWEN3_NEXT, write
from tests.simulate.test_command import simulate

TRUE = Costs(0.03, 0.01, 1e-4, 2e-10, 3e-4, 9e-9, 0.002)
STREAM = ("--requests", "150", "--concurrency", "12", "--json")


def test_work_adds_up_and_time_with_it() -> None:
    one, two = Work(1, 1, 100, 5000, 3, 900, 1), Work(2, 0, 0, 0, 8, 2000, 0)
    assert astuple(one + two) == (3, 1, 100, 5000, 11, 2900, 1)
    assert one + two - two == one
    assert one * 2 == one + one
    assert TRUE.seconds(one + two) == pytest.approx(
        TRUE.seconds(one) + TRUE.seconds(two)
    )
    assert TRUE.seconds(Work(2, 1, 10)) == pytest.approx(2 * 0.03 + 0.01 + 1e-3)


def test_a_file_of_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    DEFAULT_COSTS.write(path)
    assert CostModel.load(path) == DEFAULT_COSTS
    assert set(json.loads(path.read_text())["costs"]) == set(COEFFICIENTS)
    with pytest.raises(ConfigError, match="Cannot write"):
        DEFAULT_COSTS.write(tmp_path / "no" / "folder.json")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"costs": {}}, "costs must be an object of the numbers"),
        ({"costs": 3}, "costs must be an object of the numbers"),
        ({"costs": dict.fromkeys(COEFFICIENTS, "1")}, "must be an object of the"),
        ({"costs": dict.fromkeys(COEFFICIENTS, -1)}, "pass_s must be seconds"),
        ({"costs": dict.fromkeys(COEFFICIENTS, float("nan"))}, "must be seconds"),
        ({"costs": dict.fromkeys(COEFFICIENTS, 0)}, "no time passes"),
        ({"machine": None}, "must say machine, model, source and costs"),
        ({"more": 1}, "must say machine, model, source and costs"),
    ],
)
def test_other_files_are_refused(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    DEFAULT_COSTS.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    fails_with_one_sentence(["simulate", "--cost-model", str(path)], sentence)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--cost-model", "nowhere"), "Cannot read the cost model 'nowhere'"),
        (("--device-tflops", "9"), "go together"),
        (("--rate", "0"), "--rate must be more than 0"),
        (("--slo-ttft", "nan"), "--slo-ttft must be more than 0"),
        (("--max-running", "0"), "--max-running must lie between 1 and"),
        (("--calibrate", "nowhere"), "Cannot read the measured run 'nowhere'"),
    ],
)
def test_refused(flags: tuple[str, ...], sentence: str) -> None:
    fails_with_one_sentence(["simulate", *flags, "--requests", "3"], sentence)


def test_a_device_that_only_computes_and_reads(tmp_path: Path) -> None:
    shape = load_shape(write(tmp_path, QWEN3_NEXT))
    costs = estimate(shape, flops=1e15, bandwidth=4e12).costs
    assert costs.kv_token_s == shape.token_bytes / 4e12
    assert costs.decode_sequence_s == 2 * shape.state_bytes / 4e12
    # What the shape says of a prompt's cost is spent at full speed.
    pairs = 1000**2 / 2
    spent = 1000 * costs.prefill_token_s + pairs * costs.prefill_pair_s
    assert spent == pytest.approx(shape.prefill_flops(1000) / 1e15)
    faster = estimate(shape, flops=2e15, bandwidth=4e12).costs
    assert faster.prefill_token_s == costs.prefill_token_s / 2


def test_costs_of_a_device_reach_the_outcome(tmp_path: Path) -> None:
    config = ("--model-config", str(write(tmp_path, QWEN3_NEXT)))
    device = ("--device-tflops", "500", "--device-bandwidth", "4")
    found = simulate(*config, *device, *STREAM)
    assert "a device of 500 TFLOP/s and 4 TB/s" in found["costs"]
    assert found["times"]["wall"] < simulate(*config, *STREAM)["times"]["wall"]


class TestFit:
    @settings(max_examples=100, deadline=None)
    @given(seed=st.integers(0, 10**6))
    def test_no_point_of_a_grid_is_better(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        left, right = rng.normal(size=(6, 3)), rng.normal(size=6)
        found = non_negative(left, right)
        assert found.min() >= 0
        least = np.sum((left @ found - right) ** 2)
        for step in product((-0.05, 0.0, 0.05), repeat=3):
            near = np.maximum(found + step, 0)
            assert np.sum((left @ near - right) ** 2) >= least - 1e-12

    def test_what_is_measured_is_found(self) -> None:
        """With equations that tell all costs apart, from a start that is far off."""
        rng = np.random.default_rng(1)
        equations = []
        for _ in range(300):
            work = Work(*(rng.uniform(0, 1, 7) / np.array(astuple(TRUE))).tolist())
            seconds = TRUE.seconds(work)
            equations.append(Equation("x", work, seconds, 0.0))
        start = Costs(*(np.array(astuple(TRUE)) * 3).tolist())
        found = fit(equations, start)
        assert astuple(found) == pytest.approx(astuple(TRUE), rel=0.02)

    def test_what_is_not_measured_keeps_its_proportion(self) -> None:
        decodes = [Equation("x", Work(passes=n), 0.004 * n, 0.0) for n in (5, 9, 20)]
        found = fit(decodes, TRUE)
        speed = 0.004 / TRUE.pass_s
        scaled = [speed * cost for cost in astuple(TRUE)]
        assert astuple(found) == pytest.approx(scaled)


def test_a_measured_run_is_reproduced(tmp_path: Path) -> None:
    """Costs fitted to the times of one run give the times of another."""
    true, saved = tmp_path / "true.json", tmp_path / "fitted.json"
    CostModel("a machine", "a model", "made up", TRUE).write(true)
    times = simulate(*STREAM, "--cost-model", str(true))["times"]
    measured = tmp_path / "measured.json"
    measured.write_text(
        json.dumps(
            {
                "machine": "here",
                "model": "this",
                "wall_s": times["wall"],
                "ttft_s": times["ttft"],
                "tpot_s": times["tpot"],
            }
        )
    )
    flags = ("--calibrate", str(measured), "--save-costs", str(saved))
    found = simulate(*STREAM, *flags)
    assert len(found["fitted"]) == 1 + 3 + 3
    assert found["costs"] == "this on here (fitted to one measured run)"
    assert found["times"]["wall"] == pytest.approx(times["wall"], rel=0.1)
    assert found["times"]["ttft"]["p95"] == pytest.approx(times["ttft"]["p95"], rel=0.2)
    other = ("--requests", "150", "--concurrency", "3", "--seed", "7", "--json")
    real = simulate(*other, "--cost-model", str(true))["times"]
    again = simulate(*other, "--cost-model", str(saved))["times"]
    untold = simulate(*other)["times"]
    assert again["wall"] == pytest.approx(real["wall"], rel=0.15)
    assert abs(untold["wall"] / real["wall"] - 1) > 0.3


@pytest.mark.parametrize(
    "content",
    [
        '{"machine": "a", "model": "b"}',
        '{"machine": "a", "wall_s": 3}',
        '{"machine": "a", "model": "b", "wall_s": -3}',
        '{"machine": "a", "model": "b", "ttft_s": {"p42": 1}}',
        '{"machine": "a", "model": "b", "tpot_s": {"p50": "1"}}',
        "[1]",
        "nonsense",
    ],
)
def test_what_is_no_measured_run(content: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(content)
    flags = ["simulate", "--calibrate", str(path), "--requests", "3"]
    fails_with_one_sentence(flags, "")


def test_times_and_targets() -> None:
    found = simulate(*STREAM)
    times = found["times"]
    assert times["good"] == found["measured_requests"] == 150
    assert times["goodput"] == times["requests_per_s"] == 150 / times["wall"]
    slo = times["ttft"]["p50"]
    few = simulate(*STREAM, "--slo-ttft", str(slo))["times"]
    assert few["good"] == 75
    fewer = simulate(*STREAM, "--slo-ttft", str(slo), "--slo-tpot", "1e-6")["times"]
    assert fewer["good"] <= 1  # whose answers have one token
