# SPDX-License-Identifier: Apache-2.0
"""Serves chats whose KV two GPUs share out; prints what came of each phase.

    python -m tests.engines.context_parallel_phases FOLDER NAME ...

writes models into the folder, but those that are there already, and serves each name
among `SERVED` by the plugin, all in this process.  Then vLLM without a cache answers
the same prompts: on two ranks, and on two ranks that share out KV, which says how far
vLLM is from itself.  At last it says what is wrong with each, and ends with 1 if
something is.  Where there are not two GPUs everything runs on one rank: to try this
script.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybrid_plugin.engine import untried
from tests.engines import slow_decay
from tests.engines.chat_verdicts import described, judged, reported, say
from tests.engines.chats_vllm import (
    PAGE,
    Asked,
    Found,
    Reference,
    Setup,
    serve,
    set_environment,
)
from tests.engines.messages import Answer

TWO_GPUS = torch.cuda.device_count() > 1
RANKS: Mapping[str, Any] = {"tensor_parallel_size": 2} if TWO_GPUS else {}
DEALT: Mapping[str, Any] = (
    {**RANKS, "decode_context_parallel_size": 2} if TWO_GPUS else {}
)


HOST: Mapping[str, Any] = {"host_memory": "64MiB", "gpu_memory_budget": 12 << 20}
SERVED: Mapping[str, Setup] = {
    "elastic": Setup("mamba2", {"elastic": True}, graphs=True),
    "fixed": Setup(
        "mamba2",
        {"elastic": False, "page_size": PAGE * 2},
        {"cp_kv_cache_interleave_size": 8} if TWO_GPUS else {},
    ),
    "gated delta nets": Setup("gated delta nets", graphs=True, tells_pages=False),
    "host memory": Setup("mamba2", HOST, forgets=True),
    "latent": Setup("latent"),
}

KINDS: Mapping[str, Callable[[Path], Path]] = {
    "mamba2": partial(slow_decay.write_nemotron_h, **slow_decay.ONE_KV_HEAD),
    "gated delta nets": partial(
        slow_decay.write_qwen3_next,
        **slow_decay.ONE_KV_HEAD,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    ),
    "latent": partial(slow_decay.write_kimi_linear, first_k_dense_replace=4),
}
"""Without experts of which some are chosen, for rounding chooses among them, too."""


def write(folder: Path, kind: str) -> Path:
    """Write a model of a kind, unless it is there."""
    if folder.exists():
        return folder
    return slow_decay.sharpen_attention(KINDS[kind](folder))


def main(folder: Path, names: Sequence[str]) -> int:
    """Print a line for each phase, and at last one line of JSON."""
    kinds = dict.fromkeys(SERVED[name].kind for name in names)
    models = {kind: write(folder / kind.replace(" ", "-"), kind) for kind in kinds}
    asked: dict[str, dict[str, Asked]] = {}
    found: dict[str, Found] = {}
    for name in names:
        try:
            asked[name] = {}
            setup = SERVED[name]
            setup = replace(setup, arguments={**DEALT, **setup.arguments})
            found[name] = serve(models[setup.kind], setup, asked[name])
            say(f"{name}: {found[name]}")
        except Exception:
            say(f"{name} FAILED\n{traceback.format_exc()}")
            found[name] = {"error": traceback.format_exc()}
    for kind, model in models.items():
        phases = [
            (name, phase, one)
            for name, of in asked.items()
            if SERVED[name].kind == kind
            for phase, one in of.items()
        ]
        try:
            if phases:
                _compare(model, phases, found)
        except Exception:
            say(f"{kind} was NOT COMPARED\n{traceback.format_exc()}")
            for name, _, _ in phases:
                found[name]["error"] = "vLLM without a cache failed"
    ranks = DEALT.get("decode_context_parallel_size", 1)
    return reported({name: SERVED[name] for name in names}, found, ranks)


def _compare(
    model: Path, phases: Sequence[tuple[str, str, Asked]], found: dict[str, Found]
) -> None:
    """Have vLLM answer what the plugin answered, and note how far they are apart."""
    stock_said = _said(model, RANKS, phases)
    try:
        dealt_said = _said(model, DEALT, phases)
    except Exception:
        say(f"vLLM's own ranks FAILED\n{traceback.format_exc()}")
        dealt_said = stock_said
    for index, (name, phase, one) in enumerate(phases):
        result = judged(one, stock_said[index], dealt_said[index])
        found[name].setdefault("phases", {})[phase] = result
        say(f"{name}, {phase}: {described(result)}")


def _said(
    model: Path, arguments: Mapping[str, Any], phases: Sequence[tuple[str, str, Asked]]
) -> list[list[Answer]]:
    """What vLLM without a cache answers in each phase."""
    reference = Reference(model, arguments)
    try:
        return [reference.answers(one) for _, _, one in phases]
    finally:
        reference.close()


if __name__ == "__main__":
    set_environment()
    os.environ[untried.TRIED] = untried.CONTEXT
    # This process may have used the device before ranks are forked from it.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # FlashInfer's all-reduce uses NVLink's multicast, which a machine may lack.
    os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(SERVED)))
