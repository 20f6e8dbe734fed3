# SPDX-License-Identifier: Apache-2.0
"""Flags, options and the environment, without SGLang."""

from __future__ import annotations

import argparse
import logging
import os
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


def test_options_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_CONFIG", '{"page_size": 64}')
    first = activation.read_options()
    assert activation.read_options() is first
    monkeypatch.setenv("HYBRID_CONFIG", '{"page_size": 128}')
    assert activation.read_options() == HybridConfig(page_size=128)


def test_the_command_line_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = '{"page_size": 64, "elastic": false}'
    monkeypatch.setenv("HYBRID_CONFIG", both)
    parse("--enable-hybrid-plugin", "--hybrid-config", '{"page_size": 32}')
    expected = HybridConfig(page_size=32, elastic=False)
    assert activation.read_options() == expected


@pytest.mark.parametrize("argument", ["--enable-hy", "--enable-hybrid-plug"])
def test_an_abbreviated_flag_is_the_flag(
    monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server", argument])
    assert activation.requested()
    parse(argument)
    assert os.environ["HYBRID_PLUGIN"] == "1"


@pytest.mark.parametrize("argument", ["--enable-", "--enable-metrics", "--e", "-e"])
def test_other_flags_are_not(monkeypatch: pytest.MonkeyPatch, argument: str) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server", argument])
    assert not activation.requested()


@pytest.mark.parametrize("flags", [(), ("--enable-hybrid-plugin",)])
def test_the_option_enabled_false_leaves_the_engine_alone(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: tuple[str, ...],
) -> None:
    """In the server and in the processes that inherit its environment."""
    monkeypatch.setattr(sys, "argv", ["launch_server", *flags])
    with caplog.at_level(logging.INFO, "sglang.hybrid_plugin"):
        parse(*flags, "--hybrid-config", '{"enabled": false}')
    assert not activation.requested()
    assert caplog.messages == [
        'hybrid-plugin is inactive: the option "enabled" is false.'
    ]
    parse(*flags, "--hybrid-config", '{"enabled": false}')  # SGLang may parse twice


def test_the_option_enabled_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_PLUGIN", "1")
    monkeypatch.setenv("HYBRID_CONFIG", '{"enabled": false}')
    assert not activation.requested()
    monkeypatch.setenv("HYBRID_PLUGIN", "")
    monkeypatch.setenv("HYBRID_CONFIG", '{"enabled": true}')
    assert activation.requested()


def test_an_unreadable_environment_counts_once_the_plugin_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HYBRID_CONFIG", "{")
    parse()
    assert not activation.requested()
    with pytest.raises(SystemExit, match="HYBRID_CONFIG takes JSON"):
        parse("--enable-hybrid-plugin")


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
