# SPDX-License-Identifier: Apache-2.0
"""Points of gated norms can be built, and give what their peer gives, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def _copying(x: torch.Tensor, weight: torch.Tensor, *_: Any, **given: Any) -> None:
    """As vLLM's: of rows that lie at one distance."""
    z, out = given["z"], given["out"]
    assert x.ndim == z.ndim == out.ndim == 2 and z.is_contiguous()
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    out.copy_(x * scale * weight * torch.nn.functional.silu(z.float()))


def test_ours_and_the_peer_give_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not at the top: modules of kernel tests choose Triton's interpreter first.
    pytest.importorskip("triton")
    from benchmarks.kernel_speed import norm, shapes
    from benchmarks.kernel_speed.shapes import Head

    monkeypatch.setattr(norm, "peer", lambda module, name: _copying)
    monkeypatch.setattr(shapes, "DEVICE", "cpu")
    torch.manual_seed(0)
    point = norm.gated(Head("tiny", 1, 2, 8, 16), 3)
    before = point.pool.clone()
    answers = []
    for call in point.calls.values():
        assert call is not None
        point.pool.copy_(before)
        answers.append(call(1).clone())
        assert not torch.equal(point.pool[1], before[1])
        assert torch.equal(point.pool[2], before[2])
    torch.testing.assert_close(*answers)
