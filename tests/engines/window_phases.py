# SPDX-License-Identifier: Apache-2.0
"""Serves models with windows by stock vLLM and by the plugin; prints what came out.

    python -m tests.engines.window_phases FOLDER KIND ...

writes a model of each kind into the folder and serves it by one engine after the other
in this process, so that the pools can be observed after each step, and vLLM is
imported once.  The first kind is served once more with a cache that is broken on
purpose, which the comparison must notice.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engines import slow_decay
from tests.engines.findings import report

MAX_MODEL_LEN = 1024
STEP = 128
"""Tokens of a step: prefill chunks end within windows and at their borders."""
PAGE = 32
LONG = 400
LONG_ANSWER = 3 * slow_decay.WINDOW
ANSWER = 12
CROWD = 8
CROWD_ANSWER = 80
SHARED = 420
TURNS = (LONG, 300, 50, 130, 257, 64)
"""Prompt lengths of chats; a chat's end lies in the middle of a page."""
BUDGETS = {"gemma3": "3MiB", "llama4": "3MiB", "nemotron_h_window": "6MiB"}
"""Enough for the chats, too little for the crowd."""
Tokens = list[list[int]]
Found = dict[str, Any]


def options(kind: str) -> dict[str, Any]:
    """Of the plugin, by kind of model."""
    return {"enabled": True, "page_size": PAGE, "gpu_memory_budget": BUDGETS[kind]}


def workload() -> dict[str, Tokens]:
    """Prompts by phase, and what users say in the second turn of the chats."""
    rng = random.Random(1)

    def some(count: int) -> list[int]:
        return [rng.randrange(3, 250) for _ in range(count)]

    shared = some(SHARED)
    first = [some(length) for length in TURNS]
    return {
        "first": first,
        "more": [some(20) for _ in range(CROWD)],
        "shared": [shared + some(30) for _ in range(3)],
        "crowd": [some(rng.randrange(150, 400)) for _ in range(CROWD)],
    }


@contextmanager
def dropped_window_copies() -> Iterator[None]:
    """A cache that forgets to copy the page in which a window ends."""
    from hybrid_plugin.core.cache import HybridCache
    from hybrid_plugin.core.commands import Command, Copy

    drain = HybridCache.drain_commands

    def forgetful(cache: HybridCache) -> list[Command]:
        return [
            command
            for command in drain(cache)
            if not (isinstance(command, Copy) and command.pool.startswith("window"))
        ]

    HybridCache.drain_commands = forgetful  # type: ignore[method-assign]
    try:
        yield
    finally:
        HybridCache.drain_commands = drain  # type: ignore[method-assign]


def serve(
    model: Path,
    options: dict[str, Any],
    answers: dict[str, Tokens] | None = None,
    *,
    only_chats: bool = False,
) -> Found:
    """Serve all phases, or those of the chats.

    Args:
        model: a checkpoint.
        options: of the plugin.
        answers: that second turns contain, by phase; by default the engine's own.
        only_chats: whether to end after their second turns.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=STEP,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
        enable_prefix_caching=options["enabled"],
        # The plugin is told by its own option.
        block_size=None if options["enabled"] else PAGE,
        additional_config={"hybrid_plugin": options},
    )
    found = _serve_phases(llm, answers, only_chats)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def _serve_phases(
    llm: Any, answers: dict[str, Tokens] | None, only_chats: bool
) -> Found:
    found: Found = {"tokens": {}, "cached": {}, "levels": {}}
    levels = _watch(llm)

    def ask(phase: str, prompts: Tokens, length: int = ANSWER) -> None:
        found["tokens"][phase], found["cached"][phase] = _ask(llm, prompts, length)
        found["levels"][phase] = levels[:]
        levels.clear()

    def second_turns(phase: str) -> Tokens:
        said = (answers or found["tokens"])[phase]
        turns = zip(prompts[phase], said, prompts["more"], strict=False)
        return [prompt + answer + more for prompt, answer, more in turns]

    prompts = workload()
    ask("alone", prompts["first"][:1], LONG_ANSWER)
    ask("first", prompts["first"])
    ask("second", second_turns("first"))
    if only_chats:
        return found
    for index, prompt in enumerate(prompts["shared"]):
        ask(f"shared {index}", [prompt])
    ask("crowd", prompts["crowd"], CROWD_ANSWER)
    ask("crowd again", second_turns("crowd")[::-1])  # the last ones are still there
    cache = _cache(llm)
    if cache is not None:
        found["stats"] = cache.stats.as_dict() | {"moves": cache.broker.stats.moves}
    return found


def _ask(llm: Any, prompts: Tokens, length: int) -> tuple[Tokens, list[int]]:
    """Answers, and the tokens that were restored for each."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=length, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, [output.num_cached_tokens or 0 for output in outputs]


def _cache(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return getattr(core.scheduler.kv_cache_manager, "cache", None)


def _watch(llm: Any) -> list[dict[str, int]]:
    """After each step, the ids in use of each pool."""
    levels: list[dict[str, int]] = []
    cache = _cache(llm)
    if cache is None:
        return levels
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    scheduled = manager.step_scheduled

    def watched(requests: Any) -> None:
        scheduled(requests)
        levels.append({str(pool): one.used for pool, one in cache.levels().items()})

    manager.step_scheduled = watched
    return levels


def main(folder: Path, kinds: list[str]) -> None:
    """Print one line of JSON."""
    found: dict[str, Found] = {}
    for kind in kinds:
        model = getattr(slow_decay, f"write_{kind}")(folder / kind)
        stock = serve(model, {"enabled": False})
        answers = stock["tokens"]
        plugin = serve(model, options(kind), answers)
        found[kind] = {"stock": stock, "plugin": plugin}
        if kind == kinds[0]:
            with dropped_window_copies():
                found[kind]["broken"] = serve(
                    model, options(kind), answers, only_chats=True
                )
    report(found)


if __name__ == "__main__":
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    main(Path(sys.argv[1]), sys.argv[2:])
