# SPDX-License-Identifier: Apache-2.0
"""The simulator's models of stock's caches restore what the engines' own code does."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks.prefix_models import slot_bytes, token_bytes
from benchmarks.stock_models import SHAPE, measured, model_shape, restored
from benchmarks.vllm_bookkeeping import GPU_BLOCKS
from hybrid_plugin.tools.plan.estimate import aligned_blocks

TOLERANCE = 0.04
"""Of the prompt tokens, at these points; `benchmarks/results/stock-models-*.md` show
more, and where models are further off."""


def test_models_divide_the_memory_of_the_same_shape() -> None:
    shape = model_shape()
    assert shape.token_bytes == token_bytes(SHAPE)
    assert shape.state_bytes == slot_bytes(SHAPE, 2)
    assert aligned_blocks(shape, 1 << 33).unit == GPU_BLOCKS[SHAPE]


@pytest.mark.parametrize(
    ("engine", "points"),
    [
        pytest.param(
            engine,
            points,
            marks=pytest.mark.skipif(
                find_spec(engine) is None, reason=f"{engine}'s environment"
            ),
        )
        for engine, points in (
            ("vllm", (("few-shot", 4), ("chats", 2))),
            ("sglang", (("few-shot", 4), ("few-shot", 8))),
        )
    ],
)
def test_models_restore_what_engines_do(
    engine: str, points: tuple[tuple[str, int], ...]
) -> None:
    real = measured(engine, points)
    model = [restored(engine, *point) for point in points]
    assert model == pytest.approx(real, abs=TOLERANCE)
    assert real[0] != pytest.approx(real[1], abs=TOLERANCE)
