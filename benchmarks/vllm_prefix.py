# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of vLLM with and without the plugin, side by side in one run.

Dummy weights at the layer shapes of published models: every token costs what
it costs in the real model's layers, and no answer means anything.  Each
configuration runs the same requests in an engine process of its own:

    python benchmarks/vllm_prefix.py --model qwen3-next --out benchmarks/results/x
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# `kernels.py` beside this script must not pass for the package transformers imports.
sys.path = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]

VOCABULARY = 32768

MODELS: dict[str, dict[str, Any]] = {
    # 12 + 36 layers of Qwen3-Next-80B-A3B; 64 experts in place of 512.
    "qwen3-next": {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    # 8 + 24 layers of Qwen3.5-4B; its dense MLP as two experts, both used.
    "qwen3.5-4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4608,
        "shared_expert_intermediate_size": 64,
    },
}
STATE_DTYPE = {"qwen3-next": "auto", "qwen3.5-4b": "float32"}

# vLLM's own largest size; fewer of them, because each costs start-up time.
CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]

STOCK: dict[str, dict[str, Any]] = {
    "stock, cache off": {"enable_prefix_caching": False},
    "stock, default": {},
    "stock, unit 16, sparse": {"prefix_match_unit": 16},
    "stock, unit 16, dense": {
        "prefix_match_unit": 16,
        "prefix_cache_retention_interval": None,
    },
}
PLUGIN = "plugin"


@dataclass(frozen=True)
class Outcome:
    """One workload under one configuration."""

    prompt_tokens: int
    cached_tokens: int
    ttft_ms_p50: float
    ttft_ms_p95: float
    wall_s: float
    failed: int


@dataclass(frozen=True)
class Reply:
    """One answer."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


Ask = Callable[[Sequence[int], int], Coroutine[Any, Any, Reply]]
Workload = Callable[[Ask, random.Random], Coroutine[Any, Any, list[Reply]]]


def text(rng: random.Random, count: int) -> list[int]:
    """Random tokens: nothing is shared by accident."""
    return [rng.randrange(10, VOCABULARY) for _ in range(count)]


async def at_most(count: int, tasks: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run so many at a time, in order."""
    gate = asyncio.Semaphore(count)

    async def one(task: Coroutine[Any, Any, Any]) -> Any:
        async with gate:
            return await task

    return await asyncio.gather(*(one(task) for task in tasks))


def shared_system(tokens: int) -> Workload:
    """40 prompts behind one system prompt, four clients."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        system = text(rng, tokens)
        prompts = [system + text(rng, rng.randint(40, 200)) for _ in range(40)]
        return await at_most(4, [ask(prompt, 32) for prompt in prompts])

    return run


async def chats(ask: Ask, rng: random.Random) -> list[Reply]:
    """Ten chats of six turns, all at once; every turn contains the last answer."""

    async def chat(seed: int) -> list[Reply]:
        own = random.Random(seed)
        history, replies = text(own, 150), []
        for _ in range(6):
            history += text(own, own.randint(60, 300))
            reply = await ask(history, 120)
            history = history + list(reply.tokens)
            replies.append(reply)
        return replies

    seeds = [rng.randrange(1 << 30) for _ in range(10)]
    return [
        r for replies in await at_most(10, [chat(s) for s in seeds]) for r in replies
    ]


async def branches(ask: Ask, rng: random.Random) -> list[Reply]:
    """A trunk, four limbs, six leaves each, shuffled; four clients."""
    trunk = text(rng, 1000)
    limbs = [trunk + text(rng, 700) for _ in range(4)]
    prompts = [
        limb + text(rng, rng.randint(50, 300)) for limb in limbs for _ in range(6)
    ]
    rng.shuffle(prompts)
    return await at_most(4, [ask(prompt, 32) for prompt in prompts])


async def crowd(ask: Ask, rng: random.Random) -> list[Reply]:
    """256 requests at once over 8 prefixes, far more than the cache holds."""
    prefixes = [text(rng, 2000) for _ in range(8)]
    prompts = [rng.choice(prefixes) + text(rng, 400) for _ in range(256)]
    return await asyncio.gather(*(ask(prompt, 64) for prompt in prompts))


WORKLOADS: dict[str, Workload] = {
    "system prompt of 200": shared_system(200),
    "system prompt of 2000": shared_system(2000),
    "chats": chats,
    "branches": branches,
    "crowd": crowd,
}


def write_model(name: str) -> str:
    """Write the model's configuration; always to the same folder, for caches."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"],
        dtype="bfloat16",
        vocab_size=VOCABULARY,
        intermediate_size=1024,
        full_attention_interval=4,
        max_position_embeddings=16384,
        **MODELS[name],
    )
    folder = Path(tempfile.gettempdir()) / f"hybrid-bench-{name}"
    config.save_pretrained(folder)
    return str(folder)


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that all configurations share."""
    return {
        "model": write_model(args.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": args.cache_gib << 30,
        "mamba_ssm_cache_dtype": STATE_DTYPE[args.model],
        "gdn_prefill_backend": "triton",
        "compilation_config": {"cudagraph_capture_sizes": CAPTURE_SIZES},
        "disable_log_stats": True,
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every workload under one configuration, in this process."""
    from vllm import SamplingParams, __version__
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(args) | STOCK.get(args.one, {})
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    numbers = iter(range(1 << 30))

    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        begin, first = time.monotonic(), 0.0
        request = {"prompt_token_ids": list(prompt)}
        output: Any = None
        async for step in engine.generate(request, sampling, str(next(numbers))):
            first, output = first or time.monotonic() - begin, step
        return Reply(
            tokens=tuple(output.outputs[0].token_ids),
            prompt_tokens=len(prompt),
            cached_tokens=output.num_cached_tokens or 0,
            ttft_s=first,
        )

    await warm_up(ask)
    outcomes = {}
    for name, workload in WORKLOADS.items():
        outcomes[name] = [
            asdict(await one_round(workload, ask, seed)) for seed in range(args.rounds)
        ]
        print(args.one, name, outcomes[name][-1], file=sys.stderr, flush=True)
    cache = engine.vllm_config.cache_config
    result = {
        "vllm": __version__,
        "block_size": cache.block_size,
        "workloads": outcomes,
    }
    engine.shutdown()
    return result


async def warm_up(ask: Ask) -> None:
    """Compile what the first request of a kind compiles."""
    rng = random.Random(-1)
    for length in (8, 100, 1000, 5000):
        await asyncio.gather(*(ask(text(rng, length), 8) for _ in range(8)))
    prompt = text(rng, 3000)
    for _ in range(3):
        await ask(prompt, 8)


async def one_round(workload: Workload, ask: Ask, seed: int) -> Outcome:
    """Run a workload once; other seeds share no prefix with it."""
    begin = time.monotonic()
    replies = await workload(ask, random.Random(seed))
    wall = time.monotonic() - begin
    ttft = sorted(1000 * r.ttft_s for r in replies)
    return Outcome(
        prompt_tokens=sum(r.prompt_tokens for r in replies),
        cached_tokens=sum(r.cached_tokens for r in replies),
        ttft_ms_p50=round(statistics.median(ttft), 2),
        ttft_ms_p95=round(ttft[int(0.95 * (len(ttft) - 1))], 2),
        wall_s=round(wall, 3),
        failed=sum(not r.tokens for r in replies),
    )


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Run each configuration in a process of its own."""
    results: dict[str, Any] = {}
    for name in args.only or [*STOCK, PLUGIN]:
        command = [sys.executable, __file__, "--one", name, "--model", args.model]
        command += ["--rounds", str(args.rounds), "--cache-gib", str(args.cache_gib)]
        variables = {"HYBRID_PLUGIN": "1" if name == PLUGIN else "0"}
        environment = {**os.environ, **variables}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True
        )
        lines = [
            line for line in done.stdout.splitlines() if line.startswith("RESULT ")
        ]
        results[name] = json.loads(lines[-1][7:]) if lines else {"failed": True}
        if args.out:
            save(args, results)
    return results


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what there is so far."""
    flags = {k: v for k, v in engine_arguments(args).items() if k != "model"}
    document = {
        "model": args.model,
        "shapes": MODELS[args.model],
        "flags": flags,
        "machine": machine(),
        "results": results,
    }
    args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(results) + "\n")


def median_of(result: dict[str, Any], workload: str, field: str) -> float:
    """Median of one field over the rounds of a workload."""
    return statistics.median(r[field] for r in result["workloads"][workload])


def row(workload: str, name: str, results: dict[str, Any]) -> str:
    """One Markdown row."""
    result, base = results[name], results.get("stock, default", {})
    if "workloads" not in result:
        return f"| {workload} | {name} | did not run | | | | |"
    fields = Outcome.__dataclass_fields__
    value = {field: median_of(result, workload, field) for field in fields}
    ratio = ""
    if "workloads" in base:
        ratio = f"{value['wall_s'] / median_of(base, workload, 'wall_s'):.2f}x"
    share = 100 * value["cached_tokens"] / value["prompt_tokens"]
    return (
        f"| {workload} | {name} | {share:.1f} % | {value['ttft_ms_p50']:.1f} | "
        f"{value['ttft_ms_p95']:.1f} | {value['wall_s']:.2f} | {ratio} |"
    )


def table(results: dict[str, Any]) -> str:
    """One Markdown row per workload and configuration."""
    lines = [
        "| workload | configuration | cached | TTFT p50 ms | TTFT p95 ms | wall s | "
        "wall / stock, default |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [row(w, name, results) for w in WORKLOADS for name in results]
    return "\n".join(lines)


def machine() -> dict[str, str]:
    """What this ran on."""
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return {"device": name, "torch": torch.__version__}


def main() -> int:
    """Parse the command line; run one configuration, or all and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-gib", type=int, default=8)
    parser.add_argument("--only", nargs="*", help="configurations to run")
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("RESULT " + json.dumps(asyncio.run(measure(args))), flush=True)
        return 0
    print(table(run_all(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
