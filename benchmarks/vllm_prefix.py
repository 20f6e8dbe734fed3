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
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.prefix_workloads import (
    VOCABULARY,
    WORKLOADS,
    Ask,
    Outcome,
    Reply,
    run_once,
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


async def serve(args: argparse.Namespace) -> None:
    """Be one configuration's engine: a line of JSON in, a line with the outcome out."""
    from vllm import __version__
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(args) | STOCK.get(args.one, {})
    model = str(model_folder(args.model))
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments))
    ask = asker(engine)
    await warm_up(ask)
    block_size = engine.vllm_config.cache_config.block_size
    say({"vllm": __version__, "block_size": block_size})
    while line := await asyncio.to_thread(sys.stdin.readline):
        say(asdict(await run_once(ask=ask, **json.loads(line))))
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


MARK = "RESULT "
"""Begins the lines that are meant for us: libraries print what they like."""


def say(result: dict[str, Any]) -> None:
    """Answer the process that takes the measurements."""
    print(MARK + json.dumps(result), flush=True)


# ------------------------------------------------------------ taking measurements


class Side:
    """A configuration, its engine process, and what was measured."""

    def __init__(self, name: str, args: argparse.Namespace, lane: int) -> None:
        """Start the process, the `lane`-th of those that run together."""
        self.name = name
        self.outcomes: dict[str, list[dict[str, Any]]] = {}
        self.facts: dict[str, Any] | None = None
        """Version and block size; None unless the engine runs."""
        command = [sys.executable, "-m", "benchmarks.vllm_prefix", "--one", name]
        command += ["--model", args.model, "--cache-gib", str(args.cache_gib)]
        variables = {
            "HYBRID_PLUGIN": "1" if name == PLUGIN else "0",
            # Engines that start together must not write to one compile cache.
            "VLLM_CACHE_ROOT": str(SCRATCH / f"cache-{lane}"),
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        }
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Wait until the engine is warm, or has failed to start."""
        self.facts = self._listen()

    def run(self, workload: str, seed: int) -> None:
        """Send one round of a workload, unless the engine failed."""
        if self.facts is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"name": workload, "seed": seed}) + "\n")
        self._process.stdin.flush()
        outcome = self._listen()
        if outcome is None:
            self.facts = None
            return
        self.outcomes.setdefault(workload, []).append(outcome)
        print(self.name, workload, outcome, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def result(self) -> dict[str, Any]:
        """What goes to the results file."""
        if self.facts is None:
            return {"failed": True}
        return {**self.facts, "workloads": self.outcomes}

    def _listen(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
        return None


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every configuration, so many of them at a time as fit."""
    write_model(args.model)
    names = args.only or [*STOCK, PLUGIN]
    results: dict[str, Any] = {}
    for start in range(0, len(names), args.at_once):
        for sides in take_turns(names[start : start + args.at_once], args):
            results |= {side.name: side.result() for side in sides}
            if args.out:
                save(args, results)
    return results


def take_turns(names: Sequence[str], args: argparse.Namespace) -> Iterator[list[Side]]:
    """Start engines, and measure round after round; yields after each round."""
    with ExitStack() as stack:
        sides = []
        for lane, name in enumerate(names):
            sides.append(Side(name, args, lane))
            stack.callback(sides[-1].stop)
        for side in sides:
            side.wait_until_ready()
        for seed in range(args.rounds):
            for number, workload in enumerate(WORKLOADS):
                first = (seed + number) % len(sides)
                for side in [*sides[first:], *sides[:first]]:
                    side.run(workload, seed)
            yield sides


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
    write(args.out, ".md", table(results))


def write(out: Path, suffix: str, text: str) -> None:
    """Write a file beside others; the name may have a dot in it, as models do."""
    out.with_name(out.name + suffix).write_text(text + "\n")


def median_of(result: dict[str, Any], workload: str, field: str) -> float:
    """Median of one field over the rounds of a workload."""
    return float(statistics.median(r[field] for r in result["workloads"][workload]))


def paired(result: dict[str, Any], base: dict[str, Any], workload: str) -> str:
    """Median over the rounds of wall time by the base's in the same round."""
    if "workloads" not in base:
        return ""
    rounds = zip(
        result["workloads"][workload], base["workloads"][workload], strict=True
    )
    return f"{statistics.median(a['wall_s'] / b['wall_s'] for a, b in rounds):.2f}x"


def row(workload: str, name: str, results: dict[str, Any]) -> str:
    """One Markdown row."""
    result = results[name]
    if "workloads" not in result:
        return f"| {workload} | {name} | did not run | | | | |"
    fields = Outcome.__dataclass_fields__
    value = {field: median_of(result, workload, field) for field in fields}
    share = 100 * value["cached_tokens"] / value["prompt_tokens"]
    return (
        f"| {workload} | {name} | {share:.1f} % | {value['ttft_ms_p50']:.1f} | "
        f"{value['ttft_ms_p95']:.1f} | {value['wall_s']:.2f} | "
        f"{paired(result, results.get(DEFAULT, {}), workload)} |"
    )


def table(results: dict[str, Any]) -> str:
    """One Markdown row per workload and configuration."""
    lines = [
        "| workload | configuration | cached | TTFT p50 ms | TTFT p95 ms | wall s | "
        f"wall / {DEFAULT} |",
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
        asyncio.run(serve(args))
    else:
        print(table(run_all(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
