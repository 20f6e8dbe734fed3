# SPDX-License-Identifier: Apache-2.0
"""Scales within pages of elastic pools: vLLM's own views of them, and no write."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from hybrid_plugin.upstream.hookpoints import resolve
from hybrid_plugin.vllm import contracts, patches
from hybrid_plugin.vllm.wrapping import WRAPPED

PAGES, HEADS, TOKENS, CONTENT = 5, 2, 16, 2 * (64 + 4)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The patch, taken back afterwards."""
    owner, name = resolve(contracts.SCALES)
    monkeypatch.setattr(owner, name, getattr(owner, name))
    patches.patch_scales()
    yield


def attention() -> SimpleNamespace:
    return SimpleNamespace(_k_scale_cache=None, _v_scale_cache=None)


def cache() -> torch.Tensor:
    """The second of three layers that lie side by side in each page."""
    room = torch.full((PAGES, 3, TOKENS, HEADS, CONTENT), 7, dtype=torch.int8)
    return room[:, 1].transpose(1, 2)


def test_views_are_those_of_vllm_and_nothing_is_written(patched: None) -> None:
    owner, name = resolve(contracts.SCALES)
    function = getattr(owner, name)
    ours, theirs = attention(), attention()
    pages, filled = cache(), cache()
    function(ours, pages)
    getattr(function, WRAPPED)(theirs, filled)
    assert torch.equal(pages, cache()) and not torch.equal(filled, cache())
    for kind in ("_k_scale_cache", "_v_scale_cache"):
        one, other = getattr(ours, kind), getattr(theirs, kind)
        assert one.shape == other.shape == (PAGES, TOKENS, HEADS)
        assert one.stride() == other.stride()
        assert one.storage_offset() == other.storage_offset()
        one.fill_(1.0)  # in the pages themselves
    assert torch.equal(pages, filled)


def test_views_are_made_once(patched: None) -> None:
    owner, name = resolve(contracts.SCALES)
    one = attention()
    getattr(owner, name)(one, cache())
    made = one._k_scale_cache
    getattr(owner, name)(one, cache())
    assert one._k_scale_cache is made
