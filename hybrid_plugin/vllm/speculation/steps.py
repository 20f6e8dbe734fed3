# SPDX-License-Identifier: Apache-2.0
"""What each step verifies and what became of it, told to the cache by the scheduler."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from hybrid_plugin.core.cache import HybridCache
    from hybrid_plugin.core.sequence import LiveSequence


class DraftSteps:
    """Draft slots and verified steps of one scheduler.

    In each step: `lend`, vLLM schedules, `worth_proposing`, the step's commands are
    drained, `note`; when its output comes, before vLLM reads it, `take_outcome`.
    """

    def __init__(self, cache: HybridCache, max_model_len: int = sys.maxsize) -> None:
        """Begin without requests.

        Args:
            cache: of the scheduler.
            max_model_len: tokens of a sequence, at most.
        """
        self._cache = cache
        self._max_model_len = max_model_len
        self._noted: dict[int, tuple[SchedulerOutput, dict[str, LiveSequence]]] = {}
        """Steps in flight, by their identity, which they keep as long as they are here:
        the sequences that take one known token and drafts."""
        self._changed: set[str] = set()
        """Requests with draft slots that the workers do not know yet."""

    def lend(self, running: Sequence[Request], lookahead: int) -> None:
        """Have slots for the drafts of a step that is about to be scheduled.

        All requests of the step verify equally many drafts, as far as they have them:
        as many as all find slots and pages for.  The others are dropped.  Where
        somebody waits for what drafts hold, that is none: the step leaves each
        sequence's state in its own slot, and the others are free in the next one.

        Args:
            running: that vLLM may schedule.
            lookahead: tokens behind a step's own for which vLLM wants pages.
        """
        wanted = {
            request.request_id: len(request.spec_token_ids)
            for request in running
            if request.spec_token_ids
        }
        growth = {
            request.request_id: self._tokens(request, lookahead) for request in running
        }
        held = {name: list(self._drafts(name)) for name in wanted}
        width = self._cache.lend_drafts(wanted, growth, lookahead)
        # Slots may have been taken back and others lent: as many, or fewer.
        self._changed |= {
            name
            for name, before in held.items()
            if (now := self._drafts(name)) != before[: len(now)]
        }
        for request in running:
            if len(request.spec_token_ids) > width:
                # vLLM may share the list between requests.
                request.spec_token_ids = request.spec_token_ids[:width]

    def worth_proposing(
        self,
        output: SchedulerOutput,
        requests: Mapping[str, Request],
        most: int,
        lookahead: int,
    ) -> int:
        """How many drafts the next step can verify, for whoever proposes them.

        Args:
            output: the step that was just scheduled, not counted as computed yet.
            requests: at least those of the step.
            most: that vLLM would have proposed.
            lookahead: as in `lend`.
        """
        wanted, growth = {}, {}
        for name, count in output.num_scheduled_tokens.items():
            request = requests[name]
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            tokens = self._tokens(request, 0)
            growth[name] = tokens + lookahead
            if request.num_computed_tokens + count >= tokens:
                wanted[name] = most
                growth[name] += drafts + 1
            growth[name] = min(growth[name], self._max_model_len)
        return self._cache.foresee_drafts(wanted, growth) if wanted else most

    def note(
        self, output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> dict[str, list[int]]:
        """Note a step that was scheduled, its commands being drained.

        Args:
            output: the step.
            requests: at least those of the step.

        Returns:
            Slots by column of each request in the step that got draft slots since its
            last one.
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

    def _drafts(self, name: str) -> list[int]:
        return self._cache.sequence(name).drafts

    def _tokens(self, request: Request, lookahead: int) -> int:
        """Tokens that a request needs pages for in a step without drafts."""
        known = request.num_tokens + request.num_output_placeholders
        return min(int(known + lookahead), self._max_model_len)
