# SPDX-License-Identifier: Apache-2.0
"""How memory becomes pools: sizes, refusals, and the length that fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    MambaSpec,
)

from hybrid_plugin.config import ConfigError
from hybrid_plugin.vllm import planning
from hybrid_plugin.vllm.planning import HybridKVCacheConfig

ATTENTION = FullAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32
)
PAGE_BYTES = 16 * 2 * 8 * 2 * 4  # 2048
STATE = MambaSpec(block_size=1024, shapes=((256,),), dtypes=(torch.float32,))
SLOT_BYTES = 1024
SPECS: dict[str, KVCacheSpec] = {"a0": ATTENTION, "s0": STATE}


def config_of(
    longest: int = 1024,
    *,
    auto: bool = False,
    drafts: int = 0,
    page_ranks: int = 1,
    **options: Any,
) -> Any:
    """What planning reads of an engine's configuration."""
    return SimpleNamespace(
        additional_config={"hybrid_plugin": {"elastic": False, **options}},
        model_config=SimpleNamespace(
            max_model_len=longest, original_max_model_len=-1 if auto else longest
        ),
        cache_config=SimpleNamespace(
            prefix_cache_retention_interval=None,
            kv_cache_memory_bytes=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(
            local_world_size=1, decode_context_parallel_size=page_ranks
        ),
        num_speculative_tokens=drafts,
        num_lookahead_tokens=drafts,
    )


def planned(config: Any, *available: int) -> HybridKVCacheConfig:
    found = planning.plan(config, [SPECS] * len(available), list(available))
    assert len(found) == len(available)
    assert isinstance(found[0], HybridKVCacheConfig)
    return found[0]


def fitting(tokens: int) -> int:
    """Bytes of one sequence with the reserved ids."""
    return (-(-tokens // 16) + 1) * PAGE_BYTES + 2 * SLOT_BYTES


def test_all_ranks_plan_for_the_one_with_the_least_memory() -> None:
    alone = planned(config_of(), fitting(2048))
    assert planned(config_of(), 1 << 30, fitting(2048)).pages == alone.pages


@pytest.mark.parametrize(
    ("options", "available", "sentence"),
    [
        ({}, fitting(1024) - 1, "cannot hold one sequence of 1024 tokens"),
        (
            {"gpu_memory_budget": fitting(1024) - 1},
            1 << 30,
            "cannot hold one sequence of 1024 tokens",
        ),
    ],
)
def test_what_does_not_fit_is_told_of(
    options: Any, available: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        planned(config_of(**options), available)


def test_a_length_that_is_asked_for_is_not_lowered() -> None:
    config = config_of()
    planned(config, fitting(1024))
    assert config.model_config.max_model_len == 1024


@pytest.mark.parametrize("tokens", [16, 160, 1008])
def test_automatic_length_is_what_the_memory_holds(tokens: int) -> None:
    config = config_of(auto=True)
    found = planned(config, fitting(tokens))
    assert config.model_config.max_model_len == tokens
    assert (found.pages, found.slots) == (tokens // 16 + 1, 2)
    assert planning.capacity(config, found) == (tokens, 1)


def test_automatic_length_stays_where_it_fits() -> None:
    config = config_of(auto=True)
    planned(config, fitting(1024))
    assert config.model_config.max_model_len == 1024


def test_automatic_length_with_elastic_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning.elastic, "block_bytes", lambda config: 4096)
    config = config_of(1 << 20, auto=True, elastic=True)
    found = planned(config, 1 << 20)
    length = config.model_config.max_model_len
    assert found.shared is not None and 0 < length < 1 << 20
    longer = config_of(length + 1, elastic=True)
    with pytest.raises(ConfigError, match="elastic pools do not fit"):
        planned(longer, 1 << 20)


def test_memory_for_not_one_token_is_told_of() -> None:
    with pytest.raises(ConfigError, match="cannot hold one sequence of 1 tokens"):
        planned(config_of(auto=True), fitting(1) - 1)


@pytest.mark.parametrize(("drafts", "ids"), [(0, 3), (3, 7)])
def test_warm_up_has_a_row_of_slots_for_a_request(drafts: int, ids: int) -> None:
    """Beside a page or two for its tokens, and one id to spare."""
    groups = planning.make_groups(SPECS)
    assert planning.limits_of(config_of(drafts=drafts), groups).warm_up_ids == ids
