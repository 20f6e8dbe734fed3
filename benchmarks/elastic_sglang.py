# SPDX-License-Identifier: Apache-2.0
"""SGLang as one side of the benchmark of elastic pools."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks import sglang_prefix
from benchmarks.elastic_engine import Limit, Watch, answer_until_closed, mapped_bytes
from benchmarks.elastic_setup import CAPTURE_SIZES, Configuration, Setup
from benchmarks.prefix_models import write_model
from benchmarks.prefix_sides import check_plugin

DEFAULT = "SGLang, default"
_OFTEN = {"mamba_track_interval": 64, "page_size": 16}
STOCK = {
    DEFAULT: Configuration(),
    "SGLang, lazy": Configuration(
        {"mamba_radix_cache_strategy": "extra_buffer_lazy", **_OFTEN}
    ),
    "SGLang, unified memory": Configuration({"enable_unified_memory": True, **_OFTEN}),
}
_ONLY_ON_GPU = (
    "attention_backend",
    "sampling_backend",
    "disable_flashinfer_autotune",
    "mem_fraction_static",
    "cuda_graph_bs_decode",
    "cuda_graph_bs_prefill",
)


def prepare(setup: Setup) -> None:
    """Write the model's configuration."""
    write_model(setup.model, _folder(setup))


def shared_arguments(setup: Setup) -> dict[str, Any]:
    """Arguments that all configurations share."""
    shared = sglang_prefix.engine_arguments(argparse.Namespace(model=setup.model))
    if setup.on_gpu:
        shared["cuda_graph_bs_decode"] = CAPTURE_SIZES
    else:
        for name in _ONLY_ON_GPU:
            shared.pop(name, None)
        shared["chunked_prefill_size"] = 512
    return shared | {
        "model_path": str(_folder(setup)),
        "json_model_override_args": json.dumps(setup.model_overrides),
        "context_length": setup.longest,
        "max_running_requests": setup.scale.clients,
        "enable_metrics": True,  # the plugin's come that way
    }


def arguments(setup: Setup, configuration: Configuration) -> dict[str, Any]:
    """All arguments of one configuration."""
    found = shared_arguments(setup) | dict(configuration.flags)
    if configuration.options is None:
        # The plugin has a budget; SGLang alone is told what that comes to.
        found |= sglang_prefix.stock_pools(setup.model, setup.cache_mib << 20)
    return found


def variables(setup: Setup, configuration: Configuration, lane: int) -> dict[str, str]:
    """Environment of one of the engines that run together."""
    found = {"HF_HUB_OFFLINE": "1"}
    if configuration.options is None:
        platform = {} if setup.on_gpu else {"SGLANG_PLATFORM": "hybrid_cpu"}
        return found | platform | {"HYBRID_PLUGIN": "0"}
    budget = {"gpu_memory_budget": setup.cache_mib << 20}
    options = json.dumps({**configuration.options, **budget})
    return found | {"HYBRID_PLUGIN": "1", "HYBRID_CONFIG": options}


def serve(setup: Setup, configuration: Configuration, starting: Limit) -> None:
    """Be one configuration's engine."""
    import sglang

    check_plugin("sglang")
    given = arguments(setup, configuration)
    engine = sglang.Engine(**given)
    facts = {"sglang": sglang.__version__}
    pools = ("max_mamba_cache_size", "max_total_tokens")
    facts |= {name: given[name] for name in pools if name in given}
    watch = Watch(_mapped)
    ask = sglang_prefix.asker(_Counted(engine, watch))
    try:
        engine.loop.run_until_complete(
            answer_until_closed(ask, facts, setup.scale, watch, starting)
        )
    finally:
        engine.shutdown()


def _folder(setup: Setup) -> Path:
    return sglang_prefix.SCRATCH / setup.model


def _mapped() -> dict[str, float]:
    """From the files that SGLang's processes share their gauges in."""
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    files = [str(path) for path in folder.glob("gauge_mostrecent_*.db")]
    return mapped_bytes(MultiProcessCollector.merge(files))


class _Counted:
    """An `Engine` whose tokens are counted as they come."""

    def __init__(self, engine: Any, watch: Watch) -> None:
        self._engine, self._watch = engine, watch

    async def async_generate(self, **request: Any) -> AsyncIterator[Any]:
        steps = await self._engine.async_generate(**request)
        return self._watch.count(steps, lambda step: len(step["output_ids"]))
