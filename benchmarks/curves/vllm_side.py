# SPDX-License-Identifier: Apache-2.0
"""vLLM's own engine, scheduler and cache, without a model and without the plugin."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.curves.protocol import Load
from benchmarks.curves.serving import measure, serve_tasks
from benchmarks.curves.shapes import CHUNK, MAX_RUNNING, STATE_ITEMSIZE, Task
from benchmarks.prefix_models import (
    attention_and_state_layers,
    slot_bytes,
    token_bytes,
    write_model,
)

CACHES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm, unit 16": {"prefix_match_unit": 16},
    "vllm, unit 16, dense": {
        "prefix_match_unit": 16,
        "prefix_cache_retention_interval": None,
    },
}
"""vLLM 0.32 has one way to cache states, `--mamba-cache-mode align`, its default.

With a unit a hit may end inside a block, at the end of an earlier prompt;
dense keeps the state at the end of each block."""
_ALIGNMENT = 16
"""Tokens; the smallest kernel block of attention on a GPU."""
_STATE_DTYPES = {2: "bfloat16", 4: "float32"}


def gpu_block(shape: str) -> int:
    """Tokens in a block on a GPU, by vLLM's own rule.

    The fewest of which one attention layer's KV takes as much as the states of one
    state layer.  `Platform._align_hybrid_block_size` computes it so for backends
    that take blocks of 16; on a CPU they take no less than 32.
    """
    attention, states = attention_and_state_layers(shape)
    token = token_bytes(shape) // attention
    state = slot_bytes(shape, STATE_ITEMSIZE[shape]) // states
    return -(-state // (token * _ALIGNMENT)) * _ALIGNMENT


def engine_arguments(task: Task) -> dict[str, Any]:
    """Of vLLM's `EngineArgs`."""
    longest = max(task.longest, 2 * gpu_block(task.shape))
    folder = Path(tempfile.gettempdir()) / "hybrid-curves" / f"{task.shape}-{longest}"
    write_model(task.shape, folder, longest)
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": longest,
        "max_num_seqs": MAX_RUNNING,
        "max_num_batched_tokens": CHUNK,
        "kv_cache_memory_bytes": task.memory,
        "mamba_ssm_cache_dtype": _STATE_DTYPES[STATE_ITEMSIZE[task.shape]],
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "block_size": gpu_block(task.shape),
        "disable_log_stats": True,
        **CACHES[task.cache],
    }


def serve(task: Task, load: Load) -> dict[str, Any]:
    """Serve a task."""
    from vllm import __version__

    from benchmarks.no_model.vllm_engine import SteppedEngine

    engine = SteppedEngine(engine_arguments(task))
    row = measure(engine, load, task.seed)
    engine.shutdown()
    return row | {"vllm": __version__}


if __name__ == "__main__":
    serve_tasks(serve)
