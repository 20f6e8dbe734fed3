# SPDX-License-Identifier: Apache-2.0
"""Mamba-1 gets as many slots as its CUDA kernel addresses, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hybrid_plugin.vllm.addressing import capped, most_slots


def group(kind: Any) -> Any:
    spec = SimpleNamespace(mamba_type=kind, dtypes=(torch.bfloat16, torch.float32))
    return SimpleNamespace(kv_cache_spec=spec)


PAGES: Any = SimpleNamespace(kv_cache_spec=SimpleNamespace())
MIB = 1 << 20


@pytest.mark.parametrize("kind", [MambaAttentionBackendEnum.MAMBA1, "mamba1"])
def test_the_smallest_element_decides(kind: Any) -> None:
    assert most_slots([PAGES, group(kind)], MIB, "cuda") == 2**31 * 2 // MIB
    assert most_slots([PAGES, group(kind)], MIB, "cpu") is None


@pytest.mark.parametrize("kind", [MambaAttentionBackendEnum.MAMBA2, "mamba2"])
def test_other_states_have_no_limit(kind: Any) -> None:
    assert most_slots([PAGES, group(kind)], MIB, "cuda") is None
    assert most_slots([PAGES], MIB, "cuda") is None


def test_slots_out_of_reach_are_left_out() -> None:
    assert capped(9000, 4096) == 4096
    assert capped(4096, 4096) == 4096
    assert capped(9000, None) == 9000
