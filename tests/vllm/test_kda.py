# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention in vLLM on our kernels; vLLM's own need a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
    KimiGatedDeltaNetAttention,
)

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.kernels import layers
from hybrid_plugin.vllm.kernels.layers import StateLayers
from tests.vllm.kernel_passes import SLOTS, Row, common_of, gdn_builder

HEADS, DEPTH, TAPS = 3, 16, 4
CHANNELS = 3 * HEADS * DEPTH
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def hooked() -> None:
    patches.patch_kernels([Mixer.KDA])


class Layer(SimpleNamespace):
    """What our kernels read of a layer."""

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """As the class says for these sizes."""
        return (TAPS - 1, CHANNELS), (HEADS, DEPTH, DEPTH)


def layer_with(lower_bound: float | None = None) -> tuple[Layer, StateLayers]:
    """A layer of ours whose every slot holds what nobody may read."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    layer = Layer(
        prefix="0",
        conv1d=SimpleNamespace(weight=draw(CHANNELS, 1, TAPS) / 2, bias=None),
        A_log=draw(HEADS),
        dt_bias=draw(HEADS * DEPTH),
        gate_lower_bound=lower_bound,
        o_norm=lambda out, gate: out * gate,
        kv_cache=(
            torch.full((SLOTS, TAPS - 1, CHANNELS), torch.nan),
            torch.full((SLOTS, HEADS, DEPTH, DEPTH), torch.nan),
        ),
    )
    kind = layers.Kind(Mixer.KDA, "kda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "kind_of", lambda _: kind)
        found = StateLayers({"0": layer}, "ours", "cpu")
    found.hang()
    return layer, found


def inputs(tokens: int, seed: int = 0) -> Inputs:
    """Of a prompt: before the convolution, decays, write strengths, gates."""
    rng = torch.Generator().manual_seed(seed)
    shapes = ((CHANNELS,), (HEADS, DEPTH), (HEADS,), (HEADS, DEPTH))
    made = [torch.randn((tokens, *shape), generator=rng) for shape in shapes]
    return made[0], made[1], made[2], made[3]


def run(layer: Layer, rows: Sequence[Row], of: Inputs) -> torch.Tensor:
    """A pass as vLLM begins it: the builder's metadata, then the layer's method."""
    metadata = gdn_builder({"0": layer}).build(0, common_of(rows))
    context = SimpleNamespace(attn_metadata={"0": metadata})
    mixed, a, b, gate = of
    out = torch.full((1, len(mixed), HEADS, DEPTH), torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.forward_context.get_forward_context", lambda: context)
        KimiGatedDeltaNetAttention._forward(
            layer, mixed_qkv=mixed, g1=a[None], g2=gate, beta=b[None], core_attn_out=out
        )
    return out[0]


def part(of: Inputs, start: int, end: int) -> Inputs:
    cut = [x[start:end] for x in of]
    return cut[0], cut[1], cut[2], cut[3]


def plain(layer: Layer, of: Inputs) -> torch.Tensor:
    """The layer token by token, as its paper defines it."""
    mixed, a, b, gate = (x.double() for x in of)
    weight = layer.conv1d.weight.double().view(CHANNELS, TAPS)
    padded = torch.cat([torch.zeros(TAPS - 1, CHANNELS).double(), mixed])
    state, rows = torch.zeros(HEADS, DEPTH, DEPTH).double(), []
    for t in range(len(mixed)):
        convolved = (padded[t : t + TAPS].T * weight).sum(1)
        q, k, v = torch.nn.functional.silu(convolved).view(3, HEADS, DEPTH)
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        decays = a[t] + layer.dt_bias.double().view(HEADS, DEPTH)
        rate = -torch.exp(layer.A_log.double())[:, None]
        state = state * torch.exp(rate * torch.nn.functional.softplus(decays))[:, None]
        error = v - (state @ k[:, :, None])[:, :, 0]
        strength = torch.sigmoid(b[t])[:, None, None]
        state = state + strength * error[:, :, None] * k[:, None, :]
        rows.append((state @ q[:, :, None])[:, :, 0] * DEPTH**-0.5)
    return torch.stack(rows) * gate


def test_chunked_and_decoded_equal_the_recurrence() -> None:
    layer, _ = layer_with()
    one, other = inputs(140), inputs(40, 1)
    found = [
        run(layer, [Row(3, 0, 100)], part(one, 0, 100)),
    ]
    both = [torch.cat(pair) for pair in zip(part(one, 100, 101), other, strict=True)]
    rows = [Row(3, 100, 1, in_prompt=False), Row(5, 0, 40)]
    mixed = run(layer, rows, (both[0], both[1], both[2], both[3]))
    found.append(mixed[:1])
    found.append(run(layer, [Row(3, 101, 39)], part(one, 101, 140)))
    close = {"rtol": 1e-3, "atol": 1e-3}
    expected = plain(layer, one).float()
    torch.testing.assert_close(torch.cat(found), expected, **close)
    torch.testing.assert_close(mixed[1:], plain(layer, other).float(), **close)
    assert layer.kv_cache[1][4].isnan().all()


def test_interior_snapshots_are_what_a_pass_to_there_leaves() -> None:
    (mine, found), (paused, _) = layer_with(), layer_with()
    of = inputs(164)
    found.interior = InteriorSnapshots(torch.device("cpu"))
    found.interior.order([SaveInPass(Pool.STATE, 2, 1, 9)])
    run(mine, [Row(2, 0, 164)], of)
    run(paused, [Row(2, 0, 128)], part(of, 0, 128))
    for kept, left in zip(mine.kv_cache, paused.kv_cache, strict=True):
        torch.testing.assert_close(kept[9], left[2])
        assert not torch.equal(kept[9], kept[2])
    found.interior.clear()  # raises if nobody had looked the order up


def test_a_decay_with_a_lower_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower bound"):
        layer_with(lower_bound=-5.0)


def test_warming_up_touches_no_state() -> None:
    mine, found = layer_with()
    found.warm_up(3)
    assert all(states.isnan().all() for states in mine.kv_cache)
