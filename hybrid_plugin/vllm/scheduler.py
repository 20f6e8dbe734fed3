# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler on the two pools: snapshot stops and commands, nothing else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm import __version__
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from hybrid_plugin.engine import chat_template
from hybrid_plugin.engine.refusals import cannot_serve
from hybrid_plugin.engine.session_desk import Serving
from hybrid_plugin.vllm import deterministic, patches, peers, reports
from hybrid_plugin.vllm.activation import (
    carried_chat_template,
    logger,
    read_options,
)
from hybrid_plugin.vllm.kv_events import KvEvents
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from hybrid_plugin.vllm.metrics import StatsSender
from hybrid_plugin.vllm.planning import HybridKVCacheConfig
from hybrid_plugin.vllm.ranks import schedule_for_themselves
from hybrid_plugin.vllm.speculation import serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from hybrid_plugin.config import HybridConfig
    from hybrid_plugin.core.policy.message_boundaries import Delimiters

COMMANDS = "hybrid_commands"
"""Attribute of a scheduler output that carries its commands to the workers."""
FLUSHED = "hybrid_flushed"
"""Attribute of a scheduler output, where everything cached was forgotten before it: the
engine's way to say that weights are others, whoever wrote them."""
ROWS = "hybrid_rows"
"""Attribute of a scheduler output: slots by column where drafts got some."""
PREFILL_TOKENS = "hybrid_prefill_tokens"
"""Attribute of a scheduler output: tokens of prompts in the step, where the worker is
to measure how long they take."""
IDLE_SECONDS = 0.01
"""Time that passes behind a step with nothing to do but wait for files; a request
that comes meanwhile waits as long.  It halves what empty steps take of the processors,
from 1.6 to 0.75 of two; most of the rest is how vLLM's processes wait for each other.
"""


_ANSWERED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
"""How a request ends that was not aborted."""


class _OnTwoPools(Scheduler):
    """The part that synchronous and asynchronous scheduling share."""

    kv_cache_manager: HybridKVCacheManager

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: Any, **kwargs: Any
    ) -> None:
        if not isinstance(kv_cache_config, HybridKVCacheConfig):
            raise RuntimeError(patches.HALF_LOADED.format(where="the engine core"))
        page_size = kv_cache_config.page_size
        kwargs.update(block_size=page_size, hash_block_size=page_size)

        options = read_options(vllm_config)
        clock = _clock(vllm_config)
        if clock is None and options.host_memory is not None:
            raise cannot_serve(
                "host_memory needs one time for all ranks, and each schedules for "
                "itself: leave it out."
            )
        template = _delimiters(vllm_config, options)
        events = _kv_events(vllm_config, kv_cache_config)

        def create_manager(**arguments: Any) -> HybridKVCacheManager:
            return HybridKVCacheManager(
                kv_cache_config,
                options,
                delimiters=template,
                watermark=arguments.get("watermark", 0.0),
                log_stats=bool(arguments.get("log_stats")),
                clock=clock,
                kv_events=events,
                max_running=vllm_config.scheduler_config.max_num_seqs,
                max_model_len=vllm_config.model_config.max_model_len,
                serving=Serving(
                    str(vllm_config.model_config.model), f"vLLM {__version__}"
                ),
            )

        # Of which routers ask how much is cached: pages have tokens, and slots do not.
        vllm_config.cache_config.num_gpu_blocks = kv_cache_config.pages
        with patches.manager_factory(create_manager):
            super().__init__(
                vllm_config=vllm_config, kv_cache_config=kv_cache_config, **kwargs
            )
        if options.is_deterministic:
            step = self.kv_cache_manager.cache.policy.step
            deterministic.check_budget(vllm_config, step)
        self._stats_sender = StatsSender(self.kv_cache_manager.cache)
        self.need_mamba_block_aligned_split = True
        self._narrows_drafter = serving.takes_fewer_drafts(vllm_config)
        self._has_peers = options.peers is not None
        self._has_store = options.store is not None
        if self._has_peers:
            patches.patch_connector_warning()

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """End a prefill chunk at the next snapshot position inside it.

        A new request of which one token is left is not padded with drafts that nobody
        proposed: they would need slots.  vLLM drops the padding where it is cut.
        """
        hit = num_new_local_computed_tokens + num_external_computed_tokens
        start = request.num_computed_tokens + hit
        end = start + num_new_tokens
        if not self.kv_cache_manager.cache.is_live(request.request_id):
            end = min(end, request.num_tokens)
        return self.kv_cache_manager.chunk_end(request, start, end) - start

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a request may be admitted in this step."""
        may: bool = super()._handle_blocked_waiting_request(request)
        return may and not self.kv_cache_manager.must_wait(request)

    def add_request(self, request: Request) -> None:
        """Queue a request, of which another server may have computed the prompt, or
        will compute the answer.

        A session that streams its input comes once more for each part of it.
        """
        if request.request_id in self.requests:
            super().add_request(request)
            return
        if self._has_peers:
            peers.leave_last_token(request)
        super().add_request(request)
        if self._has_peers or self._has_store:
            self.kv_cache_manager.arrives(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """End a request, and say where another server finds its prompt."""
        params, *others = super()._free_request(request, *args, **kwargs)
        checking = self.kv_cache_manager.hit_checking
        if checking is not None and request.status not in _ANSWERED:
            checking.aborted(request.request_id)
        if self._has_peers and request.status in _ANSWERED:
            params = self.kv_cache_manager.offer(request) or params
        return params, *others

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step and give it the commands that must precede it."""
        if self._checks_hits:
            self._begin_check()
        self.kv_cache_manager.step_begins()
        self.kv_cache_manager.plan_in_batch_sharing(
            request
            for request in self.waiting
            if not self._is_blocked_waiting_status(request.status)
        )
        draft_steps = self.kv_cache_manager.draft_steps
        if self.num_spec_tokens:
            draft_steps.lend(self.running, self.num_lookahead_tokens)
        output = super().schedule(*args, **kwargs)
        scheduled = [self.requests[req_id] for req_id in output.num_scheduled_tokens]
        setattr(output, PREFILL_TOKENS, self._prefill_tokens(output))
        self.kv_cache_manager.cross(scheduled)
        if self.kv_cache_manager.was_flushed:
            setattr(output, FLUSHED, True)
        setattr(output, COMMANDS, self.kv_cache_manager.drain_commands())
        if self.num_spec_tokens:
            setattr(output, ROWS, draft_steps.note(output, self.requests))
        notice = self.kv_cache_manager.cache.broker.notice()
        if notice is not None:
            logger.info("hybrid-plugin: %s.", notice)
        self.kv_cache_manager.step_scheduled(scheduled)
        return output

    def _waits_for_files(self, output: SchedulerOutput) -> bool:
        """Whether a step is made for what is read or written, and nothing else."""
        return (
            self.kv_cache_manager.has_work
            and not self.running
            and not output.total_num_scheduled_tokens
            and self.kv_cache_manager.cache.lower_tiers.restores_due is None
        )

    def _prefill_tokens(self, output: SchedulerOutput) -> int:
        """Tokens of prompts in a step, before it is noted; 0 where nobody asks."""
        cache = self.kv_cache_manager.cache
        if cache.host is None:
            return 0
        return sum(
            count
            for req_id, count in output.num_scheduled_tokens.items()
            if cache.is_live(req_id) and cache.is_prefilling(req_id)
        )

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Have no drafts proposed that the next step cannot verify."""
        if self.num_spec_tokens and self._narrows_drafter:
            most = scheduler_output.num_spec_tokens_to_schedule
            scheduler_output.num_spec_tokens_to_schedule = (
                self.kv_cache_manager.draft_steps.worth_proposing(
                    scheduler_output, self.requests, most, self.num_lookahead_tokens
                )
            )
        super()._update_after_schedule(scheduler_output)

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Take a step's output, and what it says about moving memory."""
        report = reports.read(model_runner_output)
        if report is not None:
            self.kv_cache_manager.take_report(report)
        elif self._waits_for_files(scheduler_output):
            time.sleep(IDLE_SECONDS)
        if self.num_spec_tokens:
            self.kv_cache_manager.draft_steps.take_outcome(
                scheduler_output, model_runner_output
            )
        outputs = super().update_from_output(
            scheduler_output, model_runner_output, *args, **kwargs
        )
        if self.kv_cache_manager.hit_checking is not None:
            self.kv_cache_manager.hit_checking.take(outputs)
        return outputs

    def has_requests(self) -> bool:
        """Whether the engine is to make steps: also for what files are waited for, and
        to check hits.

        A pause waits for neither: what is still to be written may be about to be
        forgotten.
        """
        if super().has_requests():
            return True
        if self.pause_state is not PauseState.UNPAUSED:
            return self.kv_cache_manager.must_settle
        return self.kv_cache_manager.has_work or self._checks_hits

    @property
    def _checks_hits(self) -> bool:
        """Whether a hit is to be checked now: one waits, and nobody else is served."""
        checking = self.kv_cache_manager.hit_checking
        if checking is None or self.requests or not checking.is_waiting:
            return False
        return self.pause_state is PauseState.UNPAUSED

    def _begin_check(self) -> None:
        checking = self.kv_cache_manager.hit_checking
        assert checking is not None, "it has a check that waits"
        for request in checking.begin():
            super().add_request(request)

    def shutdown(self) -> None:
        """End, and let another server have the files."""
        self.kv_cache_manager.close()
        super().shutdown()

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.kv_cache_manager.front_door.count_preemption()
        super()._preempt_request(request, *args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Add the cache's own counts to what goes to the metrics endpoint."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            is_last = not self.has_unfinished_requests()
            self._stats_sender.attach(stats, is_last=is_last)
        return stats


class HybridScheduler(_OnTwoPools):
    """For synchronous scheduling."""


class HybridAsyncScheduler(_OnTwoPools, AsyncScheduler):
    """For asynchronous scheduling."""


def create_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """Create the scheduler that fits the engine's scheduling mode.

    vLLM settles the mode after the plugin names its scheduler, hence a factory.
    """
    asynchronous = vllm_config.scheduler_config.async_scheduling
    drafts = vllm_config.speculative_config is not None
    if drafts and asynchronous and not vllm_config.use_v2_model_runner:
        raise cannot_serve(
            "vLLM's V1 model runner forgets which drafts were accepted where steps are "
            "scheduled ahead; start the server with --no-async-scheduling."
        )
    cls = HybridAsyncScheduler if asynchronous else HybridScheduler
    return cls(vllm_config=vllm_config, **kwargs)


def _delimiters(vllm_config: VllmConfig, options: HybridConfig) -> Delimiters | None:
    model = vllm_config.model_config
    return chat_template.delimiters(
        options,
        str(model.tokenizer),
        revision=model.tokenizer_revision,
        trust_remote_code=model.trust_remote_code,
        logger=logger,
        server_template_text=carried_chat_template(vllm_config),
    )


def _kv_events(
    vllm_config: VllmConfig, kv_cache_config: HybridKVCacheConfig
) -> KvEvents | None:
    """What the publisher of `--kv-events-config` publishes, if it is switched on."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events:
        return None
    return KvEvents(kv_cache_config, vllm_config.cache_config.prefix_caching_hash_algo)


def _clock(vllm_config: VllmConfig) -> Callable[[], float] | None:
    """The time for TTLs; None if each rank schedules for itself, by its own clock."""
    return None if schedule_for_themselves(vllm_config) else time.monotonic
