# SPDX-License-Identifier: Apache-2.0
"""State layers of our own model classes in passes of the shape that CUDA graphs with
prefills need, run without graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from hybrid_kernels import selective_scan
from hybrid_models.kit import Mix, StateTensor
from hybrid_models.vllm import states
from hybrid_models.vllm.states import StateLayer
from vllm.platforms import current_platform

from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.mixers import mamba2, selective
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.kernels import layers, passes
from hybrid_plugin.vllm.kernels.fixed_shape import GraphLimits, PrefillTables
from hybrid_plugin.vllm.kernels.layers import StateLayers
from hybrid_plugin.vllm.kernels.passes import DecodeSlots
from tests.models.on_meta import META, captured
from tests.vllm.kernel_passes import (
    PADDING,
    SLOTS,
    Row,
    common_of,
    shaped,
    short_conv_builder,
)
from tests.vllm.test_fixed_shape import LIMITS, PASSES

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="the reference of a CPU runs the passes"
)
HEADS, WIDTH, DEPTH, INNER = 2, 4, 8, 8
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True, scope="module")
def hooked() -> None:
    patches.patch_kernels([Mixer.MODEL_CLASS])
    patches.patch_prefill_graphs([Mixer.MODEL_CLASS])


class Kind:
    """State layers of a mixer, with weights that are the same each time."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        mamba = name == "mamba2"
        self.channels = INNER + 2 * DEPTH if mamba else INNER
        state = (HEADS, WIDTH, DEPTH) if mamba else (INNER, DEPTH)
        self.inputs = (self.channels, HEADS) if mamba else (INNER, INNER)
        self.tensors = (
            StateTensor((self.channels, 3), torch.float32, is_conv=True),
            StateTensor(state, torch.float32),
        )
        self.mix = _mamba2(self.channels) if mamba else _mamba1()


def _mamba2(channels: int) -> Mix:
    weights = mamba2.Weights(
        convolution=torch.randn(channels, 4),
        bias=torch.randn(channels),
        activation="silu",
        A=-torch.rand(HEADS),
        skip=torch.randn(HEADS),
        dt_bias=torch.randn(HEADS),
    )

    def run(state_pass: Any, inputs: Any, pools: Any, out: torch.Tensor) -> None:
        heads = out.view(len(out), HEADS, WIDTH)
        mix(mamba2, weights, state_pass, inputs, pools, heads)

    return run


def _mamba1() -> Mix:
    projections = [torch.randn(INNER, n) for n in (INNER, DEPTH, DEPTH)]
    weights = selective.Weights(
        kernels=selective_scan,
        convolution=torch.randn(INNER, 4),
        bias=None,
        activation="silu",
        A=-torch.rand(INNER, DEPTH),
        skip=torch.randn(INNER),
        dt_bias=torch.randn(INNER),
        select=lambda x: tuple(x @ one for one in projections),  # type: ignore[arg-type,return-value]
    )

    def run(state_pass: Any, inputs: Any, pools: Any, out: torch.Tensor) -> None:
        mix(selective, weights, state_pass, inputs, pools, out)

    return run


class Engine:
    """A layer, its builder and what is known of both."""

    def __init__(self, kind: Kind, limits: GraphLimits | None) -> None:
        compiling = SimpleNamespace(static_forward_context={})
        self.kind = kind
        self.layer = StateLayer(
            kind.tensors,
            kind.mix,
            width=INNER,
            name="layer",
            vllm_config=SimpleNamespace(compilation_config=compiling),
            captured=True,
        )
        self.layer.kv_cache = tuple(
            torch.full((SLOTS, *one.shape), torch.nan) for one in kind.tensors
        )
        self.found = StateLayers({"layer": self.layer}, "ours", "cpu")
        self.found.graphs = limits
        self.found.hang()
        self.builder = short_conv_builder({"layer": self.layer})
        self.metadata: Any = None

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
        length = common.num_actual_tokens
        self.metadata = self.builder.build(0, common)
        context = SimpleNamespace(attn_metadata={"layer": self.metadata})
        torch.manual_seed(seed)
        drawn = [torch.randn(tokens, size) for size in self.kind.inputs]
        given = [x.new_full((length, x.shape[1]), torch.nan) for x in drawn]
        for x, real in zip(given, drawn, strict=True):
            x[:tokens] = real
        out = torch.full((length, INNER), torch.nan)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(states, "get_forward_context", lambda: context)
            self.layer.run(given, out)
        assert not out[tokens:].any(), "what follows the layer reads padding"
        return out[:tokens]


Make = Callable[[GraphLimits | None], Engine]


@pytest.fixture(params=["mamba2", "mamba1"])
def make(request: pytest.FixtureRequest) -> Make:
    """Engines of equal weights."""
    kind = Kind(request.param)
    return lambda limits: Engine(kind, limits)


def test_passes_equal_those_of_no_shape(make: Make) -> None:
    normal, fixed = make(None), make(LIMITS)
    for seed, (rows, padded) in enumerate(PASSES):
        expected, found = normal.run(rows, seed), fixed.run(rows, seed, padded)
        torch.testing.assert_close(found, expected, **CLOSE)
        described = passes.of(fixed.metadata)
        assert (described.padding is not None) == (padded is not None)
        if padded is not None:
            assert described.decodes == 0 and described.tokens == padded[1]
            assert described.prefills is not None
            assert len(described.prefills.slots) == padded[0]
    touched = sorted({row.slot for rows, _ in PASSES for row in rows})
    rest = [slot for slot in range(SLOTS) if slot not in touched]
    for one, other in zip(fixed.states, normal.states, strict=True):
        assert one[rest].isnan().all()
        torch.testing.assert_close(one[touched], other[touched], **CLOSE)


def test_states_are_kept_inside_of_a_graphs_pass(make: Make) -> None:
    normal, fixed = make(None), make(LIMITS)
    rows = [Row(4, 5, 1, in_prompt=False), Row(2, 40, 100)]
    for engine, padded in ((normal, None), (fixed, (5, 128))):
        engine.found.interior = InteriorSnapshots(torch.device("cpu"))
        engine.run([Row(4, 0, 5), Row(2, 0, 40)], 0)
        engine.found.interior.order([SaveInPass(Pool.STATE, 2, 1, 9)])
        engine.run(rows, 1, padded)
        engine.found.interior.clear()  # raises if nobody had looked the order up
    for one, other in zip(fixed.states, normal.states, strict=True):
        assert not one[9].isnan().any()
        torch.testing.assert_close(one[9], other[9], **CLOSE)
        assert one[0].isnan().all() and one[10].isnan().all()


def test_a_graph_finds_every_pass_where_it_was_captured(make: Make) -> None:
    engine = make(LIMITS)
    dummy = [Row(0, 0, n, in_prompt=False) for n in (1, 1, 2, 36)]
    engine.metadata = engine.builder.build_for_cudagraph_capture(common_of(dummy))
    captured = passes.of(engine.metadata)
    assert captured.padding is not None and not captured.padding.any()
    assert captured.prefills is not None
    assert captured.prefills.slots.tolist() == [-1] * 4
    engine.run([Row(6, 0, 9), Row(2, 0, 3)], 1, (4, 40))
    replayed = passes.of(engine.metadata)
    assert replayed.padding is not None and replayed.prefills is not None
    assert replayed.padding.tolist() == [False] * 12 + [True] * 28
    assert replayed.padding.data_ptr() == captured.padding.data_ptr()
    for name in ("cu_seqlens", "slots", "has_initial", "offsets"):
        one, other = (getattr(x.prefills, name) for x in (captured, replayed))
        assert one.data_ptr() == other.data_ptr() and one.shape == other.shape
    assert layers.captures_prefills(engine.builder, common_of(dummy))
    assert not layers.captures_prefills(engine.builder, common_of(dummy[:2]))


def test_describing_a_pass_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without data there is nothing to read."""
    given = common_of([Row(3, 70, 1, in_prompt=False), Row(5, 0, 40), PADDING])
    common = replace(
        given,
        num_actual_tokens=64,
        **{
            name: getattr(given, name).to(META)
            for name in ("query_start_loc", "seq_lens", "block_table_tensor")
        },
    )
    tables, room = PrefillTables(LIMITS, META), DecodeSlots(8, META)
    metadata = SimpleNamespace(num_decodes=1)
    with captured(monkeypatch):
        found = passes.describe(common, metadata, room, None, tables=tables)
    assert found.tokens == 64 and found.padding is not None
    assert found.padding.shape == (64,) and found.padding.device == META
    assert found.prefills is not None and len(found.prefills.slots) == 3
