# SPDX-License-Identifier: Apache-2.0
"""What is compared: the engines with and without drafts, and the plugin with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import sglang_prefix, vllm_prefix
from benchmarks.drafts import sglang_pools, shapes
from benchmarks.drafts.traffic import Scale

ENGINES = ("vllm", "sglang")
PLUGIN = "plugin"
"""Names of the plugin's sides begin with it."""
CACHED, UNCACHED = "stock, drafts, cache", "stock, drafts, no cache"
PLAIN = "stock, no drafts"
FIXED, ELASTIC = f"{PLUGIN}, drafts, fixed", f"{PLUGIN}, drafts, elastic"
REPLAY = f"{ELASTIC}, ours kernels, replay"
GRAPHS = f"{ELASTIC}, ours kernels, prefill graphs"
GRAPHS_REPLAY = f"{REPLAY}, prefill graphs"
UNDRAFTED = f"{PLUGIN}, no drafts, elastic"
QUICK = (CACHED, UNCACHED, PLAIN, ELASTIC)
_IN_GRAPHS = (GRAPHS, GRAPHS_REPLAY)
_NOT_ON_CPU = {
    # Its prefix cache copies states with a Triton kernel while it speculates.
    "vllm": (CACHED, *_IN_GRAPHS),
    # Its CPU platform keeps no states beside those of running sequences.
    "sglang": (CACHED, *_IN_GRAPHS),
}
SLACK = 16
"""Tokens that a sequence may have besides the longest one's."""
STATE_DTYPES = ("bfloat16", "float32")
SLOTS_OF_FIXED_POOLS = 2
"""For each sequence that SGLang is let run beside a scratch of fixed size: its own, and
one that keeps a state of its prefix."""
CAPTURED_TOKENS = [1, 2, *range(4, 33, 4), 48, *range(64, 513, 32)]
"""Of vLLM's graphs: a step with 3 drafts has 4 tokens a sequence."""
CAPTURED_SEQUENCES = [1, 2, 4, 8, *range(16, 129, 16)]
"""Of SGLang's."""


@dataclass(frozen=True)
class Setup:
    """What all sides of a run share."""

    model: str
    cache_mib: int
    """Of each engine: KV, states, and what drafts need besides."""
    scale: Scale
    on_gpu: bool
    drafts: int = 3
    acceptance: float | None = None
    """Tokens of a verification on average, drafts and the one after them, forced by the
    engine's own switch; None where drafts are accepted for what they are."""
    drafter: str = "mtp"
    state_dtype: str = "bfloat16"
    running: int = 128
    """The most sequences that an engine is let run at once."""
    libraries: bool = False
    """Whether engines prefill gated delta nets with what they take by default, such as
    FlashInfer's kernels where they are installed, and not with their own in Triton."""

    @property
    def longest(self) -> int:
        """Tokens that an engine's longest sequence may have."""
        return self.scale.longest + SLACK


@dataclass(frozen=True)
class Configuration:
    """What one side has for itself."""

    drafts: bool = True
    cache: bool = True
    options: Mapping[str, Any] | None = None
    """Of the plugin; None where the engine runs without it."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments."""


def configurations(engine: str) -> dict[str, Configuration]:
    """By name, stock ones first."""
    kept: dict[str, Any] = {}
    if engine == "sglang":
        # The only kind of its prefix cache that serves drafts.
        kept = {"mamba_radix_cache_strategy": "extra_buffer"}
    return {
        CACHED: Configuration(flags=kept),
        UNCACHED: Configuration(cache=False),
        PLAIN: Configuration(drafts=False),
        FIXED: of_plugin({"elastic": False}),
        ELASTIC: of_plugin({"elastic": True}),
        f"{ELASTIC}, ours kernels": of_plugin(
            {"elastic": True, "kernels": "ours", "draft_states": "columns"}
        ),
        REPLAY: of_plugin(
            {"elastic": True, "kernels": "ours", "draft_states": "replay"}
        ),
        **{
            name: of_plugin(
                {
                    "elastic": True,
                    "kernels": "ours",
                    "draft_states": states,
                    "prefill_graphs": True,
                }
            )
            for name, states in ((GRAPHS, "columns"), (GRAPHS_REPLAY, "replay"))
        },
        UNDRAFTED: of_plugin({"elastic": True}, drafts=False),
    }


def of_plugin(options: Mapping[str, Any], *, drafts: bool = True) -> Configuration:
    """One of the plugin's sides."""
    return Configuration(drafts=drafts, options={"enabled": True, **options})


def usual(engine: str, on_gpu: bool, quick: bool) -> list[str]:
    """Names of the sides that run where none are named.

    Args:
        engine: "vllm" or "sglang".
        on_gpu: some run nowhere else.
        quick: only what the comparison is about.
    """
    names = QUICK if quick else tuple(configurations(engine))
    return [name for name in names if on_gpu or name not in _NOT_ON_CPU[engine]]


SCRATCH = {"vllm": vllm_prefix.SCRATCH, "sglang": sglang_prefix.SCRATCH}
"""Folders of models' configurations."""


def arguments(engine: str, setup: Setup, side: Configuration) -> dict[str, Any]:
    """Of one side's engine, in its own words."""
    where = shapes.folder(setup.model, SCRATCH[engine])
    found = arguments_of(where, engine, setup, side)
    if setup.model == shapes.BUNDLED:
        found["load_format"] = "auto"
    return found


def versions(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Those of engines among what one says about itself."""
    return {name: facts[name] for name in ENGINES if name in facts}


def arguments_of(
    where: Path, engine: str, setup: Setup, side: Configuration
) -> dict[str, Any]:
    """Of one side's engine, for the model whose configuration lies there."""
    plain = _vllm(setup, side) if engine == "vllm" else _sglang(setup, side, where)
    return plain | {_MODEL[engine]: str(where)} | dict(side.flags)


_MODEL = {"vllm": "model", "sglang": "model_path"}


def variables(
    engine: str, setup: Setup, side: Configuration, lane: int
) -> dict[str, str]:
    """Of the environment of the `lane`-th of the engines that run together."""
    found = {
        "HF_HUB_OFFLINE": "1",
        "HYBRID_PLUGIN": "0" if side.options is None else "1",
    }
    if engine == "vllm":
        return found | {
            # Engines that start together must not write to one compile cache.
            "VLLM_CACHE_ROOT": str(vllm_prefix.SCRATCH / f"cache-{lane}"),
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        }
    if side.drafts and setup.acceptance is not None:
        found["SGLANG_SIMULATE_ACC_LEN"] = str(setup.acceptance)
    if side.options is not None:
        budget = {"gpu_memory_budget": setup.cache_mib << 20}
        found["HYBRID_CONFIG"] = json.dumps({**side.options, **budget})
    elif not setup.on_gpu:
        found["SGLANG_PLATFORM"] = "hybrid_cpu"
    return found


# ---------------------------------------------------------------------------- vLLM


def _vllm(setup: Setup, side: Configuration) -> dict[str, Any]:
    found: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": setup.longest,
        "max_num_seqs": setup.running,
        "max_num_batched_tokens": 8192 if setup.on_gpu else 512,
        "kv_cache_memory_bytes": setup.cache_mib << 20,
        # Only how much must be free at the start: engines share the device.
        "gpu_memory_utilization": 0.05,
        "enable_prefix_caching": side.cache,
        "disable_log_stats": False,  # its counters of drafts come that way
    }
    if setup.on_gpu:
        found |= {
            "mamba_ssm_cache_dtype": setup.state_dtype,
            "compilation_config": {"cudagraph_capture_sizes": CAPTURED_TOKENS},
        }
        if not setup.libraries:
            found["gdn_prefill_backend"] = "triton"
    else:
        found["enforce_eager"] = True
    if side.drafts:
        found["speculative_config"] = _speculative_config(setup)
    if side.options is not None:
        found["additional_config"] = {"hybrid_plugin": dict(side.options)}
    return found


def _speculative_config(setup: Setup) -> dict[str, Any]:
    found: dict[str, Any] = {
        "method": setup.drafter,
        "num_speculative_tokens": setup.drafts,
    }
    if setup.drafter == "ngram":
        found |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if setup.acceptance is not None:
        found |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": setup.acceptance,
        }
    return found


# -------------------------------------------------------------------------- SGLang


def _sglang(setup: Setup, side: Configuration, where: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "random_seed": 0,
        "context_length": setup.longest,
        "max_running_requests": setup.running,
        "chunked_prefill_size": 8192 if setup.on_gpu else 512,
        "disable_radix_cache": not side.cache,
        "log_level": "warning",
    }
    if setup.on_gpu:
        found |= {
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "disable_flashinfer_autotune": True,
            "mem_fraction_static": 0.9,
            "mamba_ssm_dtype": setup.state_dtype,
            "cuda_graph_bs_decode": CAPTURED_SEQUENCES,
            "cuda_graph_bs_prefill": sglang_prefix.PREFILL_SIZES,
        }
        if not setup.libraries:
            found["linear_attn_prefill_backend"] = "triton"
    if side.drafts:
        found |= _algorithm(setup)
    if side.options is None or not side.options["elastic"]:
        found |= _pools(setup, side, where)
    return found


def _algorithm(setup: Setup) -> dict[str, Any]:
    verified = {"speculative_num_draft_tokens": setup.drafts + 1}
    if setup.drafter == "ngram":
        return verified | {
            "speculative_algorithm": "NGRAM",
            "speculative_ngram_max_bfs_breadth": 1,
        }
    return verified | {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": setup.drafts,
        "speculative_eagle_topk": 1,
    }


def _pools(setup: Setup, side: Configuration, where: Path) -> dict[str, int]:
    """Of sides whose pools are fixed: as many sequences as fit with their scratch.

    The plugin divides its bytes itself, and is only told how many may run.
    """
    # Without being told SGLang keeps states in float32.
    dtype = setup.state_dtype if setup.on_gpu else "float32"
    state, token = shapes.bytes_of(where, dtype)
    slots = sglang_pools.SLOTS_OF_UNCACHED
    if side.options is not None:
        slots = SLOTS_OF_FIXED_POOLS
    elif side.cache:
        slots = sglang_pools.SLOTS_OF_CACHED
    one = sglang_pools.Sequence(
        state_bytes=state,
        token_bytes=token,
        tokens=setup.scale.crowd_tokens,
        slots=slots,
        verified=setup.drafts + 1 if side.drafts else 0,
    )
    found = sglang_pools.pools(setup.cache_mib << 20, one, setup.running)
    if side.options is not None:
        return {"max_running_requests": found.running}
    return found.flags
