# SPDX-License-Identifier: Apache-2.0
"""All hooks the plugin sets in SGLang, in one place.

Each says what breaks without it (symptom), why (cause), what it does (fix) and
when it can be deleted.  SGLang's hook registry only logs what it could not
hook: every target is checked before, and every hook after, it is set.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hybrid_plugin.config import ConfigError
from hybrid_plugin.engine.refusals import cannot_serve, ending_the_server, named
from hybrid_plugin.sglang import activation
from hybrid_plugin.sglang.contracts import (
    BLOCK_DRAFT_HOOKS,
    COMMAND_LINE_HOOKS,
    ENGINE_HOOKS,
    HIT_CHECK_HOOKS,
    SAVED_SESSION_HOOKS,
)
from hybrid_plugin.sglang.log import logger
from hybrid_plugin.upstream.hookpoints import LiveView, problems
from hybrid_plugin.upstream.standing import untested

if TYPE_CHECKING:
    from hybrid_plugin.sglang.clock import RankClock
    from hybrid_plugin.sglang.kernels.state_layers import StateLayers
    from hybrid_plugin.sglang.pool_memory import PoolMemory
    from hybrid_plugin.sglang.speculation.replay.passes import Replay

_SRT = "sglang.srt"
_UPDATER = (
    f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
)
_Hook = Callable[..., Any]
_ENGINE_HOOKED = False


def hook_command_line() -> None:
    """Symptom: `--enable-hybrid-plugin` is an unknown argument.

    Cause: SGLang's arguments are a closed record.
    Fix: add our flags to the parser, and take their values before the record is
    built; both happen after plugins are loaded.  A flag from a `--config` file is
    first seen there, and the engine is hooked then.
    Delete when: plugins can declare arguments.
    """
    _require(COMMAND_LINE_HOOKS)
    server_args = f"{_SRT}.server_args.ServerArgs"
    _hook(f"{server_args}.add_cli_args", "AFTER", activation.add_arguments)
    _hook(f"{server_args}.from_cli_args", "BEFORE", _take_arguments)
    _apply()


def hook_engine() -> None:
    """Set every other hook, once in each process that was asked for the plugin.

    Raises:
        ConfigError: naming each hook point that this SGLang moved.
    """
    from hybrid_plugin.sglang.clock import RankClock
    from hybrid_plugin.sglang.kernels.state_layers import StateLayers
    from hybrid_plugin.sglang.pool_memory import PoolMemory
    from hybrid_plugin.sglang.speculation.replay.passes import Replay

    global _ENGINE_HOOKED
    if _ENGINE_HOOKED:
        return
    activation.read_options()
    _require(ENGINE_HOOKS)
    _warn_if_untested()
    _settle_arguments()
    _allow_paged_overlap()
    memory, clock, layers, replay = PoolMemory(), RankClock(), StateLayers(), Replay()
    _divide_memory(memory, layers, replay)
    _share_memory(memory, replay)
    _find_rings_by_slots(memory)
    _find_pending_keys_by_slots(memory)
    _leave_states_in_place(memory)
    _convolve_beyond_32_bits()
    _find_chunks_on_the_host()
    _build_cache(clock, memory)
    _send_time(clock)
    _admit_by_demand()
    _park_paused_requests()
    _answer_before_going_on()
    _place_tokens()
    _run_commands()
    _send_restored_pages_late()
    _verify_drafts()
    _run_state_layers(layers, replay)
    _fold_drafts(replay)
    _capture_prefills(layers)
    _follow_weights()
    _release_memory()
    _take_session_orders()
    _apply()
    _ENGINE_HOOKED = True


def _take_arguments(cls: type, args: Any) -> None:
    """Take our flags' values; hook the engine if they ask for the plugin.

    Raises:
        SystemExit: for bad options, or an SGLang that the plugin does not fit.
    """
    activation.take_arguments(cls, args)
    if not activation.requested():
        return
    with ending_the_server():
        hook_engine()


# ------------------------------------------------------------------- the hooks


def _settle_arguments() -> None:
    """Symptom: SGLang configures its own cache for the model.

    Cause: it derives strategy and page size from the model's architecture.
    Fix: check for conflicts and declare ours just before it derives, and check once
    more when it has.
    Delete when: never; it is SGLang's own seam for plugins.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from hybrid_plugin.sglang import arguments

    register_resolution_hook("handle_model_specific_adjustments")(arguments.adjust)
    register_resolution_hook("handle_model_capability_adjustments")(arguments.confirm)


def _allow_paged_overlap() -> None:
    """Symptom: "no_buffer only supports page_size=1", and no overlap schedule.

    Cause: SGLang's own tree needs tracking slots for both; the core does not.
    Fix: skip that check, where our cache was declared.
    Delete when: the check asks the chosen radix cache backend.
    """

    def validate(original: Callable[..., None], view: Any, *args: Any) -> None:
        from hybrid_plugin.sglang.arguments import BACKEND

        if view.radix_cache_backend != BACKEND:
            original(view, *args)

    _hook(f"{_SRT}.arg_groups.mamba_hook.validate_mamba_no_buffer", "AROUND", validate)


def _divide_memory(memory: PoolMemory, layers: StateLayers, replay: Replay) -> None:
    """Symptom: a third of the state slots can run, and memory is split blindly.

    Cause: SGLang reserves tracking and snapshot slots for every request, and
    divides memory by a fixed ratio.
    Fix: one slot per running sequence (snapshots are always evictable), slots
    and pages by the plugin's options; then let the core own their ids.  A window
    pool keeps SGLang's ratio, within the plugin's budget.
    Delete when: the configurator asks the radix cache backend for its needs.
    """
    configurator = f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator"

    @named()
    def slots(original: Callable[..., float], self: Any, memory_gib: float) -> float:
        from hybrid_plugin.sglang import planning

        if not _is_ours():
            return original(self, memory_gib)
        options = activation.read_options()
        return planning.reserve_slots(self, memory_gib, options, memory)

    def slots_per_request(original: Callable[..., int], self: Any) -> int:
        return 1 if _is_ours() else original(self)

    def tokens(result: int, self: Any, token_capacity: int) -> int:
        from hybrid_plugin.sglang import planning

        if not _is_ours():
            return result
        return planning.limit_tokens(result, memory)

    @named()
    def pools(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
        from hybrid_plugin.sglang import planning, window_pools
        from hybrid_plugin.sglang.kernels import prefill_graphs

        if not _is_ours():
            return original(self, **kwargs)
        if self.is_draft_worker:
            with memory.building():
                result = original(self, **kwargs)
            target = kwargs["req_to_token_pool"]
            planning.share_draft_pages(result, self.model, target, memory)
            return result
        options = activation.read_options()
        if not self.is_hybrid_swa:
            layers.settle(
                self.model_config,
                options.wanted_kernels,
                self.device,
                round_states=options.is_deterministic,
                prefill_graphs=prefill_graphs.are_wanted(options, self),
            )
            replay.settle(options, self.model_config)
        with memory.building():
            result = original(self, **kwargs)
        if self.is_hybrid_swa:
            return window_pools.take_over(self, result, options, memory)
        return planning.take_over(result, options, memory, layers.interior, replay)

    @named()
    def budget(
        original: Callable[..., Any], self: Any, size: int, **kwargs: Any
    ) -> Any:
        from hybrid_plugin.sglang import window_pools

        if _is_ours() and self.is_hybrid_swa:
            size = window_pools.limited(self, size, activation.read_options())
        return original(self, size, **kwargs)

    _hook(f"{configurator}._handle_max_mamba_cache", "AROUND", slots)
    _hook(f"{configurator}._calculate_mamba_ratio", "AROUND", slots_per_request)
    _hook(f"{configurator}._apply_token_constraints", "AFTER", tokens)
    _hook(f"{configurator}.config_from_budget", "AROUND", budget)
    _hook(f"{configurator}._init_pools", "AROUND", pools)


def _share_memory(memory: PoolMemory, replay: Replay) -> None:
    """Symptom: the memory of the pools cannot move, and is taken twice; with drafts,
    most of it goes for the states after them.

    Cause: SGLang's pools allocate the memory of all their ids, and of these states.
    Fix: where the pools share their memory, build them on what was reserved, those of
    a draft model too, and move accepted drafts by PyTorch, because SGLang's kernel
    takes contiguous tokens and is tried before there is memory; where drafts are
    recorded, build the pools as without drafts.
    Delete when: a pool can be given its tensors.
    """
    from hybrid_plugin.sglang.speculation.replay.passes import without_draft_states

    def keys_and_values(original: Callable[..., None], self: Any) -> None:
        shared = memory.lent
        if shared is None or type(self).__name__ != "MHATokenToKVPool":
            original(self)
        else:
            shared.place_keys_and_values(self)

    def latents(original: Callable[..., None], self: Any) -> None:
        shared = memory.lent
        if shared is None or type(self).__name__ != "MLATokenToKVPool":
            original(self)
        else:
            shared.place_latents(self)

    def states(
        original: Callable[..., None], self: Any, *args: Any, **kwargs: Any
    ) -> None:
        from hybrid_plugin.sglang.slots import SlotMajorPool

        shared = memory.lent
        if shared is not None:
            scratch = () if replay.is_wanted else shared.scratch
            self.mamba_pool_cls = partial(SlotMajorPool, shared.slot_rows, scratch)
        without_draft_states(replay, original, self, *args, **kwargs)

    def prepare_moves(original: Callable[..., None], self: Any) -> None:
        if memory.lent is None:
            original(self)
        else:  # SGLang's kernel takes contiguous tokens, and is tried on holes here
            self._kv_copy_config, self.use_native_move_kv_cache = None, True

    pool = f"{_SRT}.mem_cache.memory_pool"
    _hook(f"{pool}.MHATokenToKVPool._create_buffers_normal", "AROUND", keys_and_values)
    _hook(f"{pool}.MHATokenToKVPool._init_kv_copy_and_warmup", "AROUND", prepare_moves)
    _hook(f"{pool}.MLATokenToKVPool._create_buffers", "AROUND", latents)
    _hook(f"{pool}.HybridReqToTokenPool._init_mamba_pool", "AROUND", states)


def _find_rings_by_slots(memory: PoolMemory) -> None:
    """Symptom: a hit that ends between the tokens of an index key continues with
    those of another request, and reads what it should not from then on.

    Cause: tokens that no index key stands for yet wait in a ring of the row that a
    request has while it runs.
    Fix: rings belong to slots (`rings`); look a request's up by its slot.
    Delete when: the radix cache backend is asked what to keep beside states, or rings
    are slot states (`MambaPool.register_slot_state`).
    """

    def step(original: Callable[..., None], self: Any, **kwargs: Any) -> None:
        rows = memory.rings.in_rows(kwargs["req_pool_indices"])
        original(self, **{**kwargs, "req_pool_indices": rows})

    def leave(original: Callable[..., None], self: Any, **kwargs: Any) -> None:
        row = memory.rings.in_rows(kwargs["req_pool_idx"])
        original(self, **{**kwargs, "req_pool_idx": row})

    def prefill(result: Any, *_: Any, **__: Any) -> Any:
        return memory.rings.planned(result)

    def verify(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        rows = memory.rings.in_rows(kwargs["req_pool_indices"])
        original(*args, **{**kwargs, "req_pool_indices": rows})

    pool = f"{_SRT}.mem_cache.memory_pool.DSATokenToKVPool"
    _hook(f"{pool}.kpool_decode_update_index_cache", "AROUND", step)
    _hook(f"{pool}.set_compress_tail_for_request", "AROUND", leave)
    plan = f"{_SRT}.layers.attention.dsa.kpool_plan"
    _hook(f"{plan}.init_kpool_extend_metadata", "AFTER", prefill)
    _hook(f"{plan}.update_kpool_write_plan", "AROUND", verify)


def _find_pending_keys_by_slots(memory: PoolMemory) -> None:
    """Symptom: Qwen4-Exp stops where a hit does not end with the last token of a
    compressed key; there it would go on with index keys of another request.

    Cause: index keys that wait for others are in a ring of the row that a request has
    while it runs, and prefills make compressed keys of their own tokens alone, because
    SGLang's own cache resumes at ends of pages.
    Fix: rings belong to slots (`pending_keys`); look a request's up by its slot, and
    put what is in it in front of what a prefill computes.
    Delete when: the radix cache backend is asked what to keep beside states, and
    prefills may begin anywhere.
    """
    from hybrid_plugin.sglang.pending_keys import compress

    def plan(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
        batch = kwargs["forward_batch"]
        decodes = batch.forward_mode.is_decode() or kwargs["speculative_paged"]
        if memory.pending.slots is None or decodes:
            return original(self, **kwargs)
        return memory.pending.write_plan(
            self,
            kwargs["sequence_lengths"],
            batch.extend_seq_lens,
            kwargs["token_slot_table"],
            batch.input_ids.numel(),
        )

    def describe(original: Callable[..., Any], self: Any, batch: Any) -> Any:
        return memory.pending.planned(original(self, batch), batch)

    def replay(original: Callable[..., None], self: Any, **kwargs: Any) -> None:
        original(self, **kwargs)
        memory.pending.replayed(self.forward_metadata.indexer_metadata)

    backend = f"{_SRT}.layers.attention.qwen_sparse_attn_backend.QwenSparseAttnBackend"
    _hook(f"{backend}._qsa_build_write_plan", "AROUND", plan)
    _hook(f"{backend}._metadata_from_forward_batch", "AROUND", describe)
    _hook(f"{backend}._replay_cuda_graph_metadata", "AROUND", replay)
    indexer = f"{_SRT}.layers.attention.qsa.qsa_indexer.QSAIndexer"
    _hook(f"{indexer}.update_key_state_and_compress", "AROUND", compress)


def _leave_states_in_place(memory: PoolMemory) -> None:
    """Symptom: with elastic pools every prefill copies the states of its requests, out
    of and back into the pool, in every layer of gated delta nets.

    Cause: SGLang gives its prefill kernels contiguous states only: the guard of one of
    them would run it on a copy of the whole pool, and drop what it writes.
    Fix: give them the pool, and lead it past that guard.
    Delete when: `requires_contiguous_prefill_state` is False there.
    """
    from sglang.kernels.ops.attention.fla.chunk import ChunkGatedDeltaRuleFunction
    from sglang.kernels.ops.attention.fla.utils import input_guard

    from hybrid_plugin.sglang import strided_states

    def built(result: None, backend: Any, *_: Any, **__: Any) -> None:
        if memory.shared is not None:
            strided_states.leave_in_place(backend)

    backend = f"{_SRT}.layers.attention.linear.gdn_backend.GDNAttnBackend"
    _hook(f"{backend}.__init__", "AFTER", built)
    function = ChunkGatedDeltaRuleFunction
    _hook(
        f"{function.__module__}.{function.__name__}.forward",
        "AROUND",
        strided_states.past_guard(function.forward, input_guard),
    )


def _convolve_beyond_32_bits() -> None:
    """Symptom: with elastic pools of more than 8 GiB of slots, Falcon-H1 reads and
    writes convolution states of other slots.

    Cause: SGLang's CUDA kernels multiply a slot by its stride in 32 bits.
    Fix: where an offset may not fit, call its Triton kernels, which use 64.
    Delete when: the CUDA kernels' strides are 64-bit, or are never chosen for
    strided states.
    """
    from sglang.kernels.ops.mamba import causal_conv1d_triton
    from sglang.srt.layers.attention.mamba import causal_conv1d

    from hybrid_plugin.sglang import addressing

    def prefill(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        twin = causal_conv1d_triton.causal_conv1d_fn
        addressing.convolve_prefill(original, twin, *args, **kwargs)

    def step(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        twin = causal_conv1d_triton.causal_conv1d_update
        addressing.convolve_step(original, twin, *args, **kwargs)

    # The module has them on CUDA alone.  Models take its functions by name, which
    # look these two up at each call.
    for name, hook in (
        ("causal_conv1d_fwd", prefill),
        ("causal_conv1d_update_kernel", step),
    ):
        if hasattr(causal_conv1d, name):
            _hook(f"{causal_conv1d.__name__}.{name}", "AROUND", hook)


def _find_chunks_on_the_host() -> None:
    """Symptom: a Mamba-2 prefill with a prefix waits for the decode before it.

    Cause: SGLang finds the chunks of a batch in Python, from tensors on the device.
    Fix: find them from the lengths on the host.
    Delete when: `prepare_mixed` reads no device tensor.
    """

    def prepare(original: Callable[..., Any], cls: Any, *args: Any) -> Any:
        from hybrid_plugin.sglang import mamba2_metadata

        if not _is_ours():
            return original(cls, *args)
        return mamba2_metadata.prepare_mixed(original, cls, *args)

    metadata = f"{_SRT}.layers.attention.mamba.mamba2_metadata.Mamba2Metadata"
    _hook(f"{metadata}.prepare_mixed", "AROUND", prepare)


def _build_cache(clock: RankClock, memory: PoolMemory) -> None:
    """Register our prefix cache with SGLang's registry of radix cache backends.

    It is built when the pools of all models are there, whose rows go to host memory.
    """
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from hybrid_plugin.sglang.arguments import BACKEND

    @named()
    def build(context: Any) -> Any:
        from hybrid_plugin.sglang import host_copies, outer_tiers
        from hybrid_plugin.sglang.prefix_cache import HybridPrefixCache

        if context.params.disable:
            raise cannot_serve(
                "SGLang switches prefix caches off for this model; give "
                f"--disable-radix-cache, or drop {activation.FLAG}."
            )
        allocator, outer = context.params.token_to_kv_pool_allocator, None
        if allocator.cache.host is not None:
            host_copies.attach(allocator.cache, allocator.executor)
        options = activation.read_options()
        if options.has_outer_tiers:
            outer = outer_tiers.attach(context, memory.drafts, options)
        if options.verify_fraction:
            _require(HIT_CHECK_HOOKS)
        return HybridPrefixCache(
            context.params, clock, outer, verify_fraction=options.verify_fraction
        )

    register_radix_cache_backend(BACKEND, build)


def _send_time(clock: RankClock) -> None:
    """Symptom: ranks would disagree on whether the TTL of a conversation is over, on
    what is worth a restore from host memory, and on when one should be.

    Cause: SGLang's ranks share no clock, and its requests bring no time along.
    Fix: the rank that receives requests sends its time with them, and how long its
    prefills take; stages of a pipeline pass both on.
    Delete when: a request carries a time that is equal on all ranks.
    """

    def broadcast(
        original: Callable[..., Any], receiver: Any, requests: Any, *rest: Any
    ) -> Any:
        from sglang.srt.runtime_context import get_parallel

        if not _is_ours():
            return original(receiver, requests, *rest)
        return clock.broadcast(
            partial(original, receiver),
            requests,
            *rest,
            first_stage=get_parallel().pp_rank == 0,
        )

    def relay(
        original: Callable[..., Any],
        scheduler: Any,
        requests: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if _served_by(scheduler.tree_cache):
            requests = clock.relayed(requests)
        return original(scheduler, requests, *args, **kw)

    receiver = f"{_SRT}.managers.scheduler_components.request_receiver"
    _hook(
        f"{receiver}.SchedulerRequestReceiver._broadcast_reqs_across_ranks",
        "AROUND",
        broadcast,
    )
    _hook(
        f"{_SRT}.managers.scheduler.Scheduler._pp_send_pyobj_to_next_stage",
        "AROUND",
        relay,
    )


def _admit_by_demand() -> None:
    """Symptom: prefills run past the positions where a snapshot is wanted.

    Cause: SGLang admits by counting tokens, and takes states where its kernels
    happen to have them.
    Fix: admit to the core, and end chunks where it says.
    Delete when: a prefix cache may end chunks; the class of the adder is SGLang's
    own seam.
    """

    def adder(result: type, scheduler: Any) -> type:
        from hybrid_plugin.sglang.scheduling import HybridPrefillAdder

        return HybridPrefillAdder if _served_by(scheduler.tree_cache) else result

    def rows(result: int, scheduler: Any, running: int, *_: Any, **__: Any) -> int:
        from sglang.srt.runtime_context import get_parallel

        from hybrid_plugin.sglang.scheduling import more_rows

        if not _served_by(scheduler.tree_cache):
            return result
        places = get_parallel().pp_max_micro_batch_size - running
        return more_rows(result, scheduler.tree_cache.num_parked, places)

    def retracted(result: bool, *, tree_cache: Any, **_: Any) -> None:
        if _served_by(tree_cache):
            tree_cache.retracted()

    scheduler = f"{_SRT}.managers.scheduler.Scheduler"
    _hook(f"{scheduler}.get_prefill_adder_class", "AFTER", adder)
    _hook(f"{scheduler}.get_num_allocatable_reqs", "AFTER", rows)
    _hook(f"{_SRT}.managers.schedule_batch.release_req", "AFTER", retracted)


def _park_paused_requests() -> None:
    """Symptom: a request that was paused at a snapshot position never goes on.

    Cause: SGLang goes on with one unfinished prefill at a time, its chunked request,
    and takes whatever waits for new.
    Fix: queue paused requests ahead of the others, hide them from what SGLang does
    to new requests only, let them go on whatever new ones wait for, retract them with
    those that run, and stream nothing for them.
    Delete when: SGLang goes on with several unfinished prefills.
    """
    scheduler = f"{_SRT}.managers.scheduler.Scheduler"
    policy = f"{_SRT}.managers.schedule_policy.SchedulePolicy"
    streamer = f"{_SRT}.managers.scheduler_components.output_streamer"
    for step in ("get_next_batch_to_run", "get_next_disagg_prefill_batch_to_run"):
        _hook(f"{scheduler}.{step}", "BEFORE", _park)
    _hook(f"{scheduler}._get_new_batch_prefill_raw", "AROUND", _let_parked_go_on)
    _hook(f"{scheduler}.pause_generation", "BEFORE", _park_for_a_pause)
    _hook(f"{scheduler}.pause_generation", "AFTER", _retract)
    _hook(f"{scheduler}._abort_on_queued_limit", "AROUND", _hide_parked)
    _hook(f"{scheduler}._poll_timeout_aborts", "AROUND", _hide_parked)
    _hook(f"{policy}.calc_priority", "AFTER", _parked_first)
    _hook(f"{streamer}.SchedulerOutputStreamer.stream_output", "AROUND", _stream)


def _park(scheduler: Any, running_batch: Any, last_batch: Any, **_: Any) -> None:
    from hybrid_plugin.sglang.hit_checks import check_when_idle
    from hybrid_plugin.sglang.parking import park_paused

    if _served_by(scheduler.tree_cache):
        park_paused(scheduler, running_batch, last_batch)
        check_when_idle(scheduler, running_batch, last_batch)
        scheduler.tree_cache.plan_waits(scheduler.waiting_queue)


def _let_parked_go_on(
    original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    from hybrid_plugin.sglang.parking import without_free_slots_delay

    if not _served_by(scheduler.tree_cache):
        return original(scheduler, *args, **kwargs)
    with without_free_slots_delay(scheduler):
        return original(scheduler, *args, **kwargs)


def _park_for_a_pause(scheduler: Any, recv_req: Any) -> None:
    from hybrid_plugin.sglang.parking import park_for_a_pause

    if _served_by(scheduler.tree_cache) and recv_req.mode == "retract":
        park_for_a_pause(scheduler)


def _retract(result: None, scheduler: Any, recv_req: Any) -> None:
    from hybrid_plugin.sglang.parking import retract_parked

    if _served_by(scheduler.tree_cache) and recv_req.mode == "retract":
        retract_parked(scheduler)


def _hide_parked(original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
    from hybrid_plugin.sglang.parking import without_parked

    if not _served_by(scheduler.tree_cache):
        return original(scheduler, *args)
    with without_parked(scheduler):
        return original(scheduler, *args)


def _parked_first(
    result: None, policy: Any, waiting_queue: Any, *_: Any, **__: Any
) -> None:
    from hybrid_plugin.sglang.parking import parked_first

    if _served_by(policy.tree_cache):
        parked_first(waiting_queue, policy.tree_cache)


def _stream(
    original: Callable[..., None], streamer: Any, reqs: Any, *args: Any, **kwargs: Any
) -> None:
    from hybrid_plugin.sglang.scheduling import with_output

    if _served_by(streamer.tree_cache):
        reqs = with_output(reqs)
        if streamer.tree_cache.hit_checking is not None:
            reqs = streamer.tree_cache.hit_checking.without_own(reqs)
    original(streamer, reqs, *args, **kwargs)


def _answer_before_going_on() -> None:
    """Symptom: a first token waits until the rest of another prompt is launched.

    Cause: under the overlap schedule SGLang launches a batch, and only then handles
    the results of the one before; a pause puts two prefills behind each other.
    Fix: handle those results first, where the batch goes on with paused requests, and
    never where it also decodes (see `results_first`).
    Delete when: no prompt is paused, or SGLang does so for all prefills
    (`SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP`).
    """

    def order(result: Any, scheduler: Any, batch: Any, last_batch: Any) -> Any:
        from hybrid_plugin.sglang.scheduling import results_first

        if not _served_by(scheduler.tree_cache):
            return result
        return results_first(result, scheduler, batch, last_batch)

    scheduler = f"{_SRT}.managers.scheduler.Scheduler"
    _hook(f"{scheduler}.is_disable_overlap_for_batch", "AFTER", order)


def _place_tokens() -> None:
    """Symptom: SGLang takes pages from its allocator, one batch at a time.

    Cause: its allocators do not know which request a page is for.
    Fix: place tokens on the pages of each request's sequence.
    Delete when: allocation asks the prefix cache.
    """

    def extend(original: Callable[..., Any], batch: Any) -> Any:
        from hybrid_plugin.sglang import token_placement

        if _served_by(batch.tree_cache):
            return token_placement.extend(batch.tree_cache, batch)
        return original(batch)

    def decode(original: Callable[..., Any], batch: Any, token_per_req: int) -> Any:
        from hybrid_plugin.sglang import token_placement

        if _served_by(batch.tree_cache):
            return token_placement.decode(batch.tree_cache, batch)
        return original(batch, token_per_req=token_per_req)

    def verify(
        original: Callable[..., None], tree_cache: Any, rows: Any, **kwargs: Any
    ) -> None:
        from hybrid_plugin.sglang import token_placement

        if not _served_by(tree_cache):
            original(tree_cache, rows, **kwargs)
            return
        ends = kwargs["nxt_kv_lens_cpu"].tolist()
        token_placement.verify(tree_cache, rows, kwargs["reqs"], ends)

    _hook(f"{_SRT}.mem_cache.allocation.alloc_for_extend", "AROUND", extend)
    _hook(f"{_SRT}.mem_cache.allocation.alloc_for_spec_decode", "AROUND", verify)
    _hook(f"{_SRT}.mem_cache.allocation.alloc_for_decode", "AROUND", decode)


def _run_commands() -> None:
    """Symptom: a sequence starts on a state that nobody copied or cleared; with
    `--sleep-on-idle`, files are written one in a second.

    Cause: SGLang copies and clears one state per request by its own records, and sleeps
    where nothing runs.
    Fix: run the cache's commands before each forward pass, on its stream, and
    tell the cache once it is launched; stay awake while anything is written or fetched.
    Delete when: the worker runs device work of the radix cache backend.
    """

    def forward(
        original: Callable[..., Any], self: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # With drafts, a step is more than one forward pass of the target.
        drafts = batch is not None and not batch.spec_algorithm.is_none()
        if batch is None or drafts or not _served_by(batch.tree_cache):
            return original(self, batch, *args, **kwargs)
        batch.tree_cache.step_begins(batch)
        result = original(self, batch, *args, **kwargs)
        batch.tree_cache.step_launched(batch)
        return result

    def idle(result: Any, scheduler: Any) -> None:
        if _served_by(scheduler.tree_cache):
            scheduler.tree_cache.idle()

    def sleep(original: Callable[..., None], scheduler: Any) -> None:
        cache = scheduler.tree_cache
        if not _served_by(cache) or cache.may_sleep:
            original(scheduler)

    worker = f"{_SRT}.managers.tp_worker.TpModelWorker"
    _hook(f"{worker}.forward_batch_generation", "AROUND", forward)
    scheduler = f"{_SRT}.managers.scheduler.Scheduler"
    _hook(f"{scheduler}.on_idle", "AFTER", idle)
    _hook(f"{scheduler}.maybe_sleep_on_idle", "AROUND", sleep)


def _send_restored_pages_late() -> None:
    """Symptom: a decode server gets other KV of a prefix than the prompt's, where a
    prefill server restores it from host memory.

    Cause: SGLang sends the pages of a hit before it launches the pass, and waits for
    what was launched before; copies from host memory are awaited by the pass itself.
    Fix: send the whole prompt behind the pass, where anything may come from the host.
    SGLang does so beside its own copies.
    Delete when: the radix cache backend says from where on pages may be sent.
    """
    scheduler = f"{_SRT}.managers.scheduler.Scheduler"
    early = f"{scheduler}.maybe_send_cached_prefix_chunk"
    _hook(early, "AROUND", _send_behind_restores)


def _send_behind_restores(
    original: Callable[..., None], scheduler: Any, req: Any, allow_send: bool = True
) -> None:
    cache = scheduler.tree_cache
    if _served_by(cache) and cache.cache.host is not None:
        allow_send = False
    original(scheduler, req, allow_send=allow_send)


def _verify_drafts() -> None:
    """Symptom: with drafts, what ends a turn is not cached, or wrong.

    Cause: a step gives several tokens, and how many is known when the next one runs
    already; that one has moved the states on.
    Fix: run the cache's commands before each step of a speculative worker; tell the
    core what it verifies, and what came of it; and end what is accepted at the first
    stop, so that the next step begins where the answer ends.  Workers for blocks of
    drafts accept by methods of their own, which `with_commands` wraps.  A paused
    prompt's next token is what its draft KV is computed with.
    Delete when: the worker runs device work of the radix cache backend, and SGLang cuts
    answers on the device.
    """
    from hybrid_plugin.sglang.speculation import workers

    @named()
    def commanded(result: type, algorithm: Any, *_: Any, **__: Any) -> type:
        if not _is_ours():
            return result
        if algorithm.is_dflash_family():
            _require(BLOCK_DRAFT_HOOKS)
        return workers.with_commands(result)

    def sampled(result: Any, verify_input: Any, batch: Any, *_: Any, **__: Any) -> Any:
        if not _served_by(batch.tree_cache):
            return result
        width = verify_input.draft_token_num
        return tuple(batch.tree_cache.drafts.sampled(batch, width, result))

    def tails(result: Any, batch: Any, *_: Any) -> Any:
        if not _served_by(batch.tree_cache):
            return result
        return workers.following_tokens(batch, result)

    def resolved(tokens: Any, processor: Any, result: Any, batch: Any) -> None:
        if _served_by(processor.tree_cache):
            accepted = result.num_correct_drafts_per_req_cpu
            processor.tree_cache.drafts.resolved(batch, accepted)

    speculative = f"{_SRT}.speculative"
    for owner in ("spec_info.SpeculativeAlgorithm", "spec_registry.CustomSpecAlgo"):
        _hook(f"{speculative}.{owner}.create_worker", "AFTER", commanded)
    _hook(f"{speculative}.eagle_utils.eagle_sample", "AFTER", sampled)
    _hook(f"{speculative}.eagle_utils._eagle_prefill_tail_tokens", "AFTER", tails)
    processor = (
        f"{_SRT}.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor"
    )
    _hook(f"{processor}._resolve_spec_v2_tokens", "AFTER", resolved)


def _run_state_layers(layers: StateLayers, replay: Replay) -> None:
    """Symptom: prompts pause for snapshots, and where pools are elastic, the states of
    a prefill are gathered and scattered in every layer.  With drafts, a running request
    takes the memory of several.

    Cause: SGLang's prefill kernels write no states in the middle of a prompt to slots
    that a cache chooses, and some take contiguous states only.  Those that verify write
    a state after each draft.
    Fix: run the state layers on ours, where the option `kernels` says so, or
    `draft_states` for passes that verify.
    Delete when: SGLang's kernels do both.
    """
    from hybrid_plugin.sglang.kernels import (
        gated_delta_net,
        kda,
        lightning,
        mamba2,
        short_conv,
    )

    attention = f"{_SRT}.layers.attention"
    gdn = f"{attention}.linear.gdn_backend.GDNAttnBackend"
    kimi = f"{attention}.linear.kda_backend.KDAAttnBackend"
    flash = f"{attention}.linear.lightning_backend.LightningAttentionBackend"
    mamba = f"{attention}.hybrid_linear_attn_backend.Mamba2AttnBackend"
    verifying: tuple[tuple[str, _Hook, _Hook], ...] = (
        (f"{gdn}.forward_extend", gated_delta_net.verify, gated_delta_net.extend),
        (f"{mamba}.forward", mamba2.verify, mamba2.forward),
        (f"{kimi}.forward_extend", kda.verify, kda.extend),
    )
    for target, verify, function in verifying:
        _hook(target, "AROUND", _or_else(replay, verify, _given(layers, function)))
    others: tuple[tuple[str, _Hook], ...] = (
        (f"{gdn}.forward_decode", gated_delta_net.decode),
        (f"{kimi}.forward_decode", kda.decode),
        (f"{flash}.forward_extend", lightning.extend),
        (f"{flash}.forward_decode", lightning.decode),
        (f"{_SRT}.models.lfm2.Lfm2ShortConv.forward", short_conv.forward),
        (f"{_SRT}.models.lfm2_moe.Lfm2MoeShortConv.forward", short_conv.forward),
    )
    for target, function in others:
        _hook(target, "AROUND", _given(layers, function))


def _fold_drafts(replay: Replay) -> None:
    """Symptom: a turn that ends behind a verification loses its exact state.

    Cause: SGLang commits what a verification accepted in the same step, before anybody
    knows where the answer ends.
    Fix: where drafts are recorded, keep what is to be folded, and fold it before the
    next step.
    Delete when: SGLang commits accepted drafts before the step behind.
    """
    from hybrid_plugin.sglang.speculation.replay import passes

    def commit(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        passes.commit(replay, original, *args, **kwargs)

    hybrid = f"{_SRT}.layers.attention.hybrid_linear_attn_backend"
    _hook(
        f"{hybrid}.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        "AROUND",
        commit,
    )


def _capture_prefills(layers: StateLayers) -> None:
    """Symptom: a short prefill waits for the host at every state layer.

    Cause: SGLang's graphs of prefills break at state layers; only the backend of Kimi
    delta attention knows better, with SGLang's kernels.
    Fix: where `prefill_graphs` asks for it, give the graphs sequences at addresses that
    stay, and fill them before each replay; elsewhere keep our kernels out of graphs.
    Delete when: SGLang finds a prefill's chunks on the device.
    """
    from hybrid_plugin.sglang.kernels import prefill_graphs

    attention = f"{_SRT}.layers.attention"
    linear, hybrid = f"{attention}.linear", f"{attention}.hybrid_linear_attn_backend"
    gdn = f"{linear}.gdn_backend.GDNAttnBackend"
    for backend in (gdn, f"{linear}.kda_backend.KDAAttnBackend"):
        for name, function in (
            ("supports_prefill_graph_extend", prefill_graphs.are_supported),
            ("prefill_graph_extend_active", prefill_graphs.are_active),
            ("init_prefill_graph_metadata", prefill_graphs.begin),
            ("refresh_prefill_graph_metadata", prefill_graphs.refresh),
        ):
            _hook(f"{backend}.{name}", "AROUND", _given(layers, function))
    _hook(f"{gdn}.__init__", "AFTER", prefill_graphs.bound)
    _hook(
        f"{hybrid}.HybridLinearAttnBackend.init_forward_metadata_out_graph",
        "AROUND",
        _given(layers, prefill_graphs.prepare_whole),
    )


def _given(layers: StateLayers, function: Callable[..., Any]) -> Callable[..., Any]:
    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(layers, original, *args, **kwargs)

    return hook


def _or_else(
    replay: Replay, verify: Callable[..., Any], otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """A hook that verifies, or does what another one does."""

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return verify(replay, partial(otherwise, original), *args, **kwargs)

    return hook


def _follow_weights() -> None:
    """Symptom: after weights were updated, state layers on our kernels decay as before,
    and what the new weights leave on disk counts as that of those that were loaded.

    Cause: the rates are computed from the weights once, and so is the model's name.
    Fix: compute the rates anew after each update, and change the name before it.
    Delete when: our kernels take what the checkpoint has, and SGLang tells its cache.
    """
    from hybrid_plugin.sglang.kernels import gated_delta_net, kda

    def loaded(result: Any, *_: Any, **__: Any) -> None:
        gated_delta_net.DECAYS.refresh()
        kda.DECAYS.refresh()

    def updating(updater: Any, *_: Any) -> None:
        scheduler = updater.scheduler
        if scheduler is not None and _served_by(scheduler.tree_cache):
            scheduler.tree_cache.weights_change()

    for update in (
        "update_weights_from_disk",
        "update_weights_from_ipc",
        "begin_weight_update",
    ):
        _hook(f"{_UPDATER}.{update}", "BEFORE", updating)
    for update in (
        # These two do not note a version if a draft model fails behind the target.
        "update_weights_from_disk",
        "update_weights_from_ipc",
        "record_weight_version_after_update",
        "end_weight_update",
    ):
        _hook(f"{_UPDATER}.{update}", "AFTER", loaded)


def _release_memory() -> None:
    """Symptom: with `--enable-memory-saver` elastic pools keep their memory when a
    trainer has SGLang release its own, and queued copies read pages without memory.

    Cause: that memory is ours; SGLang takes the memory of its pools before it flushes.
    Fix: flush and release ours before, and take it again behind SGLang.
    Delete when: pools and caches are told of both.
    """

    def concerns(updater: Any, request: Any) -> bool:
        from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
        from sglang.srt.runtime_context import get_exec

        return (
            get_exec().features.enable_memory_saver
            and updater.scheduler is not None
            and _served_by(updater.scheduler.tree_cache)
            and (not request.tags or GPU_MEMORY_TYPE_KV_CACHE in request.tags)
        )

    def release(updater: Any, request: Any) -> None:
        if concerns(updater, request):
            updater.scheduler.tree_cache.release_memory()

    def resumed(result: Any, updater: Any, request: Any) -> None:
        if concerns(updater, request):
            updater.scheduler.tree_cache.restore_memory()

    _hook(f"{_UPDATER}.release_memory_occupation", "BEFORE", release)
    _hook(f"{_UPDATER}.resume_memory_occupation", "AFTER", resumed)


def _take_session_orders() -> None:
    """Symptom: saved sessions have no endpoint, and nobody but a scheduler reaches the
    cache.

    Cause: SGLang's application and its kinds of control requests are closed lists.
    Fix: where a process has the server, add endpoints when its tokenizer is made, which
    is before it is served; and take control requests of our method in the schedulers.
    Delete when: plugins can add endpoints and control requests.
    """
    from hybrid_plugin.sglang import saved_sessions

    @named()
    def made(result: None, *_: Any, **__: Any) -> None:
        if saved_sessions.server_is_loaded():
            _require(SAVED_SESSION_HOOKS)
            saved_sessions.attach()

    def take(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        if request.method != saved_sessions.METHOD:
            return original(scheduler, request)
        cache = scheduler.tree_cache
        return saved_sessions.answer(cache if _served_by(cache) else None, request.body)

    managers = f"{_SRT}.managers"
    _hook(f"{managers}.tokenizer_manager.TokenizerManager.__init__", "AFTER", made)
    _hook(f"{managers}.scheduler.Scheduler.handle_dumper_control", "AROUND", take)


# -------------------------------------------------------------------- internal


def _is_ours() -> bool:
    """Whether the engine being built uses our cache."""
    from sglang.srt.runtime_context import get_memory

    from hybrid_plugin.sglang.arguments import BACKEND

    return bool(get_memory().radix_cache_backend == BACKEND)


def _served_by(tree_cache: Any) -> bool:
    from hybrid_plugin.sglang.prefix_cache import HybridPrefixCache

    return isinstance(tree_cache, HybridPrefixCache)


def _require(points: Any) -> None:
    found = problems(points, LiveView("sglang"))
    if found:
        from sglang import __version__

        raise ConfigError(
            f"it does not fit SGLang {__version__}: {'; '.join(found)}. Install a "
            f"version it supports, or serve without {activation.FLAG}."
        )


def _warn_if_untested() -> None:
    from sglang import __version__

    remark = untested("sglang", __version__)
    if remark is not None:
        logger.warning("SGLang %s is %s.", __version__, remark)


_WANTED: list[str] = []


def _hook(target: str, kind: str, function: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType[kind])
    _WANTED.append(target)


def _apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    missed = [target for target in _WANTED if target not in HookRegistry._patched]
    if missed:
        raise ConfigError(
            f"SGLang's hook registry refused {', '.join(missed)}; its log says why. "
            f"Serve without {activation.FLAG}."
        )
