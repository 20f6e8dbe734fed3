# SPDX-License-Identifier: Apache-2.0
"""SGLang's arguments under the plugin: what is refused, what is set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import msgspec
from sglang.srt.arg_groups import overrides
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.minicpm import MiniCPMHybridConfig
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from hybrid_plugin.config import (
    DEFAULT_PAGE_SIZE,
    ConfigError,
    DiskOptions,
    HybridConfig,
)
from hybrid_plugin.engine import host_memory, sizing
from hybrid_plugin.engine.refusals import cannot_serve, ending_the_server
from hybrid_plugin.sglang import (
    compressed_keys,
    deterministic,
    disaggregation,
    hicache,
    known_pools,
    pipeline,
)
from hybrid_plugin.sglang.activation import FLAG, read_options, requested
from hybrid_plugin.sglang.compressed_keys import has_compressed_keys
from hybrid_plugin.sglang.index_keys import ring_group
from hybrid_plugin.sglang.layout import keeps_states_alone
from hybrid_plugin.sglang.log import logger
from hybrid_plugin.sglang.speculation import arguments as speculation

BACKEND = "hybrid"
"""Name of our prefix cache among SGLang's radix cache backends."""


def adjust(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Settle the cache's arguments before SGLang derives them from the model.

    A resolution hook of SGLang's `handle_model_specific_adjustments`.

    Raises:
        SystemExit: for arguments that the plugin cannot serve.
    """
    if not requested():
        pass  # a server whose options switched it off after its hooks were set
    elif (idle := reason_to_stay_idle(server_args)) is not None:
        if read_options().is_deterministic:
            with ending_the_server():
                raise cannot_serve(f"deterministic needs the plugin, and {idle}.")
        logger.info("hybrid-plugin is inactive: %s.", idle)
    else:
        with ending_the_server():
            settle(server_args, read_options())
    previous(server_args)


def confirm(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check what SGLang made of the arguments behind `adjust`.

    A resolution hook of its `handle_model_capability_adjustments`, the last step that
    changes whether a server may cache.  SGLang builds the cache of a radix cache
    backend even where it has switched caches off.

    Raises:
        SystemExit: if it may not.
    """
    previous(server_args)
    view = overrides.resolved_view(server_args)
    if view.radix_cache_backend != BACKEND:
        return
    with ending_the_server():
        for reason in _may_not_cache(view):
            raise cannot_serve(
                f"{reason} (its log says why); give --disable-radix-cache, or drop "
                f"{FLAG}."
            )


def _may_not_cache(view: Any) -> Iterator[str]:
    """Phrases about what SGLang found out of a server that keeps it from caching."""
    if view.disable_radix_cache:
        yield "SGLang switches prefix caches off for this model or with these flags"
    if view.is_embedding:
        yield "SGLang makes this a server of embeddings or scores"
    if view.chunked_prefill_size is not None and view.chunked_prefill_size <= 0:
        yield "SGLang computes prompts of this model or with these flags whole"


def reason_to_stay_idle(server_args: Any) -> str | None:
    """Why this server is not the plugin's business, a phrase; None if it is.

    It is if SGLang gives the model state slots, or KV of full attention and a pool of
    its own for layers with windows, and may cache.
    """
    view = overrides.resolved_view(server_args)
    decodes = disaggregation.reason_to_stay_idle(view)
    if decodes is not None:
        return decodes
    if view.disable_radix_cache:
        return "prefix caching is switched off (--disable-radix-cache)"
    model = overrides.model_config_of(view)
    if not model.is_generation:
        return "it serves text generation, and this server gives embeddings or scores"
    if isinstance(model.hf_config, MiniCPMHybridConfig):
        return "SGLang switches prefix caches off for MiniCPM-SALA"
    if has_states(model) or has_windows(model):
        return None
    return "the model has no state layers and no window pool beside its full attention"


def has_states(model: Any) -> bool:
    """Whether SGLang gives a model state slots, beside KV or alone.

    The configuration that `mambaish_config` finds is what SGLang's memory pools go
    by; its list of architectures leaves out models that have states as well.

    Args:
        model: SGLang's `ModelConfig`.
    """
    return mambaish_config(model) is not None


def has_windows(model: Any) -> bool:
    """Whether SGLang gives a model a pool of full attention and one for windows.

    DeepSeek-V4, whose windows are rings, has neither list of layers.  Of others, such
    as Gemma-3, SGLang keeps all KV in one pool, and its own cache serves them.

    Args:
        model: SGLang's `ModelConfig`.
    """
    return (
        mambaish_config(model) is None
        and model.is_hybrid_swa
        and bool(model.swa_attention_layer_ids)
        and bool(model.full_attention_layer_ids)
    )


def settle(server_args: Any, options: HybridConfig) -> None:
    """Check for conflicts, and set what our cache needs.

    Raises:
        ConfigError: naming the first argument that the plugin cannot serve.
    """
    view = overrides.resolved_view(server_args)
    options = hicache.take_over(view, options)
    model = overrides.model_config_of(view)
    drafts = chain(
        speculation.conflicts(
            view,
            windows=has_windows(model),
            compressed=has_compressed_keys(model),
            rings=has_states(model) and ring_group(model) is not None,
        ),
        speculation.unrecorded(view, options, model),
    )
    if keeps_states_alone(model) and view.speculative_algorithm is not None:
        raise cannot_serve(
            "drafts for a model without attention layers are not supported yet; drop "
            "--speculative-algorithm."
        )
    stages = pipeline.obstacles(view, options, model, windows=has_windows(model))
    sent = disaggregation.obstacles(view, options, model, windows=has_windows(model))
    conflict = next(chain(_conflicts(view), stages, sent, drafts), None)
    if conflict is not None:
        raise cannot_serve(conflict)
    unknown = known_pools.side_memory(model)
    if unknown is not None:
        raise cannot_serve(unknown)
    own = compressed_keys.PAGE_TOKENS if has_compressed_keys(model) else None
    page_size = _page_size(view, options, own)
    if options.is_deterministic:
        obstacle = next(deterministic.obstacles(view, page_size), None)
        if obstacle is not None:
            raise cannot_serve(obstacle)
    host_memory.check_packages(options, str(view.device))
    if options.host_memory is not None:
        ranks = max(view.tp_size * view.dp_size // view.nnodes, 1)
        host_memory.check_room(options.host_memory, ranks, host_memory.free_bytes())
    for given in options.outer_options:
        _check_storable(view, given.option)
    if options.store is not None and view.tp_size > 1:
        raise ConfigError(
            "store serves one rank in SGLang, whose ranks would find different things "
            "there: leave it or --tp-size out."
        )
    chosen = {"radix_cache_backend": BACKEND, "page_size": page_size} | hicache.OFF
    chosen |= speculation.running_requests(view, options, model)
    if has_states(model):
        # One slot per running sequence and no tracking slots beside it.
        chosen["mamba_radix_cache_strategy"] = "no_buffer"
    for line in _without_effect(view, states=has_states(model)):
        logger.warning("hybrid-plugin: %s", line)
    overrides.declare_resolution(server_args, "hybrid_plugin", **chosen)
    logger.info(
        "hybrid-plugin is active: it takes over prefix caching, in pages of %d tokens.",
        page_size,
    )


def _without_effect(view: Any, *, states: bool) -> Iterator[str]:
    """Sentences about flags that are for SGLang's own cache alone.

    Args:
        view: of the arguments.
        states: whether the model has any.
    """
    strategy = view.mamba_radix_cache_strategy
    if states and strategy not in ("auto", "no_buffer"):
        yield (
            f"--mamba-radix-cache-strategy {strategy} is for SGLang's own cache and "
            "has no effect."
        )
    if states and view.mamba_full_memory_ratio != _default("mamba_full_memory_ratio"):
        yield (
            "--mamba-full-memory-ratio is for SGLang's own cache and has no effect; "
            "the option state_memory_ratio divides pools of a fixed size."
        )
    if view.radix_eviction_policy != _default("radix_eviction_policy"):
        yield (
            f"--radix-eviction-policy {view.radix_eviction_policy} is for SGLang's own "
            "cache and has no effect."
        )


def _default(name: str) -> object:
    """Of one of SGLang's arguments, where the model's kind changes nothing."""
    every = msgspec.structs.fields(ServerArgs)
    return next(field.default for field in every if field.name == name)


def _check_storable(view: Any, option: str) -> None:
    """Refuse what other processes have no name for, and what would share files.

    Args:
        view: of the arguments.
        option: that needs such names.

    Raises:
        ConfigError: naming the flag.
    """
    if max(view.dp_size, view.attn_dp_size or 1) > 1:
        own = " with a folder of its own" if option == DiskOptions.option else ""
        raise ConfigError(
            f"{option} serves one replica, and with data parallelism there are "
            f"several: leave it out, or start a server for each{own}."
        )
    if view.nnodes > 1:
        raise ConfigError(
            f"{option} serves one machine, and the ranks are on several: leave it out."
        )
    if view.enable_lora or view.lora_paths:
        raise ConfigError(
            f"{option} cannot tell the weights of adapters in SGLang from others: drop "
            f"--enable-lora and --lora-paths, or leave {option} out."
        )


def _page_size(view: Any, options: HybridConfig, own: int | None = None) -> int:
    """Tokens in a page: what was asked for, or what prefill chunks are a multiple of.

    Args:
        view: of the arguments.
        options: of the plugin.
        own: what SGLang sets afterwards for this model, whatever was asked for.

    Raises:
        ConfigError: if two sources contradict each other, or chunks do not fit.
    """
    chunk = view.chunked_prefill_size or 0
    asked = sizing.asked_page_size(options, "--page-size", view.page_size)
    if own is not None:
        if asked not in (None, own):
            raise ConfigError(
                f"SGLang has pages of {own} tokens for this model, and not of {asked}: "
                "leave the page size out."
            )
        asked = own
    if asked is None and (
        speculation.needs_single_tokens(view) or disaggregation.sends(view)
    ):
        return 1  # in the latter case SGLang's decode servers have such pages
    if asked is None:
        return math.gcd(DEFAULT_PAGE_SIZE, chunk)
    if chunk % asked:
        raise ConfigError(
            f"--chunked-prefill-size {chunk} is no multiple of the page size {asked}: "
            "change one of them."
        )
    return asked


def _conflicts(view: Any) -> Iterator[str]:
    """Sentences about what the plugin does not support, with the way out."""
    if view.enable_unified_memory:
        yield f"--enable-unified-memory is another pool; drop it, or drop {FLAG}."
    behind = hicache.obstacle(view)
    if behind is not None:
        yield behind
    if view.enable_linear_replayssm:
        yield (
            "states are exact in one step of several only, and turns end between; drop "
            "--enable-linear-replayssm."
        )
    if view.enable_linear_replayssm_spec:
        yield (
            "states have gone beyond a turn's end when it is known, or are behind it; "
            "drop --enable-linear-replayssm-spec, and set draft_states to replay, "
            "which keeps turn ends."
        )
    if view.radix_cache_backend not in (None, BACKEND):
        yield f"it brings its own radix cache; drop --radix-cache-backend, or {FLAG}."
    if view.enable_int8_mamba_checkpoint:
        yield "snapshots are exact; drop --enable-int8-mamba-checkpoint."
    for flag in ("lmcache", "flexkv", "hisparse", "unified_cache_external_linker"):
        if getattr(view, f"enable_{flag}"):
            option = flag.replace("_", "-")
            yield f"--enable-{option} is another cache; drop it, or drop {FLAG}."
    if view.enable_streaming_session or view.enable_session_radix_cache:
        yield (
            "sessions are not supported yet; drop --enable-streaming-session and "
            "--enable-session-radix-cache."
        )
    if view.device == "cpu" and (view.attn_dp_size or 1) > 1:
        yield (
            "data-parallel attention pads batches, for which SGLang's attention in "
            "PyTorch has no lengths; drop --enable-dp-attention and --attn-dp-size."
        )
    if view.dcp_size > 1:
        yield "decode context parallelism is not supported yet; drop --dcp-size."
    if (view.attn_cp_size or 1) > 1 or view.enable_prefill_cp:
        yield (
            "context parallelism is not supported yet; drop --attn-cp-size and "
            "--enable-prefill-cp."
        )
    if view.dllm_algorithm is not None:
        yield "diffusion language models are not supported; drop --dllm-algorithm."
    if view.enable_two_batch_overlap or view.enable_pdmux:
        yield (
            "split batches are not supported yet; drop --enable-two-batch-overlap and "
            "--enable-pdmux."
        )
    for flag in ("return_routed_experts", "return_indexer_topk"):
        if getattr(view, f"enable_{flag}"):
            yield (
                "SGLang notes what it returns by the place of a token, and restored "
                f"tokens have other places; drop --enable-{flag.replace('_', '-')}."
            )
    if (
        view.enable_mixed_chunk
        and (view.attn_dp_size or 1) > 1
        and envs.SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP.get()
    ):
        yield (
            "with data-parallel attention a pass that also decodes cannot wait for "
            "results; drop --enable-mixed-chunk, or unset "
            "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP."
        )
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        yield (
            "pages are handed out by number before SGLang shrinks their memory; unset "
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING."
        )
    if envs.SGLANG_RADIX_FORCE_MISS.get():
        yield (
            "SGLANG_RADIX_FORCE_MISS also hides what prompts that were paused have "
            "computed; unset it, and give --disable-radix-cache for a run without hits."
        )
    if view.strip_thinking_cache:
        yield "a state cannot be stripped of its end; drop --strip-thinking-cache."
    if view.chunked_prefill_size is not None and view.chunked_prefill_size <= 0:
        yield "it needs chunked prefill; give --chunked-prefill-size a positive size."
