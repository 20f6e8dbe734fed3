# SPDX-License-Identifier: Apache-2.0
"""Serves a model with blocks of drafts by SGLang and the plugin; prints what came out.

    python -m tests.engines.block_phases_sglang DFLASH nemotron_h OPTIONS FOLDER FLAGS

writes the model and a draft model for it into the folder, and runs SGLang's scheduler
in this process.  What the draft model proposes for each text is noted, which tells
whether its KV was there; then drafts of chosen quality are verified in its place.  At
last some of what a hit restores, or a step commits, is damaged on purpose.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.engines import draft_heads, slow_decay
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.model_phases_sglang import OF_DEVICE, ON_GPU
from tests.engines.phases import report
from tests.engines.window_phases_sglang import Engine, _request

TURNS = (203, 97, 50, 33)
"""Prompt lengths of chats."""
ANSWER = 20
BEYOND = 6
"""Tokens of each answer that are known and not asked for: limits lie within blocks."""
CROWD = 6
CROWD_ANSWER = 30
PAGE = 16
CHUNK = 96
SHARED = 250
RETRACT_EVERY = 6
TOP_K = 200
"""Tokens that sampled answers are chosen from, at a temperature of 1."""
ROUNDS = 25
"""Of the scheduler, until some of a crowd's requests decode and others wait."""
LAYERS = {"nemotron_h": (1, 5, 8), "qwen3_5": (1, 4, 6)}
"""Of each target, whose outputs the draft model reads."""
OPTIONS = {"page_size": PAGE, "gpu_memory_budget": 64 << 20}
FLAGS = (
    "--enable-hybrid-plugin",
    "--skip-tokenizer-init",
    "--context-length=1024",
    f"--chunked-prefill-size={CHUNK}",
    "--max-running-requests=8",
    *OF_DEVICE,
)
Tokens = list[list[int]]
Place = tuple[tuple[int, ...], int]
"""A prompt, and the tokens computed behind which drafts are proposed."""


class BlockEngine(Engine):
    """Also notes what the draft model proposes, and may propose other drafts."""

    def __init__(self, model: Path, flags: Sequence[str], algorithm: str) -> None:
        """Load a model and its draft model."""
        if ON_GPU and find_spec("flashinfer") is None:
            from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

            # It samples, for which SGLang takes FlashInfer's kernels on a GPU.
            DFlashWorkerV2.prewarm_sampling = lambda _: None
        super().__init__(model, flags)
        self.proposed: dict[Place, list[int]] = {}
        self.truth: dict[tuple[int, ...], list[int]] = {}
        """What follows each prompt: drafts of chosen quality are made of it."""
        self.verified = 0
        """Sequences that were verified, over all steps."""
        self.stops: dict[int, int] = {}
        """By number of a prompt, a token that ends its answer."""
        self.sampled: set[int] = set()
        """Numbers of prompts whose answers are sampled, and not greedy."""
        self._rounds_left: int | None = None
        self.scheduler.maybe_sleep_on_idle = lambda: None  # phases are short
        worker = self.scheduler.draft_worker
        if algorithm == "DFLASH":
            sample = worker._greedy_sample_from_vocab_parallel_head

            def proposing(**kwargs: Any) -> torch.Tensor:
                own = sample(**kwargs)
                width = int(worker.block_size) - 1
                return self._drafts(worker, own.view(-1, width)).view(-1)

            worker._greedy_sample_from_vocab_parallel_head = proposing
        else:
            propose = worker._proposer.propose

            def corrected(**kwargs: Any) -> Any:
                import msgspec

                found = propose(**kwargs)
                block = found.draft_block
                drafts = self._drafts(worker, block.draft_tokens)
                block = msgspec.structs.replace(block, draft_tokens=drafts)
                return msgspec.structs.replace(found, draft_block=block)

            worker._proposer.propose = corrected

    def abort(self, prompts: Tokens, length: int, rounds: int) -> list[int]:
        """Abort requests after so many rounds of the scheduler.

        Returns:
            What those had said that were running by then.
        """
        self._ended.clear()
        self._expected, self._rounds_left = len(prompts), rounds
        self._waiting = [_request(i, p, length) for i, p in enumerate(prompts)]
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()
        self._rounds_left = None
        return [len(req.output_ids) for req in self._ended.values()]

    def _ingest(self) -> None:
        for request in self._waiting:
            number = int(request.rid)
            if number in self.sampled:
                request.sampling_params.top_k = TOP_K
                request.sampling_params.top_p = 0.9
            if number in self.stops:
                request.sampling_params.ignore_eos = False
                request.sampling_params.stop_token_ids = {self.stops[number]}
        super()._ingest()
        if self._rounds_left is None:
            return
        self._rounds_left -= 1
        if self._rounds_left == 0:
            from sglang.srt.managers.io_struct import AbortReq

            self.scheduler.abort_request(AbortReq(abort_all=True))
        # Those that waited end without a word.
        self.scheduler.gracefully_exit = self._rounds_left < -ROUNDS

    def _drafts(self, worker: Any, own: torch.Tensor) -> torch.Tensor:
        """``[N, drafts]``: the model's own, or those of chosen quality."""
        batch = worker._hybrid_batch
        drafts = own.clone()
        lengths = batch.seq_lens.tolist()
        self.verified += len(lengths)
        for row, (req, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
            prompt = tuple(req.origin_input_ids)
            self.proposed[prompt, length] = own[row].tolist()
            if prompt in self.truth:
                following = self.truth[prompt][length - len(prompt) + 1 :]
                chance = random.Random(f"{prompt[:8]}{length}")
                right = following[: chance.randrange(own.shape[1] + 1)]
                drafts[row] = 7 + length % 100  # hardly ever what comes
                drafts[row, : len(right)] = torch.tensor(right, dtype=own.dtype)
        return drafts


class Serving:
    """Asks phase by phase, and keeps what came out."""

    def __init__(self, engine: BlockEngine) -> None:
        self.engine = engine
        self.found: dict[str, Any] = {"cached": {}, "lengths": {}}
        self._said: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}

    def ask(self, phase: str, prompts: Tokens, length: int = ANSWER) -> Tokens:
        before = self.engine.verified
        answers, self.found["cached"][phase] = self.engine.ask(prompts, length)
        verified = self.engine.verified - before
        steps = sum(len(answer) - 1 for answer in answers)
        self.found["lengths"][phase] = steps / max(verified, 1)
        texts = zip(map(tuple, prompts), map(tuple, answers), strict=True)
        self._said[phase] = list(texts)
        return answers

    def gaps(self, model: Path) -> dict[str, list[float]]:
        """By phase, how much likelier another token of each answer was at most."""
        texts = sorted({text for said in self._said.values() for text in said})
        asks = [Ask(prompt, len(answer)) for prompt, answer in texts]
        found = gaps(model, asks, [Answer(answer) for _, answer in texts])
        of_text = dict(zip(texts, found, strict=True))
        return {
            phase: [of_text[text] for text in said]
            for phase, said in self._said.items()
        }

    def forget(self) -> None:
        """Drop everything cached."""
        self.engine.cache.reset()


def serve(engine: BlockEngine, model: Path) -> dict[str, Any]:
    """All phases."""
    serving = Serving(engine)
    ask, found = serving.ask, serving.found
    first = _prompts(1, TURNS)
    more = _prompts(2, [20 + n for n in range(len(TURNS))])

    # By the draft model's own drafts, behind hits and without any.
    answers = ask("first", first)
    second = _joined(first, answers, more)
    ask("second", second)
    behind_hits = dict(engine.proposed)
    (common,) = _prompts(3, [SHARED])
    for number, end in enumerate(_prompts(4, [30] * 3)):
        ask(f"shared {number}", [common + end])
    behind_hits |= engine.proposed
    engine.proposed.clear()
    serving.forget()
    known = ask("second alone", second, ANSWER + BEYOND)
    for number, end in enumerate(_prompts(4, [30] * 3)):
        serving.forget()
        ask(f"shared {number} alone", [common + end])
    found["proposed"] = _compared(behind_hits, engine.proposed)
    # What rounding does: the same without hits, in other batches.
    together = dict(engine.proposed)
    engine.proposed.clear()
    for number, prompt in enumerate(second):
        serving.forget()
        ask(f"second {number} alone", [prompt], ANSWER + BEYOND)
    found["proposed one by one"] = _compared(together, engine.proposed)

    # The same from hits whose KV for the draft model is gone.
    serving.forget()
    ask("first", first)
    engine.proposed.clear()
    with _zeroed_drafts(engine):
        ask("second without drafts' KV", second)
    found["proposed from zeros"] = _compared(behind_hits, engine.proposed)

    # Drafts some of which are right.
    serving.forget()
    longer = ask("first longer", first, ANSWER + BEYOND)
    serving.forget()
    engine.truth = {
        tuple(prompt): answer
        for prompt, answer in zip([*first, *second], [*longer, *known], strict=True)
    }
    ask("first, some right", first)
    ask("second, some right", second)
    serving.forget()
    # On a GPU, SGLang takes FlashInfer's kernels for such samples.
    engine.sampled = set() if ON_GPU else set(range(1, len(first), 2))
    mixed, _ = engine.ask(first, ANSWER)
    engine.sampled = set()
    found["sampled"] = [
        said == answer for said, answer in zip(mixed, answers, strict=True)
    ]
    serving.forget()
    stops = {n: _first_of_its_kind(answer) for n, answer in enumerate(longer)}
    engine.stops = {n: longer[n][place] for n, place in stops.items()}
    stopped = ask("first, stopped", first)
    found["stopped at"] = [len(answer) for answer in stopped]
    found["stop tokens"] = [place + 1 for place in stops.values()]
    engine.stops = {}
    ask("behind stops", _joined(first, stopped, more))
    found |= _under_pressure(serving)
    _damaged(serving, first, second)
    found["gaps"] = serving.gaps(model)
    return found


def _under_pressure(serving: Serving) -> dict[str, Any]:
    """A crowd that is preempted, twice, with drafts some of which are right."""
    from sglang.srt.managers import scheduler

    engine = serving.engine
    crowd = _prompts(5, [100] * CROWD)
    answers = serving.ask("crowd alone", crowd, CROWD_ANSWER)
    serving.forget()
    engine.truth |= {tuple(p): a for p, a in zip(crowd, answers, strict=True)}
    before = dict(engine.cache.cache.stats.as_dict())
    scheduler.TEST_RETRACT_INTERVAL, scheduler.TEST_RETRACT = RETRACT_EVERY, True
    serving.ask("crowd", crowd, CROWD_ANSWER)
    scheduler.TEST_RETRACT = False
    more = _prompts(6, [20] * CROWD)
    serving.ask("crowd again", _joined(crowd, answers, more))
    aborted = engine.abort(_prompts(7, [150] * CROWD), CROWD_ANSWER, rounds=ROUNDS)
    serving.ask("behind aborts", _joined(crowd, answers, more))
    stats = engine.cache.cache.stats.as_dict()
    levels = {str(pool): one.used for pool, one in engine.cache.cache.levels().items()}
    return {
        "preemptions": stats["preemptions"] - before["preemptions"],
        "turn_ends_missed": stats["turn_ends_missed"],
        "aborted": aborted,
        "left in use": levels,
    }


def _damaged(serving: Serving, first: Tokens, second: Tokens) -> None:
    """Breakages that comparing answers must show."""
    with _wrong_turn_ends(serving.engine):
        serving.forget()
        serving.ask("first, wrong ends", first)
        serving.ask("second, wrong ends", second)
    serving.forget()
    with _one_draft_more():
        serving.ask("first, a rejected draft committed", first)


@contextmanager
def _zeroed_drafts(engine: BlockEngine) -> Iterator[None]:
    """What a hit restores has no KV of the draft model."""
    runner = engine.scheduler.draft_worker.draft_model_runner
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    begins = engine.cache.step_begins

    def step_begins(batch: Any) -> None:
        begins(batch)
        if batch.forward_mode.is_extend():
            for req in batch.reqs:
                places = table[req.kv.req_pool_idx, : req.cached_tokens].long()
                for buffer in (*pool.k_buffer, *pool.v_buffer):
                    buffer[places] = 0

    with patch.object(engine.cache, "step_begins", step_begins):
        yield


@contextmanager
def _wrong_turn_ends(engine: BlockEngine) -> Iterator[None]:
    """Turns end with the state after another draft than the last accepted one."""
    from dataclasses import replace

    from hybrid_plugin.sglang.speculation.scratch import DraftScratch

    kind = type(engine.cache._executor.scratch)
    name = "take" if kind is DraftScratch else "_cut"
    original = getattr(kind, name)

    def wrongly(self: Any, *given: Any) -> None:
        place = 0 if name == "take" else 1
        moved = [replace(one, step=one.step + 1) for one in given[place]]
        original(self, *given[:place], moved, *given[place + 1 :])

    with patch.object(kind, name, wrongly):
        yield


@contextmanager
def _one_draft_more() -> Iterator[None]:
    """States after one draft more than was accepted, where there is one."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
        HybridLinearAttnBackend as Backend,
    )

    original: Callable[..., None] = Backend.update_mamba_state_after_mtp_verify

    def commit(self: Any, **kwargs: Any) -> None:
        steps = kwargs["last_correct_step_indices"]
        kwargs["last_correct_step_indices"] = (steps + 1).clamp(max=BLOCK - 1)
        original(self, **kwargs)

    with patch.object(Backend, "update_mamba_state_after_mtp_verify", commit):
        yield


BLOCK = draft_heads.BLOCK


def _compared(
    one: dict[Place, list[int]], other: dict[Place, list[int]]
) -> dict[str, int]:
    """Texts that both have, and those with other drafts."""
    common = one.keys() & other.keys()
    unlike = sum(one[place] != other[place] for place in common)
    kinds = {tuple(drafts) for drafts in one.values()}
    return {"texts": len(common), "unlike": unlike, "kinds": len(kinds)}


def _first_of_its_kind(answer: list[int]) -> int:
    """Where a token stands that the answer had not had before, from the fifth on."""
    return next(n for n in range(4, len(answer)) if answer[n] not in answer[:n])


def _prompts(seed: int, lengths: Sequence[int]) -> Tokens:
    rng = random.Random(seed)
    return [[rng.randrange(3, 250) for _ in range(length)] for length in lengths]


def _joined(prompts: Tokens, answers: Tokens, more: Tokens) -> Tokens:
    turns = zip(prompts, answers, more, strict=True)
    return [prompt + answer + new for prompt, answer, new in turns]


def main(
    algorithm: str, kind: str, options: str, folder: Path, more: Sequence[str]
) -> None:
    """Print one line of JSON."""
    model = getattr(slow_decay, f"write_{kind}")(folder / kind)
    write = {
        "DFLASH": draft_heads.write_block_drafter,
        "DSPARK": draft_heads.write_spark_drafter,
    }[algorithm]
    drafter = write(folder / f"{kind}-{algorithm}", model, LAYERS[kind])
    flags = (
        *FLAGS,
        f"--hybrid-config={json.dumps(OPTIONS | json.loads(options))}",
        f"--speculative-algorithm={algorithm}",
        f"--speculative-draft-model-path={drafter}",
        *more,
    )
    report(serve(BlockEngine(model, flags, algorithm), model))


if __name__ == "__main__":
    os.environ["SGLANG_PLATFORM"] = "" if ON_GPU else "hybrid_cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(*sys.argv[1:4], Path(sys.argv[4]), sys.argv[5:])
