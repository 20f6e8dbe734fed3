# SPDX-License-Identifier: Apache-2.0
"""Moves memory at random under a vLLM that serves, for use under compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \\
        python -m tests.gpu.soak_elastic --moves 100000

(cuda-bindings asks for functions that a driver may not have: API errors are left
out.)

Before each step random pools ask, a few times, for a random part of what they could
have, so granules leave pages and slots all the time while requests prefill, decode and
are restored.  Ends with one line of JSON; fails if a request does, if nothing was
restored, or if a pool went over the budget.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.elastic import ElasticBroker

MODEL = Path(__file__).parents[1] / "assets" / "tiny-qwen3-next"
MAX_MODEL_LEN = 1024
ANSWER = 24
GROUP = 8
"""Requests at once: those of the next group begin like these."""


class Shaker:
    """Has the pools of a scheduler take memory from each other before each step."""

    def __init__(self, scheduler: Any, seed: int, times: int) -> None:
        self.elastic: ElasticBroker = scheduler.kv_cache_manager.cache.broker
        self._rng, self._times = random.Random(seed), times
        self._schedule = scheduler.schedule
        scheduler.schedule = self.schedule

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Ask for ids of random pools, then schedule."""
        for _ in range(self._times):
            pool = self._rng.choice([Pool.KV, Pool.STATE])
            most = self.elastic.max_free(pool)
            if most > 0:
                self.elastic.provide({pool: self._rng.randint(1, most)})
            mapped = sum(self.elastic.mapped_bytes().values())
            assert mapped <= self.elastic.budget, (mapped, self.elastic.budget)
        return self._schedule(*args, **kwargs)


def make_stems(rng: random.Random) -> list[list[int]]:
    """What all prompts begin with."""
    return [[rng.randrange(3, 250) for _ in range(700)] for _ in range(6)]


def traffic(
    rng: random.Random, stems: list[list[int]], count: int
) -> list[dict[str, Any]]:
    """Prompts of all lengths, many of which begin alike."""
    prompts = []
    for _ in range(count):
        stem = rng.choice(stems)[: rng.randint(1, 700)]
        own = [rng.randrange(3, 250) for _ in range(rng.randint(1, 200))]
        prompts.append({"prompt_token_ids": stem + own})
    return prompts


def main() -> None:
    """Serve until there were enough moves, or the time is up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--moves", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument(
        "--budget-mib", type=int, default=4094, help="more is more moves a step"
    )
    parser.add_argument(
        "--times", type=int, default=4, help="that a pool asks before a step"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    options = {"elastic": True, "gpu_memory_budget": args.budget_mib << 20}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    llm = LLM(
        model=str(MODEL),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=args.budget_mib << 20,
        gpu_memory_utilization=0.2,
        enforce_eager=args.eager,
        compilation_config={} if args.eager else graphs,
        cudagraph_capture_sizes=None if args.eager else [1, 2, 4, 8, 16, 32],
        additional_config={"hybrid_plugin": options | {"enabled": True}},
        **({"gdn_prefill_backend": "triton"} if torch.cuda.is_available() else {}),
    )
    core: Any = llm.llm_engine.engine_core
    shaker = Shaker(core.engine_core.scheduler, args.seed, args.times)
    stats, rng = shaker.elastic.stats, random.Random(args.seed)
    sampling = SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False
    )
    stems, begin, requests, restored = make_stems(rng), time.monotonic(), 0, 0
    while stats.moves < args.moves and time.monotonic() - begin < args.seconds:
        for answer in llm.generate(
            traffic(rng, stems, GROUP), sampling, use_tqdm=False
        ):
            assert len(answer.outputs[0].token_ids) == ANSWER, answer
            requests += 1
            restored += answer.num_cached_tokens or 0
        print(f"{requests} requests, {stats.moves} moves", file=sys.stderr, flush=True)
    assert restored > 0
    found = {
        "moves": stats.moves,
        "moved MiB": stats.moved_bytes >> 20,
        "requests": requests,
        "restored tokens": restored,
        "seconds": round(time.monotonic() - begin, 1),
    }
    print("SOAK " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
