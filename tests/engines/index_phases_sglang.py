# SPDX-License-Identifier: Apache-2.0
"""Serves a GLM-5.3-Flash by SGLang, alone or with the plugin; prints what came out.

    python -m tests.engines.index_phases_sglang FOLDER stock
    python -m tests.engines.index_phases_sglang FOLDER plugin ANSWERS

The first one writes the model; `ANSWERS` is what it found, as JSON: second turns have
its first answers in them, so that both serve the same prompts.  With the plugin, chats
are served again with each part of what a hit restores zeroed on purpose.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engines import slow_decay
from tests.engines.model_workload import zeroed_snapshots
from tests.engines.phases import report
from tests.engines.window_phases_sglang import Engine

TURNS = (300, 97, 50, 501, 203, 410, 119, 275)
"""Prompt lengths of chats; with their answers, most end between an index key's tokens.
"""
ANSWER = 10
SHARED = 450
PAGE = 256
"""SGLang's choice for this model: 64 index keys of four tokens each."""
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
ALIKE = 0.98
"""Cosine of two index keys in eight bits that stand for the same."""
Tokens = list[list[int]]


class AnyCache(Engine):
    """Of any prefix cache: only ends of requests are observed."""

    def _watch(self) -> None:
        released = self.cache.on_release
        self.kept: dict[str, Any] = {}
        """Index keys of each request at its end, `[layers, keys, D]`."""

        def on_release(req: Any, *, checkpointed: bool) -> None:
            if req.finished():
                self.kept[req.rid] = self._index_keys(req)
            released(req, checkpointed=checkpointed)
            if req.finished():
                self._ended[req.rid] = req

        self.cache.on_release = on_release

    def _index_keys(self, req: Any) -> Any:
        """All of a request that still has its row."""
        import torch

        from hybrid_plugin.sglang_cpu import index_keys

        runner = self.scheduler.tp_worker.model_runner
        pool = runner.token_to_kv_pool.full_kv_pool
        count = (len(req.origin_input_ids) + len(req.output_ids) - 1) // 4
        row = runner.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        pieces = row[None, :: pool.index_page_size] // pool.index_page_size
        places = index_keys.places_of(pool, pieces, torch.arange(count)[None])[0]
        buffers = pool.index_key_cache.buffer
        return torch.stack([index_keys.read(pool, one, places) for one in buffers])


def serve(
    engine: AnyCache, folder: Path, stock: dict[str, Tokens] | None
) -> dict[str, Any]:
    """All phases; with stock's answers, those on damaged hits too, and compare.

    Stock's index keys go to files.
    """
    import torch

    found: dict[str, Any] = {"answers": {}, "cached": {}, "wrong keys": {}, "gaps": {}}
    asked: dict[str, Tokens] = {}

    def ask(phase: str, prompts: Tokens) -> Tokens:
        answers, found["cached"][phase] = engine.ask(prompts, ANSWER)
        found["answers"][phase], asked[phase] = answers, prompts
        kept = [engine.kept[str(number)] for number in range(len(prompts))]
        like = "second" if phase.startswith("zeroed") else phase
        if stock is None:
            torch.save(kept, folder / f"{phase}.pt")
        else:
            pairs = zip(kept, torch.load(folder / f"{like}.pt"), prompts, strict=True)
            found["wrong keys"][phase] = [
                unlike(one[:, : len(prompt) // 4], other[:, : len(prompt) // 4])
                for one, other, prompt in pairs
            ]
        return answers

    first, more = _prompts(1, TURNS), _prompts(2, [20 + n for n in range(len(TURNS))])
    answers = ask("first", first)
    turns = zip(first, stock["first"] if stock else answers, more, strict=True)
    second = [prompt + answer + new for prompt, answer, new in turns]
    ask("second", second)
    (common,) = _prompts(3, [SHARED])
    for number, end in enumerate(_prompts(4, [30] * 3)):
        ask(f"shared {number}", [common + end])
    if stock is None:
        return found
    full = engine.cache.token_to_kv_pool_allocator.get_kvcache().full_kv_pool
    keys = full.index_key_cache.buffer
    rings = [*full._compress_tail_k, *full._compress_tail_score]
    for damage, cut in (
        ("zeroed states", zeroed_snapshots),
        ("zeroed index keys", _zeroed(keys)),
        ("zeroed rings", _zeroed(rings)),
    ):
        engine.cache.reset()
        ask("first", first)
        with cut():
            ask(damage, second)
    for phase, prompts in asked.items():
        expected = stock.get(phase, stock["second"])
        found["gaps"][phase] = gaps(folder, prompts, expected, found["answers"][phase])
    return found


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


def main(folder: Path, answers: str | None) -> None:
    """Print one line of JSON."""
    if answers is None:
        slow_decay.write_glm5_next(folder)
        report(serve(AnyCache(folder, (*COMMON, *STOCK)), folder, None))
        return
    given = json.loads(answers)["answers"]
    report(serve(AnyCache(folder, (*COMMON, *PLUGIN)), folder, given))


if __name__ == "__main__":
    os.environ["SGLANG_PLATFORM"] = "hybrid_cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(Path(sys.argv[1]), sys.argv[3] if sys.argv[2] == "plugin" else None)
