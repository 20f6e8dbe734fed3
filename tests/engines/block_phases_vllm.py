# SPDX-License-Identifier: Apache-2.0
"""Serves chats by vLLM with blocks of drafts, by DFlash; prints what came out.

python -m tests.engines.block_phases_vllm OPTIONS FOLDER

OPTIONS is a JSON object of the plugin's.  Each proposal belongs to the text that its
request has come to.  One request runs at a time, but in a last phase, which tells what
another batch changes.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.engines import draft_heads, slow_decay
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.model_phases_vllm import VllmEngine, set_environment
from tests.engines.phases import report

ON_GPU = torch.cuda.is_available()
DRAFTS = 3
TURNS = (130, 50)
"""Prompt lengths of chats; the first one's takes two passes."""
ANSWER = 24
READ = (3, 7)
"""Layers of the model whose outputs the draft model reads."""
Tokens = list[list[int]]
Proposals = dict[int, dict[int, list[int]]]


class Proposed:
    """What the draft model proposed."""

    def __init__(self) -> None:
        """Listen from now on."""
        self._drafts: dict[str, dict[int, list[int]]] = {}
        """By request, and by the number of tokens that were computed of it."""
        if ON_GPU:
            self._listen_to_the_second_runner()
        else:
            self._listen()

    def _listen(self) -> None:
        from vllm.v1.spec_decode.dflash import DFlashProposer
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        propose, have_proposed = (
            DFlashProposer.propose,
            GPUModelRunner.propose_draft_token_ids,
        )
        running: list[str] = []

        def naming(runner: Any, *args: Any, **named: Any) -> Any:
            running[:] = runner.input_batch.req_ids
            return have_proposed(runner, *args, **named)

        def noted(proposer: Any, *args: Any, **named: Any) -> Any:
            drafts = propose(proposer, *args, **named)
            lengths = named["common_attn_metadata"].seq_lens
            self._note(running, drafts, lengths, named.get("num_rejected_tokens_gpu"))
            return drafts

        DFlashProposer.propose = noted
        GPUModelRunner.propose_draft_token_ids = naming

    def _listen_to_the_second_runner(self) -> None:
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

        propose = DFlashSpeculator.propose
        signature = inspect.signature(propose)

        def noted(speculator: Any, *args: Any, **named: Any) -> Any:
            drafts = propose(speculator, *args, **named)
            given = signature.bind(speculator, *args, **named).arguments
            if not given.get("dummy_run"):
                batch = given["input_batch"]
                rejected = given["num_rejected"]
                self._note(batch.req_ids, drafts, batch.seq_lens, rejected)
            return drafts

        DFlashSpeculator.propose = noted

    def _note(
        self,
        requests: Sequence[str],
        drafts: torch.Tensor,
        lengths: torch.Tensor,
        rejected: torch.Tensor | None,
    ) -> None:
        """Of each sequence that runs."""
        for row, request in enumerate(requests):
            lost = 0 if rejected is None else int(rejected[row])
            computed = int(lengths[row]) - lost
            self._drafts.setdefault(request, {})[computed] = drafts[row].tolist()

    def take(self) -> Proposals:
        """What was proposed since the last call, by chats in the order of asking."""
        # vLLM names requests by their numbers, and something random behind them.
        in_order = sorted(self._drafts, key=lambda name: int(name.split("-")[0]))
        found = {chat: self._drafts[name] for chat, name in enumerate(in_order)}
        self._drafts.clear()
        return found


def compared(one: Proposals, other: Proposals, starts: list[int]) -> dict[str, int]:
    """How far proposals behind the starts differ."""
    pairs = [
        (drafts, other[chat][length])
        for chat, by_length in one.items()
        for length, drafts in by_length.items()
        if length >= starts[chat] and length in other[chat]
    ]
    return {
        "texts": len(pairs),
        "kinds": len({tuple(drafts) for drafts, _ in pairs}),
        "unlike": sum(drafts != others for drafts, others in pairs),
    }


def zero_draft_kv(worker: Any, pages: list[int]) -> None:
    """Forget the draft model's KV of some pages."""
    runner = worker.model_runner
    layers = runner.vllm_config.compilation_config.static_forward_context
    names = (
        runner.speculator.draft_attn_layer_names
        if ON_GPU
        else runner.drafter._draft_attn_layer_names
    )
    for name in names:
        layers[name].kv_cache[pages] = 0.0


class Chats:
    """Asks an engine, and keeps what it says."""

    def __init__(self, engine: VllmEngine, proposed: Proposed, model: Path) -> None:
        """Begin with nothing asked."""
        self._engine, self._proposed, self._model = engine, proposed, model
        self.gaps: dict[str, list[float]] = {}
        self.cached: dict[str, list[int]] = {}
        self.answers: dict[str, Tokens] = {}

    def ask(
        self, phase: str, prompts: Tokens, at_once: int = 1
    ) -> tuple[Tokens, Proposals]:
        """Answers, and what was proposed on the way.

        Args:
            phase: what this is called in what is found.
            prompts: one of each chat.
            at_once: how many of them run side by side.
        """
        self.answers[phase], self.cached[phase] = [], []
        for start in range(0, len(prompts), at_once):
            some = prompts[start : start + at_once]
            answers, cached = self._engine.ask(some, ANSWER)
            self.answers[phase] += answers
            self.cached[phase] += cached
        return self.answers[phase], self._proposed.take()

    def compare(self, phase: str, prompts: Tokens) -> None:
        """See how much likelier other tokens were than the answers of a phase."""
        asks = [Ask(tuple(prompt), ANSWER) for prompt in prompts]
        said = [Answer(tuple(answer)) for answer in self.answers[phase]]
        self.gaps[phase] = list(gaps(self._model, asks, said))


def main(options: dict[str, Any], folder: Path) -> None:
    """Print one line of JSON."""
    model = slow_decay.write_nemotron_h(folder / "model")
    drafter = draft_heads.write_block_drafter(folder / "drafts", model, READ)
    proposed = Proposed()
    engine = VllmEngine(
        model,
        # Attention that looks ahead takes no float32 on a GPU.
        dtype="bfloat16" if ON_GPU else "float32",
        additional_config={"hybrid_plugin": options},
        speculative_config={
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": DRAFTS,
        },
    )
    chats = Chats(engine, proposed, model)
    choose = random.Random(1)
    first = [[choose.randrange(1, 250) for _ in range(length)] for length in TURNS]
    answers, _ = chats.ask("first", first)
    second = [[*p, *a, *range(7, 12)] for p, a in zip(first, answers, strict=True)]
    _, behind_hits = chats.ask("second", second)
    engine.forget()
    _, without = chats.ask("second alone", second)
    engine.forget()
    # What rounding does: the same without hits, in other batches.
    _, together = chats.ask("second together", second, at_once=len(second))
    engine.forget()
    chats.ask("first again", first)
    pages = [page for node in engine.cache.tree.nodes() for page in node.pages]
    engine._llm.collective_rpc(zero_draft_kv, args=(pages,))
    _, from_zeros = chats.ask("second, draft KV zeroed", second)
    chats.compare("first", first)
    chats.compare("second", second)
    starts = [len(prompt) for prompt in second]
    stats = engine.stats()
    report(
        {
            "gaps": chats.gaps,
            "answers": chats.answers,
            "cached": chats.cached,
            "proposed": compared(behind_hits, without, starts),
            "proposed together": compared(together, without, starts),
            "proposed from zeros": compared(from_zeros, without, starts),
            "turn_ends_missed": stats["turn_ends_missed"],
        }
    )


if __name__ == "__main__":
    set_environment()
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
