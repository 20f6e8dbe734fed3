# SPDX-License-Identifier: Apache-2.0
"""LFM2's short convolutions in SGLang on our kernels, beside the plain convolution."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.sglang.kernels import short_conv
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

CHANNELS, TAPS = 6, 3
SHAPES = ((CHANNELS, TAPS - 1), (1, 1, 1))
OURS = layers_of(Mixer.SHORT_CONV)
RNG = torch.Generator().manual_seed(2)
INTO = torch.randn(CHANNELS, 3 * CHANNELS, generator=RNG)
OUT_OF = torch.randn(CHANNELS, CHANNELS, generator=RNG)
LAYER = SimpleNamespace(
    layer_idx=0,
    conv_weight=torch.randn(CHANNELS, TAPS, generator=RNG),
    conv_bias=torch.randn(CHANNELS, generator=RNG),
    in_proj=lambda x: (x @ INTO, None),
    out_proj=lambda x: (x @ OUT_OF, None),
)


def run(
    layers: StateLayers,
    pools: Pools,
    rows: Sequence[Row],
    hidden: torch.Tensor,
    mode: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """One pass of one layer, as the model calls it."""
    backend, batch = backend_of(ShortConvAttnBackend, pools), batch_of(rows, mode)
    backend._cache_indices_buf = None
    backend.init_forward_metadata(batch)
    outer = SimpleNamespace(
        short_conv_backend=backend, conv_state_metadata=backend.conv_state_metadata
    )
    monkeypatch.setattr(short_conv, "get_attn_backend", lambda: outer)
    return short_conv.forward(layers, lambda *_: "SGLang's", LAYER, hidden, batch)


def expect(pools: Pools, rows: Sequence[Row], hidden: torch.Tensor) -> torch.Tensor:
    """Token by token, from the definition; moves the states of `pools`."""
    before, behind, x = (hidden @ INTO).chunk(3, dim=-1)
    found, first = [], 0
    for row in rows:
        past = pools.conv[row.slot]
        if not row.computed:
            past = torch.zeros_like(past)
        for token in range(first, first + row.length):
            window = torch.cat([past, (before * x)[token][:, None]], dim=1)
            past = window[:, 1:]
            convolved = (window * LAYER.conv_weight).sum(1) + LAYER.conv_bias
            found.append(behind[token] * convolved @ OUT_OF)
        pools.conv[row.slot] = past
        first += row.length
    return torch.stack(found)


def filled(pools: Pools, slots: Sequence[int]) -> Pools:
    for slot in slots:
        pools.conv[slot] = torch.full(SHAPES[0], 0.1 * slot)
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
    rows: list[Row], mode: Any, slot_major: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.randn(sum(row.length for row in rows), CHANNELS)
    resumed = [row.slot for row in rows if row.computed]
    pools = filled(pools_of(*SHAPES, slot_major=slot_major), resumed)
    expected = filled(pools_of(*SHAPES), resumed)
    out = run(OURS, pools, rows, hidden, mode, monkeypatch)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(out, expect(expected, rows, hidden), **close)
    torch.testing.assert_close(pools.conv, expected.conv, equal_nan=True, **close)
    assert touched(pools.conv) == sorted(row.slot for row in rows)


def test_states_inside_a_pass_are_the_last_inputs_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interior = InteriorSnapshots(torch.device("cpu"))
    interior.order([SaveInPass(Pool.STATE, 3, 1, 7)])
    layers = layers_of(Mixer.SHORT_CONV, interior=interior)
    hidden, pools = torch.randn(130, CHANNELS), filled(pools_of(*SHAPES), [3])
    run(layers, pools, [Row(3, 100, 130)], hidden, EXTEND, monkeypatch)
    interior.clear()
    alone = filled(pools_of(*SHAPES), [3])
    expect(alone, [Row(3, 100, 92)], hidden)
    torch.testing.assert_close(pools.conv[7], alone.conv[3])


@pytest.mark.parametrize("mode", [ForwardMode.IDLE, EXTEND, DECODE])
def test_what_is_not_ours_stays_sglang_s(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = OURS if mode is ForwardMode.IDLE else StateLayers()
    rows, hidden = [Row(3, 8)], torch.randn(1, CHANNELS)
    found = run(layers, pools_of(*SHAPES), rows, hidden, mode, monkeypatch)
    assert found == "SGLang's"
