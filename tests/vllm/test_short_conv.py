# SPDX-License-Identifier: Apache-2.0
"""LFM2's convolution in vLLM on our kernels, beside vLLM's own on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.mamba import short_conv
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.platforms import current_platform

from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.kernels import layers
from hybrid_plugin.vllm.kernels.layers import StateLayers
from tests.vllm.kernel_passes import SLOTS, Row, common_of, short_conv_builder

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="vLLM's own kernels of a CPU are the peer"
)

CHANNELS, TAPS = 24, 3
METHODS = ("forward_native", "forward_cuda")


@pytest.fixture(autouse=True, scope="module")
def hooked() -> None:
    patches.patch_kernels([Mixer.SHORT_CONV])


def layer_with() -> Any:
    """A layer whose every slot holds what nobody may read."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    into, out_of = draw(3 * CHANNELS, CHANNELS), draw(CHANNELS, CHANNELS)
    return SimpleNamespace(
        prefix="0",
        conv=SimpleNamespace(weight=draw(CHANNELS, 1, TAPS), bias=draw(CHANNELS)),
        in_proj=lambda x: (x @ into.T, None),
        out_proj=lambda x: (x @ out_of.T, None),
        kv_cache=(torch.full((SLOTS, TAPS - 1, CHANNELS), torch.nan),),
    )


def ours_of(layer: Any) -> StateLayers:
    """Have our kernels run it."""
    kind = layers.Kind(Mixer.SHORT_CONV, "short_conv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "kind_of", lambda _: kind)
        found = StateLayers({"0": layer}, "ours", "cpu")
    found.hang()
    return found


def inputs(tokens: int, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn((tokens, CHANNELS), generator=rng)


def forward(
    layer: Any, rows: Sequence[Row], hidden: torch.Tensor, method: str = METHODS[0]
) -> torch.Tensor:
    """A pass as vLLM runs it: the builder's metadata, then the layer's method."""
    metadata = short_conv_builder({"0": layer}).build(0, common_of(rows))
    context = SimpleNamespace(attn_metadata={"0": metadata})
    out = torch.full(hidden.shape, torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_conv, "get_forward_context", lambda: context)
        patch.setattr("vllm.forward_context.get_forward_context", lambda: context)
        getattr(ShortConv, method)(layer, hidden_states=hidden, output=out)
    return out


PASSES: tuple[tuple[Row, ...], ...] = (
    (Row(3, 0, 5), Row(5, 0, 100)),
    (Row(3, 5, 1, in_prompt=False), Row(5, 100, 70), Row(1, 0, 64)),
    (Row(1, 64, 1, in_prompt=False), Row(3, 6, 1, in_prompt=False)),
    (Row(5, 170, 1), Row(1, 65, 1, in_prompt=False), Row(9, 0, 1), Row(2, 0, 130)),
)


@pytest.mark.parametrize("method", METHODS)
def test_passes_equal_vllms(method: str) -> None:
    theirs, mine = layer_with(), layer_with()
    ours_of(mine)
    for seed, rows in enumerate(PASSES):
        hidden = inputs(sum(row.length for row in rows), seed)
        expected = forward(theirs, rows, hidden)
        found = forward(mine, rows, hidden, method)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    touched = sorted({row.slot for rows in PASSES for row in rows})
    rest = [slot for slot in range(SLOTS) if slot not in touched]
    assert mine.kv_cache[0][rest].isnan().all()
    torch.testing.assert_close(mine.kv_cache[0][touched], theirs.kv_cache[0][touched])


def test_interior_snapshots_are_what_a_pass_to_there_leaves() -> None:
    mine, paused = layer_with(), layer_with()
    found = ours_of(mine)
    hidden = inputs(164, 5)
    found.interior = InteriorSnapshots(torch.device("cpu"))
    found.interior.order([SaveInPass(Pool.STATE, 2, 1, 9)])
    forward(mine, [Row(2, 0, 164)], hidden)
    forward(paused, [Row(2, 0, 128)], hidden[:128])
    torch.testing.assert_close(mine.kv_cache[0][9], paused.kv_cache[0][2])
    found.interior.clear()  # raises if nobody had looked the order up


def test_without_states_vllm_tries_its_projections() -> None:
    mine = layer_with()
    ours_of(mine)
    context = SimpleNamespace(attn_metadata=None)
    out = torch.full((3, CHANNELS), torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_conv, "get_forward_context", lambda: context)
        patch.setattr("vllm.forward_context.get_forward_context", lambda: context)
        ShortConv.forward_native(mine, inputs(3, 0), out)
    assert not out.isnan().any()
    assert mine.kv_cache[0].isnan().all()


def test_warming_up_touches_no_state() -> None:
    mine = layer_with()
    found = ours_of(mine)
    found.warm_up(3)
    assert all(states.isnan().all() for states in mine.kv_cache)
