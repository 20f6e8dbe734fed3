# SPDX-License-Identifier: Apache-2.0
"""Our kernels in SGLang's graphs of short prefills, as they are captured and replayed.

A graph's kernels are launched here from what the graph holds: the metadata, the inputs
padded to its tokens, and nothing of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
)
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.commands import COLUMNS, Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer, Phase
from hybrid_plugin.sglang.kernels import gated_delta_net, kda, prefill_graphs
from hybrid_plugin.sglang.kernels.state_layers import StateLayers
from tests.sglang import test_kernels_gated_delta_net as gdn_layer
from tests.sglang import test_kernels_kda as kda_layer
from tests.sglang.kernel_passes import (
    DECODE,
    MIXED,
    Pools,
    Row,
    backend_of,
    batch_of,
    layers_of,
    pools_of,
    touched,
)

TOKENS, SEQUENCES = 256, 6
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize(
    ("option", "drafts", "ranks", "wanted"),
    [
        (None, None, 1, None),
        (None, "NEXTN", 1, False),
        (None, None, 2, False),
        (True, "NEXTN", 2, True),
        (False, None, 1, False),
    ],
)
def test_where_graphs_were_not_tried_an_option_demands_them(
    option: bool | None,
    drafts: str | None,
    ranks: int,
    wanted: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = SimpleNamespace(speculative_algorithm=drafts)
    monkeypatch.setattr(prefill_graphs, "get_spec", lambda: spec)
    options = HybridConfig(prefill_graphs=option)
    server = SimpleNamespace(attn_dp_size=ranks)
    assert prefill_graphs.are_wanted(options, server) is wanted


@dataclasses.dataclass(frozen=True)
class Kind:
    """One of the two kinds of layers that SGLang lets into its graphs."""

    mixer: Mixer
    backend: type
    layer: Any
    """The module that has a layer of it, its inputs and its shapes."""
    hook: Callable[..., Any]


KINDS = [
    Kind(Mixer.GATED_DELTA_NET, GDNAttnBackend, gdn_layer, gated_delta_net.extend),
    Kind(Mixer.KDA, KDAAttnBackend, kda_layer, kda.extend),
]
each = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.mixer)


class Server:
    """A backend in an engine with graphs of `TOKENS` tokens."""

    def __init__(self, kind: Kind, *, graphs: bool = True) -> None:
        self.kind = kind
        self.interior = InteriorSnapshots(torch.device("cpu"))
        self.layers = layers_of(kind.mixer, interior=self.interior)
        self.layers.in_prefill_graphs = graphs
        self.pools: Pools = pools_of(*kind.layer.SHAPES)
        self.backend = backend_of(kind.backend, self.pools)
        self.backend.prefill_graph_max_seqs = SEQUENCES
        self.layer = kind.layer.Layer()
        self.attention: list[tuple[Any, bool]] = []
        """What attention was told to prepare for graphs of the whole model."""

    @property
    def whole(self) -> Any:
        """Both backends of the model, as `HybridLinearAttnBackend` has them."""

        def prepare(batch: Any, in_capture: bool = False) -> None:
            self.attention.append((batch, in_capture))

        whole = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
        whole.linear_attn_backend = self.backend
        whole.full_attn_backend = SimpleNamespace(
            init_forward_metadata_out_graph=prepare
        )
        return whole

    def prepare(self, rows: Sequence[Row], mode: Any, *, capture: bool = False) -> None:
        """As SGLang does for graphs of the whole model: padded in both directions."""
        padded = [*rows, *[Row(0, 0, 0)] * (SEQUENCES - len(rows))]
        batch = batch_of(padded, mode)
        batch.input_ids = torch.zeros(TOKENS, dtype=torch.int64)
        prefill_graphs.prepare_whole(
            self.layers, not_stock, self.whole, batch, in_capture=capture
        )
        assert self.attention.pop() == (batch, capture)

    def capture(self) -> Any:
        """SGLang's batch for it: all tokens in one sequence that has no slot."""
        return prefill_graphs.begin(
            self.layers, not_stock, self.backend, batch_of([Row(0, 0, TOKENS)])
        )

    def replay(
        self,
        metadata: Any,
        rows: Sequence[Row],
        given: dict[str, torch.Tensor],
        mode: Any = gdn_layer.EXTEND,
    ) -> torch.Tensor:
        """A pass by the graph; `given` has as many rows as the graph."""
        batch = batch_of(rows, mode)
        prefill_graphs.refresh(self.layers, not_stock, self.backend, metadata, batch)
        assert prefill_graphs.are_active(self.layers, not_stock, self.backend)
        return self.run(batch_of([Row(0, 0, TOKENS)]), given)

    def eager(
        self,
        rows: Sequence[Row],
        given: dict[str, torch.Tensor],
        mode: Any = gdn_layer.EXTEND,
    ) -> torch.Tensor:
        """The same without a graph."""
        batch = batch_of(rows, mode)
        self.backend.init_forward_metadata(batch)
        assert not prefill_graphs.are_active(self.layers, not_stock, self.backend)
        return self.run(batch, given)

    def run(self, batch: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
        a, b = given["a"], given["b"]
        if self.kind.mixer is Mixer.KDA:
            a, b = a.view(1, len(a), kda_layer.HEADS, -1), b[None]
        heads, width = self.kind.layer.SHAPES[1][:2]
        out = torch.full((1, len(given["b"]), heads, width), torch.nan)
        found = self.kind.hook(
            self.layers,
            not_stock,
            self.backend,
            layer=self.layer,
            forward_batch=batch,
            mixed_qkv=given["mixed_qkv"],
            a=a,
            b=b,
            linear_attn_output=out,
        )
        assert found is out
        return out


def not_stock(*_: Any, **__: Any) -> Any:
    raise AssertionError("SGLang's own")


def inputs(kind: Kind, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Of a graph: rows behind `tokens` hold what nobody may read."""
    given: dict[str, torch.Tensor] = kind.layer.inputs(TOKENS)
    rng = torch.Generator().manual_seed(seed)
    for tensor in given.values():
        tensor.copy_(torch.randn(tensor.shape, generator=rng))
        tensor[tokens:] = torch.nan
    return given


def cut(given: dict[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
    return {name: tensor[:tokens] for name, tensor in given.items()}


def tables_of(metadata: Any) -> Iterator[torch.Tensor]:
    record = metadata.fixed.prefills
    assert record.long is None, "a graph cannot know how a pass is divided"
    for field in dataclasses.fields(record):
        if field.name not in ("round_states", "long"):
            yield getattr(record, field.name)
    yield metadata.fixed.padding


PASSES: list[tuple[list[Row], list[tuple[int, int, int]], Any]] = [
    # Interior states as (slot, boundary, destination).
    (
        [Row(3, 100, 130), Row(1, 0, 90), Row(5, 0, 20)],
        [(3, 1, 8), (3, 0, 7), (1, 0, 9)],
        gdn_layer.EXTEND,
    ),
    ([Row(2, 0, 7)], [], gdn_layer.EXTEND),
    ([Row(4, 0, 70), Row(2, 7), Row(3, 230)], [(4, 0, 10)], MIXED),
    ([Row(1, 90, 40), Row(0, 0, 0), Row(5, 20, 60)], [(1, 0, 6)], gdn_layer.EXTEND),
    ([Row(slot, 0, 1) for slot in range(6, 12)], [], gdn_layer.EXTEND),
    ([Row(3, 63, TOKENS)], [(3, 0, 5), (3, 3, 8)], gdn_layer.EXTEND),
]


@each
@pytest.mark.parametrize("whole", [False, True])
def test_a_graph_s_passes_are_those_without_it(kind: Kind, whole: bool) -> None:
    """One after another, on the same states; nothing of a pass is left in the next."""
    graph, plain = Server(kind), Server(kind)
    for server in (graph, plain):
        rng = torch.Generator().manual_seed(9)
        for pool in (server.pools.conv, server.pools.temporal):
            pool[3] = torch.randn(pool.shape[1:], generator=rng) / 2
    metadata = graph.capture()
    if whole:
        graph.prepare([Row(0, 0, TOKENS)], gdn_layer.EXTEND, capture=True)
    for seed, (rows, orders, mode) in enumerate(PASSES):
        tokens = sum(row.length for row in rows)
        given = inputs(kind, tokens, seed)
        for server in (graph, plain):
            server.interior.order(SaveInPass(Pool.STATE, *order) for order in orders)
        if whole:
            graph.prepare(rows, mode)
            out = graph.run(batch_of([Row(0, 0, TOKENS)]), given)
        else:
            out = graph.replay(metadata, rows, given, mode)
        expected = plain.eager(rows, cut(given, tokens), mode)
        for server in (graph, plain):
            server.interior.clear()
        torch.testing.assert_close(out[:, :tokens], expected, **CLOSE)
        assert torch.equal(out[:, tokens:], torch.zeros_like(out[:, tokens:]))
        for name in ("conv", "temporal"):
            found, wanted = (getattr(s.pools, name) for s in (graph, plain))
            torch.testing.assert_close(found, wanted, equal_nan=True, **CLOSE)
            assert touched(found) == touched(wanted)
            assert 0 not in touched(found)


@each
def test_a_graph_reads_the_same_addresses_at_every_replay(kind: Kind) -> None:
    server = Server(kind)
    metadata = server.capture()
    tensors = [*tables_of(metadata)]
    before = [(t.data_ptr(), t.shape, t.stride()) for t in tensors]
    for rows, orders, mode in PASSES:
        server.interior.order(SaveInPass(Pool.STATE, *order) for order in orders)
        batch = batch_of(rows, mode)
        prefill_graphs.refresh(
            server.layers, not_stock, server.backend, metadata, batch
        )
        server.interior.clear()
        found = server.layers.prefills(server.backend.forward_metadata, batch, print)
        assert found is metadata.fixed.prefills
    assert [(t.data_ptr(), t.shape, t.stride()) for t in tensors] == before


def test_tables_hold_nothing_of_the_pass_before() -> None:
    server = Server(KINDS[0])
    metadata = server.capture()
    for rows, orders, mode in PASSES + PASSES[::-1]:
        found = []
        for graph in (metadata, server.capture()):
            server.interior.order(SaveInPass(Pool.STATE, *order) for order in orders)
            prefill_graphs.refresh(
                server.layers, not_stock, server.backend, graph, batch_of(rows, mode)
            )
            server.interior.clear()
            found.append([*tables_of(graph)])
        assert all(map(torch.equal, *found))


def test_rows_behind_the_sequences_are_zeroed() -> None:
    server = Server(KINDS[0])
    metadata = server.capture()
    prefill_graphs.refresh(
        server.layers, not_stock, server.backend, metadata, batch_of([Row(2, 0, 7)])
    )
    out = torch.full((1, TOKENS, 2, 3), torch.nan)
    prefill_graphs.clear_padding(out, metadata)
    assert torch.equal(out[:, 7:], torch.zeros_like(out[:, 7:]))
    assert out[:, :7].isnan().all()


@each
def test_a_capture_touches_no_state(kind: Kind) -> None:
    """Even if it happens while requests have slots in the rows that SGLang takes."""
    server = Server(kind)
    rows = [Row(2, 0, TOKENS)]
    prefill_graphs.begin(server.layers, not_stock, server.backend, batch_of(rows))
    server.run(batch_of([Row(0, 0, TOKENS)]), inputs(kind, TOKENS, 0))
    assert touched(server.pools.conv) == touched(server.pools.temporal) == []


@each
def test_graphs_of_different_sizes_are_apart(kind: Kind) -> None:
    server = Server(kind)
    large = server.capture()
    small = prefill_graphs.begin(
        server.layers, not_stock, server.backend, batch_of([Row(0, 0, 4)])
    )
    assert small.fixed.prefills.slots.shape == (4,)
    assert small.fixed.prefills.boundary_slots.shape == (4, COLUMNS)
    assert large.fixed.prefills.boundary_slots.shape == (SEQUENCES, COLUMNS)
    rows = [Row(2, 0, 4)]
    given = inputs(kind, 4, 0)
    expected = Server(kind).eager(rows, cut(given, 4))
    server.replay(large, [Row(3, 0, 100)], inputs(kind, 100, 1))
    prefill_graphs.refresh(
        server.layers, not_stock, server.backend, small, batch_of(rows)
    )
    out = server.run(batch_of([Row(0, 0, 4)]), cut(given, 4))
    torch.testing.assert_close(out, expected, **CLOSE)


@each
def test_orders_of_a_pass_that_a_graph_ran_are_not_reported(kind: Kind) -> None:
    server = Server(kind)
    metadata = server.capture()
    server.interior.order([SaveInPass(Pool.STATE, 2, 0, 7)])
    server.replay(metadata, [Row(2, 0, 70)], inputs(kind, 70, 0))
    server.interior.clear()
    server.interior.order([SaveInPass(Pool.STATE, 2, 0, 7)])
    with pytest.raises(RuntimeError, match="wrote none"):
        server.interior.clear()


def test_a_pass_that_is_too_large_is_an_error() -> None:
    server = Server(KINDS[0])
    metadata = server.capture()
    rows = [Row(slot, 0, 1) for slot in range(1, SEQUENCES + 2)]
    with pytest.raises(ValueError, match="a pass of 7 sequences"):
        server.replay(metadata, rows, inputs(KINDS[0], 7, 0))
    server.interior.order([SaveInPass(Pool.STATE, 2, COLUMNS, 7)])
    with pytest.raises(ValueError, match=f"keeps {2 * COLUMNS} states of one"):
        server.replay(metadata, [Row(2, 0, 70)], inputs(KINDS[0], 70, 0))


def test_decodes_leave_the_graph_s_metadata() -> None:
    server = Server(KINDS[0])
    server.capture()
    server.backend.init_forward_metadata(batch_of([Row(2, 8)], DECODE))
    assert not prefill_graphs.are_active(server.layers, not_stock, server.backend)


@each
def test_without_the_option_our_kernels_stay_out_of_graphs(kind: Kind) -> None:
    def asked(layers: StateLayers) -> bool:
        backend = server.backend
        return prefill_graphs.are_supported(layers, lambda _: True, backend)

    server = Server(kind, graphs=False)
    assert not asked(server.layers)
    assert asked(Server(kind).layers)
    # With SGLang's kernels, or in another backend, it is SGLang's to say.
    assert asked(StateLayers())
    assert asked(layers_of(kind.mixer, Phase.DECODE))
    server.backend.__class__ = type("Other", (kind.backend,), {})
    assert asked(server.layers)


@pytest.mark.parametrize("change", ["option", "decode", "kernels"])
def test_what_is_no_prefill_of_ours_is_prepared_by_sglang(change: str) -> None:
    called: list[bool] = []

    def stock(_: Any, batch: Any, in_capture: bool) -> None:
        called.append(in_capture)

    server = Server(KINDS[0], graphs=change != "option")
    layers = StateLayers() if change == "kernels" else server.layers
    layers.in_prefill_graphs |= change == "kernels"
    mode = DECODE if change == "decode" else gdn_layer.EXTEND
    batch = batch_of([Row(2, 8)], mode)
    prefill_graphs.prepare_whole(layers, stock, server.whole, batch, in_capture=True)
    assert called == [True]
    assert not server.attention


def test_sglang_s_own_graphs_stay_as_they_are() -> None:
    calls: list[tuple[Any, ...]] = []

    def stock(*args: Any) -> str:
        calls.append(args)
        return "SGLang's"

    server = Server(KINDS[1])
    layers, backend = StateLayers(), server.backend
    batch = SimpleNamespace()
    found = (
        prefill_graphs.begin(layers, stock, backend, batch),
        prefill_graphs.are_active(layers, stock, backend),  # type: ignore[arg-type]
    )
    prefill_graphs.refresh(layers, stock, backend, "tables", batch)
    assert found == ("SGLang's", "SGLang's")
    assert calls == [(backend, batch), (backend,), (backend, "tables", batch)]
