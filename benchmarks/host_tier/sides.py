# SPDX-License-Identifier: Apache-2.0
"""What is compared: a small device cache with and without host memory behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import elastic_sglang, elastic_vllm
from benchmarks.elastic_setup import Configuration, Setup
from benchmarks.elastic_workloads import GPU
from benchmarks.host_tier.traffic import Scale
from benchmarks.low_load.sides import CAPTURED_DECODES, CAPTURED_PASSES
from benchmarks.prefix_models import MODELS
from benchmarks.sglang_prefix import PREFILL_SIZES

ENGINES = {"vllm": elastic_vllm, "sglang": elastic_sglang}
PLUGIN = "plugin"
"""Names of the plugin's sides begin with it."""
HOSTED, LARGE = f"{PLUGIN}, host memory", f"{PLUGIN}, all on the device"
_SIMPLE = "vLLM, simple offloading"
_OFTEN = "SGLang, HiCache, often"
_DIRECT = "SGLang, HiCache, direct"
_NAMED_ONLY = (_SIMPLE, _OFTEN, _DIRECT)
MAX_RUNNING = 16


@dataclass(frozen=True)
class Tiers:
    """What all sides of a run share."""

    model: str
    cache_mib: int
    """Of each engine's device."""
    host_gb: float
    """Of host memory, where a side has any: 10^9 bytes each, SGLang's unit."""
    scale: Scale
    on_gpu: bool
    experts: int | None = None
    """In place of the model's; fewer, if more engines are to fit."""

    @property
    def host_bytes(self) -> int:
        """Of host memory."""
        return int(self.host_gb * 10**9)

    def setup(self, side: Tiered) -> Setup:
        """For the arguments that other benchmarks of engines share with this one."""
        rest = GPU.question_tokens + GPU.document_answer
        scale = replace(
            GPU, clients=MAX_RUNNING, document_tokens=self.scale.longest - rest
        )
        more = self.host_bytes >> 20 if side.host_on_device else 0
        return Setup(
            model=self.model,
            cache_mib=self.cache_mib + more,
            scale=scale,
            experts=self.experts,
            on_gpu=self.on_gpu,
        )


@dataclass(frozen=True)
class Tiered:
    """One side."""

    configuration: Configuration
    host_on_device: bool = False
    """Whether the device has the bytes that other sides have on the host."""
    only_on_gpu: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment."""


def configurations(engine: str, tiers: Tiers) -> dict[str, Tiered]:
    """By name, the plugin's first."""
    elastic = {"enabled": True, "elastic": True}
    hosted = {**elastic, "host_memory": tiers.host_bytes}
    stock = _vllm(tiers) if engine == "vllm" else _sglang(tiers)
    return {
        HOSTED: Tiered(Configuration(options=hosted)),
        PLUGIN: Tiered(Configuration(options=elastic)),
        **stock,
        LARGE: Tiered(Configuration(options=elastic), host_on_device=True),
    }


def _vllm(tiers: Tiers) -> dict[str, Tiered]:
    size = {"kv_offloading_size": tiers.host_bytes / 2**30}
    offloading = Configuration(size)
    return {
        "vLLM, offloading": Tiered(offloading, only_on_gpu=True),
        _SIMPLE: Tiered(
            offloading,
            only_on_gpu=True,
            variables={"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"},
        ),
        "vLLM": Tiered(Configuration()),
    }


def _sglang(tiers: Tiers) -> dict[str, Tiered]:
    size = int(tiers.host_gb) if tiers.host_gb.is_integer() else tiers.host_gb
    hierarchical = {
        "enable_hierarchical_cache": True,
        "hicache_size": size,
        "page_size": 64,  # of its documentation's examples
    }
    often = {
        "mamba_radix_cache_strategy": "extra_buffer",
        # Its Mamba-2 kernels need an interval of at least one chunk.
        "mamba_track_interval": MODELS[tiers.model].get("chunk_size", 64),
        "page_size": 16,
    }
    return {
        "SGLang, HiCache": Tiered(Configuration(hierarchical), only_on_gpu=True),
        _OFTEN: Tiered(Configuration({**hierarchical, **often}), only_on_gpu=True),
        # Copies without kernels, which are built when they are first needed.
        _DIRECT: Tiered(
            Configuration({**hierarchical, "hicache_io_backend": "direct"}),
            only_on_gpu=True,
        ),
        "SGLang": Tiered(Configuration()),
    }


def usual(engine: str, tiers: Tiers) -> list[str]:
    """Names of the sides that run where none are named."""
    return [
        name
        for name, side in configurations(engine, tiers).items()
        if name not in _NAMED_ONLY and (tiers.on_gpu or not side.only_on_gpu)
    ]


def arguments(engine: str, tiers: Tiers, side: Tiered) -> dict[str, Any]:
    """Of one side's engine, in its own words."""
    found: dict[str, Any] = ENGINES[engine].arguments(
        tiers.setup(side), side.configuration
    )
    if not tiers.on_gpu:
        return found
    if engine == "vllm":
        sizes = {"cudagraph_capture_sizes": CAPTURED_PASSES}
        return found | {"compilation_config": sizes}
    return found | {
        "cuda_graph_bs_decode": [n for n in CAPTURED_DECODES if n <= MAX_RUNNING],
        "cuda_graph_bs_prefill": PREFILL_SIZES,
    }


def variables(engine: str, tiers: Tiers, side: Tiered, lane: int) -> dict[str, str]:
    """Of the environment of the `lane`-th of the engines that run together."""
    found: dict[str, str] = ENGINES[engine].variables(
        tiers.setup(side), side.configuration, lane
    )
    return found | dict(side.variables)
