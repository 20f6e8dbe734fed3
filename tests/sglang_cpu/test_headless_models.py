# SPDX-License-Identifier: Apache-2.0
"""Models without attention heads start on a CPU, and others as before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from hybrid_plugin.sglang_cpu import headless_models, kernels
from hybrid_plugin.upstream.hookpoints import resolve


def test_heads_are_divided_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, name = resolve(headless_models.DIVIDES_HEADS)
    calls: list[Any] = []

    def divide(model_config: Any, load_config: Any, tp_size: int) -> str:
        calls.append((model_config, load_config, tp_size))
        return "divided"

    monkeypatch.setattr(owner, name, divide)
    headless_models.leave_models_without_heads(kernels.replace)
    headless_models.leave_models_without_heads(kernels.replace)
    adjust = getattr(owner, name)
    without = SimpleNamespace(num_attention_heads=None)
    assert adjust(without, "load", 2) is without
    assert not calls
    some = SimpleNamespace(num_attention_heads=4)
    assert adjust(some, "load", 2) == "divided"
    assert calls == [(some, "load", 2)]
