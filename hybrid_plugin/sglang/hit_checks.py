# SPDX-License-Identifier: Apache-2.0
"""Checks of hits in SGLang: two requests of our own, whose outputs go to no client.

Each rank has a scheduler.  All of them choose the same requests and begin checks in the
same rounds, because all that they decide by is equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.engine.hit_checks import TOP, HitChecks, Run, report
from hybrid_plugin.sglang import pipeline
from hybrid_plugin.sglang.log import logger
from hybrid_plugin.sglang.requests import RUN

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class HitChecking:
    """The checks of one scheduler."""

    def __init__(self, fraction: float, stats: CacheStats) -> None:
        """Nothing was checked.

        Args:
            fraction: of the requests with a hit that are checked.
            stats: counts checks.
        """
        self._checks: HitChecks[Req] = HitChecks(fraction, stats)
        self._name = f"hybrid-check-{uuid4().hex}"

    @property
    def is_waiting(self) -> bool:
        """Whether a check is to begin when nothing else runs."""
        return self._checks.is_waiting

    def void(self) -> None:
        """Note that what was checked is forgotten: weights may be others now."""
        self._checks.void()

    def admitted(self, req: Req, hit: int) -> None:
        """Have a client's request checked, or not.

        Args:
            req: that was just admitted.
            hit: tokens restored.
        """
        tokens_say_all = (
            req.multimodal_inputs is None
            and req.input_embeds is None
            and req.positional_embed_overrides is None
            and req.lora_id is None
        )
        if tokens_say_all and not req.retracted_stain:
            self._checks.offer(req, hit, len(req.origin_input_ids))

    def limit(self, length: int) -> int:
        """Tokens of a prompt that a request of ours may restore."""
        check = self._checks.running
        return length if check is None else min(length, check.hit)

    def begin(self, scheduler: Any) -> None:
        """Queue the requests of the next check.

        Args:
            scheduler: SGLang's, with nothing else to do.
        """
        check = self._checks.begin()
        for run in Run:
            name = f"{self._name}-{check.number}-{run}"
            scheduler.handle_generate_request(_request(name, check.request))
            for req in scheduler.waiting_queue:
                if req.rid == name:
                    setattr(req, RUN, run)

    def without_own(self, reqs: Iterable[Req]) -> list[Req]:
        """The requests whose outputs are clients'; takes those of ours."""
        clients = []
        for req in reqs:
            run = getattr(req, RUN, None)
            if run is None:
                clients.append(req)
            elif req.finished():
                self._judge(run, req)
        return clients

    def _judge(self, run: Run, req: Req) -> None:
        check, found = self._checks.running, req.logprob
        if check is None or not req.output_ids or not found.output_top_logprobs_idx:
            self._checks.drop()  # it was aborted
            return
        tokens, values = found.output_top_logprobs_idx[0], found.output_top_logprobs_val
        likeliest = dict(zip(map(int, tokens), map(float, values[0]), strict=True))
        hit = (
            req.cached_tokens_device
            + req.cached_tokens_host
            + req.cached_tokens_storage
        )
        verdict = self._checks.take(run, hit, likeliest)
        if pipeline.speaks() and verdict is not None and not verdict.is_ok:
            logger.error("%s", report(check, check.request.origin_input_ids, verdict))


def check_when_idle(scheduler: Any, running: Any, last: Any) -> None:
    """Begin a check if nothing else is there to be served.

    Args:
        scheduler: SGLang's scheduler, about to choose its next batch.
        running: its running batch.
        last: the batch it launched last, or None.
    """
    checking: HitChecking | None = scheduler.tree_cache.hit_checking
    if checking is None or not checking.is_waiting:
        return
    if last is None and running.is_empty() and not scheduler.waiting_queue:
        checking.begin(scheduler)


def _request(name: str, of: Req) -> TokenizedGenerateReqInput:
    """A request for one token behind a client's prompt, as from SGLang's tokenizer."""
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text="",
        input_ids=of.origin_input_ids[:],
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=True,
        logprob_start_len=-1,
        top_logprobs_num=TOP,
        token_ids_logprob=None,
        stream=False,
        extra_key=of.extra_key,
        cache_salt=of.cache_salt,
    )
