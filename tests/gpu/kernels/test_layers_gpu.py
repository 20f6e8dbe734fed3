# SPDX-License-Identifier: Apache-2.0
"""Every state layer on a GPU: accuracy, capture, strides, and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybrid_kernels import causal_conv1d
from hybrid_kernels._common.linear_chunk import CROWD

from hybrid_plugin.mixers.fixed_prefills import FixedPrefills
from hybrid_plugin.mixers.prefills import Prefills
from tests.kernels.common import cu_seqlens, on, path_to, relative_error
from tests.kernels.layers import LARGE, MANY_HEADS, Layer, names

# Relative error in the 2-norm against float64 on the same (rounded) inputs.
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
# Decode sums in float32 whatever the inputs: only the output is rounded.
STEP_BOUNDS = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
TREE = torch.tensor([[-1, 0, 0, 1, -1]])

ALL = [*LARGE, MANY_HEADS]
layers = pytest.mark.parametrize("layer", ALL, ids=names(ALL))
# One shape of each operation, those of models.
KEPT = [LARGE[2], LARGE[6], LARGE[10], *LARGE[14:15], *LARGE[16:], MANY_HEADS]
some = pytest.mark.parametrize("layer", KEPT, ids=names(KEPT))
dtypes = pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
pools = pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)


def make(layer: Layer, *lead: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return layer.make(*lead, dtype=dtype, device="cuda")


def states(layer: Layer, slots: int, dtype: torch.dtype = torch.float32) -> Any:
    """A pool; the convolution's holds inputs, so in their type."""
    return layer.states(slots, dtype, "cuda")


def nan(layer: Layer, *lead: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((*lead, *layer.out), float("nan"), device="cuda", dtype=dtype)


@layers
@dtypes
@pytest.mark.parametrize("offsets", [None, [63, 1, 40, 17, 36]], ids=["none", "some"])
def test_prefill_is_close_to_float64(
    layer: Layer, dtype: torch.dtype, offsets: list[int] | None
) -> None:
    lengths = [1, 63, 257, 0, 400]
    inputs = make(layer, sum(lengths), dtype=dtype)
    conv = layer.module is causal_conv1d
    pool = states(layer, 8, dtype if conv else torch.float32)
    before = pool.clone()
    slots = torch.tensor([4, 0, 2, 1, 3])
    table = torch.full((5, 6), -1)
    table[4, 5] = 6
    kept = 384 if offsets is None else 384 - offsets[4]
    tables = {
        "cu_seqlens": cu_seqlens(lengths),
        "slots": slots,
        "boundary_slots": table,
        "offsets": None if offsets is None else torch.tensor(offsets),
    }
    out = layer.prefill(
        inputs,
        **on("cuda", tables),
        pool=pool,
        out=nan(layer, sum(lengths), dtype=dtype),
    )
    start = 0
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        mine = layer.part(inputs, slice(start, start + length))
        expected, final = layer.define(mine, before[slot])
        if length:
            got = out[start : start + length]
            assert relative_error(got, expected) < BOUNDS[dtype]
        assert relative_error(pool[slot], final) < BOUNDS[dtype]
        if length == 400:
            final = layer.define(layer.part(mine, slice(kept)), before[slot])[1]
            assert relative_error(pool[6], final) < BOUNDS[dtype]
        start += length
    assert torch.equal(pool[5], before[5])


@layers
@dtypes
def test_update_is_close_to_float64(layer: Layer, dtype: torch.dtype) -> None:
    inputs, pool = make(layer, 33, dtype=dtype), states(layer, 40)
    slots = torch.randperm(40)[:33]
    slots[5] = -1
    before = pool.clone()
    out = layer.update(
        inputs, pool=pool, slots=slots.cuda(), out=nan(layer, 33, dtype=dtype)
    )
    for row, slot in enumerate(slots.tolist()):
        mine = layer.part(inputs, slice(row, row + 1))
        state = torch.zeros_like(before[0]) if slot < 0 else before[slot]
        expected, final = layer.define(mine, state)
        assert relative_error(out[row], expected[0]) < STEP_BOUNDS[dtype]
        if slot >= 0:
            assert relative_error(pool[slot], final) < 5e-6


@some
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_captured_verify_gives_the_bits_of_replayed_updates(
    layer: Layer, tree: bool
) -> None:
    inputs, out = make(layer, 3, 5), nan(layer, 3, 5)
    pool = states(layer, 20, torch.bfloat16)
    parents = TREE.repeat(3, 1).cuda() if tree else None
    slots = torch.full((3,), -1, device="cuda")
    drafts = torch.full((3, 5), -1, device="cuda")
    tables = {"slots": slots, "draft_slots": drafts, "parents": parents}
    graph = capture(lambda: layer.verify(inputs, **tables, pool=pool, out=out))
    slots.copy_(torch.arange(3))
    drafts.copy_(torch.arange(3, 18).view(3, 5))
    before = pool.clone()
    graph.replay()
    for draft in range(5):
        replayed = before[:3].clone()
        for node in path_to(draft, TREE[0].tolist() if tree else None):
            step = layer.part(inputs, (slice(None), node))
            y = layer.update(step, pool=replayed, slots=slots)
        assert torch.equal(out[:, draft], y)
        assert torch.equal(pool[drafts[:, draft]], replayed)


@some
def test_captured_update_replays_with_new_slots(layer: Layer) -> None:
    inputs, out, pool = make(layer, 8), nan(layer, 8), states(layer, 12)
    slots = torch.full((8,), -1, device="cuda")
    graph = capture(lambda: layer.update(inputs, pool=pool, slots=slots, out=out))
    slots.copy_(torch.tensor([3, 7, -1, 0, 1, 2, 11, 10]))
    expected = pool.clone()
    wanted = layer.update(inputs, pool=expected, slots=slots)
    graph.replay()
    assert torch.equal(out, wanted)
    assert torch.equal(pool, expected)


@some
def test_captured_prefill_replays_with_new_lengths_and_offsets(layer: Layer) -> None:
    inputs, out, pool = make(layer, 300), nan(layer, 300), states(layer, 3)
    slots = torch.arange(3, device="cuda")
    cu = cu_seqlens([100, 100, 100], "cuda")
    offsets = torch.zeros(3, dtype=torch.int32, device="cuda")
    tables = {"cu_seqlens": cu, "slots": slots, "offsets": offsets}
    graph = capture(lambda: layer.prefill(inputs, **tables, pool=pool, out=out))
    cu.copy_(torch.tensor([0, 7, 7, 300]))
    offsets.copy_(torch.tensor([60, 63, 5]))
    expected = pool.clone()
    wanted = layer.prefill(inputs, **tables, pool=expected)
    graph.replay()
    assert torch.equal(out, wanted)
    assert torch.equal(pool, expected)


@some
def test_captured_padding_replays_a_batch(layer: Layer) -> None:
    """What a graph of vLLM's is captured of, and then replayed with."""
    inputs, out, pool = make(layer, 300), nan(layer, 300), states(layer, 9)
    tables = {
        "cu_seqlens": torch.tensor([0, 1, 2, 3, 300], dtype=torch.int32),
        "slots": torch.full((4,), -1, dtype=torch.int32),
        "has_initial": torch.zeros(4, dtype=torch.bool),
        "offsets": torch.zeros(4, dtype=torch.int32),
        "boundary_slots": torch.full((4, 5), -1, dtype=torch.int32),
    }
    tables = on("cuda", tables)
    before = pool.clone()
    graph = capture(lambda: layer.prefill(inputs, **tables, pool=pool, out=out))
    assert torch.equal(pool, before)
    tables["cu_seqlens"].copy_(torch.tensor([0, 1, 71, 250, 250]))
    tables["slots"].copy_(torch.tensor([3, 5, 0, -1]))
    tables["has_initial"].copy_(torch.tensor([True, True, False, False]))
    tables["offsets"].copy_(torch.tensor([20, 60, 0, 0]))
    tables["boundary_slots"][1, 0], tables["boundary_slots"][2, 1] = 6, 7
    expected = pool.clone()
    wanted = layer.prefill(inputs, **tables, pool=expected)
    graph.replay()
    assert torch.equal(out[:250], wanted[:250])
    assert torch.equal(pool, expected)
    for slot in range(9):
        assert torch.equal(pool[slot], before[slot]) == (slot not in {0, 3, 5, 6, 7})


@some
def test_captured_prefill_replays_tables_of_one_shape(layer: Layer) -> None:
    """With rows of padding, and states kept inside a pass: the bits are the same."""
    inputs, out, pool = make(layer, 300), nan(layer, 300), states(layer, 9)
    fixed = FixedPrefills(300, 5, pool.device)
    tables = tables_of(fixed.prefills)
    graph = capture(lambda: layer.prefill(inputs, **tables, pool=pool, out=out))
    for lengths, computed, kept in (
        ([100, 20, 170], [60, 0, 127], {(0, 0): 6, (2, 1): 7}),
        ([7], [64], {}),
        ([300], [63], {(0, 4): 8}),
    ):
        given = torch.tensor([lengths, computed], device=pool.device)
        slots = torch.arange(len(lengths), dtype=torch.int32, device=pool.device)
        boundary_slots = torch.full((len(lengths), 5), -1, dtype=torch.int32)
        for place, slot in kept.items():
            boundary_slots[place] = slot
        fixed.fill(*given, slots, boundary_slots.to(pool.device))
        expected, tokens = pool.clone(), sum(lengths)
        wanted = layer.prefill(
            layer.part(inputs, slice(tokens)),
            cu_seqlens=cu_seqlens(lengths, pool.device.type),
            slots=slots,
            has_initial=given[1] > 0,
            offsets=given[1] % 64,
            boundary_slots=boundary_slots.to(pool.device),
            pool=expected,
        )
        graph.replay()
        assert torch.equal(out[:tokens], wanted)
        assert torch.equal(pool, expected)


def tables_of(prefills: Prefills) -> dict[str, Any]:
    names = ("cu_seqlens", "slots", "has_initial", "offsets", "boundary_slots")
    return {name: getattr(prefills, name) for name in names}


@some
@pools
def test_bits_ignore_the_batch_and_the_cached_prefix(
    layer: Layer, pool_dtype: torch.dtype
) -> None:
    lengths = [300, 5, 700, *range(1, 1 + CROWD)]  # enough to be cut for a crowd
    inputs = make(layer, sum(lengths))
    if layer.module is causal_conv1d:
        pool_dtype = torch.bfloat16
    count = len(lengths)
    pool = states(layer, count + 2, pool_dtype)
    alone = pool.clone()
    table = torch.full((count, 4), -1)
    table[0, 3] = count
    slots = torch.arange(count, device="cuda")
    together = layer.prefill(
        inputs,
        cu_seqlens=cu_seqlens(lengths, "cuda"),
        pool=pool,
        slots=slots,
        boundary_slots=table.cuda(),
        **layer.rounding,
    )
    for start, origin, states_then in ((0, 0, alone), (256, count, pool)):
        mine = layer.prefill(
            layer.part(inputs, slice(start, 300)),
            cu_seqlens=cu_seqlens([300 - start], "cuda"),
            pool=states_then,
            slots=slots[:1] + origin,
            **layer.rounding,
        )
        assert torch.equal(together[start:300], mine)
        assert torch.equal(pool[0], states_then[origin])
    many, rows = make(layer, 64), torch.arange(64, device="cuda")
    batch_states = states(layer, 64, pool_dtype)
    single = batch_states[:1].clone()
    batch = layer.update(many, pool=batch_states, slots=rows)
    one = layer.update(layer.part(many, slice(1)), pool=single, slots=rows[:1])
    assert torch.equal(batch[:1], one)
    assert torch.equal(batch_states[:1], single)


@some
@pools
def test_bits_of_a_sequence_that_goes_on_in_a_chunk_ignore_its_splits(
    layer: Layer, pool_dtype: torch.dtype
) -> None:
    """Tokens 100 to 400: in a crowd, and alone in calls split at 128 and 256."""
    lengths = [5, 300, 70, *range(1, 1 + CROWD)]
    inputs = make(layer, sum(lengths))
    if layer.module is causal_conv1d:
        pool_dtype = torch.bfloat16
    count = len(lengths)
    pool = states(layer, count, pool_dtype)
    alone = pool[1:2].clone()
    offsets = torch.arange(count, dtype=torch.int32, device="cuda")
    offsets[1] = 36
    together = layer.prefill(
        inputs,
        cu_seqlens=cu_seqlens(lengths, "cuda"),
        pool=pool,
        slots=torch.arange(count, device="cuda"),
        offsets=offsets,
        **layer.rounding,
    )
    for start, end, offset in ((100, 128, 36), (128, 256, 0), (256, 400, 0)):
        rows = slice(start - 95, end - 95)
        mine = layer.prefill(
            layer.part(inputs, rows),
            cu_seqlens=cu_seqlens([end - start], "cuda"),
            pool=alone,
            slots=torch.tensor([0], device="cuda"),
            offsets=torch.tensor([offset], device="cuda"),
            **layer.rounding,
        )
        assert torch.equal(together[rows], mine)
    assert torch.equal(pool[1:2], alone)


@some
def test_offsets_of_zero_give_the_bits_of_none(layer: Layer) -> None:
    inputs, pool = make(layer, 300), states(layer, 6)
    other = pool.clone()
    tables = {
        "cu_seqlens": cu_seqlens([100, 0, 200]),
        "slots": torch.arange(3),
        "boundary_slots": torch.tensor([[3, -1], [-1, -1], [4, 5]]),
    }
    tables = on("cuda", tables)
    zeros = torch.zeros(3, dtype=torch.int32, device="cuda")
    plain = layer.prefill(inputs, **tables, pool=pool)
    out = layer.prefill(inputs, **tables, pool=other, offsets=zeros)
    assert torch.equal(out, plain)
    assert torch.equal(other, pool)


@some
def test_slots_a_hundred_megabytes_apart(layer: Layer) -> None:
    """30 slots, so that offsets pass 2**31 in bytes, and 2**31 elements for bytes."""
    stride = 100 * 2**20 // 4
    small = states(layer, 30)
    room = torch.empty(30 * stride, device="cuda")
    pool = room.as_strided(small.shape, (stride, *small.stride()[1:])).copy_(small)
    inputs, slots = make(layer, 100), torch.tensor([29], device="cuda")
    table = torch.tensor([[28]], device="cuda")
    drafts = make(layer, 1, 3)
    for each in (pool, small):
        layer.prefill(
            inputs,
            cu_seqlens=cu_seqlens([100], "cuda"),
            pool=each,
            slots=slots,
            boundary_slots=table,
        )
        targets = torch.tensor([[27, 26, 25]], device="cuda")
        layer.verify(drafts, pool=each, slots=slots, draft_slots=targets)
        layer.update(layer.part(inputs, slice(1)), pool=each, slots=slots)
    assert torch.equal(pool, small)


def capture(work: Any) -> torch.cuda.CUDAGraph:
    """Run once, which compiles, and capture."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
