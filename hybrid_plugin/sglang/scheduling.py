# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefill admission on the two pools: real demand, snapshot stops.

SGLang itself goes on with one unfinished prefill at a time.  A request that is
paused at a snapshot position waits at the head of the queue instead, with its
row, pages and slot, so any number of them can be under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from hybrid_plugin.sglang.prefix_cache import HybridPrefixCache


class HybridPrefillAdder(PrefillAdder):
    """Admits to the core, and ends chunks at snapshot positions.

    SGLang's own way to go on with a chunked request is never taken: whatever ends
    before its prompt does is paused.
    """

    tree_cache: HybridPrefixCache

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        """Admit a waiting request, or leave everything as it was."""
        if self.tree_cache.follows(req):
            return AddReqResult.CONTINUE  # with the next one
        was_live = self.tree_cache.is_live(req)
        if not was_live and not self._has_row():
            return AddReqResult.OTHER
        verdict = super().add_one_req(req, *args, **kwargs)
        added = bool(self.can_run_list) and self.can_run_list[-1] is req
        if added and req.extend_end < len(req.full_untruncated_fill_ids):
            self.tree_cache.pause(req)
        elif not added and not was_live:
            self.tree_cache.withdraw(req)
        return verdict

    def _has_row(self) -> bool:
        """Whether a row of `req_to_token` is left for one more new request."""
        taken = sum(not req.kv.holds_kv for req in self.can_run_list)
        free: int = self.tree_cache.req_to_token_pool.available_size()
        return taken < free

    def _check_prefill_budget(self, req: Req, **kwargs: Any) -> tuple[bool, int | None]:
        if self.tree_cache.is_live(req):  # it has its pages and must go on
            return True, kwargs["chunk_limit"]
        verdict: tuple[bool, int | None] = super()._check_prefill_budget(req, **kwargs)
        return verdict

    def _select_prefill_admission(self, req: Req, **kwargs: Any) -> Any:
        admission = super()._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        if not self.tree_cache.admit(req):
            return AddReqResult.NO_TOKEN
        start, length = admission.prefix_len, admission.extend_len
        stop = next(
            (s for s in self.tree_cache.snapshot_positions(req) if s > start), None
        )
        if stop is not None:
            length = min(length, stop - start)
        # SGLang charges the pass for pages that are taken already: see the budget.
        self.memory_budget.refund(length)
        return replace(admission, extend_len=length, is_chunked=False)


def more_rows(result: int, scheduler: Any, num_held_rows: int) -> int:
    """Requests that a pass may run, given what SGLang counts: free rows.

    Paused requests in the queue hold rows of their own.

    Args:
        result: SGLang's count.
        scheduler: SGLang's scheduler.
        num_held_rows: rows that it counted in for requests of the pass.
    """
    held = sum(req.kv.holds_kv for req in scheduler.waiting_queue)
    return result + held - num_held_rows


def park_paused(scheduler: Any, running: ScheduleBatch, last: Any) -> None:
    """Take paused requests out of the last batch, and queue them for their rest.

    Args:
        scheduler: SGLang's scheduler, about to choose its next batch.
        running: its running batch.
        last: the batch it launched last, or None.
    """
    paused = scheduler.tree_cache.take_paused()
    if not paused or last is None:
        return
    present = {id(req) for req in last.reqs}
    parked = [
        req
        for req in paused
        if id(req) in present
        and scheduler.tree_cache.is_live(req)
        and not req.finished()
    ]
    last.filter_batch(reqs_to_exclude=parked)
    running.batch_is_full = False
    for req in parked:
        req.prefix_len = req.extend_end
    scheduler.waiting_queue[:0] = parked


def with_output(reqs: Iterable[Req]) -> list[Req]:
    """The requests that have something to send: paused ones have not."""
    return [
        req
        for req in reqs
        if req.finished() or len(req.output_ids) != req.send_token_offset
    ]
