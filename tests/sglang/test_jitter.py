# SPDX-License-Identifier: Apache-2.0
"""What we ask of SGLang's own test of caches is what it takes."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.gpu import jitter


@pytest.fixture(autouse=True)
def kept_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[dict[str, Any], ...]:
    """What its engine and its test are given."""
    test = pytest.importorskip("sglang.test.cache_consistency_jitter")
    calls = []

    class Engine:
        def __init__(self, **given: Any) -> None:
            inspect.signature(original).bind(**given)
            calls.append(given)

        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def run(engine: Engine, **given: Any) -> None:
        inspect.signature(original_run).bind(engine, **given)
        calls.append(given)

    original, original_run = test.get_jitter_engine, test.run_jitter_test
    monkeypatch.setattr(test, "get_jitter_engine", Engine)
    monkeypatch.setattr(test, "run_jitter_test", run)
    assert jitter.run(jitter.parse(words)) == 0
    return tuple(calls)


def test_without_turns_every_request_repeats_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, test = asked(monkeypatch, "--prompts", "6", "--prompt", "100")
    # SGLang cuts at most that many tokens off an answer: none.
    assert test["new_tokens"] - 64 == 0
    assert test["min_retracted_requests"] == 0
    assert engine["retract_interval"] == jitter.NEVER
    assert engine["max_total_tokens"] == 2 * (100 + 64)


def test_turns_are_cut_and_retracted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, test = asked(monkeypatch, "--turns")
    assert test["new_tokens"] > 64 and test["min_retracted_requests"] > 0
    assert engine["retract_interval"] == 500


def test_a_difference_ends_with_another_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise AssertionError("7 mismatching observations")

    asked(monkeypatch)
    test = pytest.importorskip("sglang.test.cache_consistency_jitter")
    monkeypatch.setattr(test, "run_jitter_test", failing)
    assert jitter.run(jitter.parse([])) == 1
    assert "7 mismatching observations" in capsys.readouterr().out
