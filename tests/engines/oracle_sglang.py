# SPDX-License-Identifier: Apache-2.0
"""An algorithm of SGLang whose drafts are as right as a test wants them.

A plugin of SGLang (`faults` has its entry point).  It knows the greedy answers of the
test's prompts, from the file that HYBRID_TEST_ORACLE names, and drafts the next tokens
of them, or others: all right, none, or a number that changes from step to step.  With
`--speculative-eagle-topk` above 1 the drafts are a tree in which the right ones stand
anywhere.  Chains lie where accepted drafts belong, and are not moved: SGLang's n-gram
worker, whose drafts are trees, would move them, as it cannot index keys of several
tokens.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

VARIABLE = "HYBRID_TEST_ORACLE"
NAME = "ORACLE"


def register() -> None:
    """Tell SGLang of the algorithm, in each of its processes, where a test asks so."""
    if VARIABLE not in os.environ:
        return
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Oracle(CustomSpecAlgo):
        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        # SGLang's own algorithms have these, and its scheduler asks for them.
        carries_draft_hidden_states = SpeculativeAlgorithm.carries_draft_hidden_states
        create_future_map = SpeculativeAlgorithm.create_future_map

    declare = SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, spec_class=Oracle
    )
    declare(lambda _: _worker())


Known = Sequence[tuple[Sequence[int], Sequence[int], str]]
"""Prompts, what follows each, and the share of right drafts."""


def write(path: Path, answers: Known) -> None:
    """What the oracle reads.

    Args:
        path: of the file.
        answers: prompts, what follows each of them, and whether "all", "none" or
            "some" of its drafts are right.
    """
    path.write_text(json.dumps([[list(p), list(a), share] for p, a, share in answers]))


class Drafts:
    """Trees of drafts for texts of which it knows how they go on."""

    def __init__(self, path: Path, width: int, topk: int) -> None:
        """Read the file that `write` wrote.

        Args:
            path: of it.
            width: nodes of a tree, the root counted.
            topk: children of a node; 1 for chains.
        """
        known = json.loads(path.read_text())
        self._answers = {
            tuple(prompt): (answer, share) for prompt, answer, share in known
        }
        self._width, self._topk = width, topk

    def tree(self, prompt: tuple[int, ...], output: list[int]) -> tuple[Any, Any]:
        """Tokens ``[width]`` and the mask ``[width, width]`` of the next drafts."""
        chance = random.Random(f"{prompt}{len(output)}")
        answer, share = self._answers.get(prompt, ([], "none"))
        known = answer[: len(output)] == output
        truth = answer[len(output) :][: self._width - 1] if known else []
        count = {"all": self._width, "some": chance.randrange(self._width), "none": 0}
        right = truth[: count[share]]
        tokens, parents, path = [output[-1]], [-1], [0]
        while len(tokens) < self._width:
            depth = len(path) - 1
            if depth < len(right) and (self._topk == 1 or chance.random() < 0.6):
                parents.append(path[-1])
                path.append(len(tokens))
                tokens.append(right[depth])
                continue
            open_to_more = [
                node
                for node in range(len(tokens))
                if parents.count(node) < self._topk - (node == path[-1])
            ]
            parent = len(tokens) - 1 if self._topk == 1 else chance.choice(open_to_more)
            wrong = chance.randrange(1, 200)
            if parent in path and truth[path.index(parent) :][:1] == [wrong]:
                wrong += 1
            parents.append(parent)
            tokens.append(wrong)
        mask = np.eye(self._width, dtype=bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return np.array(tokens, dtype=np.int64), mask


class _NoCorpus:
    """In the place of the n-gram worker's."""

    def __init__(self, **_: Any) -> None: ...

    def reset(self) -> None: ...

    def erase_match_state(self, _: Any) -> None: ...


def _worker() -> type:
    from sglang.srt.speculative import ngram_worker

    class OracleWorker(ngram_worker.NGRAMWorker):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with patch.object(ngram_worker, "NgramCorpus", _NoCorpus):
                super().__init__(*args, **kwargs)
            self._drafts = Drafts(
                Path(os.environ[VARIABLE]), self.draft_token_num, self.topk or 1
            )

        def forward_batch_generation(self, *args: Any, **kwargs: Any) -> Any:
            run = super().forward_batch_generation
            if (self.topk or 1) > 1:
                return run(*args, **kwargs)
            mover = "move_accept_tokens_to_target_kvcache"
            with patch.object(ngram_worker, mover, lambda *_: None):
                return run(*args, **kwargs)

        def _prepare_draft_tokens(self, batch: Any) -> tuple[Any, Any]:
            trees = [
                self._drafts.tree(
                    tuple(req.origin_input_ids_unpadded),
                    list(req.output_ids) + earlier,
                )
                for req, earlier in zip(batch.reqs, self._unseen(batch), strict=True)
            ]
            return (
                np.concatenate([tokens for tokens, _ in trees]),
                np.concatenate([mask.reshape(-1) for _, mask in trees]),
            )

        def _unseen(self, batch: Any) -> list[list[int]]:
            """Tokens that the step before gave, whose result is not handled yet."""
            if not self.enable_overlap or batch.grammar_needs_sync():
                return [[] for _ in batch.reqs]
            width, info = self.draft_token_num, batch.spec_info
            tokens = info.accept_tokens.view(-1, width).tolist()
            lens = info.accept_lens.tolist()
            return [row[:count] for row, count in zip(tokens, lens, strict=True)]

        def _update_ngram_corpus(self, batch: Any) -> None:
            pass

    return OracleWorker
