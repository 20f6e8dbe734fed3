# SPDX-License-Identifier: Apache-2.0
"""Repetitions end requests on the device where vLLM's scheduler finds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.sched.utils import check_sequence_repetition

from hybrid_plugin.vllm.speculation.repetition import Pattern, Repetitions

NEW = 4
"""Tokens that a step gives."""
ROWS = 4
CPU = torch.device("cpu")


def params(shortest: int, longest: int, count: int) -> RepetitionDetectionParams:
    return RepetitionDetectionParams(
        max_pattern_size=longest, min_pattern_size=shortest, min_count=count
    )


asked = st.one_of(
    st.none(),
    st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(2, 4))
    .filter(lambda numbers: numbers[0] <= numbers[1])
    .map(lambda numbers: params(*numbers)),
)
requests = st.tuples(
    asked,
    st.lists(st.integers(0, 1), min_size=1, max_size=30),
    st.lists(st.integers(0, 1), min_size=NEW, max_size=NEW),
    st.integers(0, 12),
    st.integers(0, 40),
)
"""What counts, known tokens, new ones, length of the prompt, least answer."""


def ends(one: Any) -> list[bool]:
    """As the scheduler decides, token by token."""
    given_params, known, new, prompt, least = one
    found = []
    for place in range(NEW):
        answer = [*known, *new[: place + 1]][prompt:]
        repeats = given_params is not None and check_sequence_repetition(
            answer, given_params
        )
        found.append(repeats and len(answer) >= least)
    return found


@settings(deadline=None)
@given(st.lists(requests, min_size=1, max_size=ROWS))
@example([(params(1, 2, 2), [0, 1, 0], [1, 1, 0, 0], 0, 0)])
@example([(params(2, 2, 2), [0, 1, 0], [1, 1, 0, 0], 1, 0)])
def test_the_scheduler_would_stop_there(batch: list[Any]) -> None:
    batch = [one for one in batch if one[3] <= len(one[1])]
    if not batch:
        return
    repetitions = Repetitions(ROWS, CPU)
    known = torch.full((ROWS, 40), 7, dtype=torch.int32)
    computed = torch.zeros(ROWS, dtype=torch.int32)
    rows = [ROWS - 1 - i for i in range(len(batch))]
    for row, (given_params, tokens, _, prompt, least) in zip(rows, batch, strict=True):
        given_all = SimpleNamespace(repetition_detection=given_params)
        repetitions.add(row, Pattern.of(given_all), prompt, least)
        known[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        computed[row] = len(tokens) - 1
    found = repetitions.ends(
        rows,
        torch.tensor([new for _, _, new, _, _ in batch]),
        torch.tensor(rows),
        computed,
        known,
    )
    if all(one[0] is None for one in batch):
        assert found is None
    else:
        assert found is not None
        assert found.tolist() == [ends(one) for one in batch]


def test_nothing_is_computed_for_batches_that_do_not_ask() -> None:
    repetitions = Repetitions(ROWS, CPU)
    repetitions.add(0, Pattern(1, 2, 2), 0, 0)
    repetitions.add(1, None, 0, 0)
    one = torch.zeros(1, NEW, dtype=torch.long)
    rest = torch.tensor([1]), torch.full((ROWS,), 3), torch.zeros(ROWS, 40)
    assert repetitions.ends([1], one, *rest) is None
    repetitions.add(0, None, 0, 0)
    assert repetitions.ends([0, 1], one, *rest) is None


@pytest.mark.parametrize("numbers", [(0, 0, 0), (0, 3, 2)])
def test_what_is_asked_for(numbers: tuple[int, int, int]) -> None:
    given_all = SimpleNamespace(repetition_detection=params(*numbers))
    expected = Pattern(1, 3, 2) if numbers[1] else None
    assert Pattern.of(given_all) == expected
