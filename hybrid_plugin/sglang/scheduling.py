# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefill admission on the two pools: real demand, snapshot stops."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from hybrid_plugin.sglang.prefix_cache import HybridPrefixCache


class HybridPrefillAdder(PrefillAdder):
    """Admits to the core, and ends chunks at snapshot positions.

    SGLang keeps at most one unfinished prefill between steps, so only one
    request of a pass can be paused; the others' stops are passed over.
    """

    tree_cache: HybridPrefixCache
    chunked_req_limit: int | None

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        """Admit a waiting request, or leave everything as it was."""
        verdict = super().add_one_req(req, *args, **kwargs)
        if not (self.can_run_list and self.can_run_list[-1] is req):
            self.tree_cache.withdraw(req)
        return verdict

    def _select_prefill_admission(
        self, req: Req, *, has_chunked_req: bool = False, **kwargs: Any
    ) -> Any:
        admission = super()._select_prefill_admission(
            req, has_chunked_req=has_chunked_req, **kwargs
        )
        if isinstance(admission, AddReqResult):
            return admission
        pausing = has_chunked_req or self.new_chunked_req is not None
        if admission.is_chunked and pausing:
            return AddReqResult.OTHER
        if not pausing:
            admission = self._paused(req, admission)
        if not self.tree_cache.admit(req):
            return AddReqResult.NO_TOKEN
        return admission

    def _paused(self, req: Req, admission: Any) -> Any:
        """The same admission, ended at the first snapshot position within."""
        start = admission.prefix_len
        end = start + admission.extend_len
        stop = next((s for s in self.tree_cache.stops(req) if start < s < end), None)
        if stop is None:
            return admission
        return replace(admission, extend_len=stop - start, is_chunked=True)

    def add_chunked_req(self, req: Req) -> Req | None:
        """Go on with the prefill that was paused, up to its next stop."""
        start = req.prefix_len
        stop = next((s for s in self.tree_cache.stops(req) if s > start), None)
        if stop is not None:
            limits = (self.chunked_req_limit, stop - start)
            self.chunked_req_limit = min(x for x in limits if x is not None)
        unfinished: Req | None = super().add_chunked_req(req)
        return unfinished
