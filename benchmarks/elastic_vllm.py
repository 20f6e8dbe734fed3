# SPDX-License-Identifier: Apache-2.0
"""vLLM as one side of the benchmark of elastic pools."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

from benchmarks import vllm_prefix
from benchmarks.elastic_engine import Limit, Watch, answer_until_closed, mapped_bytes
from benchmarks.elastic_setup import CAPTURE_SIZES, Configuration, Setup
from benchmarks.prefix_models import write_model
from benchmarks.prefix_sides import check_plugin

DEFAULT = "vLLM, default"
STOCK = {
    DEFAULT: Configuration(),
    "vLLM, unit 16, sparse": Configuration({"prefix_match_unit": 16}),
}


def prepare(setup: Setup) -> None:
    """Write the model's configuration."""
    write_model(setup.model, vllm_prefix.model_folder(setup.model))


def shared_arguments(setup: Setup) -> dict[str, Any]:
    """Arguments that all configurations share."""
    shared = vllm_prefix.engine_arguments(
        argparse.Namespace(model=setup.model, cache_gib=0)
    )
    if setup.on_gpu:
        shared["compilation_config"] = {"cudagraph_capture_sizes": CAPTURE_SIZES}
    else:
        for name in ("gdn_prefill_backend", "compilation_config"):
            del shared[name]
        shared |= {"enforce_eager": True, "max_num_batched_tokens": 512}
    return shared | {
        "model": str(vllm_prefix.model_folder(setup.model)),
        "hf_overrides": setup.model_overrides,
        "max_model_len": setup.longest,
        "max_num_seqs": setup.scale.clients,
        "kv_cache_memory_bytes": setup.cache_mib << 20,
        "disable_log_stats": False,  # the plugin's metrics come that way
    }


def arguments(setup: Setup, configuration: Configuration) -> dict[str, Any]:
    """All arguments of one configuration."""
    found = shared_arguments(setup) | dict(configuration.flags)
    if configuration.options is not None:
        options = {"hybrid_plugin": dict(configuration.options)}
        found["additional_config"] = options
    return found


def variables(setup: Setup, configuration: Configuration, lane: int) -> dict[str, str]:
    """Environment of the `lane`-th of the engines that run together."""
    return {
        "HYBRID_PLUGIN": "0" if configuration.options is None else "1",
        # Engines that start together must not write to one compile cache.
        "VLLM_CACHE_ROOT": str(vllm_prefix.SCRATCH / f"cache-{lane}"),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }


def serve(setup: Setup, configuration: Configuration, starting: Limit) -> None:
    """Be one configuration's engine."""
    asyncio.run(_serve(setup, configuration, starting))


async def _serve(setup: Setup, configuration: Configuration, starting: Limit) -> None:
    from prometheus_client import REGISTRY
    from vllm import __version__
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    check_plugin("vllm")
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments(setup, configuration))
    )
    published = REGISTRY.restricted_registry(["hybrid_cache_mapped_bytes"])
    watch = Watch(lambda: mapped_bytes(published.collect()))
    facts = {
        "vllm": __version__,
        "block_size": engine.vllm_config.cache_config.block_size,
    }
    ask = vllm_prefix.asker(_Counted(engine, watch))
    try:
        await answer_until_closed(ask, facts, setup.scale, watch, starting)
    finally:
        engine.shutdown()


class _Counted:
    """An `AsyncLLM` whose tokens are counted as they come."""

    def __init__(self, engine: Any, watch: Watch) -> None:
        self._engine, self._watch = engine, watch

    def generate(self, *request: Any) -> AsyncIterator[Any]:
        return self._watch.count(
            self._engine.generate(*request), lambda s: len(s.outputs[0].token_ids)
        )
