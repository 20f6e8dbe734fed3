# SPDX-License-Identifier: Apache-2.0
"""Slot-major states: views that share no byte, and one copy for all of a slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from hybrid_plugin.device.arena import Arena
from hybrid_plugin.sglang.pool_rows import slot_rows
from hybrid_plugin.sglang.slots import SlotMajorPool, slot_bytes, state_views

SLOTS, LAYERS = 6, 3


def params(*conv: tuple[int, ...], temporal: tuple[int, ...] = (2, 4, 8)) -> Any:
    """As much of SGLang's state parameters as views need; 16-bit convolutions."""
    return SimpleNamespace(
        shape=SimpleNamespace(conv=list(conv), temporal=temporal),
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
        layers=list(range(LAYERS)),
    )


MODELS = {
    "one convolution": params((10, 3)),
    "three convolutions": params((5, 3), (7, 3), (16, 3)),
    "no temporal state": params((10, 3), temporal=(0, 4, 8)),
}


def rows_of(model: Any) -> torch.Tensor:
    size = slot_bytes(model) + 384  # a granule's padding
    return torch.zeros(SLOTS, size, dtype=torch.int8)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_views_are_sglangs_shapes_and_share_no_byte(model: Any) -> None:
    rows = rows_of(model)
    views = state_views(rows, model)
    shapes = [*model.shape.conv, model.shape.temporal]
    assert [tuple(v.shape) for v in views] == [(LAYERS, SLOTS, *s) for s in shapes]
    for number, view in enumerate(views):
        view.fill_(number + 1)
    for number, view in enumerate(views):
        assert bool((view == number + 1).all())
        if view.numel():
            assert view[0].stride(0) * view.itemsize == rows.shape[1]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_state_is_aligned_and_lies_in_its_slot(model: Any) -> None:
    rows = rows_of(model)
    for view in state_views(rows, model):
        for layer in range(LAYERS if view.numel() else 0):
            start = view[layer].data_ptr() - rows.data_ptr()
            assert start % 128 == 0
            assert start + view[layer, 0].numel() * view.itemsize <= slot_bytes(model)


def pool() -> SlotMajorPool:
    model = MODELS["three convolutions"]
    made = SlotMajorPool(
        rows_of(model),
        size=SLOTS - 1,
        spec_state_size=0,
        cache_params=model,
        mamba_layer_ids=model.layers,
        device="cpu",
    )
    for number, state in enumerate(states(made)):
        state.copy_(torch.randn(state.shape, generator=torch.manual_seed(number)))
    return made


def states(of: SlotMajorPool) -> list[torch.Tensor]:
    return [*of.mamba_cache.conv, of.mamba_cache.temporal]


def test_copies_and_clears_touch_all_of_their_slots_and_no_other() -> None:
    made = pool()
    before = [state.clone() for state in states(made)]
    arena = Arena(slot_rows(made))
    arena.copy([1, 2], [4, 5])
    arena.zero([2])
    for state, old in zip(states(made), before, strict=True):
        assert torch.equal(state[:, [0, 1, 3]], old[:, [0, 1, 3]])
        assert torch.equal(state[:, [4, 5]], old[:, [1, 2]])
        assert not state[:, 2].any()


def test_sglang_s_own_copies_and_clears_work_on_the_views() -> None:
    made = pool()
    before = [state.clone() for state in states(made)]
    made.copy_from(torch.tensor([1]), torch.tensor([4]))
    made.clear_slots(torch.tensor([2]))
    for state, old in zip(states(made), before, strict=True):
        assert torch.equal(state[:, [1, 3, 5]], old[:, [1, 3, 5]])
        assert torch.equal(state[:, 4], old[:, 1])
        assert not state[:, 2].any()


def test_a_layer_s_cache_is_a_view_of_the_slots() -> None:
    made = pool()
    layer = made.mamba2_layer_cache(1)
    layer.temporal[3] = 7
    layer.conv[2][3] = 8
    assert bool((made.mamba_cache.temporal[1, 3] == 7).all())
    assert bool((made.mamba_cache.conv[2][1, 3] == 8).all())


def test_the_core_says_how_many_slots_there_are() -> None:
    made = pool()
    assert made.size == SLOTS - 1
    made.count_with(lambda: 3)
    assert made.size == 3
