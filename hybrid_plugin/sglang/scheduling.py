# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefill admission on the core's pools: real demand, snapshot positions.

SGLang itself goes on with one unfinished prefill at a time.  A request that is
paused at a snapshot position waits at the head of the queue instead (see `parking`),
so any number of them can be under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
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
    prefill_delayer_single_pass: Any
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
        with self._going_on() if self._resumes else nullcontext():
            verdict = super().add_one_req(req, *args, **kwargs)
        if self.can_run_list and self.can_run_list[-1] is req:
            self.tree_cache.unpark(req)
            if req.extend_end < len(req.full_untruncated_fill_ids):
                self.tree_cache.pause(req)
        elif not self._resumes:
            self.tree_cache.withdraw(req)
        return verdict

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Delay no prompt that has begun, while this lasts: it holds memory.

        Other ranks hear that this one prefills, as of SGLang's own unfinished prompt.
        """
        self._may_prefill()
        delayer = self.prefill_delayer_single_pass
        self.prefill_delayer_single_pass = None
        try:
            yield
        finally:
            self.prefill_delayer_single_pass = delayer

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
        length = self.tree_cache.chunk_end(req, start, end) - start
        # Both before the admission: a withdrawal does not bring back what an admission
        # evicts.
        if not length or not self._may_prefill():
            return AddReqResult.OTHER
        if not self.tree_cache.admit(req, end):
            return AddReqResult.NO_TOKEN
        # SGLang charges the pass for pages that are taken already: see the budget.
        self.memory_budget.refund(length)
        return replace(admission, extend_len=length, is_chunked=False)

    def _may_prefill(self) -> bool:
        """Whether `--enable-prefill-delayer` lets this pass go on; it answers once."""
        delayer = self.prefill_delayer_single_pass
        return delayer is None or delayer.negotiate_should_allow_prefill(
            local_prefillable=True,
            running_batch=self.running_batch.batch_size(),
            max_prefill_bs=self.max_prefill_bs,
            max_running_requests=self.max_running_requests,
            waiting_queue_len=self.waiting_queue_len,
        )

    def _update_prefill_budget(self, prefix_len: int, *args: Any, **kw: Any) -> None:
        super()._update_prefill_budget(self._restored(prefix_len), *args, **kw)

    def _account_prefill_cache_admission(self, req: Req, prefix_len: int) -> None:
        super()._account_prefill_cache_admission(req, self._restored(prefix_len))

    def _restored(self, prefix_len: int) -> int:
        """Tokens of a prefix that count as cached: none that the request computed."""
        return 0 if self._resumes else prefix_len


def more_rows(result: int, parked: int, places: int) -> int:
    """Requests that a pass may run, given what SGLang counts: free rows, and those that
    requests of the pass hold already.

    Args:
        result: SGLang's count.
        parked: requests in the queue that hold rows of their own.
        places: in the batch, for as many as may run at once.
    """
    return min(result + parked, places)


def results_first(
    result: bool,
    scheduler: Any,
    batch: ScheduleBatch | None,
    last: ScheduleBatch | None,
) -> bool:
    """Whether to send the last batch's first tokens before a batch is launched.

    That is so if the batch goes on with paused prompts: the requests whose prompts
    ended in the last one would wait for a pass that only the plugin's pauses put there.
    Between prefills of new requests SGLang's own flag decides, and among ranks that
    must agree SGLang does.

    A pass that also decodes (`--enable-mixed-chunk`) is launched before results are
    handled.  A request that ends with them already counts the token that this pass
    computes, and commands that store its state on the host run ahead of the pass.
    Where ranks must agree, the flag that makes SGLang wait is refused at start-up.

    Args:
        result: whether SGLang would.
        scheduler: its scheduler.
        batch: the batch that is about to be launched.
        last: the one before it, without the requests that were paused in it.
    """
    if batch is None or last is None or scheduler.require_mlp_sync:
        return result
    if batch.forward_mode.is_mixed():
        return False
    return result or (
        batch.forward_mode.is_extend()
        and last.forward_mode.is_extend()
        and scheduler.tree_cache.resumes_parked
        and bool(last.reqs)
    )


def with_output(reqs: Iterable[Req]) -> list[Req]:
    """The requests that have something to send: paused ones have not."""
    return [
        req
        for req in reqs
        if req.finished() or len(req.output_ids) != req.send_token_offset
    ]
