# SPDX-License-Identifier: Apache-2.0
"""How the memory vLLM found free becomes pools of pages and of states."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)

from hybrid_plugin.config import DEFAULT_PAGE_SIZE
from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.core.memory.attention_windows import FULL_ATTENTION, ChunkedLocal
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan
from hybrid_plugin.core.memory.layout import (
    AttentionGroup,
    CacheLayout,
    PoolSizes,
    StateGroup,
)
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.engine import elastic_memory, host_memory, sizing
from hybrid_plugin.engine.sizing import CachePlan, EngineLimits
from hybrid_plugin.engine.stages import stages_differ
from hybrid_plugin.vllm import (
    addressing,
    context_parallel,
    elastic,
    page_layout,
    page_size,
)
from hybrid_plugin.vllm.activation import logger, read_options
from hybrid_plugin.vllm.kernels import agreement
from hybrid_plugin.vllm.ranks import on_this_machine
from hybrid_plugin.vllm.servable import UnservableError
from hybrid_plugin.vllm.specs import (
    is_page_spec,
    to_pool_spec,
    tokens_in_page,
    window_of,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The states of a layer start at multiples of this many bytes within a slot, so
# that kernels can load them in full vectors.
_STATE_ALIGNMENT = 128

_WARM_UP_STEPS = 5
"""Decode steps of vLLM's warm-up."""

_STAGES_DIFFER = stages_differ("VLLM_PP_LAYER_PARTITION")

_AUTO = -1
"""`--max-model-len auto`, as vLLM keeps it."""


@dataclass
class PoolTensor(KVCacheTensor):
    """Placement of layers in one pool's memory."""

    ids: int = 0
    """Pages or slots of the pool."""
    pool: PoolId = Pool.KV


@dataclass
class HybridKVCacheConfig(KVCacheConfig):
    """vLLM's cache configuration with several pools instead of one.

    `num_blocks` is the smallest pool, or what all have memory for at the start:
    warm-up and dummy runs hand out ids up to it in every group.
    """

    pages: int = 0
    """Of the layers with full attention; where there are none, they cost nothing."""
    slots: int = 0
    windows: tuple[int, ...] = ()
    """Pages of each window group, in the order of `CacheLayout.attention_windows`."""
    shared: ElasticPlan | None = None
    """How the pools share their memory; None where each has its own."""
    interior: bool = False
    """Whether forward passes keep states in the middle of a prompt."""
    records: bool = False
    """Whether drafts leave a record of what they do to a state, and no states."""
    host: HostPlan | None = None
    """Of the host memory behind the pools; None without any."""
    page_size: int = DEFAULT_PAGE_SIZE
    """Tokens in a page.  Where no layer has pages, they only number tokens."""
    largest: CacheLayout | None = None
    """What no rank exceeds, by which pools with memory of their own are sized, where
    pipeline stages differ; None where all are like this one."""

    @property
    def plan(self) -> CachePlan:
        """The same without vLLM's types."""
        layout = self.shared.layout if self.shared else self.largest
        if layout is None:
            layout = make_layout(self._owners(), page_size=self.page_size)
        sizes = PoolSizes(self.pages, self.slots, self.windows)
        return CachePlan(layout, sizes, self.shared, self.host)

    def _owners(self) -> list[KVCacheGroupSpec]:
        """The groups without layers that read another one's KV, which vLLM's workers
        add to them."""
        owners = {name for tensor in self.kv_cache_tensors for name in tensor.layers}
        return [
            KVCacheGroupSpec(
                [name for name in group.layer_names if name in owners],
                group.kv_cache_spec,
            )
            for group in self.kv_cache_groups
        ]

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


def make_groups(
    specs: Mapping[str, KVCacheSpec], page_ranks: int = 1
) -> list[KVCacheGroupSpec]:
    """Group layers with equal specs: full attention, windows, states.

    All groups with one window use the same page ids, all state groups the
    sequence's slot id, so layers that cannot share a group cost no second
    allocation.  There may be state layers alone.

    Args:
        specs: what the layers declare.
        page_ranks: over which vLLM interleaves the tokens of a page.

    Raises:
        UnservableError: for layers that the plugin has no pools for.
    """
    by_spec: defaultdict[KVCacheSpec, list[str]] = defaultdict(list)
    for layer, spec in specs.items():
        by_spec[to_pool_spec(layer, spec, page_ranks)].append(layer)
    ordered = sorted(by_spec.items(), key=lambda item: _rank(item[0]))
    groups = [KVCacheGroupSpec(layers, spec) for spec, layers in ordered]
    if not groups:
        raise UnservableError("the model's layers keep nothing for later tokens.")
    page_sizes = {tokens_in_page(g.kv_cache_spec) for g in _page_groups(groups)}
    if len(page_sizes) > 1:
        raise UnservableError(
            "the plugin needs attention layers that agree on one page size."
        )
    for size in page_sizes:
        _check_chunks(groups, size)
    return groups


def groups_of_ranks(
    worker_specs: Sequence[Mapping[str, KVCacheSpec]], page_ranks: int = 1
) -> list[list[KVCacheGroupSpec]]:
    """The groups of each rank: the same in the same order, with the layers it has.

    Stages of a pipeline have other layers each, and may have none of some group.

    Args:
        worker_specs: what the layers of each rank declare.
        page_ranks: as of `make_groups`.

    Raises:
        UnservableError: as `make_groups` does.
    """
    merged = {name: spec for specs in worker_specs for name, spec in specs.items()}
    groups = make_groups(merged, page_ranks)
    return [
        [
            KVCacheGroupSpec(
                [name for name in group.layer_names if name in specs],
                group.kv_cache_spec,
            )
            for group in groups
        ]
        for specs in worker_specs
    ]


def _largest(ranks: Sequence[list[KVCacheGroupSpec]]) -> list[KVCacheGroupSpec]:
    """Groups of which each has as many layers as any rank has of it."""
    return [
        max(groups, key=lambda group: len(group.layer_names))
        for groups in zip(*ranks, strict=True)
    ]


def _are_alike(ranks: Sequence[list[KVCacheGroupSpec]]) -> bool:
    """Whether pages and slots are as large on every rank."""
    counts = {tuple(len(group.layer_names) for group in groups) for groups in ranks}
    return len(counts) == 1


def _rank(spec: KVCacheSpec) -> int:
    window = window_of(spec)
    return 2 if window is None else int(window != FULL_ATTENTION)


def _check_chunks(groups: list[KVCacheGroupSpec], page_size: int) -> None:
    """vLLM's attention within chunks wants each to begin with a page."""
    for group in groups:
        window = window_of(group.kv_cache_spec)
        if isinstance(window, ChunkedLocal) and window.chunk % page_size:
            raise UnservableError(
                f"pages of {page_size} tokens do not fill chunks of {window.chunk}; "
                "choose another page_size."
            )


def make_layout(
    groups: list[KVCacheGroupSpec],
    *,
    packed: bool = False,
    page_size: int = DEFAULT_PAGE_SIZE,
) -> CacheLayout:
    """Sizes of a page of each pool and of a slot, over the groups' layers.

    Args:
        groups: of `make_groups`.
        packed: whether all layers of a page lie side by side.
        page_size: tokens in a page, where no layer says so because none has pages.
    """
    pages = _page_groups(groups)
    states = [g for g in groups if not is_page_spec(g.kv_cache_spec)]
    return CacheLayout(
        page_size=tokens_in_page(pages[0].kv_cache_spec) if pages else page_size,
        attention=tuple(
            AttentionGroup(
                tuple(g.layer_names),
                g.kv_cache_spec.page_size_bytes,
                window_of(g.kv_cache_spec) or FULL_ATTENTION,
            )
            for g in pages
        ),
        states=tuple(
            StateGroup(tuple(g.layer_names), _aligned_state_bytes(g)) for g in states
        ),
        addressable_slot_bytes=addressing.addressable_bytes(
            states, elastic.device_type()
        ),
        packed=packed,
    )


def pools_of(groups: list[KVCacheGroupSpec]) -> list[PoolId]:
    """The pool of each group."""
    windows = make_layout(groups).attention_windows
    pools: list[PoolId] = []
    for group in groups:
        window = window_of(group.kv_cache_spec)
        if window is None:
            pools.append(Pool.STATE)
        elif window == FULL_ATTENTION:
            pools.append(Pool.KV)
        else:
            pools.append(Pool.window(windows.index(window)))
    return pools


def make_config(
    vllm_config: VllmConfig,
    groups: list[KVCacheGroupSpec],
    sizes: PoolSizes,
    shared: ElasticPlan | None = None,
    *,
    interior: bool = False,
    records: bool = False,
    host: HostPlan | None = None,
    largest: CacheLayout | None = None,
) -> HybridKVCacheConfig:
    """Place the groups' layers: KV as the layout says, states slot after slot.

    Args:
        vllm_config: of the engine.
        groups: of `make_groups`.
        sizes: ids of each pool.
        shared: how the pools share their memory, if they do.
        interior: whether forward passes keep states in the middle of a prompt.
        records: whether drafts leave records, and no states.
        host: the host memory behind the pools, if there is any.
        largest: what no rank exceeds, where ranks differ.
    """
    tokens = _page_size(vllm_config, groups)
    layout = make_layout(groups, page_size=tokens) if shared is None else shared.layout
    return HybridKVCacheConfig(
        num_blocks=(
            min(sizes.of(pool) for pool in pools_of(groups))
            if shared is None
            else shared.usable_at_start
        ),
        kv_cache_tensors=list(_tensors(groups, layout, sizes)),
        kv_cache_groups=groups,
        prefix_cache_retention_interval=(
            vllm_config.cache_config.prefix_cache_retention_interval
        ),
        pages=sizes.pages,
        slots=sizes.slots,
        windows=sizes.windows,
        shared=shared,
        interior=interior,
        records=records,
        host=host,
        page_size=tokens,
        largest=largest,
    )


def _tensors(
    groups: list[KVCacheGroupSpec], layout: CacheLayout, sizes: PoolSizes
) -> Iterator[PoolTensor]:
    """Where each group's layers lie in the memory of their pool."""
    used: Counter[PoolId] = Counter()
    for pool, group in zip(pools_of(groups), groups, strict=True):
        if not group.layer_names:
            continue  # another stage of the pipeline has them
        ids = sizes.of(pool)
        if pool == Pool.STATE:
            layer_stride = _aligned_state_bytes(group)
            block_stride = layout.slot_bytes
        elif layout.packed:
            layer_stride = group.kv_cache_spec.page_size_bytes
            block_stride = layout.row_bytes[pool]
        else:
            block_stride = group.kv_cache_spec.page_size_bytes
            layer_stride = block_stride * ids
        yield PoolTensor(
            size=ids * layout.row_bytes[pool],
            # A copy: vLLM adds layers that read another's KV to the group.
            layers=list(group.layer_names),
            layer_stride=layer_stride,
            block_stride=block_stride,
            offset=used[pool],
            ids=ids,
            pool=pool,
        )
        used[pool] += len(group.layer_names) * layer_stride


def plan(
    vllm_config: VllmConfig,
    worker_specs: list[dict[str, KVCacheSpec]],
    available_memory: list[int],
) -> list[KVCacheConfig]:
    """Plan equal pools for all ranks within the least memory any of them has.

    Stages of a pipeline hold different layers.  Ids mean the same on all of them, so
    pools have as many ids everywhere as fit beside the most layers of each kind.

    With `--max-model-len auto` the maximum length is set to what fits.

    Raises:
        ConfigError: if one sequence of the maximum length does not fit.
    """
    ranks = groups_of_ranks(worker_specs, context_parallel.page_ranks(vllm_config))
    groups = _largest(ranks)
    are_alike = _are_alike(ranks)
    fixed = make_layout(groups, page_size=_page_size(vllm_config, groups))
    layout = replace(fixed, packed=page_layout.is_packed(vllm_config))
    available = min(available_memory)
    options = read_options(vllm_config)
    limits = limits_of(vllm_config, groups)
    if not are_alike:
        limits = replace(limits, hindrance=limits.hindrance or _STAGES_DIFFER)
    model, longest = vllm_config.model_config, limits.max_model_len
    if model.original_max_model_len == _AUTO:
        limits = sizing.with_fitting_length(layout, available, options, limits)
        model.max_model_len = limits.max_model_len
    if limits.max_model_len < longest:
        logger.info(
            "hybrid-plugin fits the maximum length to the memory: %d of %d tokens",
            limits.max_model_len,
            longest,
        )
    found = sizing.divide(
        layout,
        available,
        options,
        limits,
        logger,
        fixed_layout=fixed,
        host_room=host_memory.room_for(options, on_this_machine(vllm_config)),
    )
    for line in found.describe():
        logger.info("%s", line)
    interior = agreement.keep_interior(worker_specs)
    records = agreement.record_drafts(worker_specs)
    return [
        make_config(
            vllm_config,
            own,
            found.sizes,
            found.shared,
            interior=interior,
            records=records,
            host=found.host,
            largest=None if are_alike else fixed,
        )
        for own in ranks
    ]


def limits_of(
    vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec] = ()
) -> EngineLimits:
    """What the configuration says about the cache.

    Args:
        vllm_config: of the engine.
        groups: of the model's layers, if they are known.
    """
    return EngineLimits(
        max_model_len=vllm_config.model_config.max_model_len,
        max_sequences=vllm_config.scheduler_config.max_num_seqs,
        chunk=vllm_config.scheduler_config.max_num_batched_tokens,
        block_bytes=elastic.block_bytes(vllm_config),
        hindrance=elastic_memory.obstacle(elastic.device_type()),
        warm_up_ids=_warm_up_ids(vllm_config, groups),
    )


def _warm_up_ids(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Ids that vLLM's warm-up hands out to one request, one after the other.

    It is given pages for a prompt and some decode steps with all drafts, and a row of
    slots, in every group.  Pages are counted by the rows of one rank.
    """
    row = 1 + vllm_config.num_speculative_tokens
    tokens = 1 + row + _WARM_UP_STEPS * row + vllm_config.num_lookahead_tokens
    return 1 + sum(
        -(-tokens // group.kv_cache_spec.block_size)
        if is_page_spec(group.kv_cache_spec)
        else row
        for group in groups
    )


def capacity(vllm_config: VllmConfig, config: HybridKVCacheConfig) -> tuple[int, float]:
    """Return (KV tokens that fit, sequences of the maximum length that fit)."""
    found = config.plan
    return found.tokens, found.sequences(vllm_config.model_config.max_model_len)


def _page_size(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Tokens in a page: as the layers with pages have it, or as the user asks."""
    for group in _page_groups(groups):
        return tokens_in_page(group.kv_cache_spec)
    return page_size.of_states(vllm_config)


def _page_groups(groups: list[KVCacheGroupSpec]) -> list[KVCacheGroupSpec]:
    return [g for g in groups if is_page_spec(g.kv_cache_spec)]


def _aligned_state_bytes(group: KVCacheGroupSpec) -> int:
    size = group.kv_cache_spec.page_size_bytes
    return -(-size // _STATE_ALIGNMENT) * _STATE_ALIGNMENT
