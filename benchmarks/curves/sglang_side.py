# SPDX-License-Identifier: Apache-2.0
"""SGLang's own scheduler and cache, without a model and without the plugin."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.curves.protocol import Load
from benchmarks.curves.serving import measure, serve_tasks
from benchmarks.curves.sglang_models import scale, write_replica
from benchmarks.curves.shapes import CHUNK, MAX_RUNNING, STATE_ITEMSIZE, Task
from benchmarks.prefix_models import MODELS

CACHES = (
    "sglang",
    "sglang, lazy",
    "sglang, unified",
    "sglang, unified, one state",
)
_STATE_DTYPES = {2: "bfloat16", 4: "float32"}


def settings(cache: str, shape: str) -> dict[str, Any]:
    """Engine arguments of a cache.

    The default, the most frequent states that the kernels allow with a second slot
    only when one is due, the same memory for both pools, and that with what experts
    set for long shared prompts: states at the ends of prompts, one of each path.
    """
    # SGLang's Mamba-2 kernels need an interval of at least one chunk.
    model = MODELS[shape]
    often = {
        "mamba_track_interval": model.get(
            "chunk_size", model.get("mamba_chunk_size", 64)
        ),
        "page_size": 16,
    }
    lazy = {"mamba_radix_cache_strategy": "extra_buffer_lazy"}
    unified = {"enable_unified_memory": True}
    by_name: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang, lazy": lazy | often,
        "sglang, unified": lazy | unified | often,
        "sglang, unified, one state": {
            **lazy,
            **unified,
            "page_size": 16,
            "mamba_track_interval": 8192,
            "mamba_max_states_per_path": 1,
        },
    }
    return by_name[cache]


def engine_arguments(task: Task) -> dict[str, Any]:
    """Of SGLang's `ServerArgs`."""
    name = f"sglang-{task.shape}-{task.longest}"
    folder = Path(tempfile.gettempdir()) / "hybrid-curves" / name
    longest = task.longest + 16  # SGLang keeps a few for itself
    write_replica(task.shape, folder, longest)
    return {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "random_seed": 0,
        "context_length": longest,
        "max_running_requests": MAX_RUNNING,
        "chunked_prefill_size": CHUNK,
        "mamba_ssm_dtype": _STATE_DTYPES[STATE_ITEMSIZE[task.shape]],
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_flashinfer_autotune": True,
        "log_level": "warning",
        **settings(task.cache, task.shape),
    }


def serve(task: Task, load: Load) -> dict[str, Any]:
    """Serve a task."""
    from benchmarks.no_model.sglang_engine import VERSION, SteppedScheduler

    memory = int(task.memory * scale(task.shape))
    engine = SteppedScheduler(engine_arguments(task), memory)
    row = measure(engine, load, task.seed)
    return row | {"sglang": VERSION}


if __name__ == "__main__":
    from benchmarks.no_model import sglang_engine  # noqa: F401  before the first fork

    serve_tasks(serve, forked=True)
