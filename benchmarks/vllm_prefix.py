# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of vLLM with and without the plugin, side by side in one run.

Dummy weights at the layer shapes of published models: every token costs what
it costs in the real model's layers, and no answer means anything.  Each
configuration has an engine process of its own.  They start together, then take
turns: every workload of every round goes to one after the other, in an order that
rotates, so that what slows the machine down for a while slows all of them down.

    python -m benchmarks.vllm_prefix --model qwen3-next --out benchmarks/results/x
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.prefix_sides import (
    Side,
    answer_until_closed,
    machine,
    table,
    take_turns,
    write,
)
from benchmarks.prefix_workloads import (
    VOCABULARY,
    WORKLOADS,
    Ask,
    Reply,
    Workload,
    warm_up,
)


@dataclass(frozen=True)
class Model:
    """Layer shapes of a published model, by its own class."""

    architecture: str
    config_class: str
    """Name of the class in `transformers`."""
    shapes: dict[str, Any]
    state_dtype: str


GATED_DELTA_NET = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}

MODELS = {
    # 12 attention and 36 state layers of Qwen3-Next-80B-A3B; 64 experts for 512.
    "qwen3-next": Model(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            **GATED_DELTA_NET,
            "num_experts": 64,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        state_dtype="auto",
    ),
    # 8 attention and 24 state layers of Qwen3.5-4B, whose MLP is dense.
    "qwen3.5-4b": Model(
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
            **GATED_DELTA_NET,
            "intermediate_size": 9216,
        },
        state_dtype="float32",
    ),
}

MODELS["tiny"] = Model(
    # For machines without a GPU: what matters is what the engine does around it.
    "Qwen3NextForCausalLM",
    "Qwen3NextConfig",
    {
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    state_dtype="auto",
)

# vLLM's own largest size; fewer of them, because each costs start-up time.
CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]

DEFAULT, PLUGIN = "stock, default", "plugin"
STOCK: dict[str, dict[str, Any]] = {
    "stock, cache off": {"enable_prefix_caching": False},
    DEFAULT: {},
    "stock, unit 16, sparse": {"prefix_match_unit": 16},
    "stock, unit 16, dense": {
        "prefix_match_unit": 16,
        "prefix_cache_retention_interval": None,
    },
}

SCRATCH = Path(tempfile.gettempdir()) / "hybrid-bench"
"""Always the same folder: compile caches are keyed on the model's path."""


def model_folder(name: str) -> Path:
    """Where a model's configuration lies."""
    return SCRATCH / name


def write_model(name: str) -> None:
    """Write the model's configuration."""
    import transformers

    model = MODELS[name]
    config = getattr(transformers, model.config_class)(
        architectures=[model.architecture],
        dtype="bfloat16",
        vocab_size=VOCABULARY,
        full_attention_interval=4,
        max_position_embeddings=16384,
        **model.shapes,
    )
    config.save_pretrained(model_folder(name))


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that all configurations share."""
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": args.cache_gib << 30,
        # Only how much must be free at the start: engines share the device.
        "gpu_memory_utilization": 0.05,
        "mamba_ssm_cache_dtype": MODELS[args.model].state_dtype,
        "gdn_prefill_backend": "triton",
        "compilation_config": {"cudagraph_capture_sizes": CAPTURE_SIZES},
        "disable_log_stats": True,
    }


# --------------------------------------------------------- in an engine's process


async def serve(
    arguments: dict[str, Any], workloads: Mapping[str, Workload] = WORKLOADS
) -> None:
    """Be one configuration's engine: a line of JSON in, a line with the outcome out."""
    from vllm import __version__
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    ask = asker(engine)
    await warm_up(ask)
    block_size = engine.vllm_config.cache_config.block_size
    facts = {"vllm": __version__, "block_size": block_size}
    await answer_until_closed(ask, facts, workloads)
    engine.shutdown()


def asker(engine: Any) -> Ask:
    """How to ask an `AsyncLLM`."""
    from vllm import SamplingParams

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

    return ask


# ------------------------------------------------------------ taking measurements


def start(name: str, args: argparse.Namespace, lane: int) -> Side:
    """Start one configuration's engine, the `lane`-th of those that run together."""
    command = [sys.executable, "-m", "benchmarks.vllm_prefix", "--one", name]
    command += ["--model", args.model, "--cache-gib", str(args.cache_gib)]
    variables = {
        "HYBRID_PLUGIN": "1" if name == PLUGIN else "0",
        # Engines that start together must not write to one compile cache.
        "VLLM_CACHE_ROOT": str(SCRATCH / f"cache-{lane}"),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    return Side(name, command, variables)


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every configuration, so many of them at a time as fit."""
    write_model(args.model)
    names = args.only or [*STOCK, PLUGIN]
    results: dict[str, Any] = {}
    for begin in range(0, len(names), args.at_once):
        with ExitStack() as stack:
            sides = []
            for lane, name in enumerate(names[begin : begin + args.at_once]):
                sides.append(start(name, args, lane))
                stack.callback(sides[-1].stop)
            for side in sides:
                side.wait_until_ready()
            for _ in take_turns(sides, args.rounds):
                results |= {side.name: side.result() for side in sides}
                if args.out:
                    save(args, results)
    return results


# ----------------------------------------------------------------------- results


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what there is so far."""
    model = MODELS[args.model]
    document = {
        "model": args.model,
        "architecture": model.architecture,
        "shapes": model.shapes,
        "flags": engine_arguments(args),
        "machine": machine(),
        "results": results,
    }
    write(args.out, ".json", json.dumps(document, indent=1))
    write(args.out, ".md", table(results, DEFAULT))


def main() -> int:
    """Parse the command line; be one engine, or measure all and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument(
        "--cache-gib", type=int, default=8, help="of each engine (%(default)s)"
    )
    parser.add_argument("--only", nargs="*", help="configurations to run")
    parser.add_argument(
        "--at-once", type=int, default=8, help="engines that fit the device together"
    )
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        arguments = engine_arguments(args) | STOCK.get(args.one, {})
        asyncio.run(serve(arguments | {"model": str(model_folder(args.model))}))
    else:
        print(table(run_all(args), DEFAULT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
