# SPDX-License-Identifier: Apache-2.0
"""How SGLang's cache memory is divided, and what is built on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.mem_cache.kv_cache_configurator import calculate_mla_kv_cache_dim
from sglang.srt.mem_cache.unified_draft_pool import draft_state_layer_classes
from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
from sglang.srt.runtime_context import (
    attention_backends,
    get_context,
    get_parallel,
    get_schedule,
    get_server_args,
)

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan
from hybrid_plugin.core.memory.layout import CacheLayout, PoolSizes
from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.device.virtual_arena import VirtualArena
from hybrid_plugin.engine import chat_template, elastic_memory, sizing
from hybrid_plugin.engine.cache_assembly import build_cache
from hybrid_plugin.engine.host_memory import plan_tier
from hybrid_plugin.engine.refusals import cannot_serve
from hybrid_plugin.engine.sizing import EngineLimits, FixedCount
from hybrid_plugin.sglang import (
    compressed_keys,
    elastic,
    host_copies,
    index_keys,
    known_pools,
    page_layout,
    pipeline,
    side_states,
)
from hybrid_plugin.sglang.allocator import (
    HybridSlotAllocator,
    HybridTokenAllocator,
    most_slots,
)
from hybrid_plugin.sglang.elastic import SharedPools
from hybrid_plugin.sglang.layout import make_layout
from hybrid_plugin.sglang.log import logger
from hybrid_plugin.sglang.pending_keys import pending_tensors
from hybrid_plugin.sglang.pipeline import StageLayers
from hybrid_plugin.sglang.pool_memory import PoolMemory
from hybrid_plugin.sglang.pool_rows import index_tensors, kv_tensors, page_rows
from hybrid_plugin.sglang.rings import ring_tensors
from hybrid_plugin.sglang.speculation import draft_pages, scratch
from hybrid_plugin.sglang.speculation.arguments import MOST_REQUESTS
from hybrid_plugin.sglang.speculation.replay import passes, records
from hybrid_plugin.sglang.speculation.replay.passes import Replay
from hybrid_plugin.sglang.speculation.scratch_layout import scratch_layout, tensors_of

_GIB = 1 << 30
_STATES = (
    "hybrid-plugin: %.1f MiB beside the pools hold the states after drafts, of %d "
    "sequences with %d tokens each to verify; fewer --max-running-requests take less."
)
_RECORDS = (
    "hybrid-plugin: %.1f MiB beside the pools hold records of drafts, of %d sequences "
    "with %d tokens each to verify; fewer --max-running-requests take less."
)


def reserve_slots(
    configurator: Any, memory_gib: float, options: HybridConfig, memory: PoolMemory
) -> float:
    """Divide a rank's cache memory; the slots, or what elastic pools share, is taken.

    Args:
        configurator: SGLang's `KVCacheConfigurator`.
        memory_gib: what there is for slots and pages together.
        options: of the plugin.
        memory: learns what was planned.

    Returns:
        What there is for pages, in GiB.

    Raises:
        ConfigError: if one sequence of the greatest length does not fit, or elastic
            pools are asked for that cannot be had.
    """
    device = torch.empty(0, device=configurator.device).device
    hindrance = elastic.hindrance(device.type)
    hindrance = hindrance or elastic.hindrance_of_pools(configurator)
    ranks = pipeline.layers_of_ranks(configurator)
    hindrance = hindrance or pipeline.hindrance(ranks)
    layers = pipeline.largest(ranks)
    available = int(memory_gib * _GIB) - host_copies.device_bytes(options, device)
    available = elastic_memory.limited(available, options)
    available = elastic.least_of_all_ranks(available)
    model = configurator.model_config
    limits = limits_of(
        model, available, device.type, hindrance, configurator.attn_dp_size
    )
    page_size = get_schedule().page_size
    kv = create_memory_pool_configurator(configurator)
    lay_out = partial(
        make_layout,
        model,
        page_size=page_size,
        device_type=device.type,
        layers=layers,
        draft_keys=draft_pages.draft_keys(configurator, page_size),
        drafts=scratch.drafts_per_step(),
    )
    fixed_layout = lay_out(
        token_bytes=_token_bytes(configurator, kv, layers), elastic=False
    )
    layout, taken = fixed_layout, None
    states_alone = layout.has_states_alone
    if elastic_memory.is_wanted(options, hindrance, states_alone=states_alone):
        layout = elastic_layout(configurator, kv, lay_out, options, limits, layers)
        taken = elastic_memory.take(
            available,
            options,
            device,
            block_bytes=limits.block_bytes,
            log=logger,
            stages=get_parallel().pp_size,
        )
        available = elastic.least_of_all_ranks(taken.held) + taken.block_bytes
    host_room = host_copies.room(options)
    plan = sizing.divide(
        layout,
        available,
        options,
        limits,
        logger,
        fixed_layout=fixed_layout,
        beside=scratch_bytes(model, available, options, limits),
        host_room=host_room,
    )
    if plan.shared is None and scratch.drafts_per_step():
        # SGLang does not count all KV of a draft model, and rows must hold it.
        pages = elastic_layout(
            configurator, kv, lay_out, options, limits, layers
        ).attention
        rows = replace(plan.layout, attention=pages)
        plan = replace(plan, host=plan_tier(rows, options, available, host_room))
    for line in plan.describe():
        logger.info("%s", line)
    memory.plan = plan
    if plan.shared is not None and taken is not None:
        memory.shared = _share(plan.shared, taken, model, options)
        _limit_sequences(plan.shared, limits, configurator.attn_dp_size)
    elif taken is not None:
        taken.close()
    if plan.shared is None:
        tell_of_scratch(model, available, options, limits)
    # SGLang counts without the slot that takes the writes of padded rows.
    slots = plan.sizes.slots - 1
    get_context().override("hybrid_plugin.slots", max_mamba_cache_size=slots)
    if states_alone:
        # SGLang counts one sequence's tokens, and no KV is taken for more.
        get_context().override("hybrid_plugin.tokens", max_total_tokens=plan.tokens)
    # SGLang divides by what it takes for the bytes of a token, a draft model's too.
    page_bytes = max(plan.layout.page_bytes, page_size * kv._cell_size)
    # Nothing would be taken for weights that leave no room.
    return max(plan.sizes.pages * page_bytes, 1) / _GIB


def _token_bytes(configurator: Any, kv: Any, layers: StageLayers) -> int:
    """KV of one token over these attention layers, of a draft model's too.

    SGLang counts index keys as well, and rounds them up to whole bytes for a token; of
    a pipeline, it counts the layers of this stage.
    """
    model = configurator.model_config
    if get_parallel().pp_size > 1:
        return int(kv._compute_cell_size(configurator, len(layers.attention)))
    if compressed_keys.has_compressed_keys(model):
        return int(kv._cell_size) - compressed_keys.token_bytes(model, kv)
    if not index_keys.has_index_keys(model):
        return int(kv._cell_size)
    dim = calculate_mla_kv_cache_dim(
        model_config=model, kv_cache_dtype=configurator.kv_cache_dtype
    )
    latents = int(dim * configurator.kv_cache_dtype.itemsize * len(layers.attention))
    page_size = get_schedule().page_size
    draft = draft_pages.draft_group(configurator, page_size)
    return latents + draft_pages.token_bytes(draft, page_size)


def elastic_layout(
    configurator: Any,
    kv: Any,
    lay_out: Callable[..., CacheLayout],
    options: HybridConfig,
    limits: EngineLimits,
    layers: StageLayers,
) -> CacheLayout:
    """How elastic pools lie.

    Args:
        configurator: SGLang's `KVCacheConfigurator`.
        kv: its `DefaultPoolConfigurator`.
        lay_out: `make_layout`, but for what is found here.
        options: of the plugin.
        limits: of the engine.
        layers: the most of each kind that any rank has.
    """
    model, page_size = configurator.model_config, get_schedule().page_size
    hybrid = mambaish_config(model)
    token_bytes: int = kv._cell_size
    draft = None
    if scratch.drafts_per_step():
        draft = draft_pages.draft_group(configurator, page_size)
        token_bytes = kv._compute_cell_size(
            configurator, len(hybrid.full_attention_layer_ids)
        )
    backends = (*attention_backends(), *draft_pages.backends())
    return lay_out(
        token_bytes=token_bytes,
        elastic=True,
        packed=page_layout.can_pack(
            model, backends, token_bytes, draft, page_size, layers
        ),
        draft=draft,
        scratch=scratch_layout(
            hybrid.mamba2_cache_params,
            torch.device(configurator.device).type,
            limits.max_sequences,
            recorded=passes.is_wanted(options, model),
        ),
    )


def _share(
    plan: ElasticPlan, taken: VirtualArena, model: Any, options: HybridConfig
) -> SharedPools:
    """The memory of all pools."""
    if plan.layout.scratch is None:
        return SharedPools(plan, taken)
    params = mambaish_config(model).mamba2_cache_params
    recorded = passes.is_wanted(options, model)
    return SharedPools(
        plan, taken, tensors_of(params, scratch.drafts_per_step(), recorded=recorded)
    )


def _limit_sequences(plan: ElasticPlan, limits: EngineLimits, ranks: int) -> None:
    """Have SGLang run no more sequences than the scratch has rows.

    More never fit; SGLang would capture graphs for them.
    """
    if plan.layout.scratch is None:
        return
    rows = plan.layout.scratch.rows
    logger.info(
        "hybrid-plugin: drafts are verified in rows of %.1f MiB that share the memory "
        "of the pools, up to %d at once.",
        plan.layout.scratch.row_bytes / (1 << 20),
        rows,
    )
    if rows < limits.max_sequences:
        get_context().override("hybrid_plugin.rows", max_running_requests=rows * ranks)


def scratch_bytes(
    model: Any, available: int, options: HybridConfig, limits: EngineLimits
) -> int:
    """Bytes that drafts take beside pools of a fixed size.

    Args:
        model: SGLang's `ModelConfig`.
        available: bytes that every rank has for all of them.
        options: of the plugin.
        limits: of SGLang.
    """
    drafts = scratch.drafts_per_step()
    if not drafts:
        return 0
    params = mambaish_config(model).mamba2_cache_params
    rows = _verifying(model, available, options, limits)
    if passes.is_wanted(options, model):
        return records.rows_of(rows) * records.row_bytes(params, drafts)
    return scratch.rows_bytes(params, rows, drafts)


def _verifying(
    model: Any, available: int, options: HybridConfig, limits: EngineLimits
) -> int:
    """Sequences that verify at once in fixed pools, at most."""
    most = limits.max_sequences
    if limits.slots is not None:
        most = min(most, limits.slots.ids - 1)
    if not passes.is_wanted(options, model):
        return most
    # Nobody runs without a slot.
    params = mambaish_config(model).mamba2_cache_params
    row = records.row_bytes(params, scratch.drafts_per_step())
    return min(most, available // int(params.mamba_cache_per_req + row))


def tell_of_scratch(
    model: Any, available: int, options: HybridConfig, limits: EngineLimits
) -> None:
    """Say in the log what drafts take beside fixed pools; arguments as above."""
    taken = scratch_bytes(model, available, options, limits)
    if taken:
        logger.info(
            _RECORDS if passes.is_wanted(options, model) else _STATES,
            taken / (1 << 20),
            _verifying(model, available, options, limits),
            scratch.drafts_per_step(),
        )


def limits_of(
    model: Any,
    available: int,
    device_type: str,
    hindrance: str | None,
    attn_dp_size: int = 1,
) -> EngineLimits:
    """What SGLang's arguments say about the cache.

    Args:
        model: SGLang's `ModelConfig`.
        available: bytes that every rank has.
        device_type: "cpu" or "cuda", as torch calls it.
        hindrance: what stands against elastic pools.
        attn_dp_size: ranks that SGLang divides requests and slots between; each has
            a cache of its own.
    """
    schedule = get_schedule()
    pages: FixedCount | None = None
    if schedule.max_total_tokens is not None:
        # SGLang counts without the page and the slot that take the writes of padding.
        count = schedule.max_total_tokens // schedule.page_size + 1
        pages = FixedCount(count, "--max-total-tokens")
    slots: FixedCount | None = None
    if schedule.max_mamba_cache_size is not None:
        count = schedule.max_mamba_cache_size // attn_dp_size + 1
        slots = FixedCount(count, "--max-mamba-cache-size")
    sequences = schedule.max_running_requests or MOST_REQUESTS
    return EngineLimits(
        max_model_len=model.context_len,
        max_sequences=max(sequences // attn_dp_size, 1),
        block_bytes=elastic_memory.block_bytes(available, device_type),
        hindrance=hindrance,
        pages=pages,
        slots=slots,
    )


def limit_tokens(tokens: int, memory: PoolMemory) -> int:
    """Tokens the KV pool is to hold, of the `tokens` that fit beside the slots."""
    return tokens if memory.plan is None else min(tokens, memory.plan.tokens)


def take_over(
    pools: Any,
    options: HybridConfig,
    memory: PoolMemory,
    interior: InteriorSnapshots | None,
    replay: Replay,
) -> Any:
    """Put the core in charge of pools that SGLang has just built.

    Args:
        pools: SGLang's `_InitializedPools`.
        options: of the plugin.
        memory: what they were built on.
        interior: what forward passes are to keep; None where they can keep nothing.
        replay: records drafts, where that is wanted.

    Returns:
        The same pools, with allocators that read from one `HybridCache`.

    Raises:
        ConfigError: for pools that keep more than the cache's commands copy.
    """
    stock = pools.token_to_kv_pool_allocator
    states = pools.req_to_token_pool
    kv_pool = stock.get_kvcache()
    full = getattr(kv_pool, "full_kv_pool", kv_pool)
    rings = [
        *memory.rings.give_to_slots(full, states),
        *memory.pending.give_to_slots(kv_pool, states),
    ]
    side_states.begin_with_zeros(states)
    written = scratch.scratch_tensors(states.mamba_pool.mamba_cache)
    known = [*_copied(stock, states), *written]
    known_pools.require(kv_pool, states, known)
    executor = memory.executor(
        kv_pool, states.mamba_pool, stock.page_size, interior, rings
    )
    kept = states.mamba_pool.mamba_cache
    tensors = () if memory.shared is None else memory.shared.scratch
    executor.scratch = replay.build(states, tensors)
    if scratch.scratch_tensors(kept):
        executor.scratch = scratch.DraftScratch(kept)
    cache = _build(stock, states, options, memory, interior is not None)
    states.mamba_allocator = HybridSlotAllocator(cache, stock.device)
    allocator = HybridTokenAllocator(cache, stock, executor)
    return msgspec.structs.replace(pools, token_to_kv_pool_allocator=allocator)


def share_draft_pages(
    pools: Any, model: torch.nn.Module, target: Any, memory: PoolMemory
) -> None:
    """Have pages carry the draft model's KV as well: it has the same positions.

    Slots carry its rings, if it has any.

    Args:
        pools: SGLang's `_InitializedPools` of the draft model.
        model: that model; its configuration is often the target's, states and all.
        target: `ReqToTokenPool` that the target's pools have.
        memory: where the target's executor is.

    Raises:
        ConfigError: for a draft model with states, or with pools that are not known.
    """
    if draft_state_layer_classes(model) or pools.req_to_token_pool is not target:
        raise cannot_serve(
            "draft models with states of their own are not supported yet; use one "
            "without state layers, or NGRAM."
        )
    kv_pool = pools.token_to_kv_pool
    pages = getattr(kv_pool, "full_kv_pool", kv_pool)
    rings = memory.rings.give_to_slots(pages, target)
    states = target.mamba_pool.mamba_cache  # SGLang may name them there as well
    targets = [*states.conv, states.temporal, *scratch.scratch_tensors(states)]
    own = [*kv_tensors(pages), *index_tensors(pages), *ring_tensors(pages)]
    known_pools.require(kv_pool, (), [*own, *targets])
    memory.drafts.append(pages)
    if memory.shared is None:
        memory.join(page_rows(pages, get_schedule().page_size), rings)
    elif not memory.shared.is_complete:
        raise cannot_serve(
            "elastic pools are not for this kind of draft model; set elastic to false."
        )


def _build(
    stock: Any,
    states: Any,
    options: HybridConfig,
    memory: PoolMemory,
    keeps_states_inside: bool,
) -> HybridCache:
    """The core, in charge of as many pages and slots as there are."""
    plan = memory.plan
    assert plan is not None, "SGLang divides its memory before it builds pools"
    if plan.shared is None:
        pages, slots = stock.size // stock.page_size + 1, states.mamba_pool.size + 1
        plan = replace(plan, sizes=PoolSizes(pages, slots))
    device = torch.device(stock.device).type
    cache = build_cache(
        plan,
        options,
        delimiters(options),
        device,
        keeps_states_inside=keeps_states_inside,
        # By default a pass over prompts does nothing for requests that decode.
        passes_are_shared=bool(get_schedule().enable_mixed_chunk),
    )
    if plan.shared is not None:
        states.mamba_pool.count_with(lambda: most_slots(cache) + cache.slots.running)
    return cache


def delimiters(options: HybridConfig) -> Delimiters | None:
    """What ends a message of the served model, if the options want to know."""
    server = get_server_args()
    return chat_template.delimiters(
        options,
        server.tokenizer_path or server.model_path,
        revision=server.revision,
        trust_remote_code=server.trust_remote_code,
        logger=logger,
        server_template=server.chat_template,
    )


def _copied(stock: Any, states: Any) -> list[torch.Tensor]:
    """All tensors that the cache's commands copy.

    Raises:
        ConfigError: for a kind of KV cache that is not known.
    """
    kv_pool, kept = stock.get_kvcache(), states.mamba_pool.mamba_cache
    full = getattr(kv_pool, "full_kv_pool", kv_pool)
    keys = compressed_keys.key_tensors(kv_pool)
    pages = [*kv_tensors(full), *index_tensors(full), *keys]
    rings = [*ring_tensors(full), *pending_tensors(kv_pool)]
    return [*pages, *kept.conv, kept.temporal, *rings, *side_states.tensors(states)]
