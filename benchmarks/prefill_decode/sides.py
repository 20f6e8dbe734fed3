# SPDX-License-Identifier: Apache-2.0
"""What is compared: pairs of servers and single ones, stock and with the plugin."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import vllm_prefix
from benchmarks.prefill_decode import models
from benchmarks.prefill_decode.traffic import Scale

PLUGIN = "plugin"
"""Names of the plugin's sides begin with it."""
PLUGIN_PAIR, STOCK_PAIR = f"{PLUGIN}, prefill and decode", "vLLM, prefill and decode"
PLUGIN_ONE, STOCK_ONE = f"{PLUGIN}, one server", "vLLM, one server"
NO_CACHE = f"{STOCK_PAIR}, no prefix cache"
HOST_BUFFER = f"{STOCK_PAIR}, host buffers"
PREFILL, DECODE, BOTH = "prefill", "decode", "both"
"""What a server does."""
SLACK = 16
"""Tokens that a sequence may have besides the longest one's."""
BATCHED_TOKENS = 8192
_SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_PORT"


@dataclass(frozen=True)
class Setup:
    """What all sides of a run share."""

    model: str
    cache_mib: int
    """Of each server's device."""
    host_mib: int
    """Of each of the plugin's servers."""
    scale: Scale
    on_gpu: bool
    experts: int | None = None
    """In place of the model's; fewer, if more servers are to fit."""
    stream_interval: int = 1
    """Tokens of a piece of an answer, after the first one."""
    flags: tuple[str, ...] = ()
    """Further ones of every server."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further ones of every server's environment."""


@dataclass(frozen=True)
class Deployment:
    """One side."""

    roles: tuple[str, ...]
    options: Mapping[str, Any] | None = None
    """Of the plugin; None where servers run without it."""
    connector: Mapping[str, Any] | None = None
    """Of vLLM: `--kv-transfer-config`."""
    flags: tuple[str, ...] = ()
    only_on_gpu: bool = False


def deployments(setup: Setup) -> dict[str, Deployment]:
    """By name."""
    hosted = {"elastic": True, "host_memory": setup.host_mib << 20}
    peers = {"weights": f"of {setup.model}"}
    pair = (PREFILL, DECODE)
    nixl: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    buffered = nixl | {"kv_buffer_device": "cpu"}
    stock = nixl if setup.on_gpu else buffered  # the CPU's memory is what it has
    return {
        PLUGIN_PAIR: Deployment(pair, {**hosted, "peers": peers}),
        STOCK_PAIR: Deployment(pair, connector=stock),
        PLUGIN_ONE: Deployment((BOTH,), hosted),
        STOCK_ONE: Deployment((BOTH,)),
        NO_CACHE: Deployment(
            pair, connector=stock, flags=("--no-enable-prefix-caching",)
        ),
        HOST_BUFFER: Deployment(pair, connector=buffered, only_on_gpu=True),
    }


USUAL = (PLUGIN_PAIR, STOCK_PAIR, PLUGIN_ONE, STOCK_ONE)
"""The sides that run where none are named."""


def device(role: str, lane: int) -> int:
    """The GPU of a server: prefill on the first, decode on the second.

    Args:
        role: of the server.
        lane: number of its side; single servers go to either GPU.
    """
    return {PREFILL: 0, DECODE: 1}.get(role, lane % 2)


def captured(concurrency: int) -> list[int]:
    """Sequences in a CUDA graph; a batch that only decodes is never larger."""
    return sorted({1, 2, 4, concurrency, *range(8, concurrency, 8)})


def arguments(setup: Setup, deployment: Deployment) -> list[str]:
    """Of `vllm serve`, but for the port."""
    shared = vllm_prefix.engine_arguments(
        argparse.Namespace(model=setup.model, cache_gib=0)
    )
    for name in ("skip_tokenizer_init", "disable_log_stats"):
        del shared[name]
    longest = setup.scale.longest + SLACK
    overrides: dict[str, int] = {"max_position_embeddings": longest}
    if setup.experts is not None:
        overrides["num_experts"] = setup.experts
    shared |= {
        "max_model_len": longest,
        "max_num_seqs": setup.scale.concurrency,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "kv_cache_memory_bytes": setup.cache_mib << 20,
        "enable_prompt_tokens_details": True,
        "stream_interval": setup.stream_interval,
    }
    if models.has_weights(setup.model):
        del shared["load_format"]
    else:
        shared["hf_overrides"] = overrides
    if setup.on_gpu:
        sizes = captured(setup.scale.concurrency)
        shared["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    else:
        for name in ("gdn_prefill_backend", "compilation_config"):
            del shared[name]
        shared |= {"enforce_eager": True, "max_num_batched_tokens": 512}
    if deployment.options is not None:
        options = {"hybrid_plugin": dict(deployment.options)}
        shared["additional_config"] = options
    if deployment.connector is not None:
        shared["kv_transfer_config"] = dict(deployment.connector)
    return [*as_flags(shared), *deployment.flags, *setup.flags]


def as_flags(given: Mapping[str, Any]) -> list[str]:
    """Engine arguments as the command line takes them."""
    return [_flag(name.replace("_", "-"), value) for name, value in given.items()]


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        value = json.dumps(value)
    return f"--{name}={value}"


def variables(
    setup: Setup, deployment: Deployment, role: str, lane: int, port: int
) -> dict[str, str]:
    """Of a server's environment.

    Args:
        setup: of all sides.
        deployment: the server's.
        role: of the server in it.
        lane: number of its side.
        port: where its connector may listen, if it has one.
    """
    found = {
        "HYBRID_PLUGIN": "0" if deployment.options is None else "1",
        # Servers that start together must not write to one compile cache.
        "VLLM_CACHE_ROOT": str(vllm_prefix.SCRATCH / f"served-cache-{lane}-{role}"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        # FlashInfer may be missing, and is not what is measured.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if setup.on_gpu:
        found["CUDA_VISIBLE_DEVICES"] = str(device(role, lane))
    else:
        found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if deployment.connector is not None:
        found[_SIDE_CHANNEL] = str(port)
        # The layout of convolutions' states that NixlConnector transfers.
        found["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
    return found | dict(setup.variables)
