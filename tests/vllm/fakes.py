# SPDX-License-Identifier: Apache-2.0
"""What the adapter reads of vLLM's objects, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import LookUp
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.core.tiers.host_plan import plan_host, rows_of
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from hybrid_plugin.vllm.planning import (
    HybridKVCacheConfig,
    make_config,
    make_groups,
    make_layout,
)
from tests.core.support import ByMinimum

PAGE = 16

SPECS: dict[str, KVCacheSpec] = {
    "a0": FullAttentionSpec(
        block_size=PAGE, num_kv_heads=2, head_size=8, dtype=torch.float32
    ),
    "s0": MambaSpec(block_size=1024, shapes=((3, 5),), dtypes=(torch.float32,)),
}


class Tokens(list[int]):
    """Tokens of a request, which count how often they are read as a whole."""

    whole_reads = 0

    def __iter__(self) -> Any:
        self.whole_reads += 1
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        if key == slice(None):
            self.whole_reads += 1
        return super().__getitem__(key)


@dataclass
class FakeRequest:
    """The fields of vLLM's request that the manager reads."""

    request_id: str
    all_token_ids: Tokens
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    cache_salt: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    extra_args: Any = None
    kv_transfer_params: Any = None
    resumable: bool = False
    prompt_token_ids: Any = None
    num_prompt_tokens: int = 0
    max_tokens: int = 16
    kv_cache_report_mode: str = "incremental"
    spec_token_ids: list[int] = field(default_factory=list)
    over: bool = True
    """Whether it is finished, when it is freed."""

    def is_finished(self) -> bool:
        """As vLLM asks."""
        return self.over

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the output."""
        return len(self.all_token_ids)

    @property
    def sampling_params(self) -> Any:
        """Only what came with the request for plugins."""
        return SimpleNamespace(extra_args=self.extra_args)


def request(name: str, length: int, first: int = 0, **fields: Any) -> Any:
    """A request whose prompt counts up from `first`."""
    return FakeRequest(name, Tokens(range(first, first + length)), **fields)


def image(identifier: str, offset: int, length: int) -> Any:
    """A multimodal item among a request's tokens."""
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def pools(
    pages: int = 9, slots: int = 5, host: int = 0, *, records: bool = False
) -> HybridKVCacheConfig:
    """Planned pools, the reserved page and slot included, and bytes of host memory."""
    cache = SimpleNamespace(prefix_cache_retention_interval=None)
    config: Any = SimpleNamespace(cache_config=cache)
    groups = make_groups(SPECS)
    plan = plan_host(rows_of(make_layout(groups)), host) if host else None
    sizes = PoolSizes(pages, slots)
    return make_config(config, groups, sizes, records=records, host=plan)


def manager(
    pages: int = 9,
    slots: int = 5,
    *,
    watermark: float = 0.0,
    clock: Callable[[], float] | None = lambda: 0.0,
    records_drafts: bool = False,
    host: int = 0,
    max_running: int | None = None,
    max_model_len: int = 1 << 20,
    **options: Any,
) -> HybridKVCacheManager:
    """A manager on such pools, whose prompts of 32 tokens leave a snapshot."""
    made = HybridKVCacheManager(
        pools(pages, slots, host, records=records_drafts),
        HybridConfig.from_mapping(options),
        watermark=watermark,
        log_stats=True,
        clock=clock,
        max_running=max_running,
        max_model_len=max_model_len,
    )
    made.cache.tree.eviction = ByMinimum(prompt_end=32)
    return made


def admit(of: HybridKVCacheManager, one: Any, tokens: int, **arguments: Any) -> Any:
    """Look a request up and admit it with `tokens` tokens more, as a scheduler."""
    blocks, hit, _ = of.get_computed_blocks(one)
    return of.allocate_slots(one, tokens, hit, blocks, **arguments)


def ids(blocks: Any) -> tuple[list[int], ...]:
    """Ids in each group: pages, then the slot."""
    return tuple([block.block_id for block in group] for group in blocks.blocks)


def compute(of: HybridKVCacheManager, one: Any, computed: int) -> None:
    """A step that takes a request to `computed` tokens is scheduled."""
    one.num_computed_tokens = computed
    of.step_scheduled([one])


def look_up_of(of: HybridKVCacheManager, seq_id: str) -> LookUp:
    """What was found last for a request that waits."""
    found = of.front_door._waiting[seq_id].found
    assert found is not None
    return found


def nothing_kept(of: HybridKVCacheManager) -> bool:
    """Whether the manager remembers no request, and no pool lends anything."""
    levels = of.cache.levels()
    return (
        of.front_door.waiting == 0
        and of.cache.live == 0
        and levels["kv"].used == 0
        and levels["state"].used == 0
    )
