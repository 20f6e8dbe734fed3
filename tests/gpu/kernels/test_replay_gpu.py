# SPDX-License-Identifier: Apache-2.0
"""Records of drafts and their commits on a GPU: bits, capture, strides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hybrid_kernels import causal_conv1d, replay
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.common import on
from tests.kernels.layers import LARGE, MANY_HEADS, REPLAYED, Layer, names
from tests.kernels.test_replay import (
    Batch,
    Row,
    commit,
    has_bits_of_updates,
    rows_of,
    same,
)

MODULES = {layer.module for layer in REPLAYED}
LAYERS = [x for x in (*LARGE, MANY_HEADS) if x.module in MODULES]
# One shape of each operation, those of models.
KEPT = [LARGE[2], LARGE[6], LARGE[10], LARGE[14], LARGE[18], MANY_HEADS]
layers = pytest.mark.parametrize("layer", LAYERS, ids=names(LAYERS))
some = pytest.mark.parametrize("layer", KEPT, ids=names(KEPT))
pools = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
trees = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
RUNS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@layers
@pools
@trees
def test_a_commit_gives_the_states_of_updates(
    layer: Layer, dtype: torch.dtype, tree: bool
) -> None:
    exact = has_bits_of_updates(layer, tree)

    @given(rows_of(tree, False), st.booleans())
    @settings(max_examples=6, **RUNS)
    def check(rows: list[Row], packed: bool) -> None:
        batch = Batch(layer, rows, packed, "cuda")
        pool = layer.states(batch.count + 1, dtype, "cuda")
        before = pool.clone()
        kept = layer.record(pool, batch.count + 1, batch.most)
        parents = batch.parents(tree)
        out = batch.verify(pool, record=kept.record, parents=parents)
        assert torch.equal(pool, before)
        commit(kept, batch, parents)
        for number, row in enumerate(rows):
            wanted = batch.updates(number, before[number + 1])
            for draft, (y, _) in enumerate(wanted):
                same(out[batch.token(number, draft)], y, exact, dtype)
            if row.accepted:
                before[number + 1] = wanted[row.accepted - 1][1]
            same(pool[number + 1], before[number + 1], exact)
        others = [0, *range(len(rows) + 1, len(pool))]
        assert torch.equal(pool[others], before[others])

    check()


@layers
@pools
def test_packed_rows_with_slots_give_the_bits_of_updates(
    layer: Layer, dtype: torch.dtype
) -> None:
    rows = [Row((-1, 0, 0, 1, 1, 4), 0), Row((), 0), Row((-1, -1), 0), Row((-1,), 0)]
    batch = Batch(layer, rows, True, "cuda")
    count = batch.count * batch.most
    pool = layer.states(batch.count + count, dtype, "cuda")
    before = pool.clone()
    table = torch.arange(count).view(batch.count, -1) + batch.count
    out = batch.verify(pool, draft_slots=table, parents=batch.parents(True))
    for number, _ in enumerate(rows):
        wanted = batch.updates(number, before[number + 1])
        for draft, (y, state) in enumerate(wanted):
            slot = int(table[number, draft])
            assert torch.equal(out[batch.token(number, draft)], y)
            assert torch.equal(pool[slot], state)
            before[slot] = state
    assert torch.equal(pool, before)


@some
@trees
def test_a_captured_step_replays_other_rows(layer: Layer, tree: bool) -> None:
    """Verify and commit in one graph, captured of padding alone."""
    most, count = 6, 3
    exact = has_bits_of_updates(layer, tree)
    pool = layer.states(count + 1, torch.bfloat16, "cuda")
    kept = layer.record(pool, count, most)
    inputs = layer.make(count * most, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(count * most, *layer.out, dtype=torch.bfloat16, device="cuda")
    tables = on(
        "cuda",
        {
            "cu_seqlens": torch.zeros(count + 1, dtype=torch.int32),
            "slots": torch.full((count,), -1, dtype=torch.int32),
            "accepted": torch.zeros(count, dtype=torch.int32),
            "parents": torch.zeros(count, most, dtype=torch.int32) if tree else None,
        },
    )
    together = both(kept)

    def step() -> None:
        layer.verify(
            inputs,
            pool=pool,
            slots=tables["slots"],
            cu_seqlens=tables["cu_seqlens"],
            parents=tables["parents"],
            record=kept.record,
            out=out,
        )
        given = {name: tables[name] for name in ("slots", "accepted", "parents")}
        replay.commit(together, **given)

    graph = capture(step)
    for lengths, accepted in (([4, 0, 2], [3, 0, 2]), ([1, 6, 5], [1, 4, 0])):
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        tables["cu_seqlens"].copy_(bounds)
        tables["slots"].copy_(torch.tensor([2, 1, 3]))
        tables["accepted"].copy_(torch.tensor(accepted))
        links = [-1, 0, 0, 1, 1, 2] if tree else list(range(-1, most - 1))
        if tree:
            tables["parents"].copy_(torch.tensor(links).repeat(count, 1))
        expected = pool.clone()
        graph.replay()
        for row, slot in enumerate((2, 1, 3)):
            node, path = accepted[row] - 1, []
            while node >= 0:
                path.insert(0, node)
                node = links[node]
            zero = torch.tensor([slot], device="cuda")
            for draft in path:
                index = int(bounds[row]) + draft
                token = layer.part(inputs, slice(index, index + 1))
                y = layer.update(token, pool=expected, slots=zero)
                if draft == path[-1]:
                    same(out[index], y[0], exact)
            same(pool[slot], expected[slot], exact)
        assert torch.equal(pool[0], expected[0])


@some
def test_slots_a_hundred_megabytes_apart(layer: Layer) -> None:
    """30 slots, so that offsets pass 2**31 in bytes."""
    stride = 100 * 2**20 // 4
    small = layer.states(30, torch.float32, "cuda")
    room = torch.empty(30 * stride, device="cuda")
    pool = room.as_strided(small.shape, (stride, *small.stride()[1:])).copy_(small)
    drafts = layer.make(1, 3, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([29], device="cuda")
    accepted = torch.tensor([2], device="cuda")
    for each in (pool, small):
        kept = layer.record(each, 1, 3)
        layer.verify(drafts, pool=each, slots=slots, record=kept.record)
        replay.commit(both(kept), slots, accepted)
    assert torch.equal(pool, small)


def test_all_layers_of_a_model_are_committed_together() -> None:
    """Thirty layers, states and windows, beside commits of each alone."""
    layer, conv = MANY_HEADS, LARGE[18]
    assert conv.module is causal_conv1d
    rows, most = 5, 4
    slots = torch.randperm(8)[:rows].cuda()
    accepted = torch.tensor([0, 1, 2, 3, 4], device="cuda")
    kept: list[Any] = []
    for number in range(30):
        each = conv if number % 2 else layer
        kept.append(each.record(each.states(8, torch.bfloat16, "cuda"), rows, most))
        kept[-1].record.normal_(0, 0.1)
    alone = [each.pool.clone() for each in kept]
    for each, pool in zip(kept, alone, strict=True):
        mine = replace(each, pool=pool)
        replay.commit(both(mine), slots, accepted)
    states = [x for x in kept if isinstance(x, replay.States)]
    windows = [x for x in kept if isinstance(x, replay.Windows)]
    replay.commit(replay.Layers(states, windows), slots, accepted)
    for each, pool in zip(kept, alone, strict=True):
        assert torch.equal(each.pool, pool)


def both(kept: replay.States | replay.Windows) -> replay.Layers:
    if isinstance(kept, replay.States):
        return replay.Layers([kept])
    return replay.Layers(windows=[kept])


def capture(work: Any) -> torch.cuda.CUDAGraph:
    """Run once, which compiles, and capture."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
