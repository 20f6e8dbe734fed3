# SPDX-License-Identifier: Apache-2.0
"""SGLang's requests and admission on a cache without a model, step by step.

Requests, the prefill adder and what drops requests are SGLang's own; batches, rows and
the rest of its scheduler are as much of them as those need.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.pool_stats_observer import (
    kv_private_tokens,
)
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Command
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.sglang import token_placement
from hybrid_plugin.sglang.allocator import HybridSlotAllocator, HybridTokenAllocator
from hybrid_plugin.sglang.clock import RankClock
from hybrid_plugin.sglang.parking import park_paused, parked_first
from hybrid_plugin.sglang.prefix_cache import HybridPrefixCache
from hybrid_plugin.sglang.scheduling import HybridPrefillAdder
from tests.core.support import ByMinimum

PAGE = 4
POLICY = HybridConfig(in_batch_prefix_min_tokens=0).snapshot_policy(PAGE)
UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE


def request(
    rid: str, tokens: Sequence[int], *, custom_params: Any = None, **fields: Any
) -> Req:
    """One of SGLang's own, for four tokens."""
    sampling = SamplingParams(max_new_tokens=4)
    sampling.custom_params = custom_params
    return Req(rid, "", array("q", tokens), sampling, **fields)


def pausing(rid: str, tokens: Sequence[int], at: int, **fields: Any) -> Req:
    """A request whose prompt pauses at `at` tokens."""
    return request(rid, tokens, custom_params={"hybrid_keep": [at]}, **fields)


class Rows:
    """As much of SGLang's `ReqToTokenPool` as placing needs."""

    def __init__(self, rows: int, width: int) -> None:
        self.req_to_token = torch.full((rows, width), -7, dtype=torch.int32)
        self.free_slots = list(range(1, rows))
        self.mamba_allocator: Any = None

    def alloc(self, reqs: list[Req]) -> list[int] | None:
        new = [req for req in reqs if not req.kv.holds_kv]
        if len(new) > len(self.free_slots):
            return None
        for req in new:
            req.kv.req_pool_idx = self.free_slots.pop(0)
        return [req.kv.req_pool_idx for req in reqs]

    def free(self, req: Req) -> None:
        assert req.kv.req_pool_idx is not None
        self.free_slots.append(req.kv.req_pool_idx)
        req.kv.req_pool_idx = None

    def available_size(self) -> int:
        return len(self.free_slots)

    def write(self, where: Any, values: torch.Tensor) -> None:
        self.req_to_token[where] = values


class Executor:
    """Has no device to run anything on."""

    moves = SimpleNamespace(seconds=0.0)
    host: Any = None
    scratch: Any = None

    def __init__(self) -> None:
        self.done: list[str] = []
        """What became of its memory."""

    def run(self, commands: Sequence[Command]) -> None:
        """Does nothing."""

    def release(self) -> int:
        """There is none to give back."""
        self.done.append("release")
        return 0

    def restore(self) -> None:
        """The same."""
        self.done.append("restore")


class Batch:
    """As much of SGLang's `ScheduleBatch` as placing, launching and parking need."""

    def __init__(self, reqs: list[Req], rows: Rows) -> None:
        self.reqs = reqs
        self.device = "cpu"
        self.batch_is_full = False
        self.forward_mode = ForwardMode.EXTEND
        self.prefix_lens = [req.prefix_len for req in reqs]
        self.seq_lens_cpu = torch.tensor([req.extend_end for req in reqs])
        self.seq_lens = self.seq_lens_cpu
        self.extend_num_tokens = sum(r.extend_end - r.prefix_len for r in reqs)
        self.req_to_token_pool = rows

    def filter_batch(self, reqs_to_exclude: Sequence[Req] = ()) -> None:
        self.reqs = [
            r for r in self.reqs if not r.finished() and r not in reqs_to_exclude
        ]


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


class FakeScheduler:
    """SGLang's own ways to drop and to retract requests, and what those need."""

    abort_request = Scheduler.abort_request
    collect_inflight_reqs = Scheduler.collect_inflight_reqs
    pause_generation = Scheduler.pause_generation
    process_pending_chunked_abort = Scheduler.process_pending_chunked_abort
    _abort_on_queued_limit = Scheduler._abort_on_queued_limit
    _collect_inflight_batches = Scheduler._collect_inflight_batches
    _poll_timeout_aborts = Scheduler._poll_timeout_aborts
    _release_aborted_request = Scheduler._release_aborted_request

    def __init__(self, cache: HybridPrefixCache, rows: Rows) -> None:
        self.tree_cache = cache
        self.req_to_token_pool = rows
        self.token_to_kv_pool_allocator = cache.token_to_kv_pool_allocator
        self.waiting_queue: list[Req] = []
        self.running_batch = Batch([], rows)
        self.last_batch: Batch | None = None
        self.told: list[str] = []
        """Request ids that were told of their abort."""
        self.disaggregation_mode = DisaggregationMode.NULL
        self.enable_priority_scheduling = True
        self.schedule_low_priority_values_first = False
        self.max_queued_requests: int | None = None
        self.chunked_req = self._pending_chunked_abort_req = None
        self.mm_receiver = self.dllm_config = self.rust_server = None
        self.decode_offload_manager = self.hisparse_coordinator = None
        self.enable_overlap = self.enable_overlap_mlx = False
        self.enable_continuous_input_polling = False
        self._pause_started_at = None
        self.grammar_manager = SimpleNamespace(abort_requests=_nothing)
        self.beam_coordinator = SimpleNamespace(retire_group=_nothing)
        self.kv_events_publisher = SimpleNamespace(publish_kv_events=_nothing)
        self.metrics_reporter = SimpleNamespace(current_scheduler_metrics_enabled=False)

    def send_abort_output(self, abort: Any, req: Req) -> None:
        self.told.append(abort.rid)

    def _add_request_to_queue(self, req: Req) -> None:
        self.waiting_queue.append(req)


class Clock(RankClock):
    """The time that a test sets."""

    now = 0.0
    """In seconds."""

    def __call__(self) -> float:
        return self.now


class Bench:
    """A cache, its pools, and passes of a scheduler without a model."""

    chunk = 1024
    """Tokens of a prefill pass."""
    events = False
    """Whether it publishes events."""
    dynamo = False
    """Whether in the format of Dynamo."""

    def __init__(self, pages: int = 64, slots: int = 9, rows: int = 9) -> None:
        self.core = self.make_core(pages, slots)
        self.allocator = self.make_allocator()
        self.rows = Rows(rows, 4 * PAGE * pages)
        self.rows.mamba_allocator = HybridSlotAllocator(self.core, "cpu")
        params: Any = SimpleNamespace(
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            enable_metrics=False,
            enable_kv_cache_events=self.events,
            dynamo_kv_event_format=self.dynamo,
            kv_event_lora_names=None,
            chunked_prefill_size=self.chunk,
        )
        self.clock = Clock()
        self.cache = HybridPrefixCache(params, self.clock)
        self.scheduler = FakeScheduler(self.cache, self.rows)
        self.adder = self.new_adder()

    def make_core(self, pages: int, slots: int) -> HybridCache:
        """Full attention and states."""
        return HybridCache(
            PagePool(pages), SlotPool(slots), PAGE, POLICY, eviction=ByMinimum()
        )

    def make_allocator(self) -> HybridTokenAllocator:
        """On pools without memory."""
        stock = SimpleNamespace(
            dtype=torch.float32, device="cpu", get_kvcache=lambda: None
        )
        executor: Any = Executor()
        return HybridTokenAllocator(self.core, stock, executor)

    def new_adder(self, chunk: int | None = None) -> HybridPrefillAdder:
        """Of one pass that may run `chunk` tokens."""
        running: Any = self.scheduler.running_batch
        return HybridPrefillAdder(
            PAGE, self.cache, self.allocator, running, 0.1, 1024, chunk or self.chunk
        )

    def queue(self, *reqs: Req) -> None:
        """Have requests wait, in their order."""
        self.scheduler.waiting_queue += reqs

    def add(self, req: Req) -> AddReqResult:
        """Offer one request to the pass."""
        req.init_next_round_input(self.cache)
        return self.adder.add_one_req(req, False, truncation_align_size=None)

    def step(self, chunk: int | None = None) -> list[str]:
        """One pass and its result; returns the ids of the requests that ran."""
        scheduler = self.scheduler
        running: Any = scheduler.running_batch
        park_paused(scheduler, running, scheduler.last_batch)
        self.cache.plan_waits(scheduler.waiting_queue)
        if scheduler.last_batch is not None:
            running.reqs += scheduler.last_batch.reqs
        running.filter_batch()
        parked_first(scheduler.waiting_queue, self.cache)
        self.adder = self.new_adder(chunk)
        for req in scheduler.waiting_queue:
            if self.add(req) is not AddReqResult.CONTINUE:
                break
        ran = list(self.adder.can_run_list)
        scheduler.waiting_queue = [r for r in scheduler.waiting_queue if r not in ran]
        scheduler.last_batch = self._launch(ran) if ran else None
        return [req.rid for req in ran]

    def _launch(self, reqs: list[Req]) -> Batch:
        batch: Any = Batch(reqs, self.rows)
        added, _, _ = token_placement.extend(self.cache, batch)
        self.cache.step_begins(batch)
        self.forward(batch, added)
        self.cache.step_launched(batch)
        for req in reqs:
            if req.inflight_middle_chunks:
                req.inflight_middle_chunks -= 1
        launched: Batch = batch
        return launched

    def forward(self, batch: Batch, positions: torch.Tensor) -> None:
        """What a model would do with new tokens at these positions: nothing."""

    def finish(self, req: Req) -> None:
        """End a request behind its prompt, as SGLang does."""
        req.output_ids.append(1)
        req.finished_reason = FINISH_LENGTH(1)
        req.finished_len = 1
        release_kv_cache(req, self.cache, checkpoint=True)

    def park(self, req: Req) -> None:
        """Run a request to its pause, and park it."""
        self.queue(req)
        assert self.step() == [req.rid]
        assert req.extend_end < len(req.origin_input_ids)
        running: Any = self.scheduler.running_batch
        park_paused(self.scheduler, running, self.scheduler.last_batch)
        assert self.cache.is_parked(req)

    def assert_conserved(self) -> None:
        """SGLang's check for leaks, as it does it while requests run."""
        last = self.scheduler.last_batch
        reqs = {*self.scheduler.running_batch.reqs, *(last.reqs if last else ())}
        uncached = sum(kv_private_tokens(r.kv, PAGE) for r in reqs if r.kv.holds_kv)
        cache, slots = self.cache, self.rows.mamba_allocator
        assert self.allocator.size == (
            self.allocator.available_size()
            + cache.full_evictable_size()
            + cache.full_protected_size()
            + uncached
        )
        assert slots.size == (
            slots.available_size()
            + cache.mamba_evictable_size()
            + cache.mamba_protected_size()
        )

    def assert_idle(self) -> None:
        """SGLang's check for leaks, as it does it while nothing runs."""
        assert self.core.live == 0
        assert (
            self.cache.full_protected_size() == self.cache.mamba_protected_size() == 0
        )
        assert len(self.rows.free_slots) == len(self.rows.req_to_token) - 1
        self.assert_conserved()
