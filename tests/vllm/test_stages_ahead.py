# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline with steps scheduled ahead, as on GPUs, on a made-up model.

The CPU build schedules no steps ahead, so its engine tests never do.  Here vLLM's
scheduler runs on our manager, and its batch queue is played: one step more is under
way than there are stages.  Each stage has pools of its own, and runs the steps in
order, but not at once; marks stand for KV and states, and a pass checks all that it
would read.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from hybrid_plugin.core.memory.elastic_plan import plan_elastic
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.device.host_arena import HostArena, is_available
from hybrid_plugin.vllm.planning import (
    HybridKVCacheConfig,
    groups_of_ranks,
    make_config,
    make_layout,
)
from hybrid_plugin.vllm.pool_memory import PoolMemory
from hybrid_plugin.vllm.scheduler import COMMANDS, HybridAsyncScheduler
from hybrid_plugin.vllm.specs import window_of
from tests.engines.drivers.driver import MODEL
from tests.vllm.fakes import SPECS, nothing_kept
from tests.vllm.test_windows_traffic import MisreadError, _marks, _reads, _write

STAGES = 2
MOST_RUNNING = 6
TURNS = 40
BLOCK = 4096
BUDGET = 24 * BLOCK
"""Of elastic pools: too little for the snapshots of all chats and their pages."""


@cache
def configuration() -> Any:
    """Of an engine with stages."""
    arguments = EngineArgs(
        model=str(MODEL),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=MOST_RUNNING,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        pipeline_parallel_size=STAGES,
    )
    return arguments.create_engine_config()


def configs(*, elastic: bool) -> list[HybridKVCacheConfig]:
    """Of each stage, which has a layer of each kind."""
    specs: list[dict[str, KVCacheSpec]] = [
        {name.replace("0", str(stage)): spec for name, spec in SPECS.items()}
        for stage in range(STAGES)
    ]
    ranks, shared, sizes = groups_of_ranks(specs), None, PoolSizes(36, 9)
    if elastic:
        shared = plan_elastic(
            make_layout(ranks[0]),
            BUDGET,
            block_bytes=BLOCK,
            max_model_len=300,
            max_sequences=MOST_RUNNING,
        )
        sizes = shared.sizes
    return [make_config(configuration(), own, sizes, shared) for own in ranks]


@dataclass(frozen=True)
class Row:
    """A request in a step."""

    name: str
    start: int
    end: int
    samples: bool
    ids: tuple[list[int], ...]
    """In each group, as the workers know them when the step is scheduled."""


@dataclass(frozen=True)
class Step:
    """What is sent to all stages."""

    output: Any
    commands: Sequence[Any]
    rows: tuple[Row, ...]
    sampled: dict[str, list[int]]
    """Filled by the last stage."""


class Stage:
    """A rank: its pools, and how far it is."""

    def __init__(self, config: HybridKVCacheConfig, *, is_late: bool) -> None:
        self._memory = PoolMemory()
        if config.shared is not None:
            arena = HostArena(BUDGET + BLOCK, BLOCK)
            arena.hold(arena.usable)
            self._memory.share(arena)
        views = self._memory.allocate(config, torch.device("cpu"), KVCacheLayout.LBHNC)
        self._views = {
            name: view[..., :4].view(torch.int32) for name, view in views.items()
        }
        self._groups = config.kv_cache_groups
        self._is_late = is_late
        self.done = 0
        """Steps that it has run."""

    @property
    def moves(self) -> int:
        return self._memory.executor.moves.calls

    def run(self, step: Step, truth: dict[str, list[int]]) -> None:
        """The step's commands, then its pass."""
        if not self._is_late:
            self._memory.executor.run(step.commands)
        for row in step.rows:
            marks = _marks(truth[row.name][: row.end])
            for group, ids in zip(self._groups, row.ids, strict=True):
                for layer in group.layer_names:
                    view = self._views[layer]
                    if window_of(group.kv_cache_spec) is None:
                        _pass_state(view[ids[0]], marks, row)
                    else:
                        _attend(view, torch.tensor(ids), marks, row)
        if self._is_late:
            self._memory.executor.run(step.commands)
        self.done += 1


def _pass_state(state: torch.Tensor, marks: list[int], row: Row) -> None:
    expected = marks[row.start - 1] if row.start else 0
    if not (state == expected).all():
        raise MisreadError(f"state at token {row.start} of {row.name}")
    state[:] = marks[row.end - 1]


def _attend(
    view: torch.Tensor, table: torch.Tensor, marks: list[int], row: Row
) -> None:
    _write(view, table, marks, range(row.start, row.end))
    if not _reads(view, table, marks, range(row.end)):
        raise MisreadError(f"KV up to token {row.end} of {row.name}")


class Engine:
    """vLLM's loop over its batch queue, and the stages."""

    def __init__(self, seed: int, *, elastic: bool, is_late: bool = False) -> None:
        self.luck = random.Random(seed)
        found = configs(elastic=elastic)
        config = configuration()
        self.scheduler = HybridAsyncScheduler(
            vllm_config=config,
            kv_cache_config=found[0],
            structured_output_manager=StructuredOutputManager(config),
            block_size=found[0].page_size,
        )
        # A CPU has the first model runner; with the second a request decodes in every
        # second step.
        self.scheduler.use_v2_model_runner = True
        self.manager = self.scheduler.kv_cache_manager
        self.stages = [
            Stage(one, is_late=is_late and number == STAGES - 1)
            for number, one in enumerate(found)
        ]
        self.steps: list[Step] = []
        self.flying: deque[Step] = deque()
        self.truth: dict[str, list[int]] = {}
        """Tokens of each request, those included that nobody has read."""
        self.most_ahead = 0
        """Steps that the first stage was ahead of the last one, at most."""
        self.preempted = 0

    def add(self, name: str, prompt: list[int], answer: int) -> None:
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, params, None))
        self.truth[name] = list(prompt)

    def turn(self) -> None:
        """Schedule a step if there is room for one more, or read the oldest output."""
        if self.scheduler.has_requests():
            step = self._schedule()
            self.flying.append(step)
            self.wander()
            if len(self.flying) <= STAGES and (
                step.rows or self.scheduler.has_requests()
            ):
                return
        if self.flying:
            self._read(self.flying.popleft())

    def wander(self) -> None:
        """Have stages run what they can, or some of it; the first is often ahead."""
        while self.luck.random() < 0.7:
            ready = [n for n in range(STAGES) if self._may_run(n)]
            if not ready:
                return
            self._run(self.luck.choice([ready[0], ready[0], *ready]))

    def _schedule(self) -> Step:
        output = self.scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        step = Step(
            output,
            getattr(output, COMMANDS),
            tuple(self._row(*item) for item in output.num_scheduled_tokens.items()),
            {},
        )
        self.steps.append(step)
        return step

    def _row(self, name: str, count: int) -> Row:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens
        ids = self.manager.get_block_ids(name)
        return Row(name, end - count, end, not request.is_prefill_chunk, ids)

    def _may_run(self, stage: int) -> bool:
        number = self.stages[stage].done
        if number == len(self.steps):
            return False
        if stage:
            return self.stages[stage - 1].done > number
        # What it computes was sampled by the last stage.
        rows = self.steps[number].rows
        return all(len(self.truth[row.name]) >= row.end for row in rows)

    def _run(self, stage: int) -> None:
        step = self.steps[self.stages[stage].done]
        self.stages[stage].run(step, self.truth)
        first, last = self.stages[0].done, self.stages[-1].done
        self.most_ahead = max(self.most_ahead, first - last)
        if stage < STAGES - 1:
            return
        for row in step.rows:
            known = self.truth[row.name]
            step.sampled[row.name] = []
            if row.samples:
                token = _marks(known[: row.end])[-1] % 250
                assert len(known) == row.end, "sampled twice"
                known.append(token)
                step.sampled[row.name].append(token)

    def _read(self, step: Step) -> None:
        """Wait for a step's output, and take it."""
        while self.stages[-1].done <= self.steps.index(step):
            self._run(max(n for n in range(STAGES) if self._may_run(n)))
        names = [row.name for row in step.rows]
        self.scheduler.update_from_output(
            step.output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[step.sampled[name] for name in names],
            ),
        )

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


def serve(engine: Engine, *, abort: float = 0.0) -> None:
    """Chats that begin alike, several at a time, each turn behind the one before."""
    luck = engine.luck
    systems = [[luck.randrange(250) for _ in range(n)] for n in (45, 100)]
    chats = [list(luck.choice(systems)) for _ in range(7)]
    live: dict[int, str] = {}
    begun = 0
    for _ in range(6000):
        chat = luck.randrange(len(chats))
        if chat not in live and begun < TURNS and luck.random() < 0.5:
            more = [luck.randrange(250) for _ in range(luck.randint(1, 40))]
            prompt = (chats[chat] + more)[:230]
            live[chat] = f"{chat}.{begun}"
            engine.add(live[chat], prompt, luck.randint(1, 30))
            begun += 1
        if live and luck.random() < abort:
            engine.abort(luck.choice(list(live.values())))
        engine.turn()
        for number, name in list(live.items()):
            if name not in engine.scheduler.requests:
                chats[number] = engine.truth[name][:]
                del live[number]
        if begun == TURNS and not live and not engine.flying:
            break
    assert not live, "requests starve"
    assert nothing_kept(engine.manager)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("abort", [0.0, 0.02])
def test_every_stage_reads_what_the_steps_before_have_left(
    elastic: bool, abort: float
) -> None:
    if elastic and not is_available():
        pytest.skip("memory comes and goes on Linux")
    engines = [Engine(seed, elastic=elastic) for seed in range(4)]
    for engine in engines:
        serve(engine, abort=abort)
        first, *others = engine.stages
        assert all(stage.moves == first.moves for stage in others)
        assert (first.moves > 0) == elastic
    stats = [engine.manager.cache.stats for engine in engines]
    hit = sum(one.hit_tokens for one in stats)
    assert hit > 0.15 * sum(one.queried_tokens for one in stats)
    assert all(engine.most_ahead >= STAGES for engine in engines)
    assert sum(engine.preempted for engine in engines) > 0


def test_commands_behind_the_pass_are_noticed() -> None:
    """Negative control: of the last stage alone."""
    with pytest.raises(MisreadError):
        serve(Engine(0, elastic=False, is_late=True))
