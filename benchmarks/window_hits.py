# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own prefix cache and the plugin restore where there are windows.

Models that mix full attention with sliding windows and have no state layers are cached
by vLLM itself.  This replays workloads through both caches' bookkeeping, one request
at a time, with equal bytes: no model, no device and no time, only hits.

    python -m benchmarks.window_hits > benchmarks/results/window-hits.md

Memory is given in tokens of KV of one of the groups of layers that vLLM makes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm import __version__
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.engine.sizing import EngineLimits, divide
from hybrid_plugin.vllm import planning
from hybrid_plugin.vllm.manager import HybridKVCacheManager

PAGE = 16
STEP = 2048
MAX_MODEL_LEN = 32768
VOCABULARY = 1 << 20
Job = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Model:
    """Layers of a published model, and a KV head that stands for all of them."""

    full: int
    sliding: int
    window: int
    block: int
    """Layers of one of vLLM's blocks: it pads every group of layers to that."""

    def specs(self) -> dict[str, KVCacheSpec]:
        """By layer."""
        shape: Any = {
            "block_size": PAGE,
            "num_kv_heads": 1,
            "head_size": 16,
            "dtype": torch.float16,
        }
        near = SlidingWindowSpec(**shape, sliding_window=self.window)
        full = FullAttentionSpec(**shape)
        specs: dict[str, KVCacheSpec] = {f"f{i}": full for i in range(self.full)}
        return specs | {f"w{i}": near for i in range(self.sliding)}


MODELS = {
    "Gemma-3-27B": Model(full=10, sliding=52, window=1024, block=10),
    "gpt-oss-120b": Model(full=18, sliding=18, window=128, block=18),
}
BUDGETS = (80_000, 200_000, 800_000)
"""Memory, in tokens of KV of a group of layers as vLLM makes them."""


def stock(model: Model, tokens: int) -> KVCacheManager:
    """vLLM's own cache."""
    names: dict[KVCacheSpec, list[str]] = {}
    for layer, spec in model.specs().items():
        names.setdefault(spec, []).append(layer)
    groups = [
        KVCacheGroupSpec(layers[start : start + model.block], spec)
        for spec, layers in names.items()
        for start in range(0, len(layers), model.block)
    ]
    config = KVCacheConfig(
        num_blocks=tokens // PAGE, kv_cache_tensors=[], kv_cache_groups=groups
    )
    return KVCacheManager(
        config,
        MAX_MODEL_LEN,
        PAGE,
        PAGE,
        max_in_flight_tokens=STEP,
        enable_caching=True,
    )


def plugin(model: Model, tokens: int) -> HybridKVCacheManager:
    """The plugin's, with elastic pools."""
    groups = planning.make_groups(model.specs())
    layout = planning.make_layout(groups)
    budget = tokens // PAGE * (layout.page_bytes // model.full * model.block)
    limits = EngineLimits(
        max_model_len=MAX_MODEL_LEN, max_sequences=8, block_bytes=4096, chunk=STEP
    )
    log = logging.getLogger(__name__)
    found = divide(layout, budget, HybridConfig(), limits, log)
    assert found.shared is not None
    cache = SimpleNamespace(prefix_cache_retention_interval=None)
    engine: Any = SimpleNamespace(cache_config=cache)
    config = planning.make_config(engine, groups, found.sizes, found.shared)
    return HybridKVCacheManager(config, HybridConfig(), watermark=0.0, log_stats=False)


def serve(manager: Any, name: str, prompt: Sequence[int], answer: list[int]) -> int:
    """Compute a request; returns the tokens that were restored."""
    ours = isinstance(manager, HybridKVCacheManager)
    hasher = None if ours else get_request_block_hasher(PAGE, sha256)
    sampling = SamplingParams(max_tokens=len(answer))
    request = Request(name, list(prompt), sampling, None, block_hasher=hasher)
    blocks, hit = manager.get_computed_blocks(request)[:2]
    end, new = hit, (hit, blocks)
    for token in [*answer, None]:
        while end < request.num_tokens:
            start, end = end, min(end + STEP, request.num_tokens)
            if ours:
                end = manager.chunk_end(request, start, end)
            assert manager.allocate_slots(request, end - start, *new) is not None
            new = (0, None)
            request.num_computed_tokens = end
            if ours:
                manager.cross([request])
                manager.step_scheduled([request])
                manager.drain_commands()
            else:
                manager.new_step_starts()
        if token is not None:
            request.append_output_token_ids(token)
    manager.free(request)
    return hit


def _some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def chats(rng: random.Random) -> Iterator[Job]:
    """30 chats with one system prompt of 1,500 tokens, 6 turns each, in turns."""
    system = _some(rng, 1500)
    texts = [list(system) for _ in range(30)]
    for _ in range(6):
        for text in texts:
            text += _some(rng, rng.randrange(100, 900))
            answer = _some(rng, 60)
            yield list(text), answer
            text += answer


def beginnings(count: int, length: int, each: int) -> Callable[..., Iterator[Job]]:
    """Prompts with one of `count` beginnings, each used `each` times, shuffled."""

    def jobs(rng: random.Random) -> Iterator[Job]:
        texts = [_some(rng, length) for _ in range(count)]
        order = [text for text in texts for _ in range(each)]
        rng.shuffle(order)
        for text in order:
            yield text + _some(rng, 120), _some(rng, 30)

    return jobs


WORKLOADS: dict[str, Callable[[random.Random], Iterator[Job]]] = {
    "30 chats": chats,
    "20 system prompts of 3,000": beginnings(20, 3000, 10),
    "12 documents of 12,000": beginnings(12, 12000, 4),
}


def restored(manager: Any, jobs: Iterator[Job]) -> float:
    """Share of the prompts' tokens that came from the cache."""
    asked = found = 0
    for index, (prompt, answer) in enumerate(jobs):
        asked += len(prompt)
        found += serve(manager, str(index), prompt, answer)
    return found / asked


def main() -> None:
    """Print a table."""
    init_none_hash(sha256)
    print(f"vLLM {__version__}; prompt tokens restored.\n")
    print("| model | workload | memory | vLLM | plugin |\n|---|---|---|---|---|")
    for name, model in MODELS.items():
        for title, work in WORKLOADS.items():
            for tokens in BUDGETS:
                shares = [
                    restored(make(model, tokens), work(random.Random(0)))
                    for make in (stock, plugin)
                ]
                cells = " | ".join(f"{share:.1%}" for share in shares)
                print(f"| {name} | {title} | {tokens:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
