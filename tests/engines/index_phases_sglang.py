# SPDX-License-Identifier: Apache-2.0
"""Serves a GLM-5.3-Flash by SGLang, alone or with the plugin; prints what came out.

    python -m tests.engines.index_phases_sglang FOLDER stock
    python -m tests.engines.index_phases_sglang FOLDER plugin ANSWERS
    python -m tests.engines.index_phases_sglang FOLDER oracle ANSWERS
    python -m tests.engines.index_phases_sglang FOLDER head ANSWERS

The first one writes the model; `ANSWERS` is what it found, as JSON: second turns have
its first answers in them, so that all serve the same prompts.  The last two verify
drafts: those of an oracle that knows stock's answers, and those of the model's own head
by the published arguments.  With the plugin, chats are served again with each part of
what a hit restores zeroed on purpose.

Index keys in eight bits turn any rounding into another choice of tokens.  So drafts are
verified where queries read all tokens, and stock serves the chats that way as well:
answers are the same then, token for token.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests.engines import oracle_sglang, slow_decay
from tests.engines.model_workload import zeroed_snapshots
from tests.engines.phases import report
from tests.engines.window_phases_sglang import Engine

TURNS = (300, 97, 50, 501, 203, 410, 119, 275)
"""Prompt lengths of chats; with their answers, most end between an index key's tokens.
"""
ANSWER = 10
BEYOND = 6
"""Tokens of each answer that the oracle knows and nobody asks for."""
SHARED = 450
PAGE = 256
"""SGLang's choice for this model: 64 index keys of four tokens each."""
TOKENS = 4
"""Of an index key."""
OPTIONS = {"gpu_memory_budget": 64 << 20, "host_memory": "64MiB"}
COMMON = (
    "--dtype=float32",
    "--skip-tokenizer-init",
    "--context-length=1024",
    f"--chunked-prefill-size={PAGE}",
    "--max-running-requests=8",
    "--attention-backend=dsa",
)
STOCK = ("--disable-radix-cache", "--max-total-tokens=16384")
PLUGIN = ("--enable-hybrid-plugin", f"--hybrid-config={json.dumps(OPTIONS)}")
CHAIN = (
    "--speculative-num-steps=5",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=6",
)
"""As published."""
ALGORITHMS = {"oracle": oracle_sglang.NAME, "head": "EAGLE"}
RETRACT_EVERY = 5
"""Steps of a crowd, for SGLang retracts hardly ever by itself."""
ABORT_AFTER = 14
"""Times that SGLang asks for requests: behind the prompts, and before the answers'
ends."""
ALL = 640
"""Tokens that a query chooses, where it is to read all."""
ALIKE = 0.98
"""Cosine of two index keys in eight bits that stand for the same."""
Tokens = list[list[int]]


class AnyCache(Engine):
    """Of any prefix cache: only ends of requests are observed."""

    def _watch(self) -> None:
        released = self.cache.on_release
        self.kept: dict[str, Any] = {}
        """Index keys of each request at its end, `[layers, keys, D]`."""
        self.kept_of_head: dict[str, Any] = {}
        """Those of the model's head, likewise."""
        self.abort: dict[int, list[str]] = {}
        """Requests to abort, by how often SGLang had asked for requests."""
        self._asked = 0

        def on_release(req: Any, *, checkpointed: bool) -> None:
            if req.finished():
                self.kept[req.rid] = self._index_keys(req, self.pool)
                if self.head_pool is not None:
                    self.kept_of_head[req.rid] = self._index_keys(req, self.head_pool)
            released(req, checkpointed=checkpointed)
            if req.finished():
                self._ended[req.rid] = req

        self.cache.on_release = on_release

    @property
    def pool(self) -> Any:
        """Latents and index keys of the model."""
        runner = self.scheduler.tp_worker.model_runner
        return runner.token_to_kv_pool.full_kv_pool

    @property
    def head_pool(self) -> Any | None:
        """Those of its head; None without one."""
        drafts = getattr(self.scheduler.draft_worker, "_draft_worker", None)
        return None if drafts is None else drafts.draft_runner.token_to_kv_pool

    def read_all(self) -> None:
        """Have queries choose all tokens."""
        for module in self.scheduler.tp_worker.model_runner.model.modules():
            if type(module).__name__ == "IndexerKPool":
                module.index_topk = ALL

    def ask(self, prompts: Tokens, length: int) -> tuple[Tokens, list[int]]:
        """Answers, and the tokens that were restored for each."""
        self._asked = 0
        return super().ask(prompts, length)

    def _ingest(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        super()._ingest()
        self._asked += 1
        for rid in self.abort.pop(self._asked, []):
            self.scheduler.abort_request(AbortReq(rid=rid))

    def _index_keys(self, req: Any, pool: Any) -> Any:
        """All of a request that still has its row."""
        import torch

        from hybrid_plugin.sglang_cpu import index_keys

        runner = self.scheduler.tp_worker.model_runner
        count = (len(req.origin_input_ids) + len(req.output_ids) - 1) // TOKENS
        row = runner.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        pieces = row[None, :: pool.index_page_size] // pool.index_page_size
        places = index_keys.places_of(pool, pieces, torch.arange(count)[None])[0]
        buffers = pool.index_key_cache.buffer
        return torch.stack([index_keys.read(pool, one, places) for one in buffers])


class Serving:
    """Phases of one server, and what came out of them."""

    def __init__(
        self,
        engine: AnyCache,
        folder: Path,
        stock: dict[str, Any] | None,
        reads: str = "chosen",
    ) -> None:
        """Ask an engine.

        Args:
            engine: it.
            folder: of the model; stock's index keys go to files there.
            stock: what stock found; None for stock itself.
            reads: the tokens that its queries read, "chosen" or "all".
        """
        self.engine, self.folder, self.stock, self.reads = engine, folder, stock, reads
        if reads == "all":
            engine.read_all()
        self.found: dict[str, Any] = {
            "answers": {},
            "cached": {},
            "wrong keys": {},
            "gaps": {},
        }
        self.asked: dict[str, tuple[Tokens, str]] = {}
        """Prompts of each phase, and stock's phase of the same ones."""
        self.of_head: dict[str, list[Any]] = {}
        """Index keys of the model's head, by phase."""
        self.first = _prompts(1, TURNS)
        self._more = _prompts(2, [20 + n for n in range(len(TURNS))])

    def ask(self, phase: str, prompts: Tokens, like: str | None = None) -> Tokens:
        """Serve a phase, and compare index keys with those of stock's phase `like`.

        All of them where the answer is stock's, and otherwise those of the prompt.
        """
        import torch

        found, engine, like = self.found, self.engine, f"{self.reads}, {like or phase}"
        length = ANSWER if self.stock else ANSWER + BEYOND
        answers, found["cached"][phase] = engine.ask(prompts, length)
        names = [str(number) for number in range(len(prompts))]
        kept = [engine.kept[name] for name in names]
        if engine.head_pool is not None:
            self.of_head[phase] = [engine.kept_of_head[name] for name in names]
        if self.stock is None:
            torch.save(kept, self.folder / f"{like}.pt")
            found.setdefault("known", {})[like] = [prompts, answers]
            answers = [answer[:ANSWER] for answer in answers]
        else:
            theirs = torch.load(self.folder / f"{like}.pt")
            _, known = self.stock[self.reads]["known"][like]
            asked = zip(prompts, answers, known, strict=True)
            ends = [
                (len(prompt) + (len(answer) - 1) * (answer == other[:ANSWER])) // TOKENS
                for prompt, answer, other in asked
            ]
            found["wrong keys"][phase] = [
                unlike(one[:, :end], other[:, :end])
                for one, other, end in zip(kept, theirs, ends, strict=True)
            ]
        found["answers"][phase], self.asked[phase] = answers, (prompts, like)
        return answers

    def chats(self) -> Tokens:
        """First turns, and second turns, which it returns."""
        answers = self.ask("first", self.first)
        if self.stock:
            answers = self.stock[self.reads]["answers"]["first"]
        turns = zip(self.first, answers, self._more, strict=True)
        second = [prompt + answer + new for prompt, answer, new in turns]
        self.ask("second", second)
        return second

    def beginnings(self) -> None:
        """Prompts that begin alike."""
        (common,) = _prompts(3, [SHARED])
        for number, end in enumerate(_prompts(4, [30] * 3)):
            self.ask(f"shared {number}", [common + end])

    def damaged(self, phase: str, second: Tokens, cut: Callable[[], Any]) -> None:
        """Serve both turns, with some of what the second ones hit damaged."""
        self.engine.cache.reset()
        self.ask(f"first, {phase}", self.first, like="first")
        with cut():
            self.ask(phase, second, like="second")

    def compare(self) -> dict[str, Any]:
        """What was found, with how far each answer is from stock's."""
        assert self.stock is not None
        stock, answers = self.stock[self.reads]["answers"], self.found["answers"]
        for phase, (prompts, like) in self.asked.items():
            expected = stock[like.removeprefix(f"{self.reads}, ")]
            self.found["gaps"][phase] = gaps(
                self.folder, prompts, expected, answers[phase]
            )
        return self.found


def serve_hits(serving: Serving) -> dict[str, Any]:
    """All phases without drafts, on damaged hits too."""
    second = serving.chats()
    serving.beginnings()
    pool = serving.engine.pool
    keys = pool.index_key_cache.buffer
    rings = [*pool._compress_tail_k, *pool._compress_tail_score]
    for damage, cut in (
        ("zeroed states", zeroed_snapshots),
        ("zeroed index keys", _zeroed(keys)),
        ("zeroed rings", _zeroed(rings)),
    ):
        serving.damaged(damage, second, cut)
    return serving.compare()


def serve_drafts(serving: Serving) -> dict[str, Any]:
    """All phases with drafts: a crowd that is retracted, and aborts, too."""
    from sglang.srt.managers import scheduler

    engine, found = serving.engine, serving.found
    steps = _count_steps(engine)
    second = serving.chats()
    found["steps"] = dict(steps)
    engine.cache.reset()
    scheduler.TEST_RETRACT_INTERVAL, scheduler.TEST_RETRACT = RETRACT_EVERY, True
    serving.ask("crowd", serving.first, like="first")
    scheduler.TEST_RETRACT = False
    engine.abort = {ABORT_AFTER: [str(number) for number in range(1, len(second), 2)]}
    answers, _ = engine.ask(second, 2 * ANSWER)
    found["lengths with aborts"] = [len(answer) for answer in answers]
    serving.ask("behind aborts", second, like="second")
    core = engine.cache.cache
    found["stats"] = core.stats.as_dict()
    found["used"] = {str(pool): one.used for pool, one in core.levels().items()}
    if engine.head_pool is not None:
        _serve_head(serving, second)
        return found
    pool = engine.pool
    pool._compress_tail_k = [ring[:, :TOKENS] for ring in pool._compress_tail_k]
    pool._compress_tail_score = [ring[:, :TOKENS] for ring in pool._compress_tail_score]
    serving.damaged("narrow rings", second, nullcontext)
    return found


def _serve_head(serving: Serving, second: Tokens) -> None:
    """Compare the head's index keys behind hits with those without a cache."""
    serving.engine.cache.reset()
    serving.ask("second alone", second, like="second")
    pool = serving.engine.head_pool
    rings = [*pool._compress_tail_k, *pool._compress_tail_score]
    serving.damaged("zeroed rings of the head", second, _zeroed(rings))
    alone = serving.of_head["second alone"]
    serving.found["wrong keys of the head"] = {
        phase: [
            unlike(one, other)
            for one, other in zip(serving.of_head[phase], alone, strict=True)
        ]
        for phase in ("second", "behind aborts", "zeroed rings of the head")
    }


def _count_steps(engine: AnyCache) -> dict[str, int]:
    """Verifications of a request each, and drafts accepted, from now on."""
    drafts, steps = engine.cache.drafts, {"verified": 0, "accepted": 0}
    resolved = drafts.resolved

    def count(batch: Any, accepted: list[int]) -> None:
        steps["verified"] += len(accepted)
        steps["accepted"] += sum(accepted)
        resolved(batch, accepted)

    drafts.resolved = count
    return steps


def unlike(keys: Any, others: Any) -> list[int]:
    """Numbers of the keys that are others in some layer, beyond rounding."""
    import torch

    alike = torch.cosine_similarity(keys, others, -1).amin(0)
    return [int(number) for number in (alike < ALIKE).nonzero()]


def gaps(
    folder: Path, prompts: Tokens, expected: Tokens, answers: Tokens
) -> list[float]:
    """How much likelier another token was where an answer first left stock's."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt, stock, answer in zip(prompts, expected, answers, strict=True):
        places = zip(stock, answer, strict=True)
        first = next((n for n, (a, b) in enumerate(places) if a != b), None)
        if first is None:
            found.append(0.0)
            continue
        with torch.no_grad():
            tokens = torch.tensor([prompt + stock[:first]])
            logits = model.eval()(input_ids=tokens).logits[0, -1]
        found.append(float(logits.max() - logits[answer[first]]))
    return found


def _zeroed(tensors: Sequence[Any]) -> Callable[[], Any]:
    """A context before which all that is cached in some tensors is lost."""

    @contextmanager
    def cut() -> Iterator[None]:
        for tensor in tensors:
            tensor.zero_()
        yield

    return cut


def _prompts(seed: int, lengths: Sequence[int]) -> Tokens:
    rng = random.Random(seed)
    return [[rng.randrange(3, 250) for _ in range(length)] for length in lengths]


def keep_latents_in_float32() -> None:
    """Have no step of the computation but index keys rounded to fewer bits."""
    import torch
    from sglang.srt.mem_cache import kv_cache_dtype

    kv_cache_dtype.configure_kv_cache_dtype = lambda **_: ("auto", torch.float32)


def main(folder: Path, mode: str, answers: str | None) -> None:
    """Print one line of JSON."""
    keep_latents_in_float32()
    if answers is None:
        slow_decay.write_glm5_next(folder)
        engine, found = AnyCache(folder, (*COMMON, *STOCK)), {}
        for reads in ("chosen", "all"):
            serving = Serving(engine, folder, None, reads)
            serving.chats()
            if reads == "chosen":
                serving.beginnings()
            found[reads] = serving.found
        report(found)
        return
    stock, flags = json.loads(answers), [*COMMON, *PLUGIN]
    if mode in ALGORITHMS:
        flags += [f"--speculative-algorithm={ALGORITHMS[mode]}", *CHAIN]
    if mode == "oracle":
        _teach(folder / "oracle.json", stock["all"]["known"])
    reads = "all" if mode in ALGORITHMS else "chosen"
    serving = Serving(AnyCache(folder, flags), folder, stock, reads)
    report(serve_hits(serving) if mode == "plugin" else serve_drafts(serving))


def _teach(path: Path, known: dict[str, tuple[Tokens, Tokens]]) -> None:
    """Have the oracle know the answers of stock's phases."""
    shares = ("all", "some", "all", "none")
    pairs = [pair for phase in known.values() for pair in zip(*phase, strict=True)]
    oracle_sglang.write(
        path,
        [
            (prompt, answer, shares[number % len(shares)])
            for number, (prompt, answer) in enumerate(pairs)
        ],
    )
    os.environ[oracle_sglang.VARIABLE] = str(path)
    oracle_sglang.register()


if __name__ == "__main__":
    os.environ["SGLANG_PLATFORM"] = "hybrid_cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(Path(sys.argv[1]), sys.argv[2], (sys.argv[3:] or [None])[0])
