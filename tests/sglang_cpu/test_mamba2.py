# SPDX-License-Identifier: Apache-2.0
"""SGLang's Mamba-2 calls: prefill, decode, and the states that tracking reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_plugin.sglang_cpu import mamba2

HEADS, WIDTH, GROUPS, DEPTH = 4, 6, 2, 8
LENGTHS = (100, 64, 200)
CHUNK = 64
BACKEND = SimpleNamespace(_enable_stochastic_rounding=False)


class Layer:
    """Random inputs of a packed batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        total = sum(LENGTHS)
        self.x = torch.randn(total, HEADS, WIDTH)
        self.dt = torch.randn(total, HEADS) - 3
        self.b = torch.randn(total, GROUPS, DEPTH)
        self.c = torch.randn(total, GROUPS, DEPTH)
        self.a = -torch.rand(HEADS)
        self.skip = torch.randn(HEADS)
        self.bias = torch.randn(HEADS)
        self.initial = torch.randn(len(LENGTHS), HEADS, WIDTH, DEPTH)
        self.bounds = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0).int()

    def prefill(
        self, **changes: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Outputs, states on the packed grid, final states, tracked states."""
        out = torch.empty_like(self.x)[None]
        call: dict[str, Any] = {
            "chunk_size": CHUNK,
            "D": self.skip,
            "dt_bias": self.bias,
            "initial_states": self.initial,
            "cu_seqlens": self.bounds,
            "dt_softplus": True,
            "out": out,
            "return_varlen_states": True,
            "return_track_states": True,
            "state_dtype": torch.float32,
        }
        grid, final, tracked = mamba2.prefill(
            self.x[None],
            self.dt[None],
            self.a,
            self.b[None],
            self.c[None],
            **(call | changes),
        )
        return out[0], grid[0], final, None if tracked is None else tracked[0]

    def decode(self) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """Outputs token by token; for each sequence the states before each token."""
        out = torch.empty_like(self.x)
        pool = self.initial.clone()
        states: list[list[torch.Tensor]] = []
        for sequence, length in enumerate(LENGTHS):
            states.append([])
            for position in range(length):
                states[-1].append(pool[sequence].clone())
                token = int(self.bounds[sequence]) + position
                row = slice(token, token + 1)
                mamba2.update(
                    BACKEND,
                    pool,
                    self.x[row],
                    self.dt[row, :, None].expand(-1, -1, WIDTH),
                    self.a[:, None, None].expand(-1, WIDTH, DEPTH),
                    self.b[row],
                    self.c[row],
                    self.skip[:, None].expand(-1, WIDTH),
                    dt_bias=self.bias[:, None].expand(-1, WIDTH),
                    dt_softplus=True,
                    state_batch_indices=torch.tensor([sequence]),
                    out=out[row],
                )
            states[-1].append(pool[sequence].clone())
        return out, states


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


@pytest.fixture(scope="module")
def decoded(layer: Layer) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    return layer.decode()


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_prefill_equals_decoding_token_by_token(layer: Layer, decoded: Any) -> None:
    out, _, final, tracked = layer.prefill()
    close(out, decoded[0])
    close(final, torch.stack([states[-1] for states in decoded[1]]))
    assert tracked is None


def test_states_at_tracked_positions(layer: Layer, decoded: Any) -> None:
    # Sequences begin at 0, 100 and 164 in the packed batch.
    _, _, _, tracked = layer.prefill(
        track_seq_idx=torch.tensor([0, 2, 2]),
        track_end_locs=torch.tensor([64, 164 + 64, 164 + 192]),
    )
    assert tracked is not None
    states = decoded[1]
    close(tracked, torch.stack([states[0][64], states[2][64], states[2][192]]))


def test_states_on_the_packed_grid(layer: Layer, decoded: Any) -> None:
    """A grid position counts where it is a boundary of its sequence too."""
    _, grid, _, _ = layer.prefill()
    assert grid.shape[0] == -(-sum(LENGTHS) // CHUNK)
    close(grid[0], decoded[1][0][0])
    close(grid[1], decoded[1][0][64])
    assert grid[2:].isnan().all()  # 128 is 28 tokens into the second sequence


def test_no_initial_states_means_zeros(layer: Layer) -> None:
    zeros = torch.zeros_like(layer.initial)
    without, given = (
        layer.prefill(initial_states=None),
        layer.prefill(initial_states=zeros),
    )
    assert torch.equal(without[0], given[0])
    assert torch.equal(without[2], given[2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dt_limit": (0.0, 0.1)}, "limited"),
        ({"return_final_states": True}, "return_final_states"),
        ({"return_track_states": False}, "only the call"),
        (
            {
                "track_seq_idx": torch.tensor([0]),
                "track_end_locs": torch.tensor([32]),
            },
            "multiple of 64",
        ),
    ],
)
def test_what_it_does_not_compute_is_refused(
    layer: Layer, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        layer.prefill(**changes)


def mamba1_call() -> dict[str, Any]:
    """A decode of SGLang's Mamba-1 mixer: a head for each channel."""
    torch.manual_seed(1)
    channels, count = 5, 3
    x = torch.randn(count, channels, 1)
    return {
        "state": torch.randn(6, channels, 1, DEPTH),
        "x": x,
        "dt": torch.randn(count, channels, 1),
        "A": -torch.rand(channels, DEPTH)[:, None, :],
        "B": torch.randn(count, 1, DEPTH),
        "C": torch.randn(count, 1, DEPTH),
        "D": torch.randn(channels, 1),
        "z": torch.randn(count, channels, 1),
        "dt_bias": torch.zeros(channels, 1),
        "dt_softplus": True,
        "state_batch_indices": torch.tensor([4, -1, 2], dtype=torch.int32),
        "out": torch.full_like(x, float("nan")),
    }


def test_mamba_1_decays_each_dimension_by_its_own() -> None:
    call = mamba1_call()
    before = call["state"].clone()
    mamba2.update(BACKEND, **call)
    for row, slot in ((0, 4), (2, 2)):
        x, dt = call["x"][row, :, 0], torch.nn.functional.softplus(call["dt"][row])
        decay = torch.exp(dt * call["A"][:, 0])
        added = dt * x[:, None] * call["B"][row]
        state = decay * before[slot, :, 0] + added
        y = (state * call["C"][row]).sum(-1) + x * call["D"][:, 0]
        y = y * torch.nn.functional.silu(call["z"][row, :, 0])
        torch.testing.assert_close(call["state"][slot, :, 0], state)
        torch.testing.assert_close(call["out"][row, :, 0], y)
    others = [0, 1, 3, 5]
    assert torch.equal(call["state"][others], before[others])


def test_drafts_of_mamba_1_are_refused() -> None:
    call = mamba1_call()
    call["intermediate_states_buffer"] = torch.zeros(3, 2, 5, 1, DEPTH)
    with pytest.raises(NotImplementedError, match="drafts for Mamba-1"):
        mamba2.update(BACKEND, **call)
