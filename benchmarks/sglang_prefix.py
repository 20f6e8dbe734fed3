# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of SGLang with and without the plugin, side by side in one run.

Dummy weights at the layer shapes of published models: every token costs what it
costs in the real model's layers, and no answer means anything.  All engines get
equal bytes of cache memory; each divides them in its own way.

    python -m benchmarks.sglang_prefix --model qwen3-next --out benchmarks/results/x
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
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
from benchmarks.prefix_workloads import VOCABULARY, WORKLOADS, Ask, Reply, warm_up

NEMOTRON_H_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp"}

MODELS: dict[str, dict[str, Any]] = {
    # 12 attention and 36 state layers of Qwen3-Next-80B-A3B; 32 experts for 512.
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 1024,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    # 4 attention, 24 Mamba-2 and 24 MLP layers of Nemotron-H-8B.
    "nemotron-h-8b": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "num_hidden_layers": len(NEMOTRON_H_PATTERN),
        "hybrid_override_pattern": NEMOTRON_H_PATTERN,
        "layers_block_type": [_KINDS[kind] for kind in NEMOTRON_H_PATTERN],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_n_groups": 8,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "chunk_size": 128,
        "expand": 2,
    },
}

DEFAULT, PLUGIN = "stock, default", "plugin"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "stock, cache off": {"disable_radix_cache": True},
    DEFAULT: {},
    "stock, every 64": {
        "mamba_radix_cache_strategy": "extra_buffer",
        "mamba_track_interval": 64,
        "page_size": 16,
    },
    "stock, lazy": {
        "mamba_radix_cache_strategy": "extra_buffer_lazy",
        "mamba_track_interval": 64,
        "page_size": 16,
    },
    "stock, unified memory": {
        "enable_unified_memory": True,
        "mamba_track_interval": 64,
        "page_size": 16,
    },
    PLUGIN: {},
}
"""SGLang's Mamba-2 kernels need an interval of at least one chunk."""

SCRATCH = Path(tempfile.gettempdir()) / "hybrid-bench-sglang"


def write_model(name: str) -> Path:
    """Write the model's configuration; returns its folder."""
    folder = SCRATCH / name
    folder.mkdir(parents=True, exist_ok=True)
    common = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16384,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(common | MODELS[name], indent=1))
    return folder


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that all configurations share."""
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "random_seed": 0,
        "context_length": 8192,
        "max_running_requests": 64,
        "chunked_prefill_size": 8192,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.9,
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 48, 64],
        "log_level": "warning",
    }


def memory(args: argparse.Namespace) -> dict[str, int]:
    """Tokens and slots of the configuration, out of the bytes that all get."""
    size = _sizes(MODELS[args.model])
    budget = args.cache_gib << 30
    if args.one == PLUGIN:
        from hybrid_plugin.core.layout import AttentionGroup, CacheLayout, StateGroup

        layout = CacheLayout(
            page_size=16,
            attention=(AttentionGroup(("all",), 16 * size["token"]),),
            states=(StateGroup(("all",), size["slot"]),),
        )
        pools = layout.split(budget, max_model_len=8192)
        tokens, slots = (pools.pages - 1) * 16, pools.slots - 1
    else:
        # SGLang's own ratio of states to KV, --mamba-full-memory-ratio.
        slots = int(budget * 0.9 / 1.9) // size["slot"]
        tokens = (budget - slots * size["slot"]) // size["token"]
    return {"max_total_tokens": tokens, "max_mamba_cache_size": slots}


def _sizes(model: dict[str, Any]) -> dict[str, int]:
    """Bytes of a token's KV and of a state slot, over all layers."""
    heads = model["num_key_value_heads"] * model["head_dim"]
    if "layers_block_type" in model:
        kinds = model["layers_block_type"]
        attention, states = kinds.count("attention"), kinds.count("mamba")
        inner = model["mamba_num_heads"] * model["mamba_head_dim"]
        state = inner * model["ssm_state_size"]
        channels = inner + 2 * model["n_groups"] * model["ssm_state_size"]
    else:
        attention = model["num_hidden_layers"] // model["full_attention_interval"]
        states = model["num_hidden_layers"] - attention
        keys = model["linear_num_key_heads"] * model["linear_key_head_dim"]
        values = model["linear_num_value_heads"] * model["linear_value_head_dim"]
        state = values * model["linear_key_head_dim"]
        channels = 2 * keys + values
    # KV and convolution in bfloat16, states in float32: SGLang's defaults.
    return {
        "token": 2 * attention * heads * 2,
        "slot": states * (4 * state + 2 * 3 * channels),
    }


# --------------------------------------------------------- in an engine's process


def serve(args: argparse.Namespace) -> None:
    """Be one configuration's engine."""
    import sglang

    arguments = engine_arguments(args) | memory(args) | CONFIGURATIONS[args.one]
    engine = sglang.Engine(model_path=str(SCRATCH / args.model), **arguments)
    facts = {"sglang": sglang.__version__, **memory(args)}

    async def answer() -> None:
        ask = asker(engine)
        await warm_up(ask)
        await answer_until_closed(ask, facts)

    engine.loop.run_until_complete(answer())
    engine.shutdown()


def asker(engine: Any) -> Ask:
    """How to ask an `Engine`."""

    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        sampling = {
            "temperature": 0,
            "max_new_tokens": max_tokens,
            "ignore_eos": True,
        }
        begin, first = time.monotonic(), 0.0
        stream = await engine.async_generate(
            input_ids=list(prompt), sampling_params=sampling, stream=True
        )
        last: dict[str, Any] = {}
        async for step in stream:
            first, last = first or time.monotonic() - begin, step
        return Reply(
            tokens=tuple(last["output_ids"]),
            prompt_tokens=len(prompt),
            cached_tokens=last["meta_info"]["cached_tokens"],
            ttft_s=first,
        )

    return ask


# ------------------------------------------------------------ taking measurements


def start(name: str, args: argparse.Namespace) -> Side:
    """Start one configuration's engine."""
    command = [sys.executable, "-m", "benchmarks.sglang_prefix", "--one", name]
    command += ["--model", args.model, "--cache-gib", str(args.cache_gib)]
    return Side(name, command, {"HYBRID_PLUGIN": "1" if name == PLUGIN else "0"})


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Start every engine, and measure them in turns."""
    write_model(args.model)
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        sides = []
        for name in args.only or CONFIGURATIONS:
            sides.append(start(name, args))
            stack.callback(sides[-1].stop)
        for side in sides:
            side.wait_until_ready()
        for _ in take_turns(sides, args.rounds, args.workloads):
            results = {side.name: side.result() for side in sides}
            if args.out:
                save(args, results)
    return results


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what there is so far."""
    document = {
        "model": args.model,
        "shapes": MODELS[args.model],
        "flags": engine_arguments(args),
        "configurations": CONFIGURATIONS,
        "cache_gib": args.cache_gib,
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
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        serve(args)
    else:
        print(table(run_all(args), DEFAULT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
