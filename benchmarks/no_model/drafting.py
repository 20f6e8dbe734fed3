# SPDX-License-Identifier: Apache-2.0
"""An executor without a model that is given drafts to verify."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from benchmarks.no_model.vllm_engine import ANSWER, NoModel


class NoModelWithDrafts(NoModel):
    """Accepts of each request's drafts a number drawn anew in each step, and proposes
    as many again.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        self._proposing: list[str] = []
        self._random = random.Random(0)

    def execute_model(
        self, scheduler_output: Any, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Answer a step."""
        names = list(scheduler_output.num_scheduled_tokens)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        sampled: list[list[int]] = []
        for name in names:
            computed, known = self.num_tokens(name)
            accepted = self._random.randint(0, len(drafts.get(name, ())))
            sampled.append([ANSWER] * (1 + accepted) if computed >= known else [])
        self._proposing = names
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def take_draft_token_ids(self) -> Any:
        """Drafts of the last step's requests."""
        drafts = self.vllm_config.num_speculative_tokens
        names, self._proposing = self._proposing, []
        return DraftTokenIds(names, [[ANSWER] * drafts for _ in names])
