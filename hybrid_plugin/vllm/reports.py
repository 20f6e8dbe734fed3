# SPDX-License-Identifier: Apache-2.0
"""What a worker tells the scheduler with a step's output: what it has measured."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from hybrid_plugin.engine.rank_files import RanksOnDisk
from hybrid_plugin.engine.rank_peers import RanksWithPeers
from hybrid_plugin.engine.rank_store import RanksInStore
from hybrid_plugin.tiers.agreement import Outcome

_REPORT = "hybrid_report"
"""Attribute of a model runner's output; vLLM pickles outputs as they are."""


@dataclass(frozen=True, slots=True)
class Report:
    """The measurements of a rank so far, and what is news."""

    move_seconds: float = 0.0
    """Spent on moving memory between pools."""
    token_seconds: float | None = None
    """Of a token's prefill; None before it was measured, and without host memory."""
    load_bytes_per_second: float | None = None
    """Of copies from host memory; None without any."""
    disk: RanksOnDisk | None = None
    """What the ranks say of their files, in the first report; None without a disk."""
    peers: RanksWithPeers | None = None
    """What they say of themselves as peers, likewise."""
    store: RanksInStore | None = None
    """What they say of themselves as members of a store, likewise."""
    weight_updates: int = 0
    """Of weights in memory; counted where something is behind the host memory."""
    outcomes: tuple[Outcome, ...] = ()
    """Of writes, fetches and offers, on which all ranks agree, since the last report.
    """
    graph_passes: int = 0
    """With prompts, that replayed a CUDA graph of the whole model."""
    wait_seconds: float = 0.0
    """For which the device has waited for copies to and from host memory."""


def can_carry(output: Any) -> bool:
    """Whether a worker's answer is a step's output, which can carry a report."""
    return isinstance(output, AsyncModelRunnerOutput | ModelRunnerOutput)


def attach(output: Any, report: Report) -> Any:
    """Put a report into a step's output.

    An output that is still on the device keeps its class, whose methods differ from
    one vLLM to the next; what it turns into is marked when it is there.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        wait = output.get_output
        output.get_output = lambda: _marked(wait(), report)
        return output
    if isinstance(output, ModelRunnerOutput):
        return _marked(output, report)
    return output


def read(output: ModelRunnerOutput) -> Report | None:
    """The report in a step's output, None if it has none."""
    report: Report | None = getattr(output, _REPORT, None)
    return report


def _marked(output: ModelRunnerOutput, report: Report) -> ModelRunnerOutput:
    output = copy(output)  # an empty one is shared by all steps
    setattr(output, _REPORT, report)
    return output
