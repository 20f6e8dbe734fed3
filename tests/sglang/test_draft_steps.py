# SPDX-License-Identifier: Apache-2.0
"""Turns that end between steps of drafts: the state that is kept is the exact one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context

from hybrid_plugin.core.commands import Pool, Take
from hybrid_plugin.sglang import token_placement
from hybrid_plugin.sglang.requests import SGLangRequest
from hybrid_plugin.sglang.speculation.scratch import DraftScratch
from hybrid_plugin.sglang.speculation.workers import following_tokens, with_commands
from tests.sglang.fakes import PAGE, Bench, request

WIDTH = 4
VOCABULARY = SimpleNamespace(vocab_size=1000)
PROMPT = [*range(10, 21)]


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    """As it is where drafts are: rows give back more than was committed."""
    with get_context().override_server_args(speculative_algorithm="NGRAM"):
        yield


class Decoding(Bench):
    """Requests behind their prompts, and steps of drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.outcomes: list[tuple[list[Req], list[int]]] = []

    def begin(self, *names: str) -> list[Req]:
        reqs = [
            request(name, [*PROMPT[: 5 + 3 * n], n]) for n, name in enumerate(names)
        ]
        for req in reqs:
            req.sampling_params.max_new_tokens = 64
        self.queue(*reqs)
        assert self.step() == list(names)
        for req in reqs:
            req.output_ids.append(1)  # the prompt's result
        return reqs

    def launch(self, reqs: list[Req]) -> None:
        """A step of all of them."""
        _, ends, _ = page_aligned_decode_alloc_lens(
            reqs, reserve=2 * WIDTH, page_size=PAGE
        )
        for req in reqs:
            req.decode_batch_idx += 1
        token_placement.verify(self.cache, self.rows, reqs, ends)
        batch: Any = SimpleNamespace(reqs=list(reqs))
        batch.forward_mode = ForwardMode.DECODE
        self.cache.step_begins(batch)
        self.cache.drafts.launched(batch, WIDTH)
        self.cache.step_launched(batch)

    def resolve(self, reqs: list[Req], accepted: list[int]) -> None:
        """The outcome of the oldest step, as SGLang handles it."""
        batch: Any = SimpleNamespace(reqs=reqs)
        self.cache.drafts.resolved(batch, accepted)
        for req, count in zip(reqs, accepted, strict=True):
            if not req.finished() and not req.is_retracted:
                req.kv.kv_committed_len += count + 1
                req.output_ids.extend([2] * (count + 1))

    def end(self, req: Req, cut: int = 0) -> list[Any]:
        """Finish a request, so many tokens before the last one; its commands."""
        self.core.drain_commands()
        req.finished_len = len(req.output_ids) - cut
        req.finished_reason = FINISH_LENGTH(req.finished_len)
        release_kv_cache(req, self.cache, checkpoint=True)
        return self.core.drain_commands()

    def hit(self, req: Req) -> int:
        """Tokens that its next turn would restore."""
        answer = req.output_ids[: req.finished_len]
        tokens = (*req.origin_input_ids, *answer, 9)
        space = SGLangRequest(req).namespace()
        return self.core.look_up(tokens, space).match.length


def known(req: Req) -> int:
    return len(req.origin_input_ids) + (req.finished_len or len(req.output_ids))


def test_with_nothing_in_flight_the_slot_is_exact() -> None:
    bench = Decoding()
    reqs = bench.begin("a", "b")
    for accepted in ([3, 0], [1, 2]):
        bench.launch(reqs)
        bench.resolve(reqs, accepted)
    assert bench.end(reqs[0]) == []
    assert bench.hit(reqs[0]) == known(reqs[0]) - 1
    assert bench.core.stats.turn_ends_exact == 1


def test_a_stop_within_accepted_drafts_is_taken_from_the_scratch() -> None:
    bench = Decoding()
    reqs = bench.begin("a", "b")
    slot = bench.core.sequence(bench.cache.name(reqs[1])).slot
    bench.launch(reqs)
    bench.resolve(reqs, [0, 3])
    # Of four new tokens two count: the known one and one draft have a state.
    assert bench.end(reqs[1], cut=2) == [Take(Pool.STATE, 1, 2, slot)]
    assert bench.hit(reqs[1]) == known(reqs[1])


def test_with_a_step_in_flight_its_first_state_is_taken() -> None:
    bench = Decoding()
    reqs = bench.begin("a", "b")
    slot = bench.core.sequence(bench.cache.name(reqs[1])).slot
    bench.launch(reqs)
    bench.launch(reqs)  # before the first one's result is handled
    bench.resolve(reqs, [1, 3])
    assert bench.end(reqs[1]) == [Take(Pool.STATE, 1, 0, slot)]
    assert bench.hit(reqs[1]) == known(reqs[1])
    # Its own result comes when it is gone, and is nobody's.
    bench.resolve(reqs, [2, 2])
    bench.launch([reqs[0]])
    bench.resolve([reqs[0]], [0])
    assert bench.end(reqs[0]) == []


def test_a_stop_behind_which_a_step_has_begun_is_counted_as_missed() -> None:
    """Only stops that the device does not see: stop strings and grammars."""
    bench = Decoding()
    (req,) = bench.begin("a")
    bench.launch([req])
    bench.launch([req])
    bench.resolve([req], [3])
    assert bench.end(req, cut=1) == []
    assert bench.core.stats.turn_ends_missed == 1
    assert bench.hit(req) < known(req) - 4


def test_who_is_retracted_with_a_step_in_flight_resumes_at_the_last_token() -> None:
    bench = Decoding()
    reqs = bench.begin("a", "b")
    bench.launch(reqs)
    bench.resolve(reqs, [1, 1])
    bench.launch(reqs)
    slot = bench.core.sequence(bench.cache.name(reqs[0])).slot
    bench.core.drain_commands()
    release_kv_cache(reqs[0], bench.cache, checkpoint=False)
    assert bench.core.drain_commands() == [Take(Pool.STATE, 0, 0, slot)]
    assert bench.hit(reqs[0]) == known(reqs[0])
    reqs[0].is_retracted = True
    bench.resolve(reqs, [2, 2])  # of the first one nobody wants to know any more
    assert bench.core.is_verifying(bench.cache.name(reqs[1]))


def test_positions_are_those_of_the_sequence_s_pages() -> None:
    bench = Decoding()
    (req,) = bench.begin("a")
    for accepted in (3, 0, 2):
        bench.launch([req])
        bench.resolve([req], [accepted])
        length = req.kv.kv_allocated_len
        pages = bench.core.sequence(bench.cache.name(req)).pages
        assert length == len(pages) * PAGE >= req.kv.kv_committed_len + WIDTH
        row = bench.rows.req_to_token[req.kv.req_pool_idx, :length].view(-1, PAGE)
        expected = torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)
        assert torch.equal(row.long(), expected)
    bench.end(req)
    bench.scheduler.last_batch = None
    bench.scheduler.running_batch.reqs = []
    bench.assert_idle()


def test_a_worker_whose_steps_are_not_seen_is_stopped() -> None:
    bench = Decoding()
    (req,) = bench.begin("a")
    req.decode_batch_idx = 2
    with pytest.raises(RuntimeError, match="does not see what this"):
        token_placement.verify(bench.cache, bench.rows, [req], [16])


def test_a_worker_runs_commands_before_its_step_and_tells_of_it_behind() -> None:
    bench = Decoding()
    seen: list[str] = []

    class Worker:
        def forward_batch_generation(self, batch: Any, on_publish: Any = None) -> Any:
            assert on_publish == "published"
            seen.append("forward")
            return SimpleNamespace(speculative_num_draft_tokens=WIDTH)

    cache: Any = bench.cache
    cache.forget_ended = lambda batch: seen.append("ended")
    cache.step_begins = lambda batch: seen.append("begins")
    cache.step_launched = lambda batch: seen.append("launched")
    cache.cache = SimpleNamespace(forget_scratch=lambda: seen.append("forgotten"))
    cache.drafts = SimpleNamespace(
        launched=lambda batch, width: seen.append(f"{width} drafts")
    )
    worker = with_commands(Worker)()
    assert isinstance(worker, Worker) and type(worker).__name__ == "Worker"
    for mode, tree_cache, expected in (
        (
            ForwardMode.DECODE,
            cache,
            ["ended", "begins", "forward", "4 drafts", "launched"],
        ),
        (ForwardMode.EXTEND, cache, ["begins", "forward", "launched"]),
        (ForwardMode.IDLE, cache, ["begins", "forward", "forgotten", "launched"]),
        (ForwardMode.DECODE, object(), ["forward"]),
    ):
        seen.clear()
        batch = SimpleNamespace(tree_cache=tree_cache, forward_mode=mode)
        worker.forward_batch_generation(batch, on_publish="published")
        assert seen == expected


def test_a_paused_prompt_goes_on_with_its_own_token() -> None:
    reqs = [request(name, range(10 * n, 10 * n + 6)) for n, name in enumerate("abc")]
    for req, end in zip(reqs, (6, 4, 5), strict=True):
        req.full_untruncated_fill_ids = req.origin_input_ids
        req.extend_end = end
    batch: Any = SimpleNamespace(reqs=reqs, model_config=VOCABULARY)
    sampled = torch.tensor([91, 92, 93], dtype=torch.int32)
    found = following_tokens(batch, sampled)
    assert found.tolist() == [91, 14, 25] and found.dtype == sampled.dtype
    assert sampled.tolist() == [91, 92, 93]
    batch.reqs = reqs[:1]
    assert following_tokens(batch, sampled[:1]).tolist() == [91]
    # A number that stands for an image is none that a draft model embeds.
    reqs[1].origin_input_ids[4] = 1 << 61
    batch.reqs = reqs
    assert following_tokens(batch, sampled).tolist() == [91, 92, 25]


def test_a_planned_step_writes_no_state_of_who_ended_meanwhile() -> None:
    """SGLang handles results first where drafts of the host follow a grammar."""
    bench = Decoding()
    reqs = bench.begin("a", "b")
    mapping = torch.tensor([-1, *range(11, 19)], dtype=torch.int32)
    bench.rows.req_index_to_mamba_index_mapping = mapping
    rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
    bench.launch(reqs)
    batch: Any = SimpleNamespace(reqs=list(reqs), req_pool_indices=rows)
    batch.forward_mode = ForwardMode.DECODE
    bench.cache.forget_ended(batch)
    kept = [11, 12, *range(13, 19)]
    assert mapping[1:].tolist() == kept, "both go on"
    bench.resolve(reqs, [1, 1])
    ended = int(rows[0])
    bench.end(reqs[0])
    bench.cache.forget_ended(batch)
    kept[ended - 1] = 0
    assert mapping[1:].tolist() == kept
    assert bench.hit(reqs[0]) == known(reqs[0]) - 1


def test_what_is_accepted_is_cut_and_noted_for_the_scratch() -> None:
    bench = Decoding()
    (req,) = bench.begin("a")
    req.sampling_params.stop_token_ids = {3}
    req.sampling_params.ignore_eos = False
    noted: list[tuple[list[list[int]], int]] = []
    scratch = DraftScratch.__new__(DraftScratch)
    scratch.note_path = lambda path, width: noted.append((path.tolist(), width))
    bench.cache._executor.scratch = scratch
    batch: Any = SimpleNamespace(reqs=[req], seq_lens=torch.tensor([6]))
    predict = torch.tensor([2, 3, 4, 5])
    path = torch.tensor([[0, 1, 2, 3]])
    result = (predict, torch.tensor([4]), path)
    _, lens, cut = bench.cache.drafts.sampled(batch, WIDTH, result)
    assert lens.tolist() == [2] and cut.tolist() == [[0, 1, -1, -1]]
    assert noted == [([[0, 1, -1, -1]], WIDTH)]
