# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 in vLLM on our kernels, beside vLLM's own on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import MambaConfig
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.ops.ssu_dispatch import (
    initialize_mamba_ssu_backend,
)
from vllm.platforms import current_platform

from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.kernels import layers
from hybrid_plugin.vllm.kernels.layers import StateLayers
from tests.vllm.fakes import SPECS
from tests.vllm.kernel_passes import SLOTS, Row, common_of, mamba2_builder

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="vLLM's own kernels of a CPU are the peer"
)

HEADS, WIDTH, GROUPS, DEPTH, TAPS = 4, 16, 2, 32, 4
INPUTS = HEADS * WIDTH
CHANNELS = INPUTS + 2 * GROUPS * DEPTH
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""Two implementations in float32."""


@pytest.fixture(autouse=True, scope="module")
def hooked() -> None:
    patches.patch_kernels([Mixer.MAMBA2])
    group = SimpleNamespace(kv_cache_spec=SPECS["s0"])
    initialize_mamba_ssu_backend(
        MambaConfig(), SimpleNamespace(kv_cache_groups=[group])
    )


def layer_with(seed: int = 0) -> Any:
    """A layer whose every slot holds what nobody may read."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    weight = draw(CHANNELS, 1, TAPS) / 2
    sizes = [INPUTS, GROUPS * DEPTH, GROUPS * DEPTH]
    return SimpleNamespace(
        prefix="0",
        conv1d=SimpleNamespace(weight=weight, bias=draw(CHANNELS)),
        conv_weights=weight.view(CHANNELS, TAPS),
        A=-draw(HEADS).exp(),
        D=draw(HEADS),
        dt_bias=draw(HEADS),
        activation="silu",
        cache_config=SimpleNamespace(),
        mamba_config=SimpleNamespace(backend=None),
        num_spec=0,
        use_replayssm=False,
        num_heads=HEADS,
        n_groups=GROUPS,
        head_dim=WIDTH,
        ssm_state_size=DEPTH,
        tp_size=1,
        is_blackwell=False,
        tped_intermediate_size=INPUTS,
        tped_conv_size=CHANNELS,
        tped_dt_size=HEADS,
        split_hidden_states_B_C_fn=lambda mixed: torch.split(mixed, sizes, dim=-1),
        kv_cache=(
            torch.full((SLOTS, TAPS - 1, CHANNELS), torch.nan),
            torch.full((SLOTS, HEADS, WIDTH, DEPTH), torch.nan),
        ),
    )


def ours_of(layer: Any) -> StateLayers:
    """Have our kernels run it."""
    kind = layers.Kind(Mixer.MAMBA2, "mamba2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "kind_of", lambda _: kind)
        found = StateLayers({"0": layer}, "ours", "cpu")
    found.hang()
    return found


def inputs(tokens: int, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn((tokens, INPUTS + CHANNELS + HEADS), generator=rng)


def forward(layer: Any, rows: Sequence[Row], projected: torch.Tensor) -> torch.Tensor:
    """A pass as vLLM runs it: the builder's metadata, then the layer's method."""
    metadata = mamba2_builder({"0": layer}).build(0, common_of(rows))
    context = SimpleNamespace(attn_metadata={"0": metadata})
    out = torch.full((len(projected), INPUTS), torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mamba_mixer2, "get_forward_context", lambda: context)
        patch.setattr("vllm.forward_context.get_forward_context", lambda: context)
        MambaMixer2.conv_ssm_forward(layer, projected_states=projected, output=out)
    return out


def run(layer: Any, rows: Sequence[Row], seed: int) -> torch.Tensor:
    return forward(layer, rows, inputs(sum(row.length for row in rows), seed))


PASSES: tuple[tuple[Row, ...], ...] = (
    (Row(3, 0, 5), Row(5, 0, 100)),
    (Row(3, 5, 1, in_prompt=False), Row(5, 100, 70), Row(1, 0, 64)),
    (Row(1, 64, 1, in_prompt=False), Row(3, 6, 1, in_prompt=False)),
    (Row(5, 170, 1), Row(1, 65, 1, in_prompt=False), Row(9, 0, 1), Row(2, 0, 130)),
)
"""Fresh, resumed and chunked prompts, beside decodes and chunks of one token."""


def test_passes_equal_vllms() -> None:
    theirs, mine = layer_with(), layer_with()
    ours_of(mine)
    for seed, rows in enumerate(PASSES):
        expected, found = run(theirs, rows, seed), run(mine, rows, seed)
        assert not found.isnan().any()
        torch.testing.assert_close(found, expected, **CLOSE)
    touched = sorted({row.slot for rows in PASSES for row in rows})
    rest = [slot for slot in range(SLOTS) if slot not in touched]
    for our_states, their_states in zip(mine.kv_cache, theirs.kv_cache, strict=True):
        assert our_states[rest].isnan().all()
        torch.testing.assert_close(our_states[touched], their_states[touched], **CLOSE)


def test_a_wrong_state_shows() -> None:
    """Negative control of the comparison."""
    theirs, mine = layer_with(), layer_with()
    ours_of(mine)
    for layer in (theirs, mine):
        run(layer, PASSES[0], 0)
    mine.kv_cache[1][5] = 0
    expected, found = (run(layer, PASSES[1], 1) for layer in (theirs, mine))
    assert not torch.allclose(found, expected, **CLOSE)


def test_interior_snapshots_are_what_a_pass_to_there_leaves() -> None:
    mine, paused = layer_with(), layer_with()
    found = ours_of(mine)
    ours_of(paused)
    projected = inputs(164, 5)
    found.interior = InteriorSnapshots(torch.device("cpu"))
    found.interior.order([SaveInPass(Pool.STATE, 2, 1, 9)])
    forward(mine, [Row(2, 0, 164)], projected)
    forward(paused, [Row(2, 0, 128)], projected[:128])
    for kept, left in zip(mine.kv_cache, paused.kv_cache, strict=True):
        assert torch.equal(kept[9], left[2])
        assert not torch.equal(kept[9], kept[2])
        assert kept[10].isnan().all()
    found.interior.clear()  # raises if nobody had looked the order up


def test_padding_rows_touch_no_slot() -> None:
    mine = layer_with()
    ours_of(mine)
    run(mine, [Row(3, 0, 5)], 0)
    before = [states.clone() for states in mine.kv_cache]
    rows = [Row(3, 5, 1, in_prompt=False)] + [Row(0, 0, 1, in_prompt=False)] * 3
    assert not run(mine, rows, 1)[:1].isnan().any()
    for states, old in zip(mine.kv_cache, before, strict=True):
        assert states[0].isnan().all()
        assert not torch.equal(states[3], old[3])


def test_without_states_vllm_is_not_asked_to_warm_its_kernels_up() -> None:
    mine = layer_with()
    ours_of(mine)
    context = SimpleNamespace(attn_metadata=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.forward_context.get_forward_context", lambda: context)
        MambaMixer2.conv_ssm_forward(mine, inputs(3, 0), torch.zeros(3, INPUTS))
    assert mine.kv_cache[1].isnan().all()


def test_warming_up_touches_no_state() -> None:
    mine = layer_with()
    found = ours_of(mine)
    found.warm_up(3)
    assert all(states.isnan().all() for states in mine.kv_cache)
