# SPDX-License-Identifier: Apache-2.0
"""The gated norm on a GPU: bits, capture, and vLLM's beside it."""

from __future__ import annotations

import pytest
import torch
from hybrid_kernels import gated_norm

from tests.kernels.common import assert_near
from tests.kernels.test_gated_norm import (
    BOUNDS,
    EPS,
    HALF,
    define,
    define_norm_of_gated,
)

HEADS, WIDTH, COLUMNS = 32, 128, 8192
"""Of Qwen3.5's layers, and what lies before the gates in a token's row."""
MOST = 8192
SIZES = (1, 3, 4, 64, 511, MOST)
activations = pytest.mark.parametrize("activation", ["silu", "sigmoid"])


def rows(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, gates within what one projection made, and weights."""
    made = torch.randn(tokens, COLUMNS + HEADS * WIDTH, device="cuda").to(HALF)
    gate = made[:, COLUMNS:].unflatten(-1, (HEADS, WIDTH))
    x = torch.randn(tokens, HEADS, WIDTH, device="cuda").to(HALF)
    return x, gate, torch.randn(WIDTH, device="cuda").to(HALF)


@activations
@pytest.mark.parametrize("tokens", SIZES)
def test_rows_are_those_of_the_definition(tokens: int, activation: str) -> None:
    x, gate, weight = rows(tokens)
    wanted = define(x, gate, weight, activation)
    gated_norm.rms_norm(x, gate, weight, EPS, activation=activation, out=x)
    assert_near("out", x, wanted, BOUNDS[HALF])


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("tokens", SIZES)
def test_a_gate_may_come_first(tokens: int, groups: int) -> None:
    """In as many channels as Bamba 9B has, or twice as many."""
    width = 8192 if groups == 1 else 2048
    made = torch.randn(tokens, COLUMNS + groups * width, device="cuda").to(HALF)
    gate = made[:, COLUMNS:].unflatten(-1, (groups, width))
    x = torch.randn(tokens, groups, width, device="cuda").to(HALF)
    weight = torch.randn(groups, width, device="cuda").to(HALF)
    out = gated_norm.norm_of_gated(x, gate, weight, EPS)
    wanted = define_norm_of_gated(x, gate, weight)
    assert_near("out", out, wanted, 2 * BOUNDS[HALF])
    part = slice(tokens - 1, tokens)
    last = gated_norm.norm_of_gated(x[part], gate[part].contiguous(), weight, EPS)
    assert torch.equal(last, out[part])


def test_rows_have_the_same_bits_in_any_batch() -> None:
    x, gate, weight = rows(MOST)
    every = gated_norm.rms_norm(x, gate, weight, EPS)
    for tokens in SIZES:
        part = slice(MOST - tokens, MOST)
        alone = gated_norm.rms_norm(x[part], gate[part].contiguous(), weight, EPS)
        assert torch.equal(alone, every[part])


@activations
@pytest.mark.parametrize("tokens", SIZES)
def test_it_gives_what_vllms_gives_of_a_copy(tokens: int, activation: str) -> None:
    """Within one unit in the last place of bfloat16: sums may be in another order."""
    guard = pytest.importorskip(
        "vllm.third_party.flash_linear_attention.ops.layernorm_guard"
    )
    x, gate, weight = rows(tokens)
    ours = gated_norm.rms_norm(x, gate, weight, EPS, activation=activation)
    theirs = torch.empty_like(x)
    guard.layer_norm_fwd(
        x.view(-1, WIDTH),
        weight,
        None,
        EPS,
        z=gate.reshape(-1, WIDTH),
        out=theirs.view(-1, WIDTH),
        group_size=WIDTH,
        norm_before_gate=True,
        is_rms_norm=True,
        activation=activation,
    )
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0.0)
    assert ours.eq(theirs).float().mean() > 0.99


def test_a_captured_norm_replays_other_rows() -> None:
    """In place, as vLLM's step does it."""
    x, gate, weight = rows(7)
    gated_norm.rms_norm(x, gate, weight, EPS, out=x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gated_norm.rms_norm(x, gate, weight, EPS, out=x)
    other_x, other_gate, _ = rows(7)
    wanted = gated_norm.rms_norm(other_x, other_gate, weight, EPS)
    x.copy_(other_x)
    gate.copy_(other_gate)
    graph.replay()
    assert torch.equal(x, wanted)


def test_rows_far_apart() -> None:
    """Five tokens 2**30 elements apart, so that offsets pass 2**31."""
    apart = 2**30
    room = torch.empty(4 * apart + HEADS * WIDTH, dtype=HALF, device="cuda")
    strides = (apart, WIDTH, 1)
    wide = room.as_strided((5, HEADS, WIDTH), strides)
    x, gate, weight = rows(5)
    wide.copy_(gate)
    wanted = gated_norm.rms_norm(x, gate, weight, EPS)
    assert torch.equal(gated_norm.rms_norm(x, wide, weight, EPS), wanted)
    gated_norm.rms_norm(x, wide, weight, EPS, out=wide)
    assert torch.equal(wide, wanted)
