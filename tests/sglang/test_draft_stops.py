# SPDX-License-Identifier: Apache-2.0
"""What a verification accepts ends at the first stop, wherever SGLang would cut it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from hybrid_plugin.sglang.speculation.stops import Accepted, Stops

WIDTH = 4
VOCABULARY = 6
runs = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=WIDTH)


def request(stops: set[int], limit: int, output: list[int], **fields: Any) -> Req:
    """One of SGLang's own, whose first output tokens are known."""
    params = SamplingParams(max_new_tokens=limit, stop_token_ids=list(stops), **fields)
    params.normalize(None)
    req = Req("r", "", array("q", [1, 2, 3]), params, vocab_size=VOCABULARY)
    req.output_ids = array("q", output)
    return req


def accepted(batch: list[list[int]]) -> Accepted:
    """As SGLang's sampling gives it, for chains."""
    width = WIDTH + 1
    predict = torch.full((len(batch) * width,), -7, dtype=torch.int32)
    path = torch.full((len(batch), width), -1, dtype=torch.int32)
    for row, tokens in enumerate(batch):
        first = row * width
        path[row, : len(tokens)] = torch.arange(first, first + len(tokens))
        predict[first : first + len(tokens)] = torch.tensor(tokens)
    lens = torch.tensor([len(tokens) for tokens in batch], dtype=torch.int32)
    return Accepted(predict, lens, path)


@settings(deadline=None)
@given(
    st.lists(st.tuples(runs, st.sets(st.integers(0, 5)), st.integers(1, 9)), max_size=3)
)
def test_sglang_finds_nothing_to_cut(
    batch: list[tuple[list[int], set[int], int]],
) -> None:
    """Its own rules say where an answer ends; the cut changes no answer."""
    reqs = [request(stops, limit + 1, [0]) for _, stops, limit in batch]
    whole = accepted([tokens for tokens, _, _ in batch])
    # A prompt of three tokens is computed; the first one of the answer is not.
    lengths = torch.full((len(batch),), 3)
    cut = Stops().cut(whole, reqs, lengths)
    assert cut.lens.dtype == whole.lens.dtype
    for row, (tokens, _, _) in enumerate(batch):
        kept = int(cut.lens[row])
        assert cut.path[row, :kept].tolist() == whole.path[row, :kept].tolist()
        assert (cut.path[row, kept:] == -1).all()
        req, twin = reqs[row], request(*_rules(reqs[row]), [0])
        for one, given_to_it in ((req, tokens), (twin, tokens[:kept])):
            one.output_ids.extend(given_to_it)
            one.update_finish_state(len(given_to_it))
        assert twin.finished() == req.finished()
        if req.finished():
            assert req.finished_len == twin.finished_len == len(twin.output_ids)
        else:
            assert kept == len(tokens)


def _rules(req: Req) -> tuple[set[int], int]:
    params = req.sampling_params
    return set(params.stop_token_ids or ()), params.max_new_tokens


def test_ends_of_text_count_unless_they_are_ignored() -> None:
    heeding, ignoring = request(set(), 9, [0]), request({2}, 9, [0], ignore_eos=True)
    heeding.eos_token_ids = ignoring.eos_token_ids = {2}
    whole = accepted([[1, 2, 3]] * 2)
    cut = Stops().cut(whole, [heeding, ignoring], torch.tensor([3, 3]))
    assert cut.lens.tolist() == [2, 3]


def test_other_requests_have_other_stops() -> None:
    stops, whole = Stops(), accepted([[1, 2, 3]])
    for token, kept in ((1, 1), (2, 2), (5, 3)):
        cut = stops.cut(whole, [request({token}, 9, [0])], torch.tensor([3]))
        assert cut.lens.tolist() == [kept]
    assert stops.cut(whole, [], torch.tensor([])) is whole
