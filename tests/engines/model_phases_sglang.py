# SPDX-License-Identifier: Apache-2.0
"""Serves one model of the registry by SGLang with the plugin; prints what came out.

python -m tests.engines.model_phases_sglang KIND FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.engines.model_workload import MAX_MODEL_LEN, PAGE, STEP, serve
from tests.engines.phases import report
from tests.engines.window_phases_sglang import Engine
from tests.models.kinds import STATES_ALONE, find

OPTIONS: dict[str, Any] = {"page_size": PAGE, "gpu_memory_budget": 64 << 20}
FLAGS = (
    "--enable-hybrid-plugin",
    "--skip-tokenizer-init",
    f"--context-length={MAX_MODEL_LEN}",
    f"--chunked-prefill-size={STEP}",
    "--max-running-requests=8",
)
ON_GPU = torch.cuda.is_available()
# SGLang's norms take no float32 on a GPU.
OF_DEVICE = (
    (
        "--dtype=bfloat16",
        "--mem-fraction-static=0.1",
        "--attention-backend=triton",
        "--sampling-backend=pytorch",
        "--disable-flashinfer-autotune",
        "--cuda-graph-bs-decode",
        *("1", "4", "8"),
    )
    if ON_GPU
    else ("--dtype=float32",)
)
RETRACT_EVERY = 15
"""Steps of the crowd, for SGLang retracts hardly ever by itself."""


class SglangEngine(Engine):
    """SGLang's scheduler, fed and read in this process."""

    @property
    def model(self) -> str:
        """The module of the class that SGLang built."""
        worker = self.scheduler.tp_worker
        return type(worker.model_runner.model).__module__

    @property
    def has_graphs_of_prefills(self) -> bool:
        """Whether SGLang on a GPU would capture any, with our state layers in them."""
        runner = self.scheduler.tp_worker.model_runner
        layers = runner.get_cuda_graph_layers(runner.model.model).attention_layers
        return all(layer is not None for layer in layers)

    def forget(self) -> None:
        """Drop everything cached."""
        self.cache.reset()

    def stats(self) -> dict[str, Any]:
        """Of the plugin's cache."""
        return dict(self.cache.cache.stats.as_dict())

    @contextmanager
    def pressure(self) -> Iterator[None]:
        """Now and then SGLang retracts a request."""
        from sglang.srt.managers import scheduler

        scheduler.TEST_RETRACT_INTERVAL, scheduler.TEST_RETRACT = RETRACT_EVERY, True
        try:
            yield
        finally:
            scheduler.TEST_RETRACT = False


def main(kind: str, folder: Path) -> None:
    """Print one line of JSON."""
    chosen = find(kind)
    checkpoint = chosen.write(folder)
    options = OPTIONS
    if chosen not in STATES_ALONE:
        options = options | {"kernels": "ours"}
    if "sglang" in chosen.brought_by:
        options = options | {"models": [chosen.architecture]}
    flags = (*FLAGS, *OF_DEVICE, f"--hybrid-config={json.dumps(options)}")
    engine = SglangEngine(checkpoint, flags)
    found = asdict(serve(engine, chosen, checkpoint))
    # SGLang's own models have bodies of other names.
    ours = engine.model.startswith("hybrid_models.")
    graphs = ours and engine.has_graphs_of_prefills
    report(found | {"model": engine.model, "has_graphs_of_prefills": graphs})


if __name__ == "__main__":
    os.environ["SGLANG_PLATFORM"] = "" if ON_GPU else "hybrid_cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(sys.argv[1], Path(sys.argv[2]))
