# SPDX-License-Identifier: Apache-2.0
"""How the memory vLLM found free becomes a KV pool and a state pool."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from logging import CRITICAL, Logger
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan
from hybrid_plugin.core.memory.layout import (
    AttentionGroup,
    CacheLayout,
    PoolSizes,
    StateGroup,
)
from hybrid_plugin.engine.elastic_memory import describe
from hybrid_plugin.vllm import addressing, elastic
from hybrid_plugin.vllm.activation import logger, read_options
from hybrid_plugin.vllm.servable import UnservableError
from hybrid_plugin.vllm.specs import is_page_spec, to_pool_spec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The states of a layer start at multiples of this many bytes within a slot, so
# that kernels can load them in full vectors.
_STATE_ALIGNMENT = 128

_AUTO = -1
"""`--max-model-len auto`, as vLLM keeps it."""

_SILENT = Logger("hybrid_plugin.silent", CRITICAL)
"""For attempts of which only the last is told of."""


@dataclass
class PoolTensor(KVCacheTensor):
    """Placement of layers in one of the two pools' memory."""

    ids: int = 0
    """Pages or slots of the pool."""
    is_state: bool = False


@dataclass
class HybridKVCacheConfig(KVCacheConfig):
    """vLLM's cache configuration with two pools instead of one.

    `num_blocks` is the smaller pool, or what both have memory for at the start:
    warm-up and dummy runs hand out ids up to it in every group.
    """

    pages: int = 0
    slots: int = 0
    shared: ElasticPlan | None = None
    """How the pools share their memory; None where each has its own."""

    def num_blocks_of(self, tensor: KVCacheTensor) -> int:
        assert isinstance(tensor, PoolTensor)
        return tensor.ids

    @property
    def has_mamba_layers(self) -> bool:
        """False: it stands for states in vLLM's one pool, and for its checks of it.

        With CUDA graphs vLLM refuses more sequences than state blocks.  Graphs
        are captured on the reserved slot, and no more sequences run at once
        than there are slots, so nothing here needs that.
        """
        return False

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Never: pages hold KV of one type for good, and slots are zeroed by us."""
        return False


def make_groups(specs: dict[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Group layers with equal specs; attention groups come first.

    Every attention group uses the sequence's page ids, every state group its
    slot id, so layers that cannot share a group cost no second allocation.
    """
    by_spec: defaultdict[KVCacheSpec, list[str]] = defaultdict(list)
    for layer, spec in specs.items():
        by_spec[to_pool_spec(layer, spec)].append(layer)
    ordered = sorted(by_spec.items(), key=lambda item: not is_page_spec(item[0]))
    groups = [KVCacheGroupSpec(layers, spec) for spec, layers in ordered]
    if len({g.kv_cache_spec.block_size for g in _page_groups(groups)}) != 1:
        raise UnservableError(
            "the plugin needs attention layers that agree on one page size."
        )
    return groups


def make_layout(groups: list[KVCacheGroupSpec]) -> CacheLayout:
    """Sizes of a page and a slot over the groups' layers."""
    pages = _page_groups(groups)
    states = [g for g in groups if not is_page_spec(g.kv_cache_spec)]
    return CacheLayout(
        page_size=pages[0].kv_cache_spec.block_size,
        attention=tuple(
            AttentionGroup(tuple(g.layer_names), g.kv_cache_spec.page_size_bytes)
            for g in pages
        ),
        states=tuple(
            StateGroup(tuple(g.layer_names), _aligned_state_bytes(g)) for g in states
        ),
    )


def make_config(
    vllm_config: VllmConfig,
    groups: list[KVCacheGroupSpec],
    sizes: PoolSizes,
    shared: ElasticPlan | None = None,
) -> HybridKVCacheConfig:
    """Place the groups' layers: KV layer after layer, states slot after slot.

    Args:
        vllm_config: of the engine.
        groups: of `make_groups`.
        sizes: ids of each pool.
        shared: how the pools share their memory, if they do.
    """
    layout = make_layout(groups) if shared is None else shared.layout
    tensors: list[KVCacheTensor] = []
    page_offset = slot_offset = 0
    for group in groups:
        count = len(group.layer_names)
        if is_page_spec(group.kv_cache_spec):
            page_bytes = group.kv_cache_spec.page_size_bytes
            tensors.append(
                PoolTensor(
                    size=sizes.pages * layout.page_bytes,
                    layers=group.layer_names,
                    layer_stride=page_bytes * sizes.pages,
                    block_stride=page_bytes,
                    offset=page_offset,
                    ids=sizes.pages,
                )
            )
            page_offset += count * page_bytes * sizes.pages
        else:
            state_bytes = _aligned_state_bytes(group)
            tensors.append(
                PoolTensor(
                    size=sizes.slots * layout.slot_bytes,
                    layers=group.layer_names,
                    layer_stride=state_bytes,
                    block_stride=layout.slot_bytes,
                    offset=slot_offset,
                    ids=sizes.slots,
                    is_state=True,
                )
            )
            slot_offset += count * state_bytes
    return HybridKVCacheConfig(
        num_blocks=(
            min(sizes.pages, sizes.slots) if shared is None else shared.usable_at_start
        ),
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        prefix_cache_retention_interval=(
            vllm_config.cache_config.prefix_cache_retention_interval
        ),
        pages=sizes.pages,
        slots=sizes.slots,
        shared=shared,
    )


def plan(
    vllm_config: VllmConfig,
    worker_specs: list[dict[str, KVCacheSpec]],
    available_memory: list[int],
) -> list[KVCacheConfig]:
    """Plan equal pools for all ranks within the least memory any of them has.

    With `--max-model-len auto` the maximum length is set to what fits.

    Raises:
        ConfigError: if one sequence of the maximum length does not fit.
    """
    groups = make_groups(worker_specs[0])
    layout = make_layout(groups)
    available = min(available_memory)
    most = addressing.most_slots(groups, layout.slot_bytes, elastic.device_type())
    if vllm_config.model_config.original_max_model_len == _AUTO:
        _fit_length(vllm_config, layout, available, most)
    sizes, shared = _divide(vllm_config, layout, available, most, logger)
    if shared is not None:
        logger.info("%s", describe(shared))
    else:
        _log_pools(layout, sizes)
    return [
        make_config(vllm_config, make_groups(s), sizes, shared) for s in worker_specs
    ]


def capacity(vllm_config: VllmConfig, config: HybridKVCacheConfig) -> tuple[int, float]:
    """Return (KV tokens that fit, sequences of the maximum length that fit)."""
    max_model_len = vllm_config.model_config.max_model_len
    if config.shared is not None:
        tokens = (config.pages - 1) * config.shared.layout.page_size
        return tokens, config.shared.sequences(max_model_len)
    layout = make_layout(config.kv_cache_groups)
    longest = layout.pages_for(max_model_len)
    sequences = min((config.pages - 1) / longest, config.slots - 1)
    return (config.pages - 1) * layout.page_size, sequences


def pool_sizes(
    layout: CacheLayout, vllm_config: VllmConfig, options: HybridConfig, budget: int
) -> PoolSizes:
    """Divide `budget` bytes as the options say.

    Raises:
        ConfigError: if one sequence of the maximum length does not fit.
    """
    try:
        return layout.split(
            budget,
            max_model_len=vllm_config.model_config.max_model_len,
            state_memory_ratio=options.state_memory_ratio,
        )
    except ValueError as error:
        raise ConfigError(f"hybrid-plugin: {error}") from error


def _divide(
    vllm_config: VllmConfig,
    layout: CacheLayout,
    available: int,
    most_slots: int | None,
    log: Logger,
) -> tuple[PoolSizes, ElasticPlan | None]:
    """Ids of each pool, and how the pools share their memory, if they do.

    Args:
        vllm_config: of the engine.
        layout: of the model's cache.
        available: bytes on each rank.
        most_slots: slots that the model's kernels can address; None for any number.
        log: where to say why pools do not share.
    """
    shared = elastic.plan(vllm_config, layout, available, log)
    if shared is not None and most_slots is not None:
        if shared.sizes.slots <= most_slots:
            return shared.sizes, shared
        elastic.refuse_slots_out_of_reach(vllm_config, most_slots)
    elif shared is not None:
        return shared.sizes, shared
    options = read_options(vllm_config)
    budget = elastic.limited(available, options)
    sizes = pool_sizes(layout, vllm_config, options, budget)
    return replace(sizes, slots=addressing.capped(sizes.slots, most_slots)), None


def _fit_length(
    vllm_config: VllmConfig,
    layout: CacheLayout,
    available: int,
    most_slots: int | None,
) -> None:
    """Lower the maximum length to the greatest of which one sequence fits."""
    model = vllm_config.model_config
    derived = model.max_model_len

    def fits(length: int) -> bool:
        model.max_model_len = length
        try:
            _divide(vllm_config, layout, available, most_slots, _SILENT)
        except ConfigError:
            return False
        return True

    if fits(derived):
        return
    # Where not even one token fits, planning for one says so.
    model.max_model_len = max(
        bisect_left(range(1, derived), True, key=lambda length: not fits(length)), 1
    )
    logger.info(
        "hybrid-plugin fits the maximum length to the memory: %d of %d tokens",
        model.max_model_len,
        derived,
    )


def _log_pools(layout: CacheLayout, sizes: PoolSizes) -> None:
    logger.info(
        "hybrid-plugin pools: %d KV pages of %d tokens (%.1f MiB) and %d state slots "
        "of %.1f KiB (%.1f MiB)",
        sizes.pages,
        layout.page_size,
        sizes.pages * layout.page_bytes / 2**20,
        sizes.slots,
        layout.slot_bytes / 2**10,
        sizes.slots * layout.slot_bytes / 2**20,
    )


def _page_groups(groups: list[KVCacheGroupSpec]) -> list[KVCacheGroupSpec]:
    return [g for g in groups if is_page_spec(g.kv_cache_spec)]


def _aligned_state_bytes(group: KVCacheGroupSpec) -> int:
    size = group.kv_cache_spec.page_size_bytes
    return -(-size // _STATE_ALIGNMENT) * _STATE_ALIGNMENT
