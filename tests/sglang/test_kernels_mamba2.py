# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 in SGLang's backend on our kernels, beside SGLang's own path."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.kernels.ops.mamba.triton_ops import ssu_dispatch
from sglang.srt import runtime_context
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer, Phase
from hybrid_plugin.sglang.kernels import mamba2
from hybrid_plugin.sglang.kernels.state_layers import StateLayers
from hybrid_plugin.sglang_cpu import kernels
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

HEADS, CHANNELS, GROUPS, DEPTH, TAPS, HIDDEN = 4, 8, 2, 16, 4, 12
INNER, MIXED_CHANNELS = HEADS * CHANNELS, HEADS * CHANNELS + 2 * GROUPS * DEPTH
SHAPES = ((MIXED_CHANNELS, TAPS - 1), (HEADS, CHANNELS, DEPTH))
OURS = layers_of(Mixer.MAMBA2)
ENGINE = StateLayers()
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True, scope="module")
def platform() -> None:
    """SGLang's own path runs on the references of the CPU platform."""
    kernels.install()
    arguments = SimpleNamespace(
        mamba_backend="triton",
        enable_mamba_cache_stochastic_rounding=False,
        mamba_cache_philox_rounds=0,
    )
    ssu_dispatch.initialize_mamba_selective_state_update_backend(arguments)


def mixer_with(seed: int = 0) -> MambaMixer2:
    """SGLang's, without its parallel layers."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng) / 3

    into, out_of = draw(HIDDEN, INNER + MIXED_CHANNELS + HEADS), draw(INNER, HIDDEN)
    mixer = MambaMixer2.__new__(MambaMixer2)
    torch.nn.Module.__init__(mixer)
    mixer.tp_size = 1
    mixer.num_heads, mixer.head_dim, mixer.n_groups = HEADS, CHANNELS, GROUPS
    mixer.intermediate_size, mixer.conv_dim = INNER, MIXED_CHANNELS
    mixer.ssm_state_size, mixer.groups_ssm_state_size = DEPTH, GROUPS * DEPTH
    mixer.activation = "silu"
    mixer.conv1d = SimpleNamespace(
        weight=draw(MIXED_CHANNELS, 1, TAPS), bias=draw(MIXED_CHANNELS)
    )
    mixer.A, mixer.D, mixer.dt_bias = -draw(HEADS).exp(), draw(HEADS), draw(HEADS)
    mixer.in_proj = lambda x: (x @ into, None)
    mixer.out_proj = lambda x: (x @ out_of, None)
    mixer.norm = lambda x, gate: x * torch.sigmoid(gate)
    return mixer


def run(
    layers: StateLayers,
    pools: Pools,
    rows: Sequence[Row],
    hidden: torch.Tensor,
    mode: Any = EXTEND,
    mixer: Any = None,
    output: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """One pass of one layer, as SGLang calls it."""
    backend, batch = backend_of(Mamba2AttnBackend, pools), batch_of(rows, mode)
    backend.init_forward_metadata(batch)
    if factors is None:
        factors = torch.linspace(0.5, 1.5, INNER + MIXED_CHANNELS + HEADS)
    return mamba2.forward(
        layers,
        Mamba2AttnBackend.forward,
        backend,
        mixer or mixer_with(),
        hidden,
        output,
        layer_id=0,
        forward_batch=batch,
        mup_vector=factors,
        use_triton_causal_conv=True,
    )


def hidden_of(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(3))


def filled(pools: Pools, slots: Sequence[int]) -> Pools:
    """The same with states in some slots."""
    rng = torch.Generator().manual_seed(9)
    for pool in (pools.conv, pools.temporal):
        for slot in slots:
            pool[slot] = torch.randn(pool.shape[1:], generator=rng)
    return pools


PASSES = {
    "new": ([Row(3, 0, 70), Row(1, 0, 5)], EXTEND),
    "resumed inside a chunk": ([Row(3, 100, 70), Row(1, 0, 130)], EXTEND),
    "running ones among prompts": ([Row(3, 16, 40), Row(1, 9), Row(5, 64)], MIXED),
    "running": ([Row(3, 70), Row(1, 5), Row(2, 64)], DECODE),
}


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own path asks the server for the layout of its pools, and the plugin's
    hooks, where another test has set them, whose cache it has.
    """
    server = SimpleNamespace(enable_page_major_kv_layout=False, radix_cache_backend="")
    for module in (hybrid_linear_attn_backend, runtime_context):
        monkeypatch.setattr(module, "get_memory", lambda: server)


@pytest.mark.parametrize("slot_major", [False, True])
@pytest.mark.parametrize(("rows", "mode"), PASSES.values(), ids=PASSES)
def test_outputs_and_states_are_those_of_sglang_s_own_path(
    rows: list[Row], mode: Any, slot_major: bool
) -> None:
    hidden = hidden_of(sum(row.length for row in rows))
    resumed = [row.slot for row in rows if row.computed]
    ours = filled(pools_of(*SHAPES, slot_major=slot_major), resumed)
    theirs = filled(pools_of(*SHAPES), resumed)
    room = torch.full_like(hidden, torch.nan)
    out = run(OURS, ours, rows, hidden, mode, output=room)
    expected = run(ENGINE, theirs, rows, hidden, mode)
    torch.testing.assert_close(out, expected, **CLOSE)
    assert torch.equal(room, out)
    torch.testing.assert_close(ours.conv, theirs.conv, equal_nan=True, **CLOSE)
    torch.testing.assert_close(ours.temporal, theirs.temporal, equal_nan=True, **CLOSE)
    assert touched(ours.temporal) == sorted(row.slot for row in rows)


def test_padded_rows_leave_every_slot_alone_and_padding_is_finite() -> None:
    pools, hidden = pools_of(*SHAPES), hidden_of(9)
    rows = [Row(2, 0, 6), Row(0, 0, 0)]
    out = run(OURS, pools, rows, hidden)
    assert touched(pools.conv) == touched(pools.temporal) == [2]
    assert torch.equal(out[6:], torch.zeros_like(out[6:]))
    alone = run(OURS, pools_of(*SHAPES), rows[:1], hidden[:6])
    torch.testing.assert_close(out[:6], alone)


def test_states_inside_a_pass_are_those_of_passes_that_end_there() -> None:
    """A sequence that resumes at 100 crosses 128 and 192."""
    interior = InteriorSnapshots(torch.device("cpu"))
    interior.order(SaveInPass(Pool.STATE, 3, n, 7 + n) for n in range(2))
    pools, hidden = filled(pools_of(*SHAPES), [3]), hidden_of(130)
    layers = layers_of(Mixer.MAMBA2, interior=interior)
    run(layers, pools, [Row(3, 100, 130)], hidden)
    interior.clear()
    assert touched(pools.temporal) == [3, 7, 8]
    for destination, length in ((7, 28), (8, 92)):
        alone = filled(pools_of(*SHAPES), [3])
        run(OURS, alone, [Row(3, 100, length)], hidden[:length])
        torch.testing.assert_close(pools.conv[destination], alone.conv[3], **CLOSE)
        found = pools.temporal[destination]
        torch.testing.assert_close(found, alone.temporal[3], **CLOSE)


@pytest.mark.parametrize("change", ["tracking", "verify", "other mixer", "phase"])
def test_what_is_no_plain_pass_stays_sglang_s(change: str) -> None:
    layers, mixer = OURS, mixer_with()
    backend, batch = (
        backend_of(Mamba2AttnBackend, pools_of(*SHAPES)),
        batch_of([Row(2, 0, 5)]),
    )
    backend.init_forward_metadata(batch)
    if change == "tracking":
        backend.forward_metadata.has_mamba_track_mask = True
    elif change == "verify":
        backend.forward_metadata.is_target_verify = True
    elif change == "other mixer":
        mixer = SimpleNamespace()
    else:
        layers = layers_of(Mixer.MAMBA2, Phase.DECODE)
    hidden = hidden_of(5)
    found = mamba2.forward(
        layers, lambda *args: args, backend, mixer, hidden, None, 0, batch
    )
    expected: Any = (backend, mixer, hidden, None, 0, batch, None, False)
    assert found == expected


def test_prompts_come_before_single_tokens_of_one_pass() -> None:
    """SGLang's metadata has that form, though its batches have rows of one token."""
    rows, hidden = [Row(2, 0, 6), Row(3, 70), Row(1, 5)], hidden_of(8)
    pools, apart = (filled(pools_of(*SHAPES), [1, 3]) for _ in range(2))
    backend, batch = backend_of(Mamba2AttnBackend, pools), batch_of(rows, MIXED)
    backend.init_forward_metadata(batch)
    metadata = backend.forward_metadata
    metadata.query_start_loc = metadata.query_start_loc[:2]
    metadata.num_prefills, metadata.num_prefill_tokens = 1, 6
    metadata.num_decodes = 2
    forward = Mamba2AttnBackend.forward
    mixer = mixer_with()
    out = mamba2.forward(OURS, forward, backend, mixer, hidden, None, 0, batch)
    factors = torch.ones(INNER + MIXED_CHANNELS + HEADS)
    for part, mode, tokens in (
        (rows[:1], EXTEND, slice(6)),
        (rows[1:], DECODE, slice(6, 8)),
    ):
        expected = run(OURS, apart, part, hidden[tokens], mode, mixer, factors=factors)
        torch.testing.assert_close(out[tokens], expected, **CLOSE)
    torch.testing.assert_close(pools.temporal, apart.temporal, equal_nan=True)
