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
        """Answer a step, and propose for its requests."""
        self._proposing = list(scheduler_output.num_scheduled_tokens)
        return super().execute_model(scheduler_output, non_block)

    def sampled(self, name: str, scheduler_output: Any) -> list[int]:
        """As many drafts as are accepted, and one token more."""
        drafts = scheduler_output.scheduled_spec_decode_tokens.get(name, ())
        return [ANSWER] * (1 + self._random.randint(0, len(drafts)))

    def take_draft_token_ids(self) -> Any:
        """Drafts of the last step's requests."""
        drafts = self.vllm_config.num_speculative_tokens
        names, self._proposing = self._proposing, []
        return DraftTokenIds(names, [[ANSWER] * drafts for _ in names])
