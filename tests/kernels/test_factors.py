# SPDX-License-Identifier: Apache-2.0
"""`gated_delta_rule.factors`: what the rule multiplies, of all tokens or of some."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import pytest
import torch
from hybrid_kernels import gated_delta_rule
from torch.nn import functional

from .common import assert_near, on

TOKENS, HEADS, VALUES, DEPTH, WIDTH = 9, 3, 6, 20, 24
Switch = Callable[[], AbstractContextManager[None]]
whose = pytest.mark.parametrize("triton", [False, True], ids=["reference", "triton"])
rows = pytest.mark.parametrize("rows", [[*range(9)], [], [7, 0, 3]], ids=str)


def made(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tokens as a convolution leaves them: queries, keys and values side by side."""
    keys, values = HEADS * DEPTH, VALUES * WIDTH
    mixed = torch.randn(TOKENS, 2 * keys + values).to(dtype)
    q, k, v = mixed.split([keys, keys, values], -1)
    gates = torch.randn(TOKENS, 2 * VALUES).to(dtype)
    return {
        "q": q.view(TOKENS, HEADS, DEPTH),
        "k": k.view(TOKENS, HEADS, DEPTH),
        "v": v.view(TOKENS, VALUES, WIDTH),
        "g": gates[:, :VALUES],
        "beta": gates[:, VALUES:],
    }


def run(
    tensors: dict[str, Any], triton: bool, device: str, switch: Switch, unit: bool
) -> Any:
    if not triton:
        return gated_delta_rule.factors(**tensors, use_qk_l2norm=unit)
    with switch():
        return gated_delta_rule.factors(**on(device, tensors), use_qk_l2norm=unit)


@whose
@rows
@pytest.mark.parametrize("bias", [False, True])
def test_of_a_layers_projections(
    device: str, on_triton: Switch, triton: bool, rows: list[int], bias: bool
) -> None:
    tokens = made(torch.bfloat16)
    options: dict[str, Any] = {
        "A": -torch.rand(VALUES),
        "dt_bias": torch.randn(VALUES) if bias else None,
        "rows": torch.tensor(rows, dtype=torch.int64),
    }
    got = run({**tokens, **options}, triton, device, on_triton, True)

    wide = {name: x.double()[rows] for name, x in tokens.items()}
    shift = options["dt_bias"].double() if bias else 0.0
    decay = (options["A"].double() * functional.softplus(wide["g"] + shift)).exp()
    for name in ("q", "k"):
        unit = wide[name] / (wide[name].square().sum(-1, keepdim=True) + 1e-6).sqrt()
        assert_near(name, getattr(got, name).double().cpu(), unit, 4e-3)
    assert torch.equal(got.v.cpu(), tokens["v"][rows])
    assert_near("decay", got.decay.double().cpu(), decay, 1e-6)
    assert_near("beta", got.beta.double().cpu(), wide["beta"].sigmoid(), 1e-6)
    assert got.decay.dtype == got.beta.dtype == torch.float32
    tensors = [getattr(got, field.name) for field in fields(got)]
    assert all(tensor.is_contiguous() for tensor in tensors)


@whose
def test_of_gates_that_are_computed(
    device: str, on_triton: Switch, triton: bool
) -> None:
    tokens = made(torch.float32)
    every = {"rows": torch.arange(TOKENS)}
    got = run({**tokens, **every}, triton, device, on_triton, False)
    for name in ("q", "k", "v", "beta"):
        assert torch.equal(getattr(got, name).cpu(), tokens[name])
    assert_near("decay", got.decay.cpu(), tokens["g"].exp(), 1e-6)


def test_a_table_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="rows has shape"):
        gated_delta_rule.factors(
            **made(torch.float32), rows=torch.zeros(2, 1, dtype=torch.int64)
        )
