# SPDX-License-Identifier: Apache-2.0
"""Serves a Qwen4-Exp by SGLang with the plugin; prints what came out.

    python -m tests.engines.compressed_phases_sglang FOLDER

writes the model there.  Second turns of chats are served on what first ones left, on an
empty cache, and on hits of which one part at a time was zeroed on purpose.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.engines import slow_decay
from tests.engines.index_phases_sglang import AnyCache, Tokens, _prompts, _zeroed
from tests.engines.model_workload import zeroed_snapshots
from tests.engines.phases import report

TURNS = (300, 97, 50, 501, 203, 410, 119, 276)
"""Prompt lengths of chats; with their answers, most end between a key's tokens."""
ANSWER = 10
SHARED = 150
PAGE = 64
"""SGLang's choice for this model: 16 compressed keys of four tokens each."""
OPTIONS = {"gpu_memory_budget": 32 << 20, "host_memory": "32MiB"}
FLAGS = (
    "--enable-hybrid-plugin",
    f"--hybrid-config={json.dumps(OPTIONS)}",
    "--dtype=float32",
    "--skip-tokenizer-init",
    "--context-length=1024",
    "--chunked-prefill-size=256",
    "--max-running-requests=8",
)


class CompressedKeys(AnyCache):
    """An engine that tells the compressed keys of each request at its end."""

    @property
    def pool(self) -> Any:
        """SGLang's pool of attention layers."""
        return self.scheduler.tp_worker.model_runner.token_to_kv_pool

    @property
    def rows(self) -> Any:
        """That of slots."""
        return self.scheduler.tp_worker.model_runner.req_to_token_pool

    def _index_keys(self, req: Any, pool: Any) -> Any:
        import torch

        rows = self.rows
        size = pool.qsa_compress_ratio
        length = len(req.origin_input_ids) + len(req.output_ids) - 1
        row = rows.req_to_token[req.kv.req_pool_idx, : length // size * size]
        places = row[::size].long() // size
        return torch.stack([keys[places] for keys in pool.qsa_compressed_k_buffer_pool])


def serve(engine: CompressedKeys, folder: Path) -> dict[str, Any]:
    """All phases."""
    found: dict[str, Any] = {"answers": {}, "cached": {}, "wrong keys": {}, "gaps": {}}
    kept: dict[str, list[Any]] = {}
    asked: dict[str, Tokens] = {}

    def ask(phase: str, prompts: Tokens) -> Tokens:
        answers, found["cached"][phase] = engine.ask(prompts, ANSWER)
        found["answers"][phase], asked[phase] = answers, prompts
        kept[phase] = [engine.kept[str(number)] for number in range(len(prompts))]
        return answers

    first, more = _prompts(1, TURNS), _prompts(2, [20 + n for n in range(len(TURNS))])
    turns = zip(first, ask("first", first), more, strict=True)
    second = [prompt + answer + new for prompt, answer, new in turns]
    ask("second", second)
    (common,) = _prompts(3, [SHARED])
    for number, end in enumerate(_prompts(4, [30] * 3)):
        ask(f"shared {number}", [common + end])
    engine.cache.reset()
    ask("empty", second)
    pool, rows = engine.pool, engine.rows
    side = (rows.short_conv_pool.conv_state, rows.ngram_pool.context)
    rings = (*pool.qsa_key_state_buffer_pool, pool.qsa_rope_position_buffer)
    damages: dict[str, Callable[[], Any]] = {
        "zeroed snapshots": zeroed_snapshots,
        "zeroed keys": _zeroed(pool.qsa_compressed_k_buffer_pool),
        "zeroed rings": _zeroed(rings),
        "zeroed n-grams": _zeroed(side),
    }
    for damage, cut in damages.items():
        engine.cache.reset()
        ask("first", first)
        with cut():
            ask(damage, second)
    for phase in ("second", *damages):
        pairs = zip(kept[phase], kept["empty"], second, strict=True)
        found["wrong keys"][phase] = [
            _unlike(one, other, len(prompt) // 4) for one, other, prompt in pairs
        ]
    for phase in ("first", "second", "shared 1", "shared 2", "empty", *damages):
        found["gaps"][phase] = _gaps(folder, asked[phase], found["answers"][phase])
    return found


def _unlike(keys: Any, others: Any, count: int) -> list[int]:
    """Numbers of a prompt's keys that differ in some layer by more than rounding."""
    differ = (keys[:, :count].float() - others[:, :count].float()).abs()
    close = differ <= 2**-6 * others[:, :count].float().abs() + 2**-8
    return [int(n) for n in (~close.flatten(2).all(2).all(0)).nonzero()]


def _gaps(folder: Path, prompts: Tokens, answers: Sequence[Sequence[int]]) -> Any:
    """For each answer, how much likelier another token was at most, in nats."""
    import torch
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32
    )
    model.eval()
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append(float((logits.max(1).values - chosen).max()))
    return found


if __name__ == "__main__":
    os.environ["SGLANG_PLATFORM"] = "hybrid_cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    MODEL = slow_decay.write_qwen4_exp(Path(sys.argv[1]))
    report(serve(CompressedKeys(MODEL, FLAGS), MODEL))
