# SPDX-License-Identifier: Apache-2.0
"""The eviction policy knows what a token and a state take in SGLang's pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.policy.eviction import FlopAware, UsedFirst
from hybrid_plugin.sglang.planning import _eviction


class MHATokenToKVPool:
    """As much of SGLang's as is read: two layers of 3 heads with 8 numbers."""

    k_buffer = (torch.zeros(64, 3, 8, dtype=torch.bfloat16),) * 2
    v_buffer = k_buffer


def pools() -> tuple[Any, Any]:
    """One state layer of two convolutions, five slots."""
    cache = SimpleNamespace(
        conv=[torch.zeros(1, 5, 10, 3), torch.zeros(1, 5, 2)],
        temporal=torch.zeros(1, 5, 4, 4, 8),
    )
    kv = SimpleNamespace(full_kv_pool=MHATokenToKVPool())
    stock = SimpleNamespace(get_kvcache=lambda: kv, page_size=16)
    pool = SimpleNamespace(mamba_cache=cache, _slot_siblings=())
    return stock, SimpleNamespace(mamba_pool=pool)


def test_sizes_are_those_of_the_tensors() -> None:
    policy = _eviction(*pools(), HybridConfig(eviction_policy="flop-aware"))
    assert isinstance(policy, FlopAware)
    assert policy.token_bytes == 4 * 3 * 8 * 2
    assert policy.slot_bytes == (30 + 2 + 128) * 4


def test_the_default() -> None:
    assert type(_eviction(*pools(), HybridConfig())) is UsedFirst
