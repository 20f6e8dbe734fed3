# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention in SGLang on our kernels, beside the plain recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from torch.nn.functional import normalize, silu, softplus

from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.sglang.kernels import kda
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

HEADS, DEPTH, TAPS = 2, 16, 4
KEYS = HEADS * DEPTH
CHANNELS = 3 * KEYS
SHAPES = ((TAPS - 1, CHANNELS), (HEADS, DEPTH, DEPTH))
"""SGLang keeps the convolution's inputs token by token here."""
OURS = layers_of(Mixer.KDA)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Layer(torch.nn.Module):
    """What SGLang's `RadixLinearAttention` holds."""

    layer_id = 0
    num_k_heads = num_v_heads = HEADS
    head_k_dim = head_v_dim = DEPTH
    bias = lower_bound = None

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(1)
        self.conv_weights = torch.randn(CHANNELS, TAPS, generator=rng) / 2
        self.A_log = torch.rand(1, 1, HEADS, 1, generator=rng) - 2
        self.dt_bias = torch.randn(KEYS, generator=rng)


LAYER = Layer()


def inputs(tokens: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {
        "mixed_qkv": torch.randn(tokens, CHANNELS, generator=rng),
        "a": torch.randn(tokens, KEYS, generator=rng),
        "b": torch.randn(tokens, HEADS, generator=rng),
    }


def run(
    layers: StateLayers,
    pools: Pools,
    rows: Sequence[Row],
    given: dict[str, torch.Tensor],
    mode: Any = EXTEND,
    layer: Any = LAYER,
) -> Any:
    """One pass of one layer, as SGLang calls it: gates in each phase's own shape."""
    backend, batch = backend_of(KDAAttnBackend, pools), batch_of(rows, mode)
    backend.init_forward_metadata(batch)
    a, hook = given["a"], kda.decode
    if mode.is_extend():
        a, hook = a.view(1, -1, HEADS, DEPTH), kda.extend
    return hook(
        layers,
        lambda *_, **__: "SGLang's",
        backend,
        layer=layer,
        forward_batch=batch,
        mixed_qkv=given["mixed_qkv"],
        a=a,
        b=given["b"][None],
    )


def expect(pools: Pools, rows: Sequence[Row], given: dict[str, torch.Tensor]) -> Any:
    """Token by token, from the definition; moves the states of `pools`."""
    found, first = [], 0
    rates = -LAYER.A_log.view(HEADS, 1).exp()
    for row in rows:
        past, state = pools.conv[row.slot], pools.temporal[row.slot]
        if not row.computed:
            past, state = torch.zeros_like(past), torch.zeros_like(state)
        for token in range(first, first + row.length):
            window = torch.cat([past, given["mixed_qkv"][token : token + 1]])
            past = window[1:]
            qkv = silu((window.T * LAYER.conv_weights).sum(1)).view(3, HEADS, DEPTH)
            q, k, v = normalize(qkv[0], dim=-1), normalize(qkv[1], dim=-1), qkv[2]
            gate = (given["a"][token] + LAYER.dt_bias).view(HEADS, DEPTH)
            state = state * (rates * softplus(gate)).exp()[:, None, :]
            wrong = v - (state @ k[:, :, None])[..., 0]
            strength = given["b"][token].sigmoid()[:, None]
            state = state + (strength * wrong)[:, :, None] * k[:, None, :]
            found.append((state @ q[:, :, None])[..., 0] * DEPTH**-0.5)
        pools.conv[row.slot], pools.temporal[row.slot] = past, state
        first += row.length
    return torch.stack(found)[None]


def filled(pools: Pools, slots: Sequence[int]) -> Pools:
    """The same with states in some slots."""
    rng = torch.Generator().manual_seed(9)
    for pool in (pools.conv, pools.temporal):
        for slot in slots:
            pool[slot] = torch.randn(pool.shape[1:], generator=rng) / 2
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
    torch.testing.assert_close(pools.conv, expected.conv, equal_nan=True, **CLOSE)
    torch.testing.assert_close(
        pools.temporal, expected.temporal, equal_nan=True, **CLOSE
    )
    assert touched(pools.temporal) == sorted(row.slot for row in rows)


def test_states_inside_a_pass_are_those_of_passes_that_end_there() -> None:
    interior = InteriorSnapshots(torch.device("cpu"))
    interior.order([SaveInPass(Pool.STATE, 3, 1, 7)])
    pools, given = filled(pools_of(*SHAPES), [3]), inputs(130)
    run(layers_of(Mixer.KDA, interior=interior), pools, [Row(3, 100, 130)], given)
    interior.clear()
    alone = filled(pools_of(*SHAPES), [3])
    expect(alone, [Row(3, 100, 92)], given)
    torch.testing.assert_close(pools.conv[7], alone.conv[3], **CLOSE)
    torch.testing.assert_close(pools.temporal[7], alone.temporal[3], **CLOSE)


def test_decays_with_a_lower_bound_stay_sglang_s() -> None:
    layer = Layer()
    layer.lower_bound = -5.0  # type: ignore[assignment]
    for mode in (EXTEND, DECODE):
        found = run(OURS, pools_of(*SHAPES), [Row(3, 8)], inputs(1), mode, layer)
        assert found == "SGLang's"
        assert run(StateLayers(), pools_of(*SHAPES), [Row(3, 8)], inputs(1), mode) == (
            "SGLang's"
        )
