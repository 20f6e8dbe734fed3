# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler takes for its KV cache manager.

Duck-typed on the methods the scheduler calls, from 0.32 to 0.33; unknown
keyword arguments are taken and ignored where their feature is refused at
start-up.  No decision is made here: each method translates to `HybridCache`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.metrics.stats import PrefixCacheStats

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.commands import Command, Pool, PoolId
from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.engine.bundle_identity import AdapterNames
from hybrid_plugin.engine.cache_assembly import build_cache
from hybrid_plugin.engine.disk import Disk
from hybrid_plugin.engine.front_door import FrontDoor
from hybrid_plugin.engine.outer_side import OuterSide
from hybrid_plugin.engine.peers import Peers, own_entry
from hybrid_plugin.engine.rank_store import join_store
from hybrid_plugin.engine.session_desk import Answer, Serving, opening, without_disk
from hybrid_plugin.engine.store import Store
from hybrid_plugin.tiers.peers.params import wants_remote_decode, wants_remote_prefill
from hybrid_plugin.vllm import saved_sessions
from hybrid_plugin.vllm.activation import logger
from hybrid_plugin.vllm.adapters import Adapters, is_of
from hybrid_plugin.vllm.hit_checks import HitChecking
from hybrid_plugin.vllm.kv_events import KvEvents
from hybrid_plugin.vllm.peers import tokens_for_others
from hybrid_plugin.vllm.planning import HybridKVCacheConfig, pools_of
from hybrid_plugin.vllm.reports import Report
from hybrid_plugin.vllm.requests import VllmRequest
from hybrid_plugin.vllm.specs import tokens_in_page
from hybrid_plugin.vllm.speculation.steps import DraftSteps

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


class _GroupView:
    """What the engine core reads of a per-group manager."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self.kv_cache_spec = spec
        self.block_size = tokens_in_page(spec)


class _Coordinator:
    """What the scheduler reads of a coordinator."""

    enable_partial_hash_hits = False

    def __init__(self, specs: Iterable[KVCacheSpec]) -> None:
        self.single_type_managers = tuple(_GroupView(spec) for spec in specs)

    def get_num_blocks_to_allocate(self, *args: Any, **kwargs: Any) -> int:
        """Only asked for with KV connectors, which are refused at start-up."""
        raise NotImplementedError("hybrid-plugin serves no KV connector")


class _Blocks:
    """Stands for the block pool; blocks are freed by sequence, never singly."""

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Only called for blocks whose free was deferred, which are none."""
        if list(blocks):
            raise NotImplementedError("hybrid-plugin defers no block's free")


class HybridKVCacheManager:
    """Speaks vLLM's manager interface for a `HybridCache`."""

    mamba_shared_prefix_checkpoint = False

    def __init__(
        self,
        kv_cache_config: HybridKVCacheConfig,
        options: HybridConfig,
        *,
        delimiters: Delimiters | None = None,
        watermark: float,
        log_stats: bool,
        clock: Callable[[], float] | None = time.monotonic,
        kv_events: KvEvents | None = None,
        max_running: int | None = None,
        max_model_len: int = sys.maxsize,
        serving: Serving | None = None,
    ) -> None:
        """Create the cache.

        Args:
            kv_cache_config: the planned pools.
            options: of the plugin.
            delimiters: what ends a message, if the options want to know.
            watermark: share of the pages that admission leaves free while
                other requests run.
            log_stats: whether vLLM collects statistics.
            clock: returns the time in seconds; None where schedulers on several ranks
                must do the same and have none in common.
            kv_events: publishes what the cache can resume; None publishes nothing.
            max_running: requests that run at once, at most; None for any number.
            max_model_len: tokens of a sequence, at most: workers have no room to note
                pages beyond.
            serving: what saved sessions say of this server.
        """
        device = current_platform.device_type
        self.cache = build_cache(
            kv_cache_config.plan,
            options,
            delimiters,
            device,
            keeps_states_inside=kv_cache_config.interior,
            records_drafts=kv_cache_config.records,
        )
        self._kv_events = kv_events
        if kv_events is not None:
            self.cache.report_to(kv_events.log)
        specs = [g.kv_cache_spec for g in kv_cache_config.kv_cache_groups]
        self.coordinator = _Coordinator(specs)
        self.block_pool = _Blocks()
        self.front_door = FrontDoor(self.cache, logger, clock)
        self.draft_steps = DraftSteps(self.cache, max_model_len)
        self.hit_checking: HitChecking | None = None
        if options.verify_fraction:
            self.hit_checking = HitChecking(options.verify_fraction, self.cache.stats)
        self._pools = pools_of(kv_cache_config.kv_cache_groups)
        self._max_running = max_running
        self._max_model_len = max_model_len
        self._restoring = 0
        """Requests of this step that wait for their prefix from host memory."""
        self._may_begin = True
        """Whether one behind them may begin to restore its own.  If not, nobody else is
        admitted in this step."""
        self._serving = serving or Serving("", "vLLM")
        self._options = options
        self._outer: OuterSide | None = None
        """Opened when the workers have said what they have."""
        self._early: list[Request] = []
        """Requests with offers of peers that came before."""
        self.was_flushed = False
        """Whether the workers have yet to hear of a flush."""
        self._weight_updates = 0
        self._adapters = Adapters(AdapterNames() if options.has_outer_tiers else None)
        self._watermark_pages = int(watermark * kv_cache_config.pages)
        self._log_stats = log_stats
        self.prefix_cache_stats = PrefixCacheStats()
        most = max(kv_cache_config.plan.sizes.of(pool) for pool in self._pools)
        self._id_blocks = [KVCacheBlock(i) for i in range(most)]
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in specs))

    # --------------------------------------------------------------- admission

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Look the request up; returns (its shared pages, tokens hit, 0).

        The pages are those of full attention: nobody reads the others here.
        """
        read = self._read(request)
        if read.is_check and self.hit_checking is not None:
            max_cache_hit_length = self.hit_checking.limit(request.request_id)
        found = self.front_door.look_up(read, max_cache_hit_length)
        if self._kv_events is not None and not read.is_check:
            self._kv_events.learn(request, found.namespace)
            if self._may_begin:  # or it is looked up again in the next step
                self._kv_events.note(request, found)
        return self._blocks({Pool.KV: found.match.pages}), found.match.length, 0

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        has_scheduled_reqs: bool = False,
        **_: Any,
    ) -> KVCacheBlocks | None:
        """Admit a waiting request or grow a running one; None if there is no room, or
        while requests ahead of it wait for their prefix from host memory.
        """
        seq_id = request.request_id
        behind = num_new_tokens + num_lookahead_tokens
        if self.cache.is_live(seq_id):
            cover = min(request.num_computed_tokens + behind, self._max_model_len)
            fresh = self.cache.grow(seq_id, cover)
            if fresh is None:
                return None
            return self._last_pages(seq_id, len(fresh))
        if not self._may_begin:
            return None
        admission = self.front_door.admit(
            self._read(request),
            num_new_computed_tokens,
            num_tokens=min(num_new_computed_tokens + behind, self._max_model_len),
            reserve_tokens=request.num_tokens if full_sequence_must_fit else 0,
            watermark_pages=self._watermark_pages if has_scheduled_reqs else 0,
        )
        if admission is None:
            return None
        if self.hit_checking is not None and not self.hit_checking.owns(seq_id):
            self.hit_checking.admitted(request, admission.hit)
        shared = admission.hit // self.cache.page_size
        return self._last_pages(seq_id, len(admission.pages) - shared, slot=True)

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Where a chunk of the request's prefill from `start` should end, at `end`
        by vLLM's own choice.
        """
        return self.front_door.chunk_end(self._read(request), start, end)

    def plan_in_batch_sharing(self, waiting: Iterable[Request]) -> None:
        """Decide which of the requests that wait follow another one.

        Args:
            waiting: in the order in which they are served.
        """
        self.front_door.plan_sharing(map(self._read, waiting))

    def step_begins(self) -> None:
        """A step will be planned."""
        self._restoring, self._may_begin = 0, True
        self.front_door.pass_time()
        if self._outer is not None:
            self._outer.step()

    def must_wait(self, request: Request) -> bool:
        """Whether a request that waits should go on waiting: for another one, for its
        prefix, which is on the way from host memory or from files, or behind one that
        waits for that.

        Call it in the order in which requests are served.  Nobody overtakes a request
        that waits for host memory, which takes a step or two: who did would take the
        memory that it needs.  Those behind it begin to bring their own prefixes, as
        many as can run.  The first one that does not is refused when it asks for slots,
        at which vLLM stops: it would look at everybody else who waits, in each step.
        Others may overtake a request that waits for files, which takes longer, and no
        memory of the device.
        """
        if self.is_opening or self.front_door.must_wait(request.request_id):
            return True
        read = self._read(request)
        if self._kv_events is not None:
            # Events name what is restored, which another server may have computed.
            self._kv_events.learn(request, read.namespace())
        if not self._restoring:
            waits = self.front_door.must_wait_for_restore(read)
            is_fetching = self.front_door.is_fetching(request.request_id)
            self._restoring += waits and not is_fetching
            return waits
        if self._may_begin:
            self._may_begin = self._restores_behind(request)
            self._restoring += self._may_begin
        return self._may_begin

    def _restores_behind(self, request: Request) -> bool:
        """Whether a request is restored while others before it are, too."""
        if self.front_door.is_restoring(request.request_id):
            return True
        if self.cache.live + self._restoring == self._max_running:
            return False
        return self.front_door.must_wait_for_restore(self._read(request))

    @property
    def is_opening(self) -> bool:
        """Whether what is behind the host is yet to be opened: the workers' first
        answer tells."""
        return self._options.has_outer_tiers and self._outer is None

    @property
    def has_work(self) -> bool:
        """Whether steps are of use without any request: files come, go or are read,
        peers are read from, or wait to hear of an offer."""
        return (
            self.must_settle
            or self.cache.lower_tiers.writing > 0
            or self.cache.lower_tiers.fetching > 0
        )

    @property
    def must_settle(self) -> bool:
        """Whether steps are of use that a pause waits for: workers and peers wait to be
        told, or somebody to be answered."""
        if not self._options.has_outer_tiers:
            return False
        return (
            self.is_opening
            or self.cache.lower_tiers.has_unsent_offers
            or self.was_flushed
            or (self._outer is not None and self._outer.is_busy)
        )

    def take_session_order(self, order: Mapping[str, Any]) -> Answer:
        """Take an order about saved sessions; see `SessionDesk.take`."""
        if self._options.disk is None:
            return without_disk()
        if self._outer is None:
            return opening()
        namespace = saved_sessions.namespace(order, self._adapters)
        return self._outer.take_session_order(order, namespace)

    def adapter_changed(self, number: int, *, in_place: bool) -> None:
        """Note that other weights are loaded under an adapter's number, or none.

        Who waits is looked up anew; who runs goes on, and nobody finds what it leaves.
        """
        names = self._adapters.changed(number, in_place=in_place)
        self.cache.leave_nothing(lambda namespace: is_of(namespace, names))
        self.front_door.forget_look_ups()

    def close(self) -> None:
        """Let another server have the files."""
        if self._outer is not None:
            self._outer.close()

    def take_report(self, report: Report) -> None:
        """Note what a worker has measured, and what became of transfers.

        Raises:
            ConfigError: if the files' folder cannot be used.
        """
        self.new_measurements(report)
        if self.is_opening and (report.disk or report.peers or report.store):
            self._open(report)
        if self._outer is None:
            return
        if report.weight_updates > self._weight_updates:
            self._weight_updates = report.weight_updates
            self._outer.renew()
        self._outer.take(report.outcomes)

    def _open(self, report: Report) -> None:
        """Put what the workers have behind the host."""
        disk = peers = store = None
        if report.disk is not None and self._options.disk is not None:
            disk = Disk(self._options.disk, report.disk, self._serving)
            logger.info("hybrid-plugin: %s.", disk.found())
        if report.peers is not None:
            peers = Peers(report.peers, logger)
        if report.store is not None and self._options.store is not None:
            objects = join_store(self._options.store, 0)
            store = Store(report.store, objects, logger)
        self._outer = OuterSide(self.cache, disk=disk, peers=peers, store=store)
        early, self._early = self._early, []
        for request in early:
            if not request.is_finished():
                self.arrives(request)

    # ------------------------------------------------------------------ peers

    def arrives(self, request: Request) -> None:
        """Begin to fetch what another server has computed of a request's prompt, and
        ask the store what it has."""
        params = request.kv_transfer_params
        offered = self._options.peers is not None and wants_remote_prefill(params)
        if not offered and self._options.store is None:
            return
        if self._outer is None:
            self._early.append(request)
            return
        if self._outer.store is not None:
            self._outer.store.arrived(self.front_door, self._read(request))
        if not offered:
            return
        assert self._outer.peers is not None, "the options give some"
        entry = own_entry(params)
        self._outer.peers.arrived(self.front_door, self._read(request), entry)

    def offer(self, request: Request) -> dict[str, Any] | None:
        """Offer the prompt of a request that ended to the server that goes on.

        Returns:
            `kv_transfer_params` for that server; None if there is nothing to offer, or
            nobody asked.
        """
        peers = None if self._outer is None else self._outer.peers
        if peers is None or not wants_remote_decode(request.kv_transfer_params):
            return None
        read = self._read(request)
        if not (read.cacheable and read.may_hit):  # as for the server that goes on
            return None
        tokens = read.tokens()[: tokens_for_others(request)]
        offer = peers.offer(self.cache, read.namespace(), tokens)
        return None if offer is None else offer.as_params()

    def new_measurements(self, report: Report) -> None:
        """Note what a worker has measured."""
        self.cache.broker.stats.device_seconds = report.move_seconds
        self.cache.stats.graph_passes = report.graph_passes
        if self.cache.host is not None:
            self.cache.host.stats.wait_seconds = report.wait_seconds
        rates = self.cache.rates
        if rates is not None:
            rates.prefill_seconds_per_token = report.token_seconds
            if report.load_bytes_per_second is not None:
                rates.load_bytes_per_second = report.load_bytes_per_second

    # -------------------------------------------------------------- progress

    def cross(self, requests: Iterable[Request]) -> None:
        """Order what the step that was just scheduled keeps of states inside it."""
        for request in requests:
            self.front_door.cross(request.request_id, request.num_computed_tokens)

    def step_scheduled(self, requests: Iterable[Request]) -> None:
        """Note how far the step that was just scheduled takes each request."""
        for request in requests:
            computed = self.draft_steps.final(request)
            self.front_door.advance(request.request_id, computed)

    def free(self, request: Request) -> None:
        """End the request's sequence: finished, aborted or preempted."""
        self.front_door.end(self._read(request), request.num_computed_tokens)

    def drain_commands(self) -> list[Command]:
        """Take the device work that must run before the next forward pass."""
        self.was_flushed = False
        return self.cache.drain_commands()

    def take_events(self) -> list[Any]:
        """What can be resumed since the last call, and what cannot any more."""
        return [] if self._kv_events is None else self._kv_events.take()

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False while requests hold pages."""
        flushed = self.front_door.flush()
        self.was_flushed |= flushed
        if flushed:
            self.prefix_cache_stats.reset = True
            if self.hit_checking is not None:
                self.hit_checking.void()
        return flushed

    # -------------------------------------------------------------- inspection

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All pages and the slots of a request.

        A page that has left its window is the reserved one, vLLM's null block.
        """
        if not self.cache.is_live(request_id):
            return self.empty_kv_cache_blocks
        return self._blocks(self._held(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Ids of `get_blocks`, per group."""
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """The same, pages clipped to those with computed tokens."""
        pages = -(-num_computed_tokens // self.cache.page_size)
        return tuple(
            ids if pool == Pool.STATE else ids[:pages]
            for ids, pool in zip(
                self.get_block_ids(request_id), self._pools, strict=True
            )
        )

    def estimate_cached_tokens(self, request: Request) -> int:
        """Tokens of a live request that the tree holds by now."""
        if not self.cache.is_live(request.request_id):
            return 0
        return self.cache.sequence(request.request_id).in_tree

    @property
    def usage(self) -> float:
        """Share in use of the fullest pool, or of the memory that the pools share.

        What is cached does not count.
        """
        return self.cache.broker.usage()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Hits since the last call, for vLLM's own counters."""
        if not self._log_stats:
            return None
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        return stats

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Count an admission for `make_prefix_cache_stats`, checks of hits left out."""
        checking = self.hit_checking
        if checking is not None and checking.owns(request.request_id):
            return
        if self._log_stats and not request.skip_reading_prefix_cache:
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=num_hits,
                preempted=request.num_preemptions > 0,
            )

    # ------------------------------------- asked for, with nothing to be done

    def new_step_starts(self) -> None:
        """A step begins."""

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Decoded tokens enter the tree when the request ends."""

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Pages leave their windows when a step is scheduled: `step_scheduled`."""

    def take_new_block_ids(self) -> list[int]:
        """Nothing is zeroed by vLLM's own means."""
        return []

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[KVCacheBlock]]:
        """Copies travel as our commands."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """KV connectors are refused at start-up."""
        return {}

    # ---------------------------------------------------------------- internal

    def _read(self, request: Request) -> VllmRequest:
        checking = self.hit_checking
        is_check = checking is not None and checking.owns(request.request_id)
        return VllmRequest(request, self._adapters, is_check)

    def create_kv_cache_blocks(
        self, blocks: tuple[Sequence[KVCacheBlock], ...]
    ) -> KVCacheBlocks:
        """Wrap per-group blocks."""
        return KVCacheBlocks(blocks)

    def _held(self, seq_id: str) -> dict[PoolId, Sequence[int]]:
        """Ids by pool of what a live sequence has, one entry per page of tokens."""
        sequence = self.cache.sequence(seq_id)
        held: dict[PoolId, Sequence[int]] = {
            Pool.KV: sequence.pages,
            Pool.STATE: (sequence.slot, *sequence.drafts),
        }
        for index, table in enumerate(sequence.windows):
            held[Pool.window(index)] = table.pages
        return held

    def _last_pages(
        self, seq_id: str, count: int, *, slot: bool = False
    ) -> KVCacheBlocks:
        """The last pages of every group, and the slot if it is new."""
        if not count and not slot:
            return self.empty_kv_cache_blocks
        held = self._held(seq_id)
        return self._blocks(
            {
                pool: (ids if slot else ()) if pool == Pool.STATE else _last(ids, count)
                for pool, ids in held.items()
            }
        )

    def _blocks(self, ids: Mapping[PoolId, Sequence[int]]) -> KVCacheBlocks:
        """Ids of each of vLLM's groups, among which pages of no layer have none."""
        blocks = {
            pool: [self._id_blocks[i] for i in some]
            for pool, some in ids.items()
            if pool in self._pools
        }
        return KVCacheBlocks(tuple(blocks.get(pool, []) for pool in self._pools))


def _last(ids: Sequence[int], count: int) -> Sequence[int]:
    return ids[len(ids) - count :]
