# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefill admission on the core's pools: real demand, snapshot positions.

SGLang itself goes on with one unfinished prefill at a time.  A request that is
paused at a snapshot position waits at the head of the queue instead (see `parking`),
so any number of them can be under way.
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
    _resumes = False
    """Whether the request that is being added was parked: its prefix is its own."""
    _restoring = 0
    """Requests before it whose prefix is on the way from host memory."""

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        """Admit a waiting request, or leave everything as it was.

        Nobody overtakes a request that waits for host memory, which takes a step or
        two.  Those behind it begin to restore their own prefixes, as many as can run.
        Who waits for what is not even there yet may do so for long, and is overtaken.
        """
        if self.tree_cache.must_wait(req):
            return AddReqResult.CONTINUE  # with the next one
        self._resumes = self.tree_cache.is_live(req)
        if not self._resumes:
            if not self._has_row():
                return AddReqResult.OTHER
            if self.tree_cache.must_wait_for_restore(req):
                self._restoring += not self.tree_cache.is_fetching(req)
                return AddReqResult.CONTINUE
            if self._restoring:  # it would take the memory that they need
                return AddReqResult.OTHER
        verdict = super().add_one_req(req, *args, **kwargs)
        if self.can_run_list and self.can_run_list[-1] is req:
            self.tree_cache.unpark(req)
            if req.extend_end < len(req.full_untruncated_fill_ids):
                self.tree_cache.pause(req)
        elif not self._resumes:
            self.tree_cache.withdraw(req)
        return verdict

    def _has_row(self) -> bool:
        """Whether a row of `req_to_token` is left for one more new request."""
        taken = sum(not req.kv.holds_kv for req in self.can_run_list)
        taken += self._restoring
        free: int = self.tree_cache.req_to_token_pool.available_size()
        return taken < free

    def _check_prefill_budget(self, req: Req, **kwargs: Any) -> tuple[bool, int | None]:
        if self._resumes:  # it has its pages and must go on
            return True, kwargs["chunk_limit"]
        verdict: tuple[bool, int | None] = super()._check_prefill_budget(req, **kwargs)
        return verdict

    def _select_prefill_admission(self, req: Req, **kwargs: Any) -> Any:
        admission = super()._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        start = admission.prefix_len
        end = start + admission.extend_len
        if not self.tree_cache.admit(req, end):
            return AddReqResult.NO_TOKEN
        end = self.tree_cache.chunk_end(req, start, end)
        length = end - start
        if not length:  # it waits for a pass with more room
            return AddReqResult.OTHER
        # SGLang charges the pass for pages that are taken already: see the budget.
        self.memory_budget.refund(length)
        return replace(admission, extend_len=length, is_chunked=False)

    def _update_prefill_budget(self, prefix_len: int, *args: Any, **kw: Any) -> None:
        super()._update_prefill_budget(self._restored(prefix_len), *args, **kw)

    def _account_prefill_cache_admission(self, req: Req, prefix_len: int) -> None:
        super()._account_prefill_cache_admission(req, self._restored(prefix_len))

    def _restored(self, prefix_len: int) -> int:
        """Tokens of a prefix that count as cached: none that the request computed."""
        return 0 if self._resumes else prefix_len


def more_rows(result: int, scheduler: Any, num_held_rows: int, places: int) -> int:
    """Requests that a pass may run, given what SGLang counts: free rows.

    Parked requests in the queue hold rows of their own.

    Args:
        result: SGLang's count.
        scheduler: SGLang's scheduler.
        num_held_rows: rows that it counted in for requests of the pass.
        places: in the batch, for as many as may run at once.
    """
    held = sum(req.kv.holds_kv for req in scheduler.waiting_queue)
    return min(result + held - num_held_rows, places)


def owes_first_tokens(
    scheduler: Any, batch: ScheduleBatch | None, last: ScheduleBatch | None
) -> bool:
    """Whether to send the last batch's first tokens before a batch is launched.

    That is so if the batch goes on with paused prompts: the requests whose prompts
    ended in the last one would wait for a pass that only the plugin's pauses put there.
    Between prefills of new requests SGLang's own flag decides, and among ranks that
    must agree SGLang does.

    Args:
        scheduler: SGLang's scheduler.
        batch: the batch that is about to be launched.
        last: the one before it, without the requests that were paused in it.
    """
    return (
        batch is not None
        and last is not None
        and batch.forward_mode.is_extend()
        and last.forward_mode.is_extend()
        and scheduler.tree_cache.resumes_parked
        and bool(last.reqs)
        and not scheduler.require_mlp_sync
    )


def with_output(reqs: Iterable[Req]) -> list[Req]:
    """The requests that have something to send: paused ones have not."""
    return [
        req
        for req in reqs
        if req.finished() or len(req.output_ids) != req.send_token_offset
    ]
