# SPDX-License-Identifier: Apache-2.0
"""The table of what steps cost, and the executor that is given drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from benchmarks import step_host_cost
from benchmarks.no_model.drafting import NoModelWithDrafts
from benchmarks.step_host_cost import SIDES


def test_ratios_are_those_of_medians() -> None:
    stock, plugin = SIDES
    rows = [
        {"side": side, "drafts": 3, "sequences": 32, "ms a step": each}
        for side, found in ((stock, (1.0, 9.0, 2.0)), (plugin, (3.0, 1.0, 1.5)))
        for each in found
    ]
    assert step_host_cost.table(rows).splitlines()[-1] == (
        "| 3 | 32 | 2.000 | 1.500 | 0.75x |"
    )


def test_drafts_are_accepted_in_any_number_and_proposed_again() -> None:
    executor: Any = NoModelWithDrafts.__new__(NoModelWithDrafts)
    executor.vllm_config = SimpleNamespace(num_speculative_tokens=3)
    executor._proposing, executor._random = [], step_host_cost.random.Random(1)
    executor.num_tokens = lambda name: (4, 5) if name == "prompt" else (9, 9)
    step = SimpleNamespace(
        num_scheduled_tokens={"prompt": 4, "a": 4, "b": 1},
        scheduled_spec_decode_tokens={"a": [7, 7, 7]},
    )
    seen = set()
    for _ in range(40):
        prompt, a, b = executor.execute_model(step).sampled_token_ids
        assert prompt == [] and len(b) == 1
        seen.add(len(a))
    assert seen == {1, 2, 3, 4}
    proposed = executor.take_draft_token_ids()
    assert proposed.req_ids == ["prompt", "a", "b"]
    assert [len(drafts) for drafts in proposed.draft_token_ids] == [3, 3, 3]
