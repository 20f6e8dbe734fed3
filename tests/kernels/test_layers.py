# SPDX-License-Identifier: Apache-2.0
"""What holds for every state layer: references, and Triton against them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from .common import assert_near, cu_seqlens, on, path_to
from .layers import LARGE, SMALL, Layer, names

Switch = Callable[[], AbstractContextManager[None]]
ALL = SMALL + LARGE
TREE = torch.tensor([[-1, 0, 0, 1, -1], [-1, -1, 1, 2, 3]])
DTYPES = [torch.float32, torch.bfloat16]

layers = pytest.mark.parametrize("layer", SMALL, ids=names(SMALL))
trees = pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("layer", ALL, ids=names(ALL))
def test_reference_prefill_is_the_definition(layer: Layer) -> None:
    lengths = [1, 63, 0, 257, 2]
    inputs = layer.make(sum(lengths) + 2)
    pool = layer.states(8)
    before = pool.clone()
    slots = torch.tensor([3, 0, 5, -1, 6])
    initial = torch.tensor([True, False, True, True, True])
    table = torch.full((5, 4), -1)
    table[3, 1], table[1, 1] = 7, 1
    out = layer.prefill(
        inputs,
        cu_seqlens=cu_seqlens(lengths),
        pool=pool,
        slots=slots,
        has_initial=initial,
        boundary_slots=table,
    )
    expected, start = before.double(), 0
    for row, length in enumerate(lengths):
        slot = int(slots[row])
        fresh = slot < 0 or not bool(initial[row])
        mine = layer.part(inputs, slice(start, start + length))
        y, final = layer.define(mine, before[slot], fresh)
        assert_near(f"out {row}", out[start : start + length], y, 1e-5)
        if slot >= 0:
            expected[slot] = final
        if row == 3:
            mine = layer.part(mine, slice(128))
            expected[7] = layer.define(mine, before[slot], fresh)[1]
        start += length
    for slot in range(8):
        assert_near(f"slot {slot}", pool[slot], expected[slot], 1e-5)


@layers
def test_updates_are_the_definition(layer: Layer) -> None:
    inputs = layer.make(5)
    pool = layer.states(7)
    before = pool.clone()
    slots = torch.tensor([6, -1, 0, 2, 1])
    out = layer.update(inputs, pool=pool, slots=slots)
    expected = before.double()
    for row, slot in enumerate(slots.tolist()):
        state = torch.zeros_like(before[0]) if slot < 0 else before[slot]
        mine = layer.part(inputs, slice(row, row + 1))
        y, final = layer.define(mine, state)
        assert_near(f"out {row}", out[row], y[0], 1e-5)
        if slot >= 0:
            expected[slot] = final
    assert_near("pool", pool, expected, 1e-5)
    assert torch.equal(pool[3:6], before[3:6])


@layers
@dtypes
@trees
def test_verify_equals_replayed_updates(
    layer: Layer, dtype: torch.dtype, parents: torch.Tensor | None
) -> None:
    inputs = layer.make(2, 5)
    pool = layer.states(14, dtype)
    before = pool.clone()
    slots, drafts = torch.tensor([0, 1]), torch.arange(2, 12).view(2, 5)
    out = layer.verify(
        inputs, pool=pool, slots=slots, draft_slots=drafts, parents=parents
    )
    for row in range(2):
        links = None if parents is None else parents[row].tolist()
        for draft in range(5):
            state = before[slots[row]][None].clone()
            for node in path_to(draft, links):
                token = layer.part(inputs, (slice(row, row + 1), node))
                y = layer.update(token, pool=state, slots=torch.tensor([0]))
            # PyTorch's vectorised exp differs in the last bit with the layout.
            assert_near("out", out[row, draft], y[0], 1e-6)
            bound = 1e-6 if dtype == torch.float32 else 3e-3
            assert_near("state", pool[drafts[row, draft]], state[0], bound)
    assert torch.equal(pool[:2], before[:2])
    assert torch.equal(pool[12:], before[12:])


@layers
@dtypes
def test_resuming_at_a_boundary_gives_the_same_bits(
    layer: Layer, dtype: torch.dtype
) -> None:
    inputs = layer.make(200)
    pool = layer.states(4, dtype)
    pool[1] = pool[0]
    whole = layer.prefill(
        inputs,
        cu_seqlens=cu_seqlens([200]),
        pool=pool,
        slots=torch.tensor([0]),
        boundary_slots=torch.tensor([[-1, 2]]),
        **layer.rounding,
    )
    rest = layer.prefill(
        layer.part(inputs, slice(128, None)),
        cu_seqlens=cu_seqlens([72]),
        pool=pool,
        slots=torch.tensor([2]),
        **layer.rounding,
    )
    # The convolution's inputs are kept in the pool's type: exact if that is theirs.
    if dtype == torch.float32 or layer.rounding:
        assert torch.equal(whole[128:], rest)
    assert torch.equal(pool[0], pool[2])


@layers
def test_triton_prefill_equals_reference(
    layer: Layer, device: str, on_triton: Switch
) -> None:
    lengths = [1, 63, 0, 130]
    inputs = layer.make(sum(lengths))
    pool = layer.states(8)
    other = pool.clone()
    table = torch.full((4, 2), -1)
    table[3, 0], table[1, 0] = 7, 1
    tables = {
        "cu_seqlens": cu_seqlens(lengths),
        "slots": torch.tensor([3, 0, 5, -1]),
        "has_initial": torch.tensor([True, False, True, True]),
        "boundary_slots": table,
    }
    expected = layer.prefill(inputs, **tables, pool=other)
    pool = pool.to(device)
    with on_triton():
        out = layer.prefill(on(device, inputs), **on(device, tables), pool=pool)
    assert_near("out", out, expected, 1e-5)
    for slot in range(8):
        assert_near(f"slot {slot}", pool[slot], other[slot], 1e-5)


@layers
@pytest.mark.parametrize("triton", [False, True], ids=["reference", "triton"])
def test_a_slot_without_a_sequence_may_repeat_as_padding(
    layer: Layer, device: str, on_triton: Switch, triton: bool
) -> None:
    """Whatever it holds: rows and slots of sequences have the bits of padding by -1."""
    device = device if triton else "cpu"
    rows, drafts = on(device, layer.make(5)), on(device, layer.make(5, 2))
    inputs = on(device, layer.make(40))
    pool = layer.states(9).to(device)
    pool[0] = torch.nan
    real = torch.tensor([1, 4], device=device)
    cu = cu_seqlens([10, 20, 0, 0, 10], device)

    def work(padding: int) -> list[torch.Tensor]:
        states = pool.clone()
        slots = torch.full((5,), padding, device=device)
        slots[real] = torch.tensor([3, 2], device=device)
        table = torch.full((5, 2), padding, device=device)
        table[real] = torch.tensor([[5, 6], [7, 8]], device=device)
        outs = [
            layer.update(rows, pool=states, slots=slots)[real],
            layer.verify(drafts, pool=states, slots=slots, draft_slots=table)[real],
            layer.prefill(inputs, pool=states, slots=slots, cu_seqlens=cu)[10:],
        ]
        return [*outs, states[1:]]

    with on_triton() if triton else nullcontext():
        for mine, wanted in zip(work(0), work(-1), strict=True):
            assert mine.isfinite().all()
            assert torch.equal(mine, wanted)


@layers
@pytest.mark.parametrize("triton", [False, True], ids=["reference", "triton"])
def test_a_step_writes_rows_of_padding_as_well(
    layer: Layer, device: str, on_triton: Switch, triton: bool
) -> None:
    """What is given to be written holds NaN."""
    device = device if triton else "cpu"
    rows, pool = on(device, layer.make(3)), layer.states(2).to(device)
    slots = torch.tensor([-1, 1, -1], device=device)
    with on_triton() if triton else nullcontext():
        wanted = layer.update(rows, pool=pool.clone(), slots=slots)
        out = torch.full_like(wanted, torch.nan)
        layer.update(rows, pool=pool, slots=slots, out=out)
    assert out.isfinite().all()
    assert torch.equal(out, wanted)


@layers
@trees
def test_triton_steps_equal_reference(
    layer: Layer, device: str, on_triton: Switch, parents: torch.Tensor | None
) -> None:
    inputs = layer.make(3, 5)
    # Not bfloat16: the interpreter truncates where the GPU and PyTorch round.
    pool = layer.states(16, torch.float16)
    other = pool.clone()
    drafts = torch.cat([torch.arange(2, 12).view(2, 5), torch.full((1, 5), -1)])
    if parents is None:
        drafts[0, 3] = -1
    else:
        parents = torch.cat([parents, torch.full((1, 5), -1)])
    tables = {
        "slots": torch.tensor([0, 1, -1]),
        "draft_slots": drafts,
        "parents": parents,
    }
    expected = layer.verify(inputs, **tables, pool=other)
    pool = pool.to(device)
    with on_triton():
        out = layer.verify(on(device, inputs), **on(device, tables), pool=pool)
    # A float16 state may round the other way after a sum in another order.
    assert_near("out", out, expected, 3e-4)
    assert_near("pool", pool, other, 3e-4)
    assert torch.equal(pool[12:].cpu(), other[12:])


@layers
def test_chain_may_reuse_the_main_slot(
    layer: Layer, device: str, on_triton: Switch
) -> None:
    """An engine that reads column `accepted` of the table it then overwrites."""
    inputs = layer.make(1, 3)
    pool = layer.states(4)
    other = pool.clone()
    layer.verify(
        inputs,
        pool=other,
        slots=torch.tensor([1]),
        draft_slots=torch.tensor([[2, 0, 3]]),
    )
    tables = {"slots": torch.tensor([1]), "draft_slots": torch.tensor([[0, 1, 2]])}
    pool = pool.to(device)
    with on_triton():
        layer.verify(on(device, inputs), **on(device, tables), pool=pool)
    assert_near("pool", pool[:3], other[[2, 0, 3]], 1e-5)


@layers
def test_triton_bits_ignore_the_batch_and_the_cached_prefix(
    layer: Layer, device: str, on_triton: Switch
) -> None:
    inputs = on(device, layer.make(150))
    dtype = torch.float16 if layer.rounding else torch.float32
    pool = layer.states(6, dtype).to(device)
    alone = pool.clone()
    tables = {
        "cu_seqlens": cu_seqlens([5, 100, 45]),
        "slots": torch.arange(3),
        "boundary_slots": torch.tensor([[-1], [4], [-1]]),
    }
    with on_triton():
        together = layer.prefill(
            inputs, **on(device, tables), pool=pool, **layer.rounding
        )
        for start, end, slot in ((5, 105, 1), (69, 105, 4)):
            if slot == 4:
                alone[4] = pool[4]
            mine = layer.prefill(
                layer.part(inputs, slice(start, end)),
                cu_seqlens=cu_seqlens([end - start], device),
                slots=torch.tensor([slot], device=device),
                pool=alone,
                **layer.rounding,
            )
            assert torch.equal(together[start:end], mine)
            assert torch.equal(pool[1], alone[slot])
            pool[4] = pool[4]
        rows = layer.part(inputs, slice(3))
        states = layer.states(4, dtype).to(device)
        other = states.clone()
        slots = torch.tensor([2, 0, 3], device=device)
        batch = layer.update(rows, pool=states, slots=slots)
        one = layer.update(layer.part(rows, slice(1, 2)), pool=other, slots=slots[1:2])
    assert torch.equal(batch[1:2], one)
    assert torch.equal(states[0], other[0])


@layers
def test_triton_slots_beyond_two_to_the_31(
    layer: Layer, device: str, on_triton: Switch
) -> None:
    """Slots 2**30 elements apart; only the pages that are touched take memory."""
    inputs, small = on(device, layer.make(70)), layer.states(4, torch.float16)
    stride = 2**30
    options = {"dtype": torch.float16, "device": device}
    room = torch.empty(3 * stride + 2 * small[0].numel(), **options)
    pool = room.as_strided(small.shape, (stride, *small.stride()[1:])).copy_(small)
    small = small.to(device)
    tables = {
        "cu_seqlens": cu_seqlens([70]),
        "slots": torch.tensor([3]),
        "boundary_slots": torch.tensor([[2]]),
    }
    drafts = {"slots": torch.tensor([3]), "draft_slots": torch.tensor([[2, 1]])}
    token = layer.part(inputs, slice(2))
    token = {n: x[None] if n in layer.rows() else x for n, x in token.items()}
    with on_triton():
        for states in (pool, small):
            layer.prefill(inputs, **on(device, tables), pool=states)
            layer.verify(token, **on(device, drafts), pool=states)
    assert torch.equal(pool, small)


@layers
def test_nothing_to_do(layer: Layer, device: str, on_triton: Switch) -> None:
    """No sequences, no tokens, no rows, no drafts, on either side."""
    pool = layer.states(2).to(device)
    before = pool.clone()
    none, inputs = torch.empty(0, dtype=torch.int64, device=device), layer.make(0)
    inputs = on(device, inputs)
    zero = torch.zeros(3, dtype=torch.int32, device=device)
    slots = torch.tensor([0, 1], device=device)
    rows = on(device, layer.make(2, 0))

    def work() -> None:
        layer.prefill(inputs, cu_seqlens=zero[:1], pool=pool, slots=none)
        layer.prefill(inputs, cu_seqlens=zero, pool=pool, slots=slots)
        layer.update(inputs, pool=pool, slots=none)
        layer.verify(rows, pool=pool, slots=slots, draft_slots=none.view(2, 0))

    if device == "cpu":
        work()
    with on_triton():
        work()
    assert torch.equal(pool, before)


@pytest.mark.parametrize("layer", SMALL[:4], ids=names(SMALL[:4]))
def test_triton_prefill_stays_accurate_with_equal_keys(
    layer: Layer, device: str, on_triton: Switch
) -> None:
    """The chunk's system is worst when all keys agree and nothing decays."""
    inputs = layer.make(128)
    inputs["k"][:] = inputs["k"][0]
    if "A" in inputs:
        inputs["A"][:], inputs["beta"][:] = 0, 30
    else:
        inputs["g"][:], inputs["beta"][:] = 0, 1
    expected, _ = layer.define(inputs, torch.zeros(layer.item))
    pool = torch.zeros(1, *layer.item, device=device)
    tables = {"cu_seqlens": cu_seqlens([128]), "slots": torch.tensor([0])}
    with on_triton():
        out = layer.prefill(on(device, inputs), **on(device, tables), pool=pool)
    assert_near("out", out, expected, 1e-4)


@pytest.mark.parametrize("layer", SMALL[:6], ids=names(SMALL[:6]))
def test_triton_prefill_forgets_at_any_speed(
    layer: Layer, device: str, on_triton: Switch
) -> None:
    """Decays of exp(-1000) a token beside none: no product may overflow."""
    inputs = layer.make(100)
    if "decay" in inputs:
        inputs["decay"][:] = torch.tensor([0.0, -1000.0]).repeat(2)
    else:
        inputs["dt" if "dt" in inputs else "g"][::3] = 0
        inputs["dt" if "dt" in inputs else "g"][1::3] *= 1000
    if "A" in inputs and "g" in inputs:
        inputs["g"] = inputs["g"].abs()
    if "dt" in inputs:
        inputs["dt"] = inputs["dt"].abs()
    expected, final = layer.define(inputs, torch.zeros(layer.item))
    pool = torch.zeros(1, *layer.item, device=device)
    tables = {"cu_seqlens": cu_seqlens([100]), "slots": torch.tensor([0])}
    with on_triton():
        out = layer.prefill(on(device, inputs), **on(device, tables), pool=pool)
    # A running sum in the thousands has three digits left behind the point.
    assert_near("out", out, expected, 1e-3)
    assert_near("state", pool[0], final, 1e-3)


@layers
def test_wrong_arguments_are_refused(layer: Layer) -> None:
    inputs, pool = layer.make(3), layer.states(4)
    tables = {"cu_seqlens": torch.tensor([0, 1, 3]), "slots": torch.arange(2)}
    layer.prefill(inputs, **tables, pool=pool)
    first = next(iter(layer.rows()))
    cut = {n: x[..., :-1] for n, x in inputs.items() if x.numel() > 1}
    cut |= {n: x[:2] for n, x in inputs.items() if n in layer.rows() and n != first}
    wrong = [{name: value} for name, value in cut.items()]
    wrong += [{"pool": pool[:, 1:]}, {"pool": pool[0]}, {"out": pool}]
    wrong += [{"slots": tables["slots"].float()}, {"slots": torch.arange(3)}]
    wrong += [{"cu_seqlens": torch.tensor([0.0, 1, 3])}]
    wrong += [{"has_initial": torch.ones(2)}, {"has_initial": torch.ones(3) > 0}]
    wrong += [{"offsets": torch.zeros(2)}, {"offsets": torch.arange(3)}]
    wrong += [{"offsets": torch.arange(4)[::2]}]
    wrong += [{"boundary_slots": torch.arange(2)}]
    wrong += [{"boundary_slots": torch.arange(4).view(2, 2).T}]
    for change in wrong:
        with pytest.raises(ValueError):
            layer.prefill({}, **{**inputs, **tables, "pool": pool, **change})
    rows = layer.make(2, 3)
    slots, drafts = torch.arange(2), torch.arange(6).view(2, 3)
    for change in (
        {"slots": torch.arange(3)},
        {"draft_slots": drafts[:, :2]},
        {"parents": drafts[:1]},
        {"parents": drafts.float()},
    ):
        tables = {"pool": pool, "slots": slots, "draft_slots": drafts, **change}
        with pytest.raises(ValueError):
            layer.verify(rows, **tables)
    with pytest.raises(ValueError):
        layer.update(inputs, pool=pool, slots=slots)
