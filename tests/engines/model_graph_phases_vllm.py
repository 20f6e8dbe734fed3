# SPDX-License-Identifier: Apache-2.0
"""Serves one model of the registry by vLLM, prompts in CUDA graphs and then without.

python -m tests.engines.model_graph_phases_vllm KIND FOLDER

Without a GPU there are no graphs: passes are described as a graph's, and then as usual.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from tests.engines.model_phases_vllm import VllmEngine, options, set_environment
from tests.engines.model_workload import Tokens, gap, prompts_of, serve
from tests.engines.phases import report
from tests.models.kinds import find

BUDGET = 1024
"""Tokens of a pass."""
SIZES = [1, 2, 4, 8, 16, 64, 128, 256]
"""Of vLLM's graphs; those of prompts are from 16 on, and longer ones."""
LENGTHS = (5, 40, 70, 100, 130, 200, 300)
"""Of prompts that come one by one, then all at once, on an empty cache each time."""
ANSWER = 12
TIMES = 20
"""That a first token is timed."""


def measured(engine: VllmEngine) -> dict[str, Any]:
    """Answers, how many passes replayed a graph for them, and a first token's time."""
    before = engine.stats()["graph_passes"]
    asked = prompts_of(7, LENGTHS)
    answers: Tokens = []
    for prompts in (*([one] for one in asked), asked):
        engine.forget()
        answers += engine.ask(prompts, ANSWER)[0]
    seconds = []
    for prompt in prompts_of(8, [40] * TIMES):
        begin = time.perf_counter()
        engine.ask([prompt], 1)
        seconds.append(time.perf_counter() - begin)
    return {
        "prompts": asked + asked,
        "answers": answers,
        "passes": engine.stats()["graph_passes"] - before,
        "first token ms": round(1e3 * median(seconds[1:]), 2),
    }


@contextmanager
def prompts_without_graphs() -> Iterator[None]:
    """No pass with prompts is one of a graph's, nor described as such."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from hybrid_plugin.vllm.kernels.fixed_shape import GraphLimits

    dispatch, hold = CudaGraphManager.dispatch, GraphLimits.hold
    others: dict[int, Any] = {}

    def of_others(manager: Any) -> Any:
        return {
            key: [
                graph
                for graph in graphs
                if graph.cg_mode != CUDAGraphMode.FULL
                or graph.uniform_token_count is not None
            ]
            for key, graphs in manager._candidates.items()
        }

    def found(manager: Any, *args: Any, **kwargs: Any) -> Any:
        if id(manager) not in others:  # once: first tokens are timed
            others[id(manager)] = of_others(manager)
        every, manager._candidates = manager._candidates, others[id(manager)]
        try:
            return dispatch(manager, *args, **kwargs)
        finally:
            manager._candidates = every

    CudaGraphManager.dispatch = found
    GraphLimits.hold = lambda *_: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaGraphManager.dispatch = dispatch
        GraphLimits.hold = hold  # type: ignore[method-assign]


def _describe_as_of_graphs(model: Any) -> int:
    """Have short prompts described as a graph's, without one; counts state layers."""
    from hybrid_plugin.vllm.kernels import layers
    from hybrid_plugin.vllm.kernels.fixed_shape import GraphLimits

    found = [one for one in map(layers.ours, model.modules()) if one is not None]
    found[0].together.graphs = GraphLimits(8, 256, BUDGET // 64)
    return len(found)


def main(kind: str, folder: Path) -> None:
    """Print one line of JSON."""
    import torch

    chosen, on_gpu = find(kind), torch.cuda.is_available()
    checkpoint = chosen.write(folder)
    given = options(chosen) | ({"prefill_graphs": True} if on_gpu else {})
    sizes = {"compilation_config": {"cudagraph_capture_sizes": SIZES}}
    engine = VllmEngine(
        checkpoint,
        max_num_batched_tokens=BUDGET,
        additional_config={"hybrid_plugin": given},
        **(sizes if on_gpu else {}),
    )
    if not on_gpu:
        assert min(engine.apply(_describe_as_of_graphs)) > 0
    found = {"with graphs": measured(engine)}
    with prompts_without_graphs():
        found["without"] = measured(engine)
    reference = chosen.reference(checkpoint)
    for one in found.values():
        pairs = zip(one.pop("prompts"), one["answers"], strict=True)
        one["gaps"] = [gap(reference, prompt, answer) for prompt, answer in pairs]
    served = asdict(serve(engine, chosen, checkpoint))
    report({"runs": found, "served": served | {"model": engine.model}})


if __name__ == "__main__":
    set_environment()
    main(sys.argv[1], Path(sys.argv[2]))
