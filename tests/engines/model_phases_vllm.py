# SPDX-License-Identifier: Apache-2.0
"""Serves one model of the registry by vLLM with the plugin; prints what came out.

python -m tests.engines.model_phases_vllm KIND FOLDER
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.engines.model_workload import (
    MAX_MODEL_LEN,
    PAGE,
    REFUSED_EVERY,
    STEP,
    Tokens,
    serve,
)
from tests.engines.phases import report
from tests.models.kinds import STATES_ALONE, find

OPTIONS: dict[str, Any] = {"page_size": PAGE}


class VllmEngine:
    """vLLM, fed and read in this process."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        """Load a model, with the plugin."""
        from vllm import LLM

        given: dict[str, Any] = {"dtype": "float32"} | _of_device(model)
        self._llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=STEP,
            kv_cache_memory_bytes=64 << 20,
            disable_log_stats=True,
            **given | arguments,
        )

    @property
    def model(self) -> str:
        """The module of the class that vLLM built."""
        executor: Any = self._llm.llm_engine.model_executor
        return type(executor.driver_worker.worker.model_runner.model).__module__

    def ask(self, prompts: Tokens, length: int) -> tuple[Tokens, list[int]]:
        """Answers, and the tokens that were restored for each."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, detokenize=False
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling,
            use_tqdm=False,
        )
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return tokens, [output.num_cached_tokens or 0 for output in outputs]

    def forget(self) -> None:
        """Drop everything cached."""
        assert self._llm.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """Of the plugin's cache."""
        core: Any = self._llm.llm_engine.engine_core
        manager = core.engine_core.scheduler.kv_cache_manager
        return dict(manager.cache.stats.as_dict())

    @contextmanager
    def pressure(self) -> Iterator[None]:
        """Now and then a sequence that grows gets no page: vLLM preempts."""
        from hybrid_plugin.core.cache import HybridCache

        grow, calls = HybridCache.grow, itertools.count(1)

        def seldom(cache: HybridCache, *args: Any, **kwargs: Any) -> Any:
            refused = next(calls) % REFUSED_EVERY == 0
            return None if refused else grow(cache, *args, **kwargs)

        HybridCache.grow = seldom  # type: ignore[method-assign]
        try:
            yield
        finally:
            HybridCache.grow = grow  # type: ignore[method-assign]


def _of_device(model: Path) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"enforce_eager": True}
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, STEP]}
    # Several engines may share the device.
    given = {"gpu_memory_utilization": 0.05, "compilation_config": sizes}
    if "kv_lora_rank" in json.loads((model / "config.json").read_text()):
        # vLLM's latent attention takes no float32 there.
        given["dtype"] = "bfloat16"
    return given


def main(kind: str, folder: Path) -> None:
    """Print one line of JSON."""
    chosen = find(kind)
    checkpoint = chosen.write(folder)
    options = OPTIONS if chosen in STATES_ALONE else OPTIONS | {"enabled": True}
    if "vllm" in chosen.brought_by:
        options |= {"models": [chosen.architecture]}
    engine = VllmEngine(checkpoint, additional_config={"hybrid_plugin": options})
    found = asdict(serve(engine, chosen, checkpoint))
    report(found | {"model": engine.model})


if __name__ == "__main__":
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(sys.argv[1], Path(sys.argv[2]))
