# SPDX-License-Identifier: Apache-2.0
"""Accepted drafts behind a request's end count as rejected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import RepetitionDetectionParams

from hybrid_plugin.upstream.hookpoints import resolve
from hybrid_plugin.vllm import contracts
from hybrid_plugin.vllm.speculation import patches
from hybrid_plugin.vllm.speculation.stop_cut import End, StopCut

DRAFTS = 3
ROWS = 5
CPU = torch.device("cpu")

requests = st.tuples(
    st.lists(st.integers(0, 5), min_size=DRAFTS + 1, max_size=DRAFTS + 1),
    st.integers(0, DRAFTS + 1),
    st.sets(st.integers(0, 5), max_size=3),
    st.integers(1, 30),
    st.integers(0, 12),
)
"""Sampled tokens and how many count, stop tokens, greatest length, tokens computed."""


def kept(
    tokens: list[int], count: int, stops: set[int], longest: int, computed: int
) -> int:
    """As the scheduler cuts an answer, token by token."""
    for place, token in enumerate(tokens[:count]):
        if token in stops or computed + 2 + place >= longest:
            return place + 1
    return count


@settings(deadline=None)
@given(batch=st.lists(requests, min_size=1, max_size=ROWS), shift=st.integers(0, 4))
def test_the_scheduler_would_cut_there(batch: list[Any], shift: int) -> None:
    cut = StopCut(ROWS, CPU)
    rows = [(i + shift) % ROWS for i in range(len(batch))]
    computed = torch.zeros(ROWS, dtype=torch.int32)
    ends = []
    for row, (_, _, stops, longest, before) in zip(rows, batch, strict=True):
        ends.append(End(row, stops, longest))
        computed[row] = before
    cut.add(ends)
    sampled = torch.tensor([tokens for tokens, *_ in batch])
    counts = torch.tensor([count for _, count, *_ in batch], dtype=torch.int32)
    for line, count in zip(sampled, counts, strict=True):
        line[count:] = -1  # as the rejection sampler pads
    rejected = (DRAFTS + 1 - counts).clamp(min=0)
    found, now = cut.cut(
        sampled, counts, rejected, torch.tensor(rows, dtype=torch.int32), computed
    )
    wanted = [kept(*one) for one in batch]
    assert found.tolist() == wanted
    assert (found + now).tolist() == (counts + rejected).tolist()
    assert found.dtype == counts.dtype and now.dtype == rejected.dtype


def test_there_is_room_for_many_stop_tokens_and_a_row_forgets() -> None:
    cut = StopCut(ROWS, CPU)
    cut.add([End(0, {7}, 100), End(1, set(range(50, 90)), 100)])
    sampled = torch.tensor([[7, 1, 2, 3], [1, 89, 2, 3]])
    full = torch.tensor([4, 4])
    arguments = full, full - 4, torch.tensor([0, 1]), torch.zeros(ROWS).int()
    assert cut.cut(sampled, *arguments)[0].tolist() == [1, 2]
    cut.add([End(1, set(), 100)])
    assert cut.cut(sampled, *arguments)[0].tolist() == [1, 4]


class Runner:
    """A V2 model runner as far as requests come and tokens are sampled."""

    max_num_reqs, max_model_len, device = ROWS, 64, CPU

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(
            req_id_to_index={"a": 2},
            num_computed_tokens=SimpleNamespace(gpu=torch.full((ROWS,), 10)),
            all_token_ids=SimpleNamespace(gpu=torch.full((ROWS, 64), 9)),
        )
        self.added: list[Any] = []
        self.num_speculative_steps = DRAFTS

    def add_requests(self, output: Any) -> None:
        self.added.append(output)

    def sample(self, hidden: Any, batch: Any, grammar: Any) -> Any:
        tokens = torch.tensor([[5, 9, 6, 4]])
        counts, rejected = torch.tensor([4]), torch.tensor([0])
        output = SimpleNamespace(
            sampled_token_ids=tokens, num_sampled=counts, num_rejected=rejected
        )
        return output, counts, rejected


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose class is patched as vLLM's is."""
    for target in (contracts.V2_ADD_REQUESTS, contracts.V2_SAMPLE):
        owner, name = resolve(target)
        monkeypatch.setattr(owner, name, getattr(Runner, name))
    patches.patch_stops_in_accepted_runs()
    for target in (contracts.V2_ADD_REQUESTS, contracts.V2_SAMPLE):
        owner, name = resolve(target)
        monkeypatch.setattr(Runner, name, getattr(owner, name))
    return Runner()


def add(
    runner: Any,
    eos: int | None,
    stops: list[int] | None,
    most: int,
    repetition: RepetitionDetectionParams | None = None,
) -> None:
    given = SimpleNamespace(
        stop_token_ids=stops,
        eos_token_id=eos,
        max_tokens=most,
        min_tokens=0,
        repetition_detection=repetition,
    )
    new = SimpleNamespace(req_id="a", prompt_len=8, sampling_params=given)
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=[new]))
    assert len(runner.added) == 1


def sampled(runner: Any, drafts: int = DRAFTS) -> tuple[int, int]:
    batch = SimpleNamespace(
        num_draft_tokens=drafts,
        idx_mapping=torch.tensor([2]),
        idx_mapping_np=np.array([2]),
    )
    output, counts, rejected = runner.sample(None, batch, None)
    assert output.num_sampled is counts and output.num_rejected is rejected
    return int(counts), int(rejected)


@pytest.mark.parametrize(
    ("eos", "stops", "most", "wanted"),
    [
        (None, None, 100, (4, 0)),
        (9, None, 100, (2, 2)),
        (4, [6, 7], 100, (3, 1)),
        (None, [], 5, (2, 2)),
    ],
)
def test_the_runner_takes_less(
    runner: Any, eos: int | None, stops: Any, most: int, wanted: tuple[int, int]
) -> None:
    add(runner, eos, stops, most)
    assert sampled(runner) == wanted


def test_the_runner_takes_less_where_an_answer_repeats_itself(runner: Any) -> None:
    """Tokens 8 to 10 are 9, the second one that is sampled again."""
    add(runner, None, None, 100, RepetitionDetectionParams(1, 1, 2))
    assert sampled(runner) == (4, 0), "5, 9, 6, 4 repeat nothing"
    runner.req_states.all_token_ids.gpu[2, 10] = 5
    assert sampled(runner) == (1, 3), "5 and 5"
    runner.added.clear()
    add(runner, None, None, 100)
    assert sampled(runner) == (4, 0), "another request in the row does not ask for it"


def test_steps_without_drafts_are_left_alone(runner: Any) -> None:
    add(runner, 5, None, 1)
    assert sampled(runner, drafts=0) == (4, 0)
