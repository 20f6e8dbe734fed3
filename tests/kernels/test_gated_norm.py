# SPDX-License-Identifier: Apache-2.0
"""The gated norm: definition, reference and kernel, and memory beside its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybrid_kernels import gated_norm

from .common import assert_near

EPS = 1e-6
HALF = torch.bfloat16
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Half a unit in the last place, and float32 sums in any order."""
types = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
activations = pytest.mark.parametrize("activation", gated_norm.ACTIVATIONS)
shapes = pytest.mark.parametrize(
    ("tokens", "heads", "width"),
    [(1, 32, 128), (3, 6, 128), (5, 1, 64), (2, 3, 96), (4, 5, 1), (1, 2, 1000)],
)


def define(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, activation: str
) -> torch.Tensor:
    """In float64, head by head."""
    x, gate, weight = (t.double().cpu() for t in (x, gate, weight))
    opened = 1 / (1 + torch.exp(-gate))
    if activation != "sigmoid":
        opened = opened * gate
    root = (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt()
    return x / root * weight * opened


def define_norm_of_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """In float64, group by group; weights are the group's own."""
    x, gate, weight = (t.double().cpu() for t in (x, gate, weight))
    gated = x * gate / (1 + torch.exp(-gate))
    root = (gated.pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt()
    return gated / root * weight


def draw(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape).to(device, dtype)


@shapes
@types
@activations
def test_rows_are_those_of_the_definition(
    backend: str,
    tokens: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    activation: str,
) -> None:
    x, gate = (
        draw(tokens, heads, width, dtype=dtype, device=backend) for _ in range(2)
    )
    weight = draw(width, dtype=torch.float32, device=backend)
    before = x.clone(), gate.clone()
    out = gated_norm.rms_norm(x, gate, weight, EPS, activation=activation)
    assert out.dtype == dtype
    assert torch.equal(x, before[0]) and torch.equal(gate, before[1])
    assert_near("out", out, define(x, gate, weight, activation), BOUNDS[dtype])


def test_types_are_each_tensors_own(backend: str) -> None:
    x = draw(2, 3, 64, dtype=torch.float32, device=backend)
    gate = draw(2, 3, 64, dtype=torch.float16, device=backend)
    weight = draw(64, dtype=HALF, device=backend)
    out = torch.empty_like(x, dtype=HALF)
    assert gated_norm.rms_norm(x, gate, weight, EPS, out=out) is out
    assert_near("out", out, define(x, gate, weight, "silu"), BOUNDS[HALF])


def inside(
    tokens: int, heads: int, width: int, transposed: bool, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows within a wider tensor of NaN, and all of it."""
    shape = (heads, tokens) if transposed else (tokens, heads)
    room = torch.full((shape[0] + 2, shape[1] + 3, width + 8), torch.nan, dtype=HALF)
    room = room.to(device)
    part = room[1:-1, 2:-1, 8:]
    return part.transpose(0, 1) if transposed else part, room


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width", [128, 96])
def test_strides_are_any_and_what_lies_between_is_neither_read_nor_written(
    backend: str, transposed: bool, width: int
) -> None:
    """A compiler may sum rows that are aligned otherwise in another order."""
    shape = (3, 6, width)
    x, gate = (draw(*shape, dtype=HALF, device=backend) for _ in range(2))
    weight = draw(width, dtype=HALF, device=backend)
    wanted = gated_norm.rms_norm(x, gate, weight, EPS)
    parts = [inside(*shape, transposed, backend) for _ in range(3)]
    (wide_x, _), (wide_gate, _), (out, room) = parts
    wide_x.copy_(x)
    wide_gate.copy_(gate)
    gated_norm.rms_norm(wide_x, wide_gate, weight, EPS, out=out)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=0.0)
    assert room.isnan().sum() == room.numel() - out.numel()


@pytest.mark.parametrize("onto", ["x", "gate"])
def test_out_may_be_what_is_read(backend: str, onto: str) -> None:
    tensors = {n: draw(3, 6, 64, dtype=HALF, device=backend) for n in ("x", "gate")}
    weight = draw(64, dtype=HALF, device=backend)
    wanted = gated_norm.rms_norm(**tensors, weight=weight, eps=EPS)
    gated_norm.rms_norm(**tensors, weight=weight, eps=EPS, out=tensors[onto])
    assert torch.equal(tensors[onto], wanted)


def test_rows_have_the_same_bits_in_any_batch(backend: str) -> None:
    x, gate = (draw(70, 5, 128, dtype=HALF, device=backend) for _ in range(2))
    weight = draw(128, dtype=HALF, device=backend)
    every = gated_norm.rms_norm(x, gate, weight, EPS)
    for rows in (slice(1), slice(3, 7), slice(69, 70)):
        alone = gated_norm.rms_norm(x[rows], gate[rows], weight, EPS)
        assert torch.equal(alone, every[rows])


def test_a_row_of_zeros_stays_one(backend: str) -> None:
    zeros = torch.zeros(1, 2, 64, device=backend)
    gate, weight = torch.ones_like(zeros), torch.ones(64, device=backend)
    assert gated_norm.rms_norm(zeros, gate, weight, EPS).eq(0).all()


@pytest.mark.parametrize("shape", [(0, 4, 64), (3, 0, 64)])
def test_nothing_makes_nothing(backend: str, shape: tuple[int, ...]) -> None:
    x, weight = torch.zeros(shape, device=backend), torch.ones(64, device=backend)
    assert gated_norm.rms_norm(x, x, weight, EPS).shape == shape


@pytest.mark.parametrize("change", ["no square", "no gate", "gate before the norm"])
def test_another_formula_shows(backend: str, change: str) -> None:
    """Negative control of the bounds."""
    x, gate = (draw(2, 3, 128, dtype=torch.float32, device=backend) for _ in range(2))
    weight = draw(128, dtype=torch.float32, device=backend)
    out = gated_norm.rms_norm(x, gate, weight, EPS)
    if change == "no square":
        wrong = define(x.abs().sqrt() * x.sign(), gate, weight, "silu")
    elif change == "no gate":
        wrong = define(x, torch.full_like(gate, 30.0), weight, "sigmoid")
    else:
        gated = x * torch.nn.functional.silu(gate)
        wrong = define(gated, torch.full_like(gate, 30.0), weight, "sigmoid")
    with pytest.raises(AssertionError, match="relative error"):
        assert_near("out", out, wrong, BOUNDS[HALF])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64)}, "x has 2 dimensions, expected 3"),
        ({"gate": torch.zeros(3, 4, 32)}, "gate has shape"),
        ({"weight": torch.zeros(4, 64)}, "weight has shape"),
        ({"out": torch.zeros(2, 4, 64)}, "out has shape"),
        ({"gate": torch.zeros(3, 64, 4).mT}, "gate has strides"),
        ({"weight": torch.zeros(64).long()}, r"weight is torch\.int64"),
        ({"activation": "relu"}, "activation is 'relu', expected one of silu, swish"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "x": torch.zeros(3, 4, 64),
        "gate": torch.zeros(3, 4, 64),
        "weight": torch.ones(64),
        "eps": EPS,
    }
    with pytest.raises(ValueError, match=message):
        gated_norm.rms_norm(**(given | change))


# ------------------------------------------------------------------ the gate first


@shapes
@types
def test_a_gate_may_come_first(
    backend: str, tokens: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    x, gate = (
        draw(tokens, heads, width, dtype=dtype, device=backend) for _ in range(2)
    )
    weight = draw(heads, width, dtype=dtype, device=backend)
    before = x.clone(), gate.clone()
    out = gated_norm.norm_of_gated(x, gate, weight, EPS)
    assert out.dtype == dtype
    assert torch.equal(x, before[0]) and torch.equal(gate, before[1])
    # Rounded twice.
    bound = 2 * BOUNDS[dtype]
    assert_near("out", out, define_norm_of_gated(x, gate, weight), bound)


def test_the_norm_of_what_is_gated_is_rounded_before_its_weight(backend: str) -> None:
    x, gate = (draw(3, 2, 64, dtype=HALF, device=backend) for _ in range(2))
    weight = torch.full((2, 64), 1 + 2**-7, dtype=torch.float32, device=backend)
    plain = gated_norm.norm_of_gated(x, gate, torch.ones_like(weight), EPS)
    out = torch.empty_like(x, dtype=torch.float32)
    assert gated_norm.norm_of_gated(x, gate, weight, EPS, out=out) is out
    assert torch.equal(out, plain.float() * weight)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width", [128, 96])
def test_strides_of_what_is_gated_first_are_any(
    backend: str, transposed: bool, width: int
) -> None:
    shape = (3, 6, width)
    x, gate = (draw(*shape, dtype=HALF, device=backend) for _ in range(2))
    weight = draw(6, 2 * width, dtype=HALF, device=backend)[:, width:]
    wanted = gated_norm.norm_of_gated(x, gate, weight, EPS)
    parts = [inside(*shape, transposed, backend) for _ in range(3)]
    (wide_x, _), (wide_gate, _), (out, room) = parts
    wide_x.copy_(x)
    wide_gate.copy_(gate)
    gated_norm.norm_of_gated(wide_x, wide_gate, weight, EPS, out=out)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=0.0)
    assert room.isnan().sum() == room.numel() - out.numel()


@pytest.mark.parametrize("onto", ["x", "gate"])
def test_what_is_gated_first_may_be_written_over(backend: str, onto: str) -> None:
    tensors = {n: draw(3, 6, 64, dtype=HALF, device=backend) for n in ("x", "gate")}
    weight = draw(6, 64, dtype=HALF, device=backend)
    wanted = gated_norm.norm_of_gated(**tensors, weight=weight, eps=EPS)
    gated_norm.norm_of_gated(**tensors, weight=weight, eps=EPS, out=tensors[onto])
    assert torch.equal(tensors[onto], wanted)


def test_rows_gated_first_have_the_same_bits_in_any_batch(backend: str) -> None:
    x, gate = (draw(9, 2, 600, dtype=HALF, device=backend) for _ in range(2))
    weight = draw(2, 600, dtype=HALF, device=backend)
    every = gated_norm.norm_of_gated(x, gate, weight, EPS)
    for rows in (slice(1), slice(3, 7), slice(8, 9)):
        alone = gated_norm.norm_of_gated(x[rows], gate[rows], weight, EPS)
        assert torch.equal(alone, every[rows])


@pytest.mark.parametrize("shape", [(0, 4, 64), (3, 0, 64)])
def test_nothing_gated_first_makes_nothing(
    backend: str, shape: tuple[int, ...]
) -> None:
    x, weight = torch.zeros(shape, device=backend), torch.ones(shape[1:]).to(backend)
    assert gated_norm.norm_of_gated(x, x, weight, EPS).shape == shape


@pytest.mark.parametrize("change", ["the norm first", "one norm of all groups"])
def test_another_order_shows(backend: str, change: str) -> None:
    """Negative control of the bounds."""
    x, gate = (draw(2, 3, 128, dtype=torch.float32, device=backend) for _ in range(2))
    weight = draw(3, 128, dtype=torch.float32, device=backend)
    out = gated_norm.norm_of_gated(x, gate, weight, EPS)
    if change == "the norm first":
        wrong = define(x, gate, weight, "silu")
    else:
        flat = (t.reshape(*t.shape[:-2], 1, -1) for t in (x, gate, weight))
        wrong = define_norm_of_gated(*flat).view(x.shape)
    with pytest.raises(AssertionError, match="relative error"):
        assert_near("out", out, wrong, BOUNDS[HALF])


def test_weights_of_one_group_for_all_are_refused() -> None:
    x = torch.zeros(3, 4, 64)
    with pytest.raises(ValueError, match="weight has shape"):
        gated_norm.norm_of_gated(x, x, torch.ones(64), EPS)
