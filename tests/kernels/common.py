# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by the kernel tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def cu_seqlens(lengths: Sequence[int], device: str = "cpu") -> torch.Tensor:
    """Running sum of sequence lengths, starting at 0."""
    total = torch.tensor([0, *lengths]).cumsum(0)
    return total.to(device=device, dtype=torch.int32)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`; NaN stays NaN."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    scale = expected.norm().clamp(min=1e-30)
    return float((actual - expected).norm() / scale)


def assert_near(
    name: str, actual: torch.Tensor, expected: torch.Tensor, bound: float
) -> None:
    """Same shape, and relative error under `bound` (so no NaN)."""
    assert actual.shape == expected.shape, f"{name}: shapes differ"
    if expected.numel() == 0:
        return
    if not expected.any():
        assert not actual.any(), f"{name}: expected zeros"
        return
    error = relative_error(actual, expected)
    assert error < bound, f"{name}: relative error {error:.2e}, bound {bound:.0e}"


def path_to(draft: int, parents: Sequence[int] | None) -> list[int]:
    """The drafts from the main state to a draft, itself included."""
    path = []
    while draft >= 0:
        path.insert(0, draft)
        draft = draft - 1 if parents is None else parents[draft]
    return path


def on(device: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same on a device; whatever is None stays None."""
    return {n: None if x is None else x.to(device) for n, x in tensors.items()}
