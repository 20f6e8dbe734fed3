# SPDX-License-Identifier: Apache-2.0
"""What a worker tells the scheduler with a step's output: what moving memory cost."""

from __future__ import annotations

from copy import copy
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

_SECONDS = "hybrid_move_seconds"
"""Attribute of a model runner's output; vLLM pickles outputs as they are."""


def attach(output: Any, seconds: float) -> Any:
    """Put the seconds spent on moving memory so far into a step's output.

    An output that is still on the device keeps its class, whose methods differ from
    one vLLM to the next; what it turns into is marked when it is there.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        wait = output.get_output
        output.get_output = lambda: _marked(wait(), seconds)
        return output
    if isinstance(output, ModelRunnerOutput):
        return _marked(output, seconds)
    return output


def read(output: ModelRunnerOutput) -> float | None:
    """The seconds in a step's output, None if it has none."""
    seconds: float | None = getattr(output, _SECONDS, None)
    return seconds


def _marked(output: ModelRunnerOutput, seconds: float) -> ModelRunnerOutput:
    output = copy(output)  # an empty one is shared by all steps
    setattr(output, _SECONDS, seconds)
    return output
