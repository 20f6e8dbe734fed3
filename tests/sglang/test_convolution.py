# SPDX-License-Identifier: Apache-2.0
"""Gathered states go to SGLang's convolution in few shapes, and come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_plugin.sglang.convolution import convolve

CHANNELS, WIDTH = 6, 4


class Backend:
    """Notes what its convolution is given, and updates the states of the batch."""

    def __init__(self) -> None:
        self.given: list[torch.Size] = []

    def convolve_prefill(
        self, layer: Any, batch: Any, mixed: torch.Tensor, states: Any, indices: Any
    ) -> torch.Tensor:
        self.given.append(states.shape)
        states[indices] += 1
        return mixed * 2


def run(states: torch.Tensor, indices: torch.Tensor) -> tuple[Backend, torch.Tensor]:
    backend, mixed = Backend(), torch.ones(9, CHANNELS)
    original = Backend.convolve_prefill
    return backend, convolve(original, backend, None, None, mixed, states, indices)


@pytest.mark.parametrize(
    ("requests", "rows"), [(1, 16), (15, 16), (16, 16), (17, 32), (33, 64)]
)
def test_gathered_states_have_a_power_of_two_of_rows(requests: int, rows: int) -> None:
    states = torch.rand(requests, CHANNELS, WIDTH - 1)
    before = states.clone()
    backend, out = run(states, torch.arange(requests))
    assert backend.given == [(rows, CHANNELS, WIDTH - 1)]
    assert torch.equal(states, before + 1)
    assert torch.equal(out, torch.full((9, CHANNELS), 2.0))


def test_the_pool_itself_is_left_as_it_is() -> None:
    rows = torch.zeros(40, 64)
    pool = rows[:, : CHANNELS * (WIDTH - 1)].view(40, CHANNELS, WIDTH - 1)
    for states, indices in (
        (pool, torch.tensor([3, 7])),
        (pool[:2], torch.tensor([1, 0])),
        (torch.zeros(40, CHANNELS, WIDTH - 1), torch.tensor([3, 7])),
    ):
        backend, _ = run(states, indices)
        assert backend.given == [states.shape]
        assert states.sum() == 2 * CHANNELS * (WIDTH - 1)
