# SPDX-License-Identifier: Apache-2.0
"""Qwen's gated delta net in vLLM on our kernels, beside vLLM's own on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
    QwenGatedDeltaNetAttention,
)
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.platforms import current_platform

from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.mixers.long_prefill import LongKernel
from hybrid_plugin.upstream.hookpoints import resolve
from hybrid_plugin.vllm import contracts, patches
from hybrid_plugin.vllm.kernels import layers, passes
from hybrid_plugin.vllm.kernels.layers import StateLayers
from tests.mixers.fake_flashinfer import chunk_gated_delta_rule
from tests.vllm.kernel_passes import SLOTS, Row, common_of, gdn_builder

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="vLLM's own kernels of a CPU are the peer"
)

KEY_HEADS, VALUE_HEADS, DEPTH, WIDTH, TAPS = 2, 4, 64, 64, 4
CHANNELS = 2 * KEY_HEADS * DEPTH + VALUE_HEADS * WIDTH
CLOSE = {"rtol": 0.05, "atol": 0.02}
"""Two implementations that round to bfloat16 in other places."""


@pytest.fixture(autouse=True, scope="module")
def hooked() -> None:
    patches.patch_kernels([Mixer.GATED_DELTA_NET])


class Layer(SimpleNamespace):
    """What vLLM's and our kernels read of a layer."""

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """As the class says for these sizes."""
        return (TAPS - 1, CHANNELS), (VALUE_HEADS, WIDTH, DEPTH)

    def rearrange_mixed_qkv(self, mixed: torch.Tensor) -> Any:
        """As the class does."""
        return QwenGatedDeltaNetAttention.rearrange_mixed_qkv(self, mixed)


def layer_with(seed: int = 0) -> Layer:
    """A layer whose every slot holds what nobody may read."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    convolution = SimpleNamespace(weight=draw(CHANNELS, 1, TAPS) / 2, bias=None)
    if torch.cpu._is_avx512_bf16_supported():  # what vLLM does when it loads one
        plain = convolution.weight.view(CHANNELS, TAPS).contiguous().clone()
        convolution._cpu_unpacked_conv_weight = plain
        convolution.weight = torch.ops._C.causal_conv1d_weight_pack(plain)
    return Layer(
        prefix="0",
        conv1d=convolution,
        A_log=draw(VALUE_HEADS, dtype=torch.float32).abs().log(),
        dt_bias=draw(VALUE_HEADS),
        activation="silu",
        key_dim=KEY_HEADS * DEPTH,
        value_dim=VALUE_HEADS * WIDTH,
        head_k_dim=DEPTH,
        head_v_dim=WIDTH,
        tp_size=1,
        kv_cache=(
            torch.full((SLOTS, TAPS - 1, CHANNELS), torch.nan, dtype=torch.bfloat16),
            torch.full((SLOTS, VALUE_HEADS, WIDTH, DEPTH), torch.nan),
        ),
    )


def ours_of(layer: Layer) -> StateLayers:
    """Have our kernels run it."""
    kind = layers.Kind(Mixer.GATED_DELTA_NET, "gated_delta_net")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "kind_of", lambda _: kind)
        found = StateLayers({"0": layer}, "ours", "cpu")
    found.hang()
    return found


def inputs(tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    sizes = (CHANNELS, VALUE_HEADS, VALUE_HEADS)
    return tuple(
        torch.randn((tokens, n), generator=rng).to(torch.bfloat16) for n in sizes
    )


def run(layer: Layer, rows: Sequence[Row], seed: int) -> torch.Tensor:
    """A pass as vLLM runs it: the builder's metadata, then the op of a CPU."""
    common = common_of(rows)
    metadata = gdn_builder({"0": layer}).build(0, common)
    mixed, b, a = inputs(common.num_actual_tokens, seed)
    out = torch.full((len(mixed), VALUE_HEADS, WIDTH), torch.nan, dtype=torch.bfloat16)
    gdn_attention._cpu_gdn_attention_nonspec(layer, metadata, mixed, b, a, out)
    return out


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
    for states in mine.kv_cache:
        assert not states[touched].isnan().any()
        assert states[rest].isnan().all()
    torch.testing.assert_close(
        mine.kv_cache[0][touched], theirs.kv_cache[0][touched], rtol=0, atol=0
    )
    # vLLM's kernel keeps a state transposed on a CPU.
    their_states = theirs.kv_cache[1][touched].view(-1, VALUE_HEADS, DEPTH, WIDTH)
    torch.testing.assert_close(
        mine.kv_cache[1][touched], their_states.transpose(-1, -2), **CLOSE
    )


def test_a_layer_that_is_not_ours_stays_vllms() -> None:
    theirs, left_alone = layer_with(), layer_with()
    assert torch.equal(run(theirs, PASSES[0], 1), run(left_alone, PASSES[0], 1))
    assert torch.equal(theirs.kv_cache[1][5], left_alone.kv_cache[1][5])


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
    run(mine, [Row(4, 0, 5), Row(2, 0, 64)], 0)
    run(paused, [Row(4, 0, 5), Row(2, 0, 64)], 0)
    found.interior = InteriorSnapshots(torch.device("cpu"))
    found.interior.order([SaveInPass(Pool.STATE, 2, 1, 9)])
    tokens = 64 + 100
    mixed, b, a = inputs(tokens, 5)

    def go_on(layer: Layer, computed: int, part: slice) -> None:
        rows = [Row(2, computed, part.stop - part.start)]
        metadata = gdn_builder({"0": layer}).build(0, common_of(rows))
        out = torch.zeros(part.stop - part.start, VALUE_HEADS, WIDTH).bfloat16()
        gdn_attention._cpu_gdn_attention_nonspec(
            layer, metadata, mixed[part], b[part], a[part], out
        )

    go_on(mine, 64, slice(0, tokens))
    go_on(paused, 64, slice(0, 128))
    for kept, left in zip(mine.kv_cache, paused.kv_cache, strict=True):
        assert torch.equal(kept[9], left[2])
        assert not torch.equal(kept[9], kept[2])
        assert kept[10].isnan().all()
    found.interior.clear()  # raises if nobody had looked the order up


def test_padding_rows_touch_no_slot() -> None:
    """A graph's batch is padded by rows that vLLM gives its reserved slot."""
    mine = layer_with()
    ours_of(mine)
    run(mine, [Row(3, 0, 5)], 0)
    before = [states.clone() for states in mine.kv_cache]
    rows = [Row(3, 5, 1, in_prompt=False)] + [Row(0, 0, 1, in_prompt=False)] * 3
    out = run(mine, rows, 1)
    assert not out[:1].isnan().any()
    for states, old in zip(mine.kv_cache, before, strict=True):
        assert states[0].isnan().all()
        assert not torch.equal(states[3], old[3])


def test_slots_of_decodes_stay_where_a_graph_finds_them() -> None:
    mine = layer_with()
    ours_of(mine)
    builder = gdn_builder({"0": mine})
    decodes = [Row(slot, 9, 1, in_prompt=False) for slot in (4, 2, 6)]
    first = passes.of(builder.build(0, common_of(decodes)))
    captured = first.decode_slots
    second = passes.of(builder.build(0, common_of(decodes[1:2])))
    assert second.decode_slots.data_ptr() == captured.data_ptr()
    assert captured.tolist() == [2, -1, -1]
    mixed = passes.of(builder.build(0, common_of([decodes[0], Row(5, 0, 9)])))
    assert mixed.decode_slots.tolist() == [4]
    assert captured.tolist() == [2, -1, -1]


def test_groups_share_what_was_described_and_not_where_it_lies() -> None:
    mine = layer_with()
    ours_of(mine)
    one, other = gdn_builder({"0": mine}), gdn_builder({"0": mine})
    common = common_of([Row(4, 9, 1, in_prompt=False), Row(2, 3, 1, in_prompt=False)])
    built = one.build(0, common)
    again = other.update_block_table(
        built, common.block_table_tensor, common.slot_mapping
    )
    slots = passes.of(built).decode_slots, passes.of(again).decode_slots
    assert slots[0].tolist() == slots[1].tolist() == [4, 2]
    assert slots[0].data_ptr() != slots[1].data_ptr()
    longer = one.build(0, common_of([Row(4, 10, 9)]))
    again = other.update_block_table(
        longer, common.block_table_tensor[:1], common.slot_mapping
    )
    assert passes.of(again).prefills is passes.of(longer).prefills


def test_chunks_are_placed_by_the_prompts_start() -> None:
    mine = layer_with()
    ours_of(mine)
    rows = [Row(3, 7, 1, in_prompt=False), Row(5, 100, 70), Row(1, 64, 5), Row(2, 0, 3)]
    found = passes.of(gdn_builder({"0": mine}).build(0, common_of(rows)))
    assert found.decodes == 1 and found.tokens == 79
    assert found.prefills is not None
    assert found.prefills.cu_seqlens.tolist() == [0, 70, 75, 78]
    assert found.prefills.slots.tolist() == [5, 1, 2]
    assert found.prefills.offsets.tolist() == [36, 0, 0]
    assert found.prefills.has_initial.tolist() == [True, True, False]
    assert found.prefills.boundary_slots is None


def test_a_pass_that_nobody_described_is_refused() -> None:
    mine = layer_with()
    ours_of(mine)
    with pytest.raises(RuntimeError, match="is not hooked"):
        layers.run(mine, SimpleNamespace())


def test_new_weights_are_taken_to_where_the_old_ones_were() -> None:
    mine = layer_with()
    found = ours_of(mine)
    kernels = layers.ours(mine)
    assert kernels is not None
    place = kernels.weights.A.data_ptr()
    mine.A_log += 1
    found.refresh()
    assert kernels.weights.A.data_ptr() == place
    assert torch.equal(kernels.weights.A, -torch.exp(mine.A_log))


def test_warming_up_touches_no_state() -> None:
    mine = layer_with()
    found = ours_of(mine)
    found.warm_up(3)
    assert all(states.isnan().all() for states in mine.kv_cache)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of the size that FlashInfer's kernel has."""
    name, heads = __name__, 2 * KEY_HEADS + VALUE_HEADS
    monkeypatch.setattr(f"{name}.DEPTH", 128)
    monkeypatch.setattr(f"{name}.WIDTH", 128)
    monkeypatch.setattr(f"{name}.CHANNELS", 128 * heads)


def beside_flashinfer(layer: Layer) -> tuple[StateLayers, list[int]]:
    """Have it run what is longer than 128 tokens; notes the tokens of its calls."""
    found, seen = ours_of(layer), []

    def function(**call: Any) -> Any:
        seen.append(len(call["q"]))
        return chunk_gated_delta_rule(**call)

    kernels = layers.ours(layer)
    assert kernels is not None
    kernels.long = LongKernel(function, 128)
    return found, seen


@pytest.mark.usefixtures("wide")
def test_long_passes_that_keep_states_are_divided() -> None:
    mine, whole = layer_with(), layer_with()
    found, seen = beside_flashinfer(mine)
    for every in (found, ours_of(whole)):
        every.interior = InteriorSnapshots(torch.device("cpu"))
        layer = mine if every is found else whole
        run(layer, [Row(3, 0, 7), Row(5, 0, 100), Row(1, 0, 64)], 0)
    orders = [
        SaveInPass(Pool.STATE, 5, 0, 9),
        SaveInPass(Pool.STATE, 5, 1, 10),
        SaveInPass(Pool.STATE, 1, 1, 11),
    ]
    rows = [Row(3, 7, 1, in_prompt=False), Row(5, 100, 150), Row(1, 64, 130)]
    outs = []
    for every, layer in ((found, mine), (ours_of(whole), whole)):
        every.interior = InteriorSnapshots(torch.device("cpu"))
        every.interior.order(orders)
        outs.append(run(layer, rows, 1))
        every.interior.clear()
    assert seen == [150 - 28 + 130], "what is not yet on the grid is ours"
    torch.testing.assert_close(*outs, **CLOSE)
    for name, divided, ours in zip("cs", mine.kv_cache, whole.kv_cache, strict=True):
        assert torch.equal(divided.isnan(), ours.isnan()), name
        filled = [slot for slot in range(SLOTS) if not ours[slot].isnan().any()]
        assert {9, 10, 11} <= {*filled}
        torch.testing.assert_close(divided[filled], ours[filled], **CLOSE)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("change", ["short", "keeps none", "rounds"])
def test_other_passes_are_whole(change: str) -> None:
    mine = layer_with()
    found, seen = beside_flashinfer(mine)
    found.interior = InteriorSnapshots(torch.device("cpu"))
    found.round_states = change == "rounds"
    common = common_of([Row(5, 0, 128 if change == "short" else 200)])
    if change != "keeps none":
        found.interior.order([SaveInPass(Pool.STATE, 5, 1, 9)])
    built = passes.of(gdn_builder({"0": mine}).build(0, common))
    assert built.prefills is not None and built.prefills.long is None
    assert not seen


@pytest.mark.usefixtures("wide")
def test_a_pass_of_which_the_host_knows_nothing_is_whole() -> None:
    mine = layer_with()
    found, _ = beside_flashinfer(mine)
    found.interior = InteriorSnapshots(torch.device("cpu"))
    found.interior.order([SaveInPass(Pool.STATE, 5, 1, 9)])
    common = common_of([Row(5, 0, 200)])
    metadata = gdn_builder({"0": mine}).build(0, common)
    (kernels,) = found._ours.values()
    room = passes.DecodeSlots(1, torch.device("cpu"))

    def divided() -> bool:
        described = passes.describe(
            common, metadata, room, found.interior, long=kernels.long
        )
        assert described.prefills is not None
        return described.prefills.long is not None

    assert divided()
    common.seq_lens_cpu_upper_bound = None
    assert not divided()


@pytest.mark.usefixtures("wide")
def test_warming_up_compiles_the_kernel_of_long_passes() -> None:
    mine = layer_with()
    found, seen = beside_flashinfer(mine)
    found.warm_up(3)
    assert sorted(seen) == [64, 66]
    assert all(states.isnan().all() for states in mine.kv_cache)


@pytest.mark.parametrize("is_ours", [True, False])
def test_where_vllm_fuses_the_norm_ours_run_before_it(
    is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the gates where they are, and behind ours the norm of the pass's tokens."""
    seen: list[Any] = []

    def run(layer: Any, metadata: Any, *tensors: torch.Tensor) -> bool:
        seen.append(tensors)
        tensors[-1].fill_(2.0)
        return is_ours

    def norm(x: torch.Tensor, output_gate: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(x, output_gate, out=out)

    target = contracts.GDN_FUSED_NORM
    owner, name = resolve(target)
    monkeypatch.setattr(owner, name, lambda *args: seen.append("vLLM's"))
    monkeypatch.setattr(patches, "require", lambda contracts: None)
    patches._patch_gated_delta_net_with_drafts()
    monkeypatch.setattr(layers, "run", run)
    metadata = SimpleNamespace(num_actual_tokens=2)
    monkeypatch.setattr(patches, "_metadata_of", lambda layer: metadata)
    gates, out = torch.randn(3, 2 * VALUE_HEADS), torch.zeros(3, VALUE_HEADS, WIDTH)
    b, a = gates.chunk(2, dim=-1)
    gate = torch.full_like(out, 3.0)
    layer = SimpleNamespace(_rms_norm_gated_cuda=norm)
    getattr(owner, name)(
        layer,
        mixed_qkv=torch.randn(3, CHANNELS),
        b=b,
        a=a,
        output_gate=gate,
        core_attn_out=out,
    )
    assert seen[0][1] is a and seen[0][2] is b
    assert seen[1:] == ([] if is_ours else ["vLLM's"])
    assert out[:2].eq(6.0 if is_ours else 2.0).all() and out[2:].eq(2.0).all()
