# SPDX-License-Identifier: Apache-2.0
"""Mamba-1 gets as many slots as its CUDA kernel addresses, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hybrid_plugin.vllm.addressing import addressable_bytes


def group(kind: Any) -> Any:
    spec = SimpleNamespace(mamba_type=kind, dtypes=(torch.bfloat16, torch.float32))
    return SimpleNamespace(kv_cache_spec=spec)


PAGES: Any = SimpleNamespace(kv_cache_spec=SimpleNamespace())


@pytest.mark.parametrize("kind", [MambaAttentionBackendEnum.MAMBA1, "mamba1"])
def test_the_smallest_element_decides(kind: Any) -> None:
    assert addressable_bytes([PAGES, group(kind)], "cuda") == 2**31 * 2
    assert addressable_bytes([PAGES, group(kind)], "cpu") is None


@pytest.mark.parametrize("kind", [MambaAttentionBackendEnum.MAMBA2, "mamba2"])
def test_other_states_have_no_limit(kind: Any) -> None:
    assert addressable_bytes([PAGES, group(kind)], "cuda") is None
    assert addressable_bytes([PAGES], "cuda") is None
