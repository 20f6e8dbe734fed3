# SPDX-License-Identifier: Apache-2.0
"""SGLang's causal convolution calls."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hybrid_plugin.sglang_cpu import convolution

CHANNELS, TAPS = 6, 4
BOUNDS = torch.tensor([0, 9, 9, 11], dtype=torch.int32)
SLOTS = torch.tensor([2, 0, 3], dtype=torch.int32)


@pytest.fixture
def weight() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(CHANNELS, TAPS)


def expected(line: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``[D, W - 1 + T]`` to ``[D, T]``."""
    out = functional.conv1d(line[None], weight[:, None], groups=CHANNELS)[0]
    return functional.silu(out)


def test_prefill_then_decode(weight: torch.Tensor) -> None:
    x = torch.randn(CHANNELS, 11)
    pool = torch.randn(4, CHANNELS, TAPS - 1)
    before = pool.clone()
    flags = torch.tensor([True, True, False])
    out = convolution.prefill(
        x, weight, None, pool, BOUNDS, [9, 0, 2], SLOTS, flags, activation="silu"
    )
    first = torch.cat([before[2], x[:, :9]], dim=1)
    third = torch.cat([torch.zeros(CHANNELS, TAPS - 1), x[:, 9:]], dim=1)
    torch.testing.assert_close(out[:, :9], expected(first, weight))
    torch.testing.assert_close(out[:, 9:], expected(third, weight))
    assert torch.equal(pool[2], x[:, 6:9])
    assert torch.equal(pool[[0, 1]], before[[0, 1]])

    token = torch.randn(2, CHANNELS)
    slots = torch.tensor([2, -1], dtype=torch.int32)
    step = convolution.update(
        token, pool, weight, None, "silu", conv_state_indices=slots
    )
    line = torch.cat([x[:, 6:9], token[0][:, None]], dim=1)
    torch.testing.assert_close(step[0], expected(line, weight)[:, 0])
    assert torch.equal(pool[2], line[:, 1:])


def test_without_flags_every_sequence_is_new(weight: torch.Tensor) -> None:
    x = torch.randn(CHANNELS, 11)
    pool = torch.full((4, CHANNELS, TAPS - 1), torch.nan)
    out = convolution.prefill(x, weight, None, pool, BOUNDS, [9, 0, 2], SLOTS)
    assert not out.isnan().any()


@pytest.mark.parametrize("name", ["silu", "swish", True])
def test_names_of_the_activation(weight: torch.Tensor, name: str | bool) -> None:
    x = torch.randn(2, CHANNELS)
    plain, active = (
        convolution.update(
            x, torch.zeros(2, CHANNELS, TAPS - 1), weight, None, activation
        )
        for activation in (None, name)
    )
    torch.testing.assert_close(active, functional.silu(plain))


def test_unknown_activation(weight: torch.Tensor) -> None:
    pool = torch.zeros(2, CHANNELS, TAPS - 1)
    with pytest.raises(ValueError, match="relu"):
        convolution.update(torch.randn(2, CHANNELS), pool, weight, None, "relu")


def test_windows_that_move_are_refused(weight: torch.Tensor) -> None:
    pool = torch.zeros(2, CHANNELS, TAPS - 1)
    with pytest.raises(NotImplementedError, match="num_accept_tokens"):
        convolution.update(
            torch.randn(2, CHANNELS), pool, weight, num_accept_tokens=pool
        )
