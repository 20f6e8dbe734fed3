# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, with steps scheduled ahead, on a model that is made up.

The CPU build schedules no steps ahead, so engine tests never do.  Here vLLM's
scheduler runs on our manager, and its batch queue is played: the next step is scheduled
before the output of the last one is read, and what is accepted is cut at a request's
end, as on the device.  The cache refuses counts that do not fit, so that wrong
bookkeeping fails here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from hybrid_plugin.vllm.scheduler import ROWS, HybridAsyncScheduler, HybridScheduler
from tests.engines.drivers.driver import MODEL
from tests.vllm.fakes import PAGE, nothing_kept, pools

DRAFTS = 3
REQUESTS = 12
MOST_RUNNING = 6


@cache
def configuration() -> Any:
    """Of an engine whose drafter may propose any number."""
    arguments = EngineArgs(
        model=str(MODEL),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=MOST_RUNNING,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": DRAFTS},
    )
    return arguments.create_engine_config()


class Engine:
    """Schedules, and answers for the model."""

    def __init__(
        self,
        seed: int,
        *,
        ahead: bool,
        pages: int,
        slots: int,
        recorded: bool = False,
    ) -> None:
        config = configuration()
        self.luck = random.Random(seed)
        self.ahead, self.recorded = ahead, recorded
        kind: Any = HybridAsyncScheduler if ahead else HybridScheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=pools(pages, slots, records=recorded),
            structured_output_manager=StructuredOutputManager(config),
            block_size=PAGE,
        )
        self.manager = self.scheduler.kv_cache_manager
        self.flying: deque[tuple[Any, dict[str, list[int]]]] = deque()
        self.widths: list[set[int]] = []
        """Drafts of the rows of each step that decodes only, prompts' ends left out."""
        self.before_reading: Callable[[], None] = lambda: None
        """What happens when the next step is scheduled and the last one not read."""
        self.ended_preempted = 0
        """Requests whose last step was running when they were preempted: they left the
        cache then, and once."""
        self._answered: dict[str, int] = {}
        """Tokens that the model gave each request, some of which nobody has read."""
        self._table: dict[str, tuple[Any, list[int]]] = {}
        """Slots by column as the workers know them, and whose they are."""

    @property
    def stats(self) -> Any:
        return self.manager.cache.stats

    def add(self, name: str, prompt: int, answer: int, first: int) -> None:
        tokens = list(range(first, first + prompt))
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        self.scheduler.add_request(Request(name, tokens, params, None))
        self._answered[name] = 0

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One turn of the engine's loop: schedule a step, read the oldest output."""
        output = self.scheduler.schedule()
        if output.total_num_scheduled_tokens:
            self.flying.append((output, self._run(output)))
        self.before_reading()
        if len(self.flying) > (self.ahead and output.total_num_scheduled_tokens > 0):
            self.read()

    def read(self) -> None:
        output, sampled = self.flying.popleft()
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        preempted = [
            name
            for name in names
            if name in requests and requests[name].status == RequestStatus.PREEMPTED
        ]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[sampled[name] for name in names],
            ),
        )
        self.ended_preempted += sum(name not in requests for name in preempted)
        if not self.ahead:
            for name in names:
                request = self.scheduler.requests.get(name)
                if request is not None and not request.is_prefill_chunk:
                    count = self.luck.randint(0, output.num_spec_tokens_to_schedule)
                    request.spec_token_ids = [7] * count

    def _run(self, output: Any) -> dict[str, list[int]]:
        """What the step gives each request; it runs when all before it have run."""
        self._find_slots(output)
        drafts = output.scheduled_spec_decode_tokens
        counts = output.num_scheduled_tokens
        rows = {name: len(drafts.get(name, ())) for name in counts}
        if all(counts[name] == 1 + row for name, row in rows.items()):
            requests = [self.scheduler.requests[name] for name in rows]
            self.widths.append(
                {
                    rows[one.request_id]
                    for one in requests
                    if one.num_computed_tokens - counts[one.request_id]
                    >= self.manager.cache.sequence(one.request_id).prompt_length
                }
            )
        return {name: self._sample(output, name) for name in counts}

    def _find_slots(self, output: Any) -> None:
        """As workers do: a request begins with its slot, then rows are overwritten."""
        rows = getattr(output, ROWS, None) or {}
        for name in output.num_scheduled_tokens:
            sequence = self.manager.cache.sequence(name)
            known = self._table.get(name)
            if known is None or known[0] is not sequence:
                self._table[name] = sequence, [sequence.slot]
            if name in rows:
                self._table[name] = sequence, rows[name]
            drafts = output.scheduled_spec_decode_tokens.get(name, ())
            columns = slice(1 + (0 if self.recorded else len(drafts)))
            held = [sequence.slot, *sequence.drafts]
            assert self._table[name][1][columns] == held[columns], "another's slots"

    def _sample(self, output: Any, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        if request.is_prefill_chunk:
            return []
        drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        count = 1 + self.luck.randint(0, drafts)
        left = request.max_tokens - self._answered[name]
        count = max(min(count, left), 1)  # the cut at its end
        self._answered[name] += count
        return [self.luck.randint(0, 200) for _ in range(count)]


def serve(engine: Engine, *, abort: float = 0.0) -> int:
    """Serve a few requests to their ends; returns how many were aborted."""
    luck, names = engine.luck, [f"r{i}" for i in range(REQUESTS)]
    coming, aborted = list(names), 0
    for _ in range(3000):
        if coming and luck.random() < 0.4:
            name = coming.pop()
            engine.add(
                name, luck.randint(2, 90), luck.randint(1, 40), luck.choice((0, 0, 300))
            )
        live = [one.request_id for one in engine.scheduler.running]
        if live and luck.random() < abort:
            engine.abort(luck.choice(live))
            aborted += 1
        if not coming and not engine.scheduler.has_unfinished_requests():
            break
        engine.step()
    while engine.flying:
        engine.read()
    assert not engine.scheduler.has_unfinished_requests(), "requests starve"
    engine.scheduler.schedule()
    assert nothing_kept(engine.manager)
    return aborted


@settings(max_examples=15, deadline=None)
@example(seed=281, ahead=True, pages=14, slots=5, recorded=False)
@given(
    seed=st.integers(0, 1000),
    ahead=st.booleans(),
    pages=st.integers(14, 60),
    slots=st.integers(3, 30),
    recorded=st.booleans(),
)
def test_every_turn_ends_exactly(
    seed: int, ahead: bool, pages: int, slots: int, recorded: bool
) -> None:
    """Under any pressure; and scheduled ahead, all rows have equally many drafts."""
    engine = Engine(seed, ahead=ahead, pages=pages, slots=slots, recorded=recorded)
    serve(engine)
    assert engine.stats.turn_ends_missed == 0
    ends = REQUESTS + engine.stats.preemptions - engine.ended_preempted
    assert engine.stats.turn_ends_exact == ends
    assert engine.stats.drafts_lent == 0 or not recorded
    if ahead:
        assert all(len(rows) <= 1 for rows in engine.widths)


def test_the_traffic_verifies_and_narrows() -> None:
    widths: set[int] = set()
    for slots in (6, 9, 30):
        engine = Engine(1, ahead=True, pages=60, slots=slots)
        serve(engine)
        widths |= set().union(*engine.widths)
    assert widths == set(range(DRAFTS + 1))


def test_aborts_between_two_steps_leave_exact_states() -> None:
    """With one step in flight."""
    aborted = 0
    for seed in range(4):
        engine = Engine(seed, ahead=True, pages=40, slots=20)
        aborted += serve(engine, abort=0.2)
        assert engine.stats.turn_ends_missed == 0
    assert aborted > 4


def test_aborts_before_an_output_is_read_leave_none() -> None:
    """With two steps in flight, as vLLM reads aborts behind each step."""
    engine = Engine(0, ahead=True, pages=40, slots=20)
    aborted = []

    def abort() -> None:
        steps = [output.num_scheduled_tokens for output, _ in engine.flying]
        twice = set.intersection(*map(set, steps)) if len(steps) == 2 else set()
        decoding = [
            request.request_id
            for request in engine.scheduler.running
            if request.request_id in twice and request.num_output_tokens > 1
        ]
        if decoding and engine.luck.random() < 0.2:
            aborted.append(decoding[0])
            engine.abort(decoding[0])

    engine.before_reading = abort
    serve(engine)
    assert engine.stats.turn_ends_missed == len(aborted) > 0
    assert engine.stats.turn_ends_exact == REQUESTS - len(aborted)


def test_routers_are_told_of_pages() -> None:
    """`num_gpu_blocks` of vLLM's metrics is what they think is cached."""
    engine = Engine(0, ahead=False, pages=33, slots=5)
    cache = engine.scheduler.vllm_config.cache_config
    assert cache.num_gpu_blocks == engine.manager.cache.pages.capacity == 33
