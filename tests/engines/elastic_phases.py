# SPDX-License-Identifier: Apache-2.0
"""Serves phases that want states, KV and states again; prints what memory did.

    python -m tests.engines.elastic_phases MODEL OPTIONS RANKS PHASES

The engine runs in this process, so that the pools' memory can be looked at
after each step; with two ranks it runs in processes of its own.
"""

from __future__ import annotations

import json
import os
import random
import sys
from itertools import islice
from typing import Any

import torch

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.device.executor import Executor
from tests.core.resident import resident
from tests.engines.phases import report

MAX_MODEL_LEN = 1024
ANSWER = 16


class Watch:
    """Looks at the memory of both pools whenever commands were run."""

    def __init__(self) -> None:
        self.executor: Executor | None = None
        self.most_mapped = self.most_resident = 0
        self.budget = 0
        run = Executor.run

        def watched(executor: Executor, commands: Any) -> None:
            run(executor, commands)
            self.executor = executor
            self.look()

        Executor.run = watched  # type: ignore[method-assign]

    def look(self) -> dict[str, int]:
        """Bytes mapped, and bytes resident in each pool's addresses."""
        if self.executor is None:
            return {}
        arenas = self.executor._arenas
        memory = getattr(arenas[Pool.KV], "_memory", None)
        if memory is None:
            return {}
        self.budget = memory.usable
        found = {
            f"resident_{pool}": resident(arenas[pool]._place)  # type: ignore[attr-defined]
            for pool in (Pool.KV, Pool.STATE)
        }
        self.most_mapped = max(self.most_mapped, memory.mapped)
        self.most_resident = max(self.most_resident, sum(found.values()))
        return found | {"mapped": memory.mapped}


def phases() -> dict[str, list[list[int]]]:
    """Prompts: many short ones, a few long ones, and again."""
    rng = random.Random(7)

    def prompt(least: int, most: int) -> list[int]:
        return [rng.randrange(3, 250) for _ in range(rng.randint(least, most))]

    longest = MAX_MODEL_LEN - ANSWER - 1
    return {
        "states": [prompt(5, 40) for _ in range(60)],
        "kv": [prompt(longest - 100, longest) for _ in range(5)],
        "states again": [prompt(5, 40) for _ in range(60)],
        "kv again": [prompt(longest - 100, longest) for _ in range(5)],
    }


def main(model: str, options: dict[str, Any], ranks: int, count: int) -> None:
    """Serve the first so many phases and print one line of JSON."""
    from vllm import LLM, SamplingParams

    watch = Watch()
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=64 << 20,
        **({"gpu_memory_utilization": 0.05} if torch.cuda.is_available() else {}),
        tensor_parallel_size=ranks,
        disable_log_stats=True,
        enable_prefix_caching=options.get("enabled", True),
        additional_config={"hybrid_plugin": options},
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False
    )
    found: dict[str, Any] = {"phases": []}
    for name, prompts in islice(phases().items(), count):
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling,
            use_tqdm=False,
        )
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        found["phases"].append({"name": name, "tokens": tokens} | watch.look())
    if ranks == 1:
        core: Any = llm.llm_engine.engine_core
        cache = getattr(core.engine_core.scheduler.kv_cache_manager, "cache", None)
        if cache is not None and cache.broker.moves_memory:
            found["stats"] = cache.broker.stats.as_dict()
    found["most_mapped"] = watch.most_mapped
    found["most_resident"] = watch.most_resident
    found["budget"] = watch.budget
    report(found)


if __name__ == "__main__":
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(int(sys.argv[3]) > 1))
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
