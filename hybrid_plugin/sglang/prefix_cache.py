# SPDX-License-Identifier: Apache-2.0
"""What SGLang's scheduler takes for its prefix cache.

No decision is made here: each method translates to `HybridCache`.  SGLang
locks nodes, inserts after each chunk and frees what was not inserted; the core
does all of that by sequence, so these methods have nothing left to do.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    CacheRequestHandle,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.common import release_kv_cache

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Command
from hybrid_plugin.core.memory.window_tables import WindowDemand
from hybrid_plugin.core.sequence import LiveSequence
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.engine.front_door import FrontDoor
from hybrid_plugin.engine.session_desk import Answer, without_disk
from hybrid_plugin.sglang import pipeline
from hybrid_plugin.sglang.clock import RankClock
from hybrid_plugin.sglang.hit_checks import HitChecking
from hybrid_plugin.sglang.host_steps import HostSteps
from hybrid_plugin.sglang.kv_events import KvEvents
from hybrid_plugin.sglang.log import logger
from hybrid_plugin.sglang.metrics import StepMetrics
from hybrid_plugin.sglang.outer_steps import OuterSteps
from hybrid_plugin.sglang.requests import SGLangRequest, namespace, sequence_id
from hybrid_plugin.sglang.speculation.steps import DraftSteps
from hybrid_plugin.sizes import gib
from hybrid_plugin.tiers.peers.params import OWN

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from hybrid_plugin.sglang.allocator import HybridSlotAllocator, HybridTokenAllocator

_OUTSIDE = Node(parent=None, tokens=array("q"), pages=array("i"), end=0)
"""Stands for no node at all where SGLang wants a handle."""


class HybridPrefixCache(BasePrefixCache):
    """Speaks SGLang's prefix cache interface for a `HybridCache`."""

    token_to_kv_pool_allocator: HybridTokenAllocator

    def __init__(
        self,
        params: CacheInitParams,
        clock: RankClock,
        outer: OuterSteps | None = None,
        verify_fraction: float = 0.0,
    ) -> None:
        """Wrap the core cache that the allocator carries.

        Args:
            params: of SGLang, with our allocator in it.
            clock: has the time, equal on all ranks.
            outer: where there is something behind the host memory.
            verify_fraction: of the requests with a hit that are checked.
        """
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.cache: HybridCache = self.token_to_kv_pool_allocator.cache
        self.page_size = params.page_size
        self.disable = False
        self.sliding_window_size = None
        self.root_node = _OUTSIDE
        self.device = self.token_to_kv_pool_allocator.device
        self._executor = self.token_to_kv_pool_allocator.executor
        self.front_door = FrontDoor(self.cache, logger, clock)
        self._requests: dict[str, Req] = {}
        """Of the live sequences, by their ids; the core says which are live."""
        self._paused: list[Req] = []
        self._parked: set[str] = set()
        self._told: set[str] = set()
        """Requests whose offers of other servers were read."""
        self._sought: set[str] = set()
        """Waiting requests for which the store was asked."""
        self.resumes_parked = False
        """Whether the batch that is launched next goes on with a parked request."""
        self._metrics = StepMetrics(self.cache) if params.enable_metrics else None
        self._kv_events: KvEvents | None = None
        if params.enable_kv_cache_events:
            self._kv_events = KvEvents(self.cache, params)
        self.has_slots = self.cache.slots.needed
        self.window_map = self.token_to_kv_pool_allocator.window_map
        self.drafts = DraftSteps(self.cache, self._executor)
        self._chunk_tokens = params.chunked_prefill_size or 0
        """Arguments that the plugin serves have chunks."""
        self._host: HostSteps | None = None
        """Where there is host memory behind the pools."""
        if self.cache.host is not None:
            self._host = HostSteps(self.cache, clock, torch.device(self.device))
        self._outer = outer
        self.hit_checking: HitChecking | None = None
        if verify_fraction:
            self.hit_checking = HitChecking(verify_fraction, self.cache.stats)

    @property
    def slot_ids(self) -> torch.Tensor:
        """All slot ids, on the device."""
        allocator: HybridSlotAllocator = self.req_to_token_pool.mamba_allocator
        return allocator.ids

    # --------------------------------------------------------------- admission

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Look a request up; nothing is held for it yet."""
        req, key = params.req, params.key
        if req is not None and self.is_live(req):
            return self._match_of_paused(req)
        if req is not None:
            request, limit = SGLangRequest(req), len(key)
            if self.hit_checking is not None and request.is_check:
                limit = self.hit_checking.limit(limit)
            found = self.front_door.look_up(request, limit)
        else:
            space = namespace(key.extra_key, key.cache_salt)
            found = self.cache.look_up(key.token_ids, space, len(key))
        node = found.match.node or _OUTSIDE
        length = found.match.length
        return MatchResult(
            device_prefix_len=length,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            # SGLang counts what the tree owns of a request in whole pages.
            cache_protected_len=length // self.page_size * self.page_size,
            full_kv_hit_length=found.match.kv_length,
        )

    def _match_of_paused(self, req: Req) -> MatchResult:
        return MatchResult(
            device_prefix_len=req.prefix_len,
            last_device_node=req.last_node,
            last_host_node=req.last_node,
            best_match_node=req.last_node,
            cache_protected_len=req.kv.cache_protected_len,
        )

    def chunk_end(self, req: Req, start: int, end: int) -> int:
        """Where a chunk of a request's prompt should end, admitted or just looked up.

        Models with windows (Gemma-4) may look both ways within an image, unless a
        chunk ends in it: SGLang alone says where a prompt with images is cut.

        Args:
            req: the request.
            start: its first token in the chunk.
            end: where SGLang would end it.
        """
        if self.cache.windows and req.multimodal_inputs is not None:
            return end
        return self.front_door.chunk_end(SGLangRequest(req), start, end)

    def name(self, req: Req) -> str:
        """Name of the request's sequence in the core."""
        return _id(req)

    def is_live(self, req: Req) -> bool:
        """Whether the request was admitted and has not been released."""
        return self.cache.is_live(_id(req))

    def sequence(self, req: Req) -> LiveSequence:
        """The core's record of a live request."""
        return self.cache.sequence(_id(req))

    def admit(self, req: Req, end: int) -> bool:
        """Give a request what its prompt takes up to `end`; False if there is no room.

        A request that has begun must never wait for pages that another holds.  So it
        gets pages for all of its prompt and a slot at once, though SGLang may run it
        in chunks.  Where there are windows, it gets pages for a chunk, because those
        behind it are free again by then, and has the rest reserved.
        """
        if self.is_live(req):
            return self.grow(req, end)
        request = SGLangRequest(req)
        length = request.num_tokens
        demand: WindowDemand | None = None
        if self.cache.windows:
            demand = WindowDemand(self._chunk_tokens, request.max_tokens)
        admission = self.front_door.admit(
            request,
            req.prefix_len,
            num_tokens=length if demand is None else end,
            reserve_tokens=length,
            window_demand=demand,
        )
        if admission is None:
            return False
        self._requests[request.seq_id] = req
        request.note_sources(admission)
        if self.hit_checking is not None and not request.is_check:
            self.hit_checking.admitted(req, admission.hit)
        return True

    def grow(self, req: Req, num_tokens: int) -> bool:
        """Give a live request pages for `num_tokens` tokens; False if none is left."""
        return self.cache.grow(_id(req), num_tokens) is not None

    def trim(self, req: Req, computed: int) -> None:
        """Free the pages that no window of a decoding request reaches any more."""
        if self.cache.windows:
            self.cache.trim(_id(req), computed)

    def withdraw(self, req: Req) -> None:
        """Take back an admission that the scheduler did not use."""
        if self.is_live(req):
            del self._requests[_id(req)]
            self.front_door.withdraw(_id(req))

    def plan_waits(self, queue: Sequence[Req]) -> None:
        """Decide which of the requests that wait follow another one."""
        if self._host is not None:
            self._host.plan(waiting=bool(queue))
        if self._outer is not None:
            self._outer.settle()
            self._read_offers(self._outer, queue)
            self._ask_store(self._outer, queue)
        self.front_door.plan_sharing(map(SGLangRequest, queue))

    def _read_offers(self, outer: OuterSteps, queue: Sequence[Req]) -> None:
        """Begin to fetch what other servers have computed of requests that came."""
        if outer.peers is None:
            return
        for req in queue:
            name, extra = _id(req), req.sampling_params.custom_params
            if name in self._told or not isinstance(extra, dict) or OWN not in extra:
                continue
            self._told.add(name)
            if not self.is_live(req):
                outer.peers.arrived(self.front_door, SGLangRequest(req), extra[OWN])

    def _ask_store(self, outer: OuterSteps, queue: Sequence[Req]) -> None:
        """Ask the store what it has of requests that came."""
        if outer.store is None:
            return
        self._sought &= set(map(_id, queue))
        for req in queue:
            if _id(req) not in self._sought and not self.is_live(req):
                self._sought.add(_id(req))
                outer.store.arrived(self.front_door, SGLangRequest(req))

    def must_wait(self, req: Req) -> bool:
        """Whether a request that waits should go on waiting, for another one."""
        return self.front_door.must_wait(_id(req))

    def must_wait_for_restore(self, req: Req) -> bool:
        """Whether its prefix is on the way from host memory, or from behind it.

        Args:
            req: one that was looked up, and could be admitted in this step.  It is
                looked up again where the device has more of it since then.
        """
        if self._host is None or self.is_live(req):
            return False
        if self.front_door.must_wait_for_restore(SGLangRequest(req)):
            return True
        if self.front_door.is_stale(_id(req)):
            req.init_next_round_input(self)
        return False

    def is_fetching(self, req: Req) -> bool:
        """Whether a request waits for what is on the way to host memory.

        That may take any time, and no memory of the device.
        """
        return self.front_door.is_fetching(_id(req))

    # ---------------------------------------------------------------- progress

    def pause(self, req: Req) -> None:
        """Note that the request's prefill was ended before its prompt's end.

        SGLang then keeps what the step samples for it from being an answer.
        """
        req.inflight_middle_chunks += 1
        self._paused.append(req)

    def take_paused(self, batch: ScheduleBatch | None) -> list[Req]:
        """The paused requests of a batch, taken out; those of others stay.

        With pipeline parallelism other batches are under way meanwhile.

        Args:
            batch: whose results were handled, or None.
        """
        if batch is None or not self._paused:
            return []
        present = set(map(id, batch.reqs))
        taken = [req for req in self._paused if id(req) in present]
        self._paused = [req for req in self._paused if id(req) not in present]
        return taken

    def park(self, req: Req) -> None:
        """Note that a paused request went from its batch to the queue."""
        self._parked.add(_id(req))

    def unpark(self, req: Req) -> None:
        """Note that a request is in a batch, whether it was parked or not."""
        self.resumes_parked |= self.is_parked(req)
        self._parked.discard(_id(req))

    @property
    def num_parked(self) -> int:
        """Live requests that wait in the queue for the rest of their prompts."""
        return len(self._parked)

    def is_parked(self, req: Req) -> bool:
        """Whether a live request waits in the queue for the rest of its prompt."""
        return _id(req) in self._parked

    def step_begins(self, batch: ScheduleBatch) -> None:
        """Run what must precede a batch's forward pass, on the current stream."""
        if batch.forward_mode.is_extend():
            for req in batch.reqs:
                self.front_door.cross(_id(req), req.extend_end)
        verifies = batch.forward_mode.is_decode()
        self.cache.trim_scratch(len(batch.reqs) if verifies else 0)
        self.run_commands(verifies=not batch.forward_mode.is_extend())
        if self._host is not None:
            self._host.begins()

    def forget_ended(self, batch: ScheduleBatch) -> None:
        """Have a batch commit no state for requests that ended since it was planned.

        SGLang handles the results before a verification where drafts made on the host
        must follow a grammar.  It writes by the rows of a batch, which still name the
        slots in which ended requests have left their turns' ends.
        """
        ended = [row for row, req in enumerate(batch.reqs) if not self.is_live(req)]
        if ended and self.cache.slots.needed:
            rows = batch.req_pool_indices[ended]
            self.req_to_token_pool.req_index_to_mamba_index_mapping[rows] = 0

    def run_commands(self, *, verifies: bool = False) -> None:
        """Run the commands that are queued.

        Args:
            verifies: whether the pass behind them may write the scratch of drafts.
        """
        self._run(self.cache.drain_commands(), verifies=verifies)

    def _run(self, commands: Sequence[Command], *, verifies: bool = False) -> None:
        self.drafts.precede(commands, verifies=verifies)
        self._executor.run(commands)
        if commands:
            self._tell_of_moves()

    def _run_queued(self, host: HostSteps) -> None:
        """Run commands behind the last pass, if there are any."""
        commands = self.cache.drain_commands()
        if commands:
            with host.behind_the_last():
                self._run(commands)

    def _tell_of_moves(self) -> None:
        broker = self.cache.broker
        broker.stats.device_seconds = self._executor.moves.seconds
        if self.cache.host is not None and self._executor.host is not None:
            self.cache.host.stats.wait_seconds = self._executor.host.wait_seconds
        notice = broker.notice()
        if notice is not None and pipeline.speaks():
            logger.info("hybrid-plugin: %s.", notice)

    def step_launched(self, batch: ScheduleBatch) -> None:
        """Note how far the forward pass that was just launched takes each request."""
        self.resumes_parked = False
        extends = batch.forward_mode.is_extend()
        if self._host is not None:
            self._host.launched(batch.extend_num_tokens if extends else 0)
        if extends:
            for req in batch.reqs:
                self.front_door.advance(_id(req), req.extend_end)
        if self._metrics is not None:
            self._metrics.publish_now_and_then()

    def take_events(self) -> list[Any]:
        """What can be resumed since the last call, and what cannot any more."""
        return [] if self._kv_events is None else self._kv_events.take()

    def idle(self) -> None:
        """Give back what no step needs, and publish the last counts before a pause."""
        self.cache.trim_scratch()
        if self._host is not None:
            self._run_queued(self._host)
        if self._outer is not None:
            self._outer.wait()
        if self._metrics is not None:
            self._metrics.publish_now_and_then()

    @property
    def may_sleep(self) -> bool:
        """Whether nothing goes on that needs the scheduler's rounds."""
        checks = self.hit_checking is not None and self.hit_checking.is_waiting
        return not checks and (self._outer is None or not self._outer.is_busy)

    def take_session_order(self, order: Mapping[str, Any]) -> Answer:
        """Take an order about saved sessions; see `SessionDesk.take`."""
        if self._outer is None:
            return without_disk()
        return self._outer.take_session_order(order)

    def weights_change(self) -> None:
        """Note that the model's weights are about to be updated."""
        if self._outer is not None:
            self._outer.weights_change()

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """The core inserts as steps are launched, and when a sequence ends."""

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """End the request's sequence: finished, aborted or retracted."""
        self._parked.discard(_id(req))
        self._paused = [paused for paused in self._paused if paused is not req]
        if req.finished():
            self._told.discard(_id(req))
        self._requests.pop(_id(req), None)
        name = _id(req)
        verifying = self.cache.is_live(name) and self.cache.is_verifying(name)
        request = SGLangRequest(req, cut=verifying)
        self.front_door.end(request, req.kv.kv_committed_len)
        req.kv.mamba_pool_idx = None

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        """Release what a request that SGLang drops from its queue still holds.

        SGLang calls this for whatever leaves the queue without being run, by abort,
        deadline, queue limit or priority.  It takes all that waits for new, and not
        every such path releases more; a parked request has a row, pages and a slot.
        """
        name = sequence_id(handle)
        self._told.discard(name)
        self.front_door.forget(name)
        req = self._requests.get(name)
        if req is not None:
            release_kv_cache(req, self, checkpoint=False)

    def retracted(self) -> None:
        """Count a running request that was put back into the queue."""
        self.front_door.count_preemption()

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Pages go back with their sequence, in `on_release`."""

    def reset(self) -> None:
        """Forget everything cached; SGLang calls it while nothing runs.

        Raises:
            RuntimeError: if a request is live: SGLang would clear its row, and answer
                that all is forgotten.
        """
        if not self.front_door.flush():
            raise RuntimeError(
                f"SGLang flushes its cache while {', '.join(self._requests)} still "
                "hold pages."
            )
        if self.hit_checking is not None:
            self.hit_checking.void()
        if self._host is not None:  # a load may be under way, and the pools may go
            self._run_queued(self._host)
            self._host.wait()

    def release_memory(self) -> None:
        """Forget everything cached, and give the pools' memory back.

        Nothing runs until `restore_memory`; of fixed pools the memory is SGLang's to
        release, which it does behind this.

        Raises:
            RuntimeError: as `reset` does.
        """
        self.reset()
        freed = self._executor.release()
        if freed and pipeline.speaks():
            logger.info("hybrid-plugin released %s of its pools.", gib(freed))

    def restore_memory(self) -> None:
        """Take the memory again.

        Raises:
            MemoryError: if the system has it no more.
        """
        self._executor.restore()

    # ------------------------------------------------------------------- locks

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """Sequences hold their own locks in the core."""
        return IncLockRefResult()

    def dec_lock_ref(self, node: Any, params: Any = None) -> DecLockRefResult:
        """Sequences hold their own locks in the core."""
        return DecLockRefResult()

    def evict(self, params: EvictParams) -> EvictResult:
        """The core makes room as it hands out pages and slots."""
        return EvictResult()

    # -------------------------------------------------------------- inspection

    def supports_mamba(self) -> bool:
        """True: requests resume where there is a snapshot, not at any token."""
        return True

    def is_root(self, node: Any) -> bool:
        """Whether a handle stands for no hit."""
        return node is _OUTSIDE

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        """Token positions of the request's hit, int64 `[prefix_len]`."""
        pages = torch.tensor(self.sequence(req).pages, dtype=torch.int64)
        offsets = torch.arange(self.page_size)
        positions = (pages[:, None] * self.page_size + offsets).reshape(-1)
        return positions[: req.prefix_len].to(self.device)

    def dfs_weight_order(self, node_handles: Sequence[Any]) -> list[int]:
        """Requests that resume at one node side by side, the largest groups first."""
        groups: dict[int, list[int]] = {}
        for index, node in enumerate(node_handles):
            groups.setdefault(id(node), []).append(index)
        ordered = sorted(groups.values(), key=len, reverse=True)
        return [index for group in ordered for index in group]

    def full_evictable_size(self) -> int:
        """Tokens in pages that only the tree holds."""
        return self.cache.pages.reclaimable * self.page_size

    def evictable_size(self) -> int:
        """The same: SGLang asks by both names."""
        return self.full_evictable_size()

    def full_protected_size(self) -> int:
        """Tokens in pages that live sequences hold, but for those that SGLang counts.

        Its check for leaks adds the private tokens of requests in batches itself.
        """
        return self.cache.pages.in_use * self.page_size - self._tokens_of_batches()

    def _tokens_of_batches(self) -> int:
        """Private tokens of requests in batches, which SGLang adds to what we say."""
        return sum(
            self._private_tokens(req)
            for name, req in self._requests.items()
            if name not in self._parked
        )

    def _private_tokens(self, req: Req) -> int:
        whole = -(-req.kv.kv_allocated_len // self.page_size) * self.page_size
        return whole - req.kv.cache_protected_len if req.kv.holds_kv else 0

    def protected_size(self) -> int:
        """The same: SGLang asks by both names."""
        return self.full_protected_size()

    def swa_evictable_size(self) -> int:
        """Tokens in pages of windows that only snapshots hold; 0 without windows."""
        pages = sum(group.pages.reclaimable for group in self.cache.windows)
        return pages * self.page_size

    def swa_protected_size(self) -> int:
        """Tokens in pages of windows that live sequences hold, as SGLang counts them.

        It counts all private tokens of requests in batches, of which most have left
        their windows: that is a number below 0 then, and its sum is right.
        """
        pages = sum(group.pages.in_use for group in self.cache.windows)
        return pages * self.page_size - self._tokens_of_batches()

    def mamba_evictable_size(self) -> int:
        """Snapshots, each evictable to admit a request."""
        return self.cache.slots.snapshots

    def mamba_protected_size(self) -> int:
        """Slots of live sequences, and those that are filled from host memory."""
        return self.cache.slots.running

    def total_size(self) -> int:
        """Tokens in pages that are not free."""
        pages = self.cache.pages
        return (pages.usable - pages.free) * self.page_size

    def available_and_evictable_str(self) -> str:
        """How full the pools are, for SGLang's messages."""
        levels = self.cache.levels().items()
        return ", ".join(f"{pool}: {level}" for pool, level in levels) + "\n"

    def pretty_print(self) -> None:
        """Print how full the pools are."""
        print(self.available_and_evictable_str())

    def sanity_check(self) -> None:
        """The core's own tests check its invariants; nothing to walk here."""


def _id(req: Req) -> str:
    return sequence_id(req.cache_request_handle)
