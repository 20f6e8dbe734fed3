# SPDX-License-Identifier: Apache-2.0
"""What each step verifies and what became of it, told to the cache by the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from hybrid_plugin.core.cache import HybridCache
    from hybrid_plugin.core.sequence import LiveSequence


class DraftSteps:
    """Draft slots and verified steps of one scheduler.

    In each step: `lend`, vLLM schedules, the step's commands are drained, `note`; when
    its output comes, before vLLM reads it, `take_outcome`.
    """

    def __init__(self, cache: HybridCache) -> None:
        """Begin without requests."""
        self._cache = cache
        self._noted: dict[int, tuple[SchedulerOutput, dict[str, LiveSequence]]] = {}
        """Steps in flight, by their identity, which they keep as long as they are here:
        the sequences that take one known token and drafts."""
        self._changed: set[str] = set()
        """Requests with draft slots that the workers do not know yet."""

    def lend(self, running: Iterable[Request]) -> None:
        """Have slots for the drafts of a step that is about to be scheduled.

        Drafts without a slot are dropped: the request decodes without them.  Where
        somebody waits for what drafts hold, all are, so that the step leaves each
        sequence's state in its own slot, and the others can be taken back.

        Args:
            running: in the order in which vLLM schedules them.
        """
        cache = self._cache
        if not cache.drafts.need_slots:
            return
        narrow = cache.drafts_wanted_back
        for request in running:
            wanted = len(request.spec_token_ids)
            if not wanted:
                continue
            held = 0
            if not narrow:
                if cache.hold_drafts(request.request_id, wanted):
                    self._changed.add(request.request_id)
                held = len(cache.sequence(request.request_id).drafts)
            if held < wanted:
                # vLLM may share the list between requests.
                request.spec_token_ids = request.spec_token_ids[:held]

    def note(
        self, output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> dict[str, list[int]]:
        """Note a step that was scheduled, its commands being drained.

        Args:
            output: the step.
            requests: at least those of the step.

        Returns:
            Slots by column of each request in the step whose draft slots have changed
            since its last one.
        """
        cache, noted = self._cache, {}
        for name, count in output.num_scheduled_tokens.items():
            sequence = cache.sequence(name)
            start = requests[name].num_computed_tokens - count
            if start < sequence.prompt_length:
                continue
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            cache.verify(name, start, drafts, known=requests[name].num_tokens)
            noted[name] = sequence
            if sequence.drafts and not drafts and cache.drafts_wanted_back:
                cache.return_drafts(name)
        self._noted[id(output)] = output, noted
        changed = self._changed & noted.keys()
        self._changed = {
            name for name in self._changed - changed if cache.is_live(name)
        }
        return {name: [noted[name].slot, *noted[name].drafts] for name in changed}

    def take_outcome(self, output: SchedulerOutput, model_runner_output: Any) -> None:
        """Note how many drafts of a step were accepted, before a stop cuts them."""
        _, noted = self._noted.pop(id(output), (None, {}))
        for name, sequence in noted.items():
            # It may have ended meanwhile, and begun anew.
            if self._cache.is_live(name) and self._cache.sequence(name) is sequence:
                row = model_runner_output.req_id_to_index[name]
                sampled = len(model_runner_output.sampled_token_ids[row])
                self._cache.accept(name, sampled - 1)

    def final(self, request: Request) -> int:
        """Tokens of a live request that are computed, whatever becomes of its drafts,
        once the steps scheduled so far have run.
        """
        steps = self._cache.sequence(request.request_id).steps
        if steps is None:
            return int(request.num_computed_tokens)
        return steps.final + len(steps.in_flight)
