# SPDX-License-Identifier: Apache-2.0
"""Passes in the shape that CUDA graphs with prefills need, run without graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.platforms import current_platform

from hybrid_plugin.core.commands import CHUNK, COLUMNS, Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.kernels import layers, passes
from hybrid_plugin.vllm.kernels.fixed_shape import GraphLimits, PrefillTables
from hybrid_plugin.vllm.kernels.layers import StateLayers
from tests.vllm import test_gated_delta_net as gdn
from tests.vllm import test_mamba2 as mamba2
from tests.vllm.kernel_passes import (
    SLOTS,
    Row,
    common_of,
    gdn_builder,
    mamba2_builder,
    shaped,
)

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="the reference of a CPU runs the passes"
)

LIMITS = GraphLimits(most=6, tokens=250, chunks=64)
CLOSE = {
    "gated_delta_net": {"rtol": 0.05, "atol": 0.02},
    "mamba2": {"rtol": 1e-4, "atol": 1e-4},
}


@pytest.fixture(autouse=True, scope="module")
def hooked() -> None:
    mixers = [Mixer.GATED_DELTA_NET, Mixer.MAMBA2]
    patches.patch_kernels(mixers)
    patches.patch_prefill_graphs(mixers)


class Engine:
    """A layer, its builder and what our kernels know of both."""

    def __init__(self, kind: str, limits: GraphLimits | None) -> None:
        self.kind = kind
        module: Any = gdn if kind == "gated_delta_net" else mamba2
        make: Any = gdn_builder if kind == "gated_delta_net" else mamba2_builder
        self.layer = module.layer_with()
        self.found: StateLayers = module.ours_of(self.layer)
        self.found.graphs = limits
        self.builder = make({"0": self.layer})
        self.metadata: Any = None

    @property
    def prefills(self) -> Any:
        """Of the last pass."""
        return passes.of(self.metadata).prefills

    @property
    def states(self) -> Sequence[torch.Tensor]:
        return self.layer.kv_cache

    def run(
        self, rows: Sequence[Row], seed: int, padded: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """A pass; returns the outputs of its own tokens.

        Args:
            rows: its sequences.
            seed: of its inputs.
            padded: sequences and tokens of the graph that replays it.
        """
        common, tokens = shaped(rows, padded)
        self.metadata = self.builder.build(0, common)
        forward = self._gdn if self.kind == "gated_delta_net" else self._mamba2
        return forward(tokens, common.num_actual_tokens, seed)[:tokens]

    def _gdn(self, tokens: int, length: int, seed: int) -> torch.Tensor:
        mixed, b, a = (_padded(x, length) for x in gdn.inputs(tokens, seed))
        shape = length, gdn.VALUE_HEADS, gdn.WIDTH
        out = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        gdn_attention._cpu_gdn_attention_nonspec(
            self.layer, self.metadata, mixed, b, a, out
        )
        return out

    def _mamba2(self, tokens: int, length: int, seed: int) -> torch.Tensor:
        context = SimpleNamespace(attn_metadata={"0": self.metadata})
        projected = _padded(mamba2.inputs(tokens, seed), length)
        out = torch.full((length, mamba2.INPUTS), torch.nan)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mamba_mixer2, "get_forward_context", lambda: context)
            patch.setattr("vllm.forward_context.get_forward_context", lambda: context)
            MambaMixer2.conv_ssm_forward(
                self.layer, projected_states=projected, output=out
            )
        return out


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """With rows that nobody may read."""
    nobody = x.new_full((length - len(x), *x.shape[1:]), torch.nan)
    return torch.cat([x, nobody])


PASSES: tuple[tuple[tuple[Row, ...], tuple[int, int] | None], ...] = (
    ((Row(3, 0, 5), Row(5, 0, 100)), (6, 128)),
    ((Row(3, 5, 1, in_prompt=False), Row(5, 100, 70), Row(1, 0, 64)), (3, 135)),
    ((Row(1, 64, 1, in_prompt=False), Row(3, 6, 1, in_prompt=False)), None),
    ((Row(1, 65, 1, in_prompt=False), Row(3, 7, 9)), (6, 16)),
    ((Row(1, 66, 1, in_prompt=False), Row(3, 16, 1, in_prompt=False)), (3, 4)),
    ((Row(5, 170, 1), Row(9, 0, 1), Row(2, 0, 130)), (4, 250)),
    ((Row(2, 130, 300),), None),
)
"""Fresh, resumed and chunked prompts, beside decodes and chunks of one token, and what
they are padded to; None for a pass that fits no graph, or one of decodes."""


@pytest.mark.parametrize("kind", CLOSE)
def test_passes_equal_those_of_no_shape(kind: str) -> None:
    normal, fixed = Engine(kind, None), Engine(kind, LIMITS)
    for seed, (rows, padded) in enumerate(PASSES):
        expected, found = normal.run(rows, seed), fixed.run(rows, seed, padded)
        assert not found.isnan().any()
        torch.testing.assert_close(found, expected, **CLOSE[kind])
        if padded is not None:
            assert passes.of(fixed.metadata).decodes == 0
            assert len(fixed.prefills.slots) == padded[0]
    touched = sorted({row.slot for rows, _ in PASSES for row in rows})
    rest = [slot for slot in range(SLOTS) if slot not in touched]
    for one, other in zip(fixed.states, normal.states, strict=True):
        assert one[rest].isnan().all()
        torch.testing.assert_close(one[touched], other[touched], **CLOSE[kind])


def test_a_wrong_slot_shows() -> None:
    """Negative control of the comparison."""
    normal, fixed = Engine("mamba2", None), Engine("mamba2", LIMITS)
    (rows, padded), (later, more) = PASSES[:2]
    normal.run(rows, 0)
    fixed.run(rows, 0, padded)
    wrong = [replace(later[0], slot=8), *later[1:]]
    fixed.states[0][8], fixed.states[1][8] = 0, 0
    expected, found = normal.run(later, 1), fixed.run(wrong, 1, more)
    assert not torch.allclose(found[:1], expected[:1], **CLOSE["mamba2"])
    torch.testing.assert_close(found[1:], expected[1:], **CLOSE["mamba2"])


@pytest.mark.parametrize("kind", CLOSE)
def test_snapshots_are_what_a_pass_to_there_leaves(kind: str) -> None:
    normal, fixed = Engine(kind, None), Engine(kind, LIMITS)
    for engine in (normal, fixed):
        engine.found.interior = InteriorSnapshots(torch.device("cpu"))
        engine.run([Row(4, 0, 5), Row(2, 0, 40)], 0)
    rows = [Row(4, 5, 1, in_prompt=False), Row(2, 40, 100)]
    for engine, padded in ((normal, None), (fixed, (5, 128))):
        assert engine.found.interior is not None
        orders = [
            SaveInPass(Pool.STATE, 2, boundary, 9 + boundary) for boundary in (0, 1)
        ]
        engine.found.interior.order(orders)
        engine.run(rows, 1, padded)
        engine.found.interior.clear()  # raises if nobody had looked the orders up
    for one, other in zip(fixed.states, normal.states, strict=True):
        for slot in (9, 10):
            assert not one[slot].isnan().any()
            torch.testing.assert_close(one[slot], other[slot], **CLOSE[kind])
        assert not torch.equal(one[9], one[10])
        assert one[11].isnan().all() and one[0].isnan().all()
    before = [states.clone() for states in fixed.states]
    fixed.run([Row(4, 6, 1, in_prompt=False), Row(2, 140, 100)], 2, (5, 128))
    for states, old in zip(fixed.states, before, strict=True):
        assert torch.equal(states[[9, 10]], old[[9, 10]])  # no order outlives its pass


def test_a_graph_finds_every_pass_where_it_was_captured() -> None:
    engine = Engine("gated_delta_net", LIMITS)
    engine.found.interior = InteriorSnapshots(torch.device("cpu"))
    engine.run([Row(4, 0, 70), Row(2, 0, 40), Row(1, 0, 3), Row(5, 0, 7)], 0)
    captured = engine.prefills
    engine.found.interior.order([SaveInPass(Pool.STATE, 2, 0, 9)])
    engine.run([Row(6, 20, 1, in_prompt=False), Row(2, 40, 100)], 1, (4, 120))
    for name in ("cu_seqlens", "slots", "has_initial", "offsets", "boundary_slots"):
        first, second = getattr(captured, name), getattr(engine.prefills, name)
        assert first.data_ptr() == second.data_ptr()
        assert first.stride() == second.stride() and first.shape == second.shape
    assert captured.cu_seqlens.tolist() == [0, 1, 101, 101, 101]
    assert captured.slots.tolist() == [6, 2, -1, -1]
    assert captured.has_initial.tolist() == [True, True, False, False]
    assert captured.offsets.tolist() == [20, 40, 0, 0]
    assert captured.boundary_slots.tolist() == [
        [-1] * COLUMNS,
        [9] + [-1] * (COLUMNS - 1),
        [-1] * COLUMNS,
        [-1] * COLUMNS,
    ]
    assert passes.of(engine.metadata).tokens == 120
    engine.run([Row(3, 0, 2)], 2, (1, 8))
    smaller = engine.prefills
    assert smaller.slots.data_ptr() == captured.slots.data_ptr()
    assert smaller.boundary_slots.stride() == captured.boundary_slots.stride()
    assert smaller.boundary_slots.tolist() == [[-1] * COLUMNS]


def test_a_sequence_reaches_as_many_boundaries_as_there_is_room_for() -> None:
    """The longest pass that begins just before a boundary."""
    tokens = COLUMNS * CHUNK + 1
    tables = PrefillTables(GraphLimits(1, tokens, 0), torch.device("cpu"))
    interior = InteriorSnapshots(torch.device("cpu"))
    interior.order([SaveInPass(Pool.STATE, 2, COLUMNS, 9)])
    slots = torch.tensor([2], dtype=torch.int32)
    prefills = Prefills(
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        slots=slots,
        has_initial=torch.tensor([True]),
        offsets=torch.tensor([CHUNK - 1], dtype=torch.int32),
        boundary_slots=interior.rows(slots),
    )
    held = tables.hold(prefills, keeps=True).boundary_slots
    assert held is not None and held[0, COLUMNS] == 9
    assert (held >= 0).sum() == 1


def test_what_fits_no_graph_keeps_its_shape() -> None:
    engine = Engine("mamba2", LIMITS)
    engine.run([Row(3, 0, 5)], 0)
    engine.run([Row(3, 5, 1, in_prompt=False), Row(5, 0, 256)], 1)
    described = passes.of(engine.metadata)
    assert described.decodes == 1 and described.prefills.slots.tolist() == [5]
    engine.run([Row(3, 6, 1, in_prompt=False)], 2)
    assert passes.of(engine.metadata).prefills is None


@pytest.mark.parametrize("kind", CLOSE)
def test_a_capture_of_prefills_is_described_as_such(kind: str) -> None:
    """vLLM's dummy batch deals out its tokens, one or two to each sequence."""
    engine = Engine(kind, LIMITS)
    dummy = [Row(0, 0, n, in_prompt=False) for n in (1, 1, 2)]
    engine.metadata = engine.builder.build_for_cudagraph_capture(common_of(dummy))
    described = passes.of(engine.metadata)
    assert described.decodes == 0 and described.tokens == 4
    assert engine.prefills.slots.tolist() == [-1, -1, -1]
    assert engine.prefills.cu_seqlens.tolist() == [0, 1, 2, 4]
    assert not layers.captures_prefills(engine.builder, common_of(dummy[:2]))


def test_a_capture_of_prefills_is_vllms_where_there_are_none() -> None:
    engine = Engine("mamba2", None)
    with pytest.raises(AssertionError):
        engine.builder.build_for_cudagraph_capture(common_of([Row(0, 0, 9)]))


def test_groups_share_where_a_pass_lies() -> None:
    engine = Engine("gated_delta_net", LIMITS)
    other = gdn_builder({"0": engine.layer})
    engine.run([Row(4, 0, 5), Row(2, 0, 9)], 0, (4, 16))
    common = common_of([Row(4, 0, 5), Row(2, 0, 9)])
    again = other.update_block_table(
        engine.metadata, common.block_table_tensor, common.slot_mapping
    )
    assert passes.of(again).prefills is engine.prefills
