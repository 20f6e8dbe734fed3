# SPDX-License-Identifier: Apache-2.0
"""What is compared: the engines' own settings, and the plugin's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from benchmarks import elastic_sglang, elastic_vllm
from benchmarks.elastic_setup import Configuration, Setup
from benchmarks.elastic_workloads import CPU, GPU
from benchmarks.prefix_models import MODELS

ENGINES: Mapping[str, ModuleType] = {"vllm": elastic_vllm, "sglang": elastic_sglang}
MAX_RUNNING = 64
PLUGIN = "plugin"
"""Names of the plugin's sides begin with it."""
DEFAULT = f"{PLUGIN}, default"
"""With no option; runs only where it is named."""
GRAPHS = f"{PLUGIN}, ours kernels, elastic, prefill graphs"
"""On a GPU, for models whose layers the engine lets into graphs; runs only where it is
named."""
CAPTURED_DECODES = [1, 2, 4, 8, 16, 32, 64]
CAPTURED_PASSES = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512]
"""Tokens of vLLM's graphs, decodes and prefills."""
CAPTURED_PREFILLS = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
"""Tokens of SGLang's graphs of prefills."""


def setup(model: str, cache_mib: int, on_gpu: bool) -> Setup:
    """What all sides share."""
    longest = 12_288 if on_gpu else 1024
    traffic = replace(GPU if on_gpu else CPU, clients=MAX_RUNNING)
    rest = traffic.question_tokens + traffic.document_answer
    return Setup(
        model=model,
        cache_mib=cache_mib,
        scale=replace(traffic, document_tokens=longest - rest),
        on_gpu=on_gpu,
    )


def plugin_name(kernels: str, elastic: bool) -> str:
    """Of one of the plugin's sides."""
    return f"{PLUGIN}, {kernels} kernels, {'elastic' if elastic else 'fixed'}"


def configurations(engine: str, model: str) -> dict[str, Configuration]:
    """By name: stock settings, then the plugin's kernels and pools, with graphs last.

    Args:
        engine: "vllm" or "sglang".
        model: whose chunk bounds how often SGLang can keep states.
    """
    found = _stock_vllm() if engine == "vllm" else _stock_sglang(model)
    for kernels in ("engine", "ours"):
        for elastic in (True, False):
            options = {"enabled": True, "elastic": elastic, "kernels": kernels}
            found[plugin_name(kernels, elastic)] = Configuration(options=options)
    found[DEFAULT] = Configuration(options={"enabled": True})
    options = {"enabled": True, "kernels": "ours", "prefill_graphs": True}
    found[GRAPHS] = Configuration(options={**options, "elastic": True})
    return found


def _stock_vllm() -> dict[str, Configuration]:
    return {
        "stock, default": Configuration(),
        "stock, unit 16, sparse": Configuration({"prefix_match_unit": 16}),
    }


def _stock_sglang(model: str) -> dict[str, Configuration]:
    # Its Mamba-2 kernels need an interval of at least one chunk.
    interval = MODELS[model].get("chunk_size", 64)
    often = {"mamba_track_interval": interval, "page_size": 16}
    strategy = "mamba_radix_cache_strategy"
    return {
        "stock, default": Configuration(),
        "stock, lazy": Configuration({strategy: "extra_buffer_lazy", **often}),
        "stock, unified memory": Configuration(
            {"enable_unified_memory": True, **often}
        ),
    }


def arguments(
    engine: str,
    shared: Setup,
    configuration: Configuration,
    *,
    libraries: bool = False,
) -> dict[str, Any]:
    """Of one side's engine.

    Args:
        engine: "vllm" or "sglang".
        shared: of all sides.
        configuration: the side's.
        libraries: whether the engine prefills gated delta nets with what it takes by
            default, FlashInfer where it is installed, and not with its own Triton
            kernels.
    """
    found: dict[str, Any] = ENGINES[engine].arguments(shared, configuration)
    if not shared.on_gpu:
        return found
    if engine == "vllm":
        if libraries:
            del found["gdn_prefill_backend"]
        return found | {
            "compilation_config": {"cudagraph_capture_sizes": CAPTURED_PASSES}
        }
    if not libraries:
        found["linear_attn_prefill_backend"] = "triton"
    return found | {
        "cuda_graph_bs_decode": CAPTURED_DECODES,
        "cuda_graph_bs_prefill": CAPTURED_PREFILLS,
    }


def variables(
    engine: str, shared: Setup, configuration: Configuration, lane: int
) -> dict[str, str]:
    """Of the environment of the `lane`-th of the engines that run together."""
    found: dict[str, str] = ENGINES[engine].variables(shared, configuration, lane)
    return found
