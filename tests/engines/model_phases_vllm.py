# SPDX-License-Identifier: Apache-2.0
"""Serves one model of the registry by vLLM with the plugin; prints what came out.

python -m tests.engines.model_phases_vllm KIND FOLDER [RANKS]
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engines.model_workload import (
    MAX_MODEL_LEN,
    PAGE,
    REFUSED_EVERY,
    STEP,
    Tokens,
    serve,
)
from tests.engines.pass_cost import as_on_cpu
from tests.engines.phases import report
from tests.models.kinds import STATES_ALONE, Kind, find

if TYPE_CHECKING:
    from hybrid_plugin.core.cache import HybridCache

OPTIONS: dict[str, Any] = {"page_size": PAGE}


class VllmEngine:
    """vLLM, fed and read in this process."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        """Load a model, with the plugin."""
        from vllm import LLM

        given: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": STEP}
        given |= _of_device(model)
        self._llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            kv_cache_memory_bytes=64 << 20,
            disable_log_stats=True,
            **given | arguments,
        )

    @property
    def model(self) -> str:
        """The module of the class that vLLM built."""
        found: list[str] = self._llm.apply_model(_module)
        assert len(set(found)) == 1, found
        return found[0]

    def apply(self, function: Callable[[Any], Any]) -> list[Any]:
        """What a function gives of the model, on each rank."""
        found: list[Any] = self._llm.apply_model(function)
        return found

    def kinds_of_linear_layers(self) -> list[str]:
        """How vLLM computes them: the names of their methods."""
        found: list[list[str]] = self._llm.apply_model(_methods)
        return sorted({name for rank in found for name in rank})

    def ask(
        self, prompts: Tokens, length: int, adapter: Any = None
    ) -> tuple[Tokens, list[int]]:
        """Answers, and the tokens that were restored for each.

        Args:
            prompts: all at once.
            length: of answers.
            adapter: vLLM's `LoRARequest` for all of them; None for none.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, detokenize=False
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling,
            use_tqdm=False,
            lora_request=adapter,
        )
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return tokens, [output.num_cached_tokens or 0 for output in outputs]

    def forget(self) -> None:
        """Drop everything cached."""
        assert self._llm.reset_prefix_cache()

    @property
    def cache(self) -> HybridCache:
        """The plugin's cache."""
        core: Any = self._llm.llm_engine.engine_core
        found: HybridCache = core.engine_core.scheduler.kv_cache_manager.cache
        return found

    def stats(self) -> dict[str, Any]:
        """Of the plugin's cache."""
        return dict(self.cache.stats.as_dict())

    def pressure(self) -> AbstractContextManager[None]:
        """Now and then a sequence that grows gets no page: vLLM preempts."""
        return refusing_pages(REFUSED_EVERY)


@contextmanager
def refusing_pages(every: int) -> Iterator[None]:
    """One in so many growths of a sequence finds no page, here and in forked processes.

    Args:
        every: growths.
    """
    from hybrid_plugin.core.cache import HybridCache

    grow, calls = HybridCache.grow, itertools.count(1)

    def seldom(cache: HybridCache, *args: Any, **kwargs: Any) -> Any:
        return None if next(calls) % every == 0 else grow(cache, *args, **kwargs)

    HybridCache.grow = seldom  # type: ignore[method-assign]
    try:
        yield
    finally:
        HybridCache.grow = grow  # type: ignore[method-assign]


def options(kind: Kind) -> dict[str, Any]:
    """Of the plugin, with which a kind is served by our class, if there is one."""
    if kind in STATES_ALONE:
        return OPTIONS
    found = OPTIONS | {"enabled": True, "kernels": "ours"}
    if "vllm" in kind.brought_by:
        return found | {"models": [kind.architecture]}
    return found


def set_environment() -> None:
    """What vLLM reads when it is imported, and what the plugin takes a pass to cost."""
    as_on_cpu()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    os.environ["HF_HUB_OFFLINE"] = "1"


def _module(model: Any) -> str:
    return type(model).__module__


def _methods(model: Any) -> list[str]:
    from vllm.model_executor.layers.linear import LinearBase

    layers = (m for m in model.modules() if isinstance(m, LinearBase))
    return sorted({type(layer.quant_method).__name__ for layer in layers})


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


def main(kind: str, folder: Path, ranks: int) -> None:
    """Print one line of JSON."""
    chosen = find(kind)
    checkpoint = chosen.write(folder)
    engine = VllmEngine(
        checkpoint,
        tensor_parallel_size=ranks,
        additional_config={"hybrid_plugin": options(chosen)},
    )
    found = asdict(serve(engine, chosen, checkpoint))
    report(found | {"model": engine.model})


if __name__ == "__main__":
    set_environment()
    main(sys.argv[1], Path(sys.argv[2]), int((*sys.argv, "1")[3]))
