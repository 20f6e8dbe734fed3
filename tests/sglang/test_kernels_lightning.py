# SPDX-License-Identifier: Apache-2.0
"""Lightning attention in SGLang on our kernels, beside the plain recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.linear.lightning_backend import (
    LightningAttentionBackend,
)

from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.sglang.kernels import lightning
from hybrid_plugin.sglang.kernels.state_layers import StateLayers
from tests.sglang.kernel_passes import (
    DECODE,
    EXTEND,
    MIXED,
    Pools,
    Row,
    backend_of,
    batch_of,
    layers_of,
    pools_of,
    touched,
)

HEADS, DEPTH, SCALE = 2, 16, 0.3
SHAPES = ((1, 1), (HEADS, DEPTH, DEPTH))
SLOPES = torch.tensor([0.01, 0.2]).view(HEADS, 1, 1)
LAYER = SimpleNamespace(
    layer_id=1, tp_q_head_num=HEADS, head_dim=DEPTH, v_head_dim=DEPTH, scaling=SCALE
)
OURS = layers_of(Mixer.LIGHTNING)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def inputs(tokens: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {n: torch.randn(tokens, HEADS, DEPTH, generator=rng) / 4 for n in "qkv"}


def run(
    layers: StateLayers,
    pools: Pools,
    rows: Sequence[Row],
    given: dict[str, torch.Tensor],
    mode: Any = EXTEND,
) -> Any:
    """One pass of one layer, as SGLang calls it."""
    backend = backend_of(LightningAttentionBackend, pools)
    backend.tp_slope = [torch.full_like(SLOPES, 9.0), SLOPES]
    batch = batch_of(rows, mode)
    backend.init_forward_metadata(batch)
    hook = lightning.extend if mode.is_extend() else lightning.decode
    return hook(
        layers,
        lambda *_, **__: "SGLang's",
        backend,
        layer=LAYER,
        forward_batch=batch,
        save_kv_cache=True,
        **given,
    )


def expect(pools: Pools, rows: Sequence[Row], given: dict[str, torch.Tensor]) -> Any:
    """Token by token, with SGLang's states, keys along their rows; moves them."""
    found, first = [], 0
    for row in rows:
        state = pools.temporal[row.slot]
        if not row.computed:
            state = torch.zeros_like(state)
        for token in range(first, first + row.length):
            q, k, v = (given[name][token] for name in "qkv")
            state = state * (-SLOPES).exp() + k[:, :, None] * v[:, None, :]
            found.append(SCALE * (q[:, None, :] @ state)[:, 0])
        pools.temporal[row.slot] = state
        first += row.length
    return torch.stack(found).flatten(1)


def filled(pools: Pools, slots: Sequence[int]) -> Pools:
    """The same with states in some slots."""
    rng = torch.Generator().manual_seed(9)
    for slot in slots:
        pools.temporal[slot] = torch.randn(SHAPES[1], generator=rng) / 2
    return pools


@pytest.mark.parametrize("slot_major", [False, True])
@pytest.mark.parametrize(
    ("rows", "mode"),
    [
        ([Row(3, 100, 70), Row(1, 0, 66)], EXTEND),
        ([Row(3, 16, 40), Row(1, 9), Row(5, 64)], MIXED),
        ([Row(3, 70), Row(1, 5)], DECODE),
    ],
)
def test_outputs_and_states_follow_the_definition(
    rows: list[Row], mode: Any, slot_major: bool
) -> None:
    given = inputs(sum(row.length for row in rows))
    resumed = [row.slot for row in rows if row.computed]
    pools = filled(pools_of(*SHAPES, slot_major=slot_major), resumed)
    expected = filled(pools_of(*SHAPES), resumed)
    out = run(OURS, pools, rows, given, mode)
    torch.testing.assert_close(out, expect(expected, rows, given), **CLOSE)
    torch.testing.assert_close(
        pools.temporal, expected.temporal, equal_nan=True, **CLOSE
    )
    assert touched(pools.temporal) == sorted(row.slot for row in rows)


def test_states_inside_a_pass_are_those_of_passes_that_end_there() -> None:
    interior = InteriorSnapshots(torch.device("cpu"))
    interior.order([SaveInPass(Pool.STATE, 3, 1, 7)])
    pools, given = filled(pools_of(*SHAPES), [3]), inputs(130)
    layers = layers_of(Mixer.LIGHTNING, interior=interior)
    run(layers, pools, [Row(3, 100, 130)], given)
    interior.clear()
    alone = filled(pools_of(*SHAPES), [3])
    expect(alone, [Row(3, 100, 92)], given)
    torch.testing.assert_close(pools.temporal[7], alone.temporal[3], **CLOSE)


def test_padding_behind_the_sequences_is_finite() -> None:
    given = inputs(9)
    out = run(OURS, pools_of(*SHAPES), [Row(2, 0, 6)], given)
    assert torch.equal(out[6:], torch.zeros_like(out[6:]))


@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_what_is_not_ours_stays_sglang_s(mode: Any) -> None:
    found = run(StateLayers(), pools_of(*SHAPES), [Row(3, 8)], inputs(1), mode)
    assert found == "SGLang's"
