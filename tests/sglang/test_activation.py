# SPDX-License-Identifier: Apache-2.0
"""Flags, options and the environment, without SGLang."""

from __future__ import annotations

import argparse
import sys

import pytest

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.sglang import activation


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (activation.ENABLE_VARIABLE, activation.OPTIONS_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever a test sets
    monkeypatch.setattr(sys, "argv", ["launch_server"])


def parse(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    activation.add_arguments(None, parser)
    activation.take_arguments(object, parser.parse_args(arguments))


def test_not_requested_by_default() -> None:
    assert not activation.requested()


def test_requested_by_the_flag_before_arguments_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server", "--enable-hybrid-plugin"])
    assert activation.requested()


@pytest.mark.parametrize(("value", "answer"), [("1", True), ("0", False)])
def test_the_environment_decides(
    monkeypatch: pytest.MonkeyPatch, value: str, answer: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server", "--enable-hybrid-plugin"])
    monkeypatch.setenv("HYBRID_PLUGIN", value)
    assert activation.requested() is answer


def test_the_flag_reaches_child_processes() -> None:
    parse("--enable-hybrid-plugin", "--hybrid-config", '{"page_size": 32}')
    assert activation.requested()
    assert activation.read_options() == HybridConfig(page_size=32)


def test_without_the_flag_nothing_is_passed_on() -> None:
    parse()
    assert not activation.requested()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hybrid-config", "{}"], "--hybrid-config needs --enable-hybrid-plugin"),
        (["--enable-hybrid-plugin", "--hybrid-config", "{"], "takes JSON"),
        (["--enable-hybrid-plugin", "--hybrid-config", "[]"], "takes a JSON object"),
        (
            ["--enable-hybrid-plugin", "--hybrid-config", '{"pages": 1}'],
            "Unknown hybrid_plugin option 'pages'",
        ),
        (
            ["--enable-hybrid-plugin", "--hybrid-config", '{"state_memory_ratio": 2}'],
            "state_memory_ratio must lie between 0 and 1",
        ),
    ],
)
def test_bad_options_end_the_process_with_a_sentence(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        parse(*arguments)


def test_flag_and_environment_must_not_contradict_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HYBRID_PLUGIN", "0")
    with pytest.raises(SystemExit, match="says no"):
        parse("--enable-hybrid-plugin")


def test_bad_options_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_CONFIG", "page_size=16")
    with pytest.raises(ConfigError, match="takes JSON"):
        activation.read_options()
