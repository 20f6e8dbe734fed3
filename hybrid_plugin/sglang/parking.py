# SPDX-License-Identifier: Apache-2.0
"""Paused requests in SGLang's waiting queue, which takes all that is in it for new.

A parked request has begun its prompt: it holds a row of `req_to_token`, pages and a
state slot.  SGLang has one request of that kind, its chunked one, outside the queue.
What SGLang does with that one, and not with what waits, is done here for all of them:
they run first, and no queue limit or deadline of the queue counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import retract_all

from hybrid_plugin.sglang.disaggregation import send_what_is_computed

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from hybrid_plugin.sglang.prefix_cache import HybridPrefixCache


def park_paused(scheduler: Any, running: ScheduleBatch, last: Any) -> None:
    """Take paused requests out of the last batch, and queue them for their rest.

    Args:
        scheduler: SGLang's scheduler, about to choose its next batch.
        running: its running batch.
        last: the batch it launched last, or None.
    """
    cache: HybridPrefixCache = scheduler.tree_cache
    begun = cache.take_paused(last)
    if not begun:
        return
    last.filter_batch(reqs_to_exclude=begun)
    running.batch_is_full = False
    parked = [req for req in begun if req.to_finish is None]
    for req in parked:
        req.prefix_len = req.extend_end
        cache.park(req)
    if scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
        send_what_is_computed(parked)
    scheduler.waiting_queue[:0] = parked
    for req in begun:
        if req.to_finish is not None:
            _end_aborted(scheduler, req)


def _end_aborted(scheduler: Any, req: Req) -> None:
    """End a request that was aborted while its chunk ran, by SGLang's own way.

    SGLang would finish the prompt first.  As with its chunked request, the chunk may
    still run; what is launched later runs behind it.
    """
    scheduler.chunked_req = scheduler._pending_chunked_abort_req = req
    scheduler.process_pending_chunked_abort()
    # The client has its answer; the chunk's result must not send another.
    req.finished_output = True


def parked_first(queue: list[Req], cache: HybridPrefixCache) -> None:
    """Put parked requests ahead of the queue, and leave the order otherwise.

    A pass ends at the first request for which there is no room.  If that one could
    be ahead, it would wait for pages of the parked ones behind it, for ever.
    """
    if cache.num_parked:
        queue.sort(key=lambda req: not cache.is_parked(req))


@contextmanager
def without_parked(scheduler: Any) -> Iterator[None]:
    """Let SGLang see a waiting queue of new requests only, while this lasts."""
    cache: HybridPrefixCache = scheduler.tree_cache
    if not cache.num_parked:
        yield
        return
    queue = scheduler.waiting_queue
    parked = [req for req in queue if cache.is_parked(req)]
    scheduler.waiting_queue = [req for req in queue if not cache.is_parked(req)]
    try:
        yield
    finally:
        scheduler.waiting_queue[:0] = parked


@contextmanager
def without_free_slots_delay(scheduler: Any) -> Iterator[None]:
    """Have nobody wait for others to end, while this lasts, if somebody is parked.

    SGLang has new requests begin several at once (`--min-free-slots-delay`), but lets
    its unfinished prompt go on, which holds memory meanwhile.
    """
    delayer = scheduler.min_free_slots_delayer
    if delayer is None or not scheduler.tree_cache.num_parked:
        yield
        return
    scheduler.min_free_slots_delayer = None
    try:
        yield
    finally:
        scheduler.min_free_slots_delayer = delayer


def park_for_a_pause(scheduler: Any) -> None:
    """Park paused requests of a prefill server whose last batch SGLang is to forget.

    It keeps its own unfinished prompt in such a pause, because another server has part
    of it already, and flushes nothing while that holds pages.
    """
    if scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
        park_paused(scheduler, scheduler.running_batch, scheduler.last_batch)


def retract_parked(scheduler: Any) -> None:
    """Have parked requests begin anew, as SGLang does with those that run.

    It retracts all of them before weights are updated: with pages still held, the
    cache could not be flushed, and the rest of a prompt would follow a beginning that
    other weights computed.  In prefill servers they stay; see `park_for_a_pause`.
    """
    if scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
        return
    retract_all(
        reqs=[r for r in scheduler.waiting_queue if scheduler.tree_cache.is_parked(r)],
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
    )
