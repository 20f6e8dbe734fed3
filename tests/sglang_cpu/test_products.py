# SPDX-License-Identifier: Apache-2.0
"""Products of 16-bit matrices on a CPU that has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("sglang")

from hybrid_plugin.sglang_cpu import torch_shims
from hybrid_plugin.sglang_cpu.torch_shims import _LEAST_ROWS

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The types of what PyTorch itself was given to multiply, by the shim."""
    seen: list[torch.dtype] = []
    plain = getattr(functional.linear, torch_shims._APPLIED, functional.linear)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        seen.append(x.dtype)
        return plain(x, weight, bias)

    monkeypatch.setattr(functional, "linear", linear)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    torch_shims.multiply_in_float32()
    return seen


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", [(_LEAST_ROWS,), (2, _LEAST_ROWS // 2)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_are_rounded_once(
    asked: list[torch.dtype], dtype: torch.dtype, shape: tuple[int, ...], has_bias: bool
) -> None:
    x, weight = torch.randn(*shape, 96).to(dtype), torch.randn(40, 96).to(dtype)
    bias = torch.randn(40).to(dtype) if has_bias else None
    found = functional.linear(x, weight, bias)
    assert asked == [torch.float32]
    assert found.dtype == dtype and found.shape == (*shape, 40)
    wanted = x.double() @ weight.double().T
    if bias is not None:
        wanted += bias.double()
    torch.testing.assert_close(
        found.double(), wanted, rtol=1.01 * ROUNDING[dtype], atol=1e-5
    )


def test_the_rest_is_left_to_pytorch(asked: list[torch.dtype]) -> None:
    half, weight = torch.randn(64, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    functional.linear(half[: _LEAST_ROWS - 1], weight)
    functional.linear(half.float(), weight.float())
    functional.linear(half[:0], weight)
    assert asked == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_it_is_put_once_and_only_where_it_helps(
    asked: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = functional.linear
    torch_shims.multiply_in_float32()
    assert functional.linear is once
    plain = getattr(once, torch_shims._APPLIED)
    monkeypatch.setattr(functional, "linear", plain)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    torch_shims.multiply_in_float32()
    assert functional.linear is plain
