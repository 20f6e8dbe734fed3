# SPDX-License-Identifier: Apache-2.0
"""Drafts of which the test says how many are right.

What a sequence will say is read from a file: a reference's answers.  How many of its
drafts are right goes by the sequence:

* "none": all are wrong;
* "all": all are right;
* "some": the first few are right, a random number of them, and the rest wrong;
* "ragged": a random number, all right, so that rows differ in length.

Where an answer is not the file's any more, nothing is proposed.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.messages import Answer, Ask

FILE = "HYBRID_TEST_ORACLE"
"""Environment variable that names the file."""
MODES = ("none", "all", "some", "ragged")


def write(path: Path, asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
    """Write what sequences will say, their modes taking turns."""
    known = [
        {"tokens": [*ask.prompt, *answer.tokens], "mode": MODES[i % len(MODES)]}
        for i, (ask, answer) in enumerate(zip(asks, answers, strict=True))
    ]
    path.write_text(json.dumps(known))


class Oracle:
    """A proposer as vLLM's `custom_class` wants it."""

    def __init__(self, vllm_config: Any) -> None:
        """Read the file."""
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._random = random.Random(0)
        known = json.loads(Path(os.environ[FILE]).read_text())
        self._known = [(tuple(one["tokens"]), one["mode"]) for one in known]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts of each row; none for rows that sampled nothing."""
        return [
            self._drafts(tuple(token_ids_cpu[row, : num_tokens_no_spec[row]].tolist()))
            if len(sampled)
            else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def _drafts(self, said: tuple[int, ...]) -> list[int]:
        length = len(said)
        for tokens, mode in self._known:
            if len(tokens) > length and tokens[:length] == said:
                return self._of(tokens[length : length + self._most], mode)
        return []

    def _of(self, coming: tuple[int, ...], mode: str) -> list[int]:
        right = {"none": 0, "all": self._most}.get(mode)
        if right is None:
            right = self._random.randint(0, self._most)
        drafts = list(coming[:right])
        if mode == "ragged":
            return drafts
        wrong = [token ^ 1 for token in coming[len(drafts) :]]
        return drafts + wrong + [1] * (self._most - len(drafts) - len(wrong))
