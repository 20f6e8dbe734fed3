# SPDX-License-Identifier: Apache-2.0
"""What a worker adds to a step's output reaches the scheduler, whatever the class."""

from __future__ import annotations

import pytest

outputs = pytest.importorskip("vllm.v1.outputs")

from hybrid_plugin.vllm import reports  # noqa: E402
from hybrid_plugin.vllm.reports import Report  # noqa: E402


def test_an_output_is_marked_and_the_shared_one_is_not() -> None:
    empty = outputs.EMPTY_MODEL_RUNNER_OUTPUT
    assert reports.read(reports.attach(empty, Report(0.5))) == Report(0.5)
    assert reports.read(empty) is None


def test_an_output_on_the_device_keeps_its_class() -> None:
    class OnDevice(outputs.AsyncModelRunnerOutput):  # type: ignore[name-defined,misc]
        """As vLLM's runners have them, with methods that only they know."""

        def get_output(self) -> object:
            return outputs.EMPTY_MODEL_RUNNER_OUTPUT

        def another_of_the_runner(self) -> int:
            return 7

    attached = reports.attach(OnDevice(), Report(1.5))
    assert attached.another_of_the_runner() == 7
    assert reports.read(attached.get_output()) == Report(1.5)


def test_anything_else_is_left_alone() -> None:
    assert reports.attach(None, Report(1.0)) is None
