# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets in SGLang's backend on our kernels, beside SGLang's own path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer, Phase
from hybrid_plugin.mixers.long_prefill import LongKernel
from hybrid_plugin.sglang.kernels import gated_delta_net
from hybrid_plugin.sglang.kernels.state_layers import StateLayers
from hybrid_plugin.sglang_cpu import kernels
from tests.mixers.fake_flashinfer import chunk_gated_delta_rule
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

KEY_HEADS, VALUE_HEADS, DEPTH, WIDTH, TAPS = 2, 4, 16, 8, 4
CHANNELS = 2 * KEY_HEADS * DEPTH + VALUE_HEADS * WIDTH
SHAPES = ((CHANNELS, TAPS - 1), (VALUE_HEADS, WIDTH, DEPTH))
OURS = layers_of(Mixer.GATED_DELTA_NET)
ENGINE = StateLayers()


@pytest.fixture(autouse=True, scope="module")
def platform() -> None:
    """SGLang's own path runs on the references of the CPU platform."""
    kernels.install()


class Layer(torch.nn.Module):
    """What SGLang's `RadixLinearAttention` holds."""

    layer_id = 0
    num_q_heads = num_k_heads = KEY_HEADS
    num_v_heads = VALUE_HEADS
    head_q_dim = head_k_dim = DEPTH
    head_v_dim = WIDTH
    q_dim = k_dim = KEY_HEADS * DEPTH
    v_dim = VALUE_HEADS * WIDTH
    activation = "silu"
    bias = None

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(1)
        self.conv_weights = torch.randn(CHANNELS, TAPS, generator=rng) / 2
        self.A_log = torch.rand(VALUE_HEADS, generator=rng) - 2
        self.dt_bias = torch.randn(VALUE_HEADS, generator=rng)


def inputs(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "mixed_qkv": torch.randn(tokens, CHANNELS, generator=rng),
        "a": torch.randn(tokens, VALUE_HEADS, generator=rng),
        "b": torch.randn(tokens, VALUE_HEADS, generator=rng),
    }


def run(
    layers: StateLayers,
    pools: Pools,
    rows: Sequence[Row],
    given: dict[str, torch.Tensor],
    mode: Any = EXTEND,
    layer: Any = None,
) -> torch.Tensor:
    """One pass of one layer, as SGLang calls it."""
    backend, batch = backend_of(GDNAttnBackend, pools), batch_of(rows, mode)
    backend.init_forward_metadata(batch)
    return call(layers, backend, batch, given, layer)


def call(
    layers: StateLayers,
    backend: Any,
    batch: Any,
    given: dict[str, torch.Tensor],
    layer: Any = None,
) -> torch.Tensor:
    decodes = batch.forward_mode.is_decode()
    kind = GDNAttnBackend
    hook, original = (
        (gated_delta_net.decode, kind.forward_decode)
        if decodes
        else (gated_delta_net.extend, kind.forward_extend)
    )
    out: torch.Tensor = hook(
        layers,
        original,
        backend,
        layer=layer or Layer(),
        forward_batch=batch,
        q=None,
        k=None,
        v=None,
        save_kv_cache=True,
        **given,
    )
    return out


def filled(pools: Pools, slots: Sequence[int]) -> Pools:
    """The same with states in some slots."""
    rng = torch.Generator().manual_seed(9)
    for pool in (pools.conv, pools.temporal):
        for slot in slots:
            pool[slot] = torch.randn(pool.shape[1:], generator=rng)
    return pools


def cleared(pools: Pools, rows: Sequence[Row]) -> Pools:
    """The same with zeros where sequences begin, which SGLang's kernels need."""
    for row in rows:
        if not row.computed:
            pools.temporal[row.slot] = 0
    return pools


PASSES = {
    "new": ([Row(3, 0, 70), Row(1, 0, 5)], EXTEND),
    "resumed inside a chunk": ([Row(3, 100, 70), Row(1, 0, 130)], EXTEND),
    "running ones among prompts": ([Row(3, 16, 40), Row(1, 9), Row(5, 64)], MIXED),
    "running": ([Row(3, 70), Row(1, 5), Row(2, 64)], DECODE),
}


@pytest.mark.parametrize("slot_major", [False, True])
@pytest.mark.parametrize(("rows", "mode"), PASSES.values(), ids=PASSES)
def test_outputs_and_states_are_those_of_sglang_s_own_path(
    rows: list[Row], mode: Any, slot_major: bool
) -> None:
    given = inputs(sum(row.length for row in rows))
    resumed = [row.slot for row in rows if row.computed]
    ours = filled(pools_of(*SHAPES, slot_major=slot_major), resumed)
    theirs = cleared(filled(pools_of(*SHAPES), resumed), rows)
    out = run(OURS, ours, rows, given, mode)
    expected = run(ENGINE, theirs, rows, given, mode)
    torch.testing.assert_close(out, expected.view(out.shape), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        ours.conv, theirs.conv, equal_nan=True, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        ours.temporal, theirs.temporal, equal_nan=True, rtol=1e-4, atol=1e-5
    )
    assert touched(ours.temporal) == sorted(row.slot for row in rows)


def test_padded_rows_leave_every_slot_alone() -> None:
    pools = pools_of(*SHAPES)
    rows = [Row(2, 0, 6), Row(0, 0, 0), Row(0, 0, 1)]
    run(OURS, pools, rows, inputs(7))
    assert touched(pools.conv) == touched(pools.temporal) == [2]


def test_padding_behind_the_sequences_is_finite() -> None:
    given = inputs(9)
    out = run(OURS, pools_of(*SHAPES), [Row(2, 0, 6)], given)
    assert out.shape == (1, 9, VALUE_HEADS, WIDTH)
    assert torch.equal(out[:, 6:], torch.zeros_like(out[:, 6:]))


def test_a_graph_s_padded_rows_leave_every_slot_alone() -> None:
    pools = filled(pools_of(*SHAPES), [4])
    backend, batch = backend_of(GDNAttnBackend, pools), batch_of([Row(4, 7)], DECODE)
    backend.init_forward_metadata(batch)
    backend.forward_metadata.mamba_cache_indices = torch.tensor([4, -1, -1]).int()
    alone = filled(pools_of(*SHAPES), [4])
    given = inputs(3)
    out = call(OURS, backend, batch, given)
    first = {name: value[:1] for name, value in given.items()}
    expected = run(OURS, alone, [Row(4, 7)], first, DECODE)
    torch.testing.assert_close(out[:, :1], expected)
    assert touched(pools.temporal) == [4]


def test_the_output_that_sglang_gives_is_written() -> None:
    given = inputs(6)
    room = torch.full((1, 9, VALUE_HEADS, WIDTH), torch.nan)
    pools = pools_of(*SHAPES)
    backend, batch = backend_of(GDNAttnBackend, pools), batch_of([Row(2, 0, 6)])
    backend.init_forward_metadata(batch)
    out = call(OURS, backend, batch, given | {"linear_attn_output": room[:, :6]})
    assert out.data_ptr() == room.data_ptr()
    expected = run(OURS, pools_of(*SHAPES), [Row(2, 0, 6)], given)
    assert torch.equal(room[:, :6], expected)
    assert room[:, 6:].isnan().all()


def test_states_inside_a_pass_are_those_of_passes_that_end_there() -> None:
    """A sequence that resumes at 100 crosses 128 and 192; a new one crosses 64."""
    rows = [Row(3, 100, 130), Row(1, 0, 90), Row(5, 0, 20)]
    interior = InteriorSnapshots(torch.device("cpu"))
    interior.order(
        [
            SaveInPass(Pool.STATE, 3, 1, 8),
            SaveInPass(Pool.STATE, 3, 0, 7),
            SaveInPass(Pool.STATE, 1, 0, 9),
        ]
    )
    layers = layers_of(Mixer.GATED_DELTA_NET, interior=interior)
    given = inputs(240)
    pools = filled(pools_of(*SHAPES), [3])
    run(layers, pools, rows, given)
    interior.clear()
    assert touched(pools.temporal) == [1, 3, 5, 7, 8, 9]
    for slot, destination, first, length in (
        (3, 7, 0, 28),
        (3, 8, 0, 92),
        (1, 9, 130, 64),
    ):
        alone = filled(pools_of(*SHAPES), [3])
        part = {name: value[first : first + length] for name, value in given.items()}
        row = next(row for row in rows if row.slot == slot)
        run(OURS, alone, [replace(row, length=length)], part)
        for found, expected in (
            (pools.conv, alone.conv),
            (pools.temporal, alone.temporal),
        ):
            torch.testing.assert_close(
                found[destination], expected[slot], rtol=1e-4, atol=1e-6
            )


def test_a_pass_is_described_once_for_all_layers() -> None:
    pools = pools_of(*SHAPES)
    backend, batch = backend_of(GDNAttnBackend, pools), batch_of([Row(2, 0, 6)])
    backend.init_forward_metadata(batch)
    records = [OURS.prefills(backend.forward_metadata, batch, print) for _ in range(2)]
    assert records[0] is records[1]
    backend.init_forward_metadata(batch)
    assert OURS.prefills(backend.forward_metadata, batch, print) is not records[0]


@pytest.mark.parametrize("change", ["scoring", "tracking", "subclass", "phase"])
def test_what_is_no_plain_prefill_stays_sglang_s(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interior = InteriorSnapshots(torch.device("cpu"))
    interior.order([SaveInPass(Pool.STATE, 2, 0, 7)])
    layers = layers_of(Mixer.GATED_DELTA_NET, interior=interior)
    backend, batch = (
        backend_of(GDNAttnBackend, pools_of(*SHAPES)),
        batch_of([Row(2, 0, 70)]),
    )
    backend.init_forward_metadata(batch)
    if change == "scoring":
        backend.mis_metadata = SimpleNamespace()
    elif change == "tracking":
        backend.forward_metadata.has_mamba_track_mask = True
    elif change == "subclass":
        backend.__class__ = type("Other", (GDNAttnBackend,), {})
    else:
        layers = layers_of(Mixer.GATED_DELTA_NET, Phase.DECODE, interior=interior)
    seen = []
    monkeypatch.setattr(
        GDNAttnBackend, "forward_extend", lambda *_, **__: seen.append(1)
    )
    call(layers, backend, batch, inputs(70))
    assert seen == [1]
    with pytest.raises(RuntimeError, match="wrote none"):
        interior.clear()


def test_projections_that_come_as_a_pair_are_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Qwen3.5's decode on a GPU leaves that to the backend."""
    given, gate = inputs(2), torch.randn(2, VALUE_HEADS, WIDTH)
    pair = (torch.ones(1), torch.zeros(1))

    def split(*args: Any) -> Any:
        assert args == (*pair, KEY_HEADS, VALUE_HEADS, DEPTH, WIDTH)
        return given["mixed_qkv"], gate, given["b"], given["a"]

    name = "fused_qkvzba_split_reshape_cat_contiguous"
    monkeypatch.setattr(gdn_backend, name, split, raising=False)
    rows = [Row(3, 70), Row(1, 5)]
    placeholders = {"mixed_qkv": pair, "a": pair[1], "b": pair[1]}
    found: Any = run(
        OURS,
        filled(pools_of(*SHAPES), [1, 3]),
        rows,
        placeholders,
        DECODE,  # type: ignore[arg-type]
    )
    expected = run(OURS, filled(pools_of(*SHAPES), [1, 3]), rows, given, DECODE)
    assert torch.equal(found[0], expected) and found[1] is gate


def test_rates_follow_the_weights_in_place() -> None:
    layer = Layer()
    given, rows = inputs(6), [Row(2, 0, 6)]
    before = run(OURS, pools_of(*SHAPES), rows, given, layer=layer)
    rates = gated_delta_net.DECAYS.of(layer)
    layer.A_log += 1
    gated_delta_net.DECAYS.refresh()
    assert gated_delta_net.DECAYS.of(layer) is rates
    assert torch.equal(rates, -layer.A_log.exp())
    after = run(OURS, pools_of(*SHAPES), rows, given, layer=layer)
    fresh = run(ENGINE, cleared(pools_of(*SHAPES), rows), rows, given, layer=layer)
    torch.testing.assert_close(after, fresh.view(after.shape), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, after, rtol=1e-3)


def test_the_warm_up_touches_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of(Mixer.GATED_DELTA_NET)
    layers._cold = True
    pools = pools_of(*SHAPES)
    backend, batch = backend_of(GDNAttnBackend, pools), batch_of([Row(2, 0, 70)])
    backend.init_forward_metadata(batch)
    seen: list[tuple[int, bool]] = []

    def note(*args: Any, **kwargs: Any) -> None:
        prefills = args[1]
        seen.append((len(prefills.slots), prefills.boundary_slots is not None))
        if len(seen) < 5:
            real(*args, **kwargs)
            assert touched(pools.conv) == touched(pools.temporal) == []

    real = gated_delta_net.gated_delta_net.prefill
    monkeypatch.setattr(gated_delta_net.gated_delta_net, "prefill", note)
    call(layers, backend, batch, inputs(70))
    call(layers, backend, batch, inputs(70))
    few_and_many = [(1, False), (1, True), (16, False), (16, True)]
    assert seen == [*few_and_many, (1, False), (1, False)]


WIDE = ((4 * 128, TAPS - 1), (2, 128, 128))


class WideLayer(Layer):
    """With heads of the size that FlashInfer's kernel has."""

    num_q_heads = num_k_heads = 1
    num_v_heads = 2
    head_q_dim = head_k_dim = head_v_dim = 128
    q_dim = k_dim = 128
    v_dim = 256

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(2)
        self.conv_weights = torch.randn(4 * 128, TAPS, generator=rng).bfloat16() / 2
        self.A_log, self.dt_bias = self.A_log[:2], self.dt_bias[:2]


def wide_inputs(tokens: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    sizes = {"mixed_qkv": 4 * 128, "a": 2, "b": 2}
    return {
        name: torch.randn(tokens, size, generator=rng).bfloat16()
        for name, size in sizes.items()
    }


def beside_flashinfer(interior: Any = None) -> tuple[StateLayers, list[int]]:
    """It runs what is longer than 128 tokens; notes the tokens of its calls."""
    seen: list[int] = []

    def function(**call: Any) -> Any:
        seen.append(len(call["q"]))
        return chunk_gated_delta_rule(**call)

    layers = layers_of(Mixer.GATED_DELTA_NET, interior=interior)
    layers._long = LongKernel(function, 128)
    return layers, seen


@pytest.mark.parametrize("slot_major", [False, True])
def test_long_passes_that_keep_states_are_divided(slot_major: bool) -> None:
    rows = [Row(2, 100, 150), Row(4, 0, 130), Row(6, 30, 1)]
    orders = [
        SaveInPass(Pool.STATE, 2, 0, 7),
        SaveInPass(Pool.STATE, 2, 1, 8),
        SaveInPass(Pool.STATE, 4, 1, 9),
    ]
    outs, pools = [], []
    for divides in (True, False):
        interior = InteriorSnapshots(torch.device("cpu"))
        interior.order(orders)
        layers, seen = beside_flashinfer(interior)
        if not divides:
            layers._long = None
        given = wide_inputs(281)
        pool = filled(
            pools_of(*WIDE, slot_major=slot_major, dtype=torch.bfloat16), [2, 6]
        )
        pools.append(pool)
        outs.append(run(layers, pool, rows, given, MIXED, WideLayer()))
        interior.clear()
        assert seen == ([150 - 28 + 130] if divides else [])
    torch.testing.assert_close(*outs, rtol=0.05, atol=0.02)
    for one, other in (
        (pools[0].conv, pools[1].conv),
        (pools[0].temporal, pools[1].temporal),
    ):
        assert touched(one) == touched(other) == [2, 4, 6, 7, 8, 9]
        torch.testing.assert_close(
            one[touched(one)], other[touched(one)], rtol=0.05, atol=0.02
        )


@pytest.mark.parametrize("change", ["short", "keeps none", "nobody knows", "rounds"])
def test_other_passes_are_whole(change: str) -> None:
    interior = InteriorSnapshots(torch.device("cpu"))
    if change != "keeps none":
        interior.order([SaveInPass(Pool.STATE, 2, 1, 9)])
    layers, seen = beside_flashinfer(interior)
    layers.round_states = change == "rounds"
    length = 128 if change == "short" else 200
    backend = backend_of(GDNAttnBackend, pools_of(*WIDE, dtype=torch.bfloat16))
    batch = batch_of([Row(2, 0, length)])
    backend.init_forward_metadata(batch)
    if change == "nobody knows":
        batch.extend_prefix_lens_cpu = None
    call(layers, backend, batch, wide_inputs(length), WideLayer())
    assert not seen


@pytest.mark.parametrize(("tokens", "calls"), [(70, [70, 70]), (1, [1])])
def test_the_warm_up_compiles_the_kernel_of_long_passes(
    tokens: int, calls: list[int]
) -> None:
    layers, seen = beside_flashinfer()
    layers._cold = True
    pools = pools_of(*WIDE, dtype=torch.bfloat16)
    run(layers, pools, [Row(2, 0, tokens)], wide_inputs(tokens), layer=WideLayer())
    assert seen == calls
    assert touched(pools.temporal) == [2]
