# SPDX-License-Identifier: Apache-2.0
"""Checks of hits in vLLM: two requests of our own, whose outputs go to no client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from uuid import uuid4

from vllm import SamplingParams
from vllm.v1.request import Request

from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.engine.hit_checks import TOP, HitChecks, Run, report
from hybrid_plugin.vllm.activation import logger

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs


class HitChecking:
    """The checks of one scheduler."""

    def __init__(self, fraction: float, stats: CacheStats) -> None:
        """Nothing was checked.

        Args:
            fraction: of the requests with a hit that are checked.
            stats: counts checks.
        """
        self._checks: HitChecks[Request] = HitChecks(fraction, stats)
        self._name = f"hybrid-check-{uuid4().hex}"
        self._runs: dict[str, Run] = {}
        """By the name of a request of ours that is not over."""

    @property
    def is_waiting(self) -> bool:
        """Whether a check is to begin when nothing else runs."""
        return self._checks.is_waiting

    def owns(self, request_id: str) -> bool:
        """Whether a request is one of ours."""
        return request_id in self._runs

    def admitted(self, request: Request, hit: int) -> None:
        """Have a client's request checked, or not.

        Args:
            request: that was just admitted.
            hit: tokens restored.
        """
        is_text = request.prompt_token_ids is not None and not request.mm_features
        if is_text and request.sampling_params and not request.num_preemptions:
            self._checks.offer(request, hit, request.num_prompt_tokens)

    def begin(self) -> list[Request]:
        """The requests of the next check."""
        check = self._checks.begin()
        self._runs = {f"{self._name}-{check.number}-{run}": run for run in Run}
        return [_request(name, run, check.request) for name, run in self._runs.items()]

    def aborted(self, request_id: str) -> None:
        """Note that a request ended without an answer."""
        if self._runs.pop(request_id, None) is not None:
            self._checks.drop()

    def void(self) -> None:
        """Note that what was checked is forgotten: weights may be others now."""
        self._checks.void()

    def limit(self, request_id: str) -> int | None:
        """Tokens that a request of ours may restore, where it reads the cache."""
        check = self._checks.running
        return None if check is None else check.hit

    def take(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Take our requests' outputs out of a step's."""
        if not self._runs:
            return
        for of_client in outputs.values():
            own = [one for one in of_client.outputs if self.owns(one.request_id)]
            if own:
                of_client.outputs = [one for one in of_client.outputs if one not in own]
                self._judge(own)

    def _judge(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            run = self._runs.pop(output.request_id)
            check = self._checks.running
            top, stats = output.new_logprobs, output.prefill_stats
            if check is None or top is None or stats is None:
                self._checks.drop()  # one of the two was aborted
                continue
            tokens = zip(top.logprob_token_ids[0], top.logprobs[0], strict=True)
            likeliest = {int(token): float(value) for token, value in tokens}
            verdict = self._checks.take(run, stats.num_cached_tokens, likeliest)
            if verdict is not None and not verdict.is_ok:
                prompt = check.request.prompt_token_ids or ()
                logger.error("%s", report(check, prompt, verdict))


def _request(name: str, run: Run, of: Request) -> Request:
    """A request for one token behind a client's prompt."""
    return Request(
        request_id=name,
        prompt_token_ids=of.prompt_token_ids,
        sampling_params=SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=TOP,
            detokenize=False,
            skip_reading_prefix_cache=run is Run.COMPUTED,
        ),
        pooling_params=None,
        lora_request=of.lora_request,
        cache_salt=of.cache_salt,
    )
