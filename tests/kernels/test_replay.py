# SPDX-License-Identifier: Apache-2.0
"""Packed drafts, records of drafts, and accepted drafts folded into main states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hybrid_kernels import (
    causal_conv1d,
    gated_delta_rule,
    lightning_attention,
    replay,
    ssd,
)
from hybrid_kernels.replay import reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .common import assert_near, cu_seqlens, on
from .layers import REPLAYED, Layer, Tensors, convolution, kimi, names

Switch = Callable[[], AbstractContextManager[None]]
layers = pytest.mark.parametrize("layer", REPLAYED, ids=names(REPLAYED))
sides = pytest.mark.parametrize("triton", [False, True], ids=["reference", "triton"])
pools = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
# A fixture's switch is as good for the next example.
RUNS = {"deadline": None, "suppress_health_check": list(HealthCheck)}
NAN = float("nan")
MOST = 6
"""Drafts of a row."""
SUMMED = MOST * 12
"""Terms that a value is a sum of, at most: a key's, for each draft of a path."""
ROUNDING = {
    # Each addition rounds by half of epsilon at most.
    torch.float32: SUMMED * torch.finfo(torch.float32).eps / 2,
    torch.float16: 1e-2,
    # Its numbers have three bits less.
    torch.bfloat16: 8e-2,
}
"""Relative errors that sums in another order may have, by what is compared."""
IN_MATRICES = (gated_delta_rule, ssd, lightning_attention)
"""Whose chains are verified in matrix form where a record is kept: sums in another
order than those of `update`."""
reference_nodes, reference_fold = reference._nodes, reference.fold


@dataclass(frozen=True)
class Row:
    """One sequence's drafts, and one more than the index of the last accepted."""

    parents: tuple[int, ...]
    accepted: int


@st.composite
def rows_of(draw: st.DrawFn, trees: bool, triton: bool) -> list[Row]:
    """A few rows of a few drafts each; fewer for the interpreter, which is slow."""
    rows = []
    for _ in range(draw(st.integers(1, 2 if triton else 3))):
        length = draw(st.integers(0, 4 if triton else MOST))
        parents = [
            draw(st.integers(-1, node - 1)) if trees else node - 1
            for node in range(length)
        ]
        rows.append(Row(tuple(parents), draw(st.integers(0, length))))
    return rows


@dataclass
class Batch:
    """Rows at the front of their tables, and a row of padding behind them."""

    layer: Layer
    rows: Sequence[Row]
    packed: bool
    device: str

    def __post_init__(self) -> None:
        lengths = [len(row.parents) for row in self.rows]
        self.most = max(lengths)
        self.starts = [sum(lengths[:row]) for row in range(len(lengths))]
        lead = (sum(lengths) + 2,) if self.packed else (self.count, self.most)
        self.inputs = self.layer.make(*lead)
        self.out = torch.full((*lead, *self.layer.out), NAN)
        for row, length in enumerate(lengths):
            # No row may read what is beyond its drafts.
            if not self.packed:
                self._spoil((row, slice(length, None)))
        self._spoil(slice(sum(lengths), None) if self.packed else -1)
        bounds = cu_seqlens([*lengths, 0]) if self.packed else None
        self.tables = {"cu_seqlens": bounds}

    @property
    def count(self) -> int:
        return len(self.rows) + 1

    def _spoil(self, index: Any) -> None:
        for name in self.layer.rows():
            self.inputs[name][index] = NAN

    def token(self, row: int, draft: int) -> Any:
        """Index of a draft's token."""
        return self.starts[row] + draft if self.packed else (row, draft)

    def slots(self) -> torch.Tensor:
        return torch.tensor([*range(1, self.count), -1], dtype=torch.int32)

    def parents(self, trees: bool) -> torch.Tensor | None:
        """Padding, and what is behind a row's drafts, may hold anything."""
        if not trees:
            return None
        table = torch.full((self.count, self.most), 7)
        for row, links in enumerate(self.rows):
            table[row, : len(links.parents)] = torch.tensor(links.parents)
        return table

    def accepted(self) -> torch.Tensor:
        return torch.tensor([*(row.accepted for row in self.rows), 9])

    def verify(self, pool: torch.Tensor, **tables: torch.Tensor | None) -> torch.Tensor:
        tables = on(self.device, {"slots": self.slots(), **self.tables, **tables})
        return self.layer.verify(
            on(self.device, self.inputs),
            pool=pool,
            out=self.out.clone().to(self.device),
            **tables,
        )

    def updates(
        self, row: int, state: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each draft's output and state, one by one from those of its parent."""
        zero = torch.tensor([0], device=self.device)
        done: list[tuple[torch.Tensor, torch.Tensor]] = []
        for draft, parent in enumerate(self.rows[row].parents):
            after = (state if parent < 0 else done[parent][1])[None].clone()
            index = self.token(row, draft)
            token = {
                n: x[index][None] if n in self.layer.rows() else x
                for n, x in self.inputs.items()
            }
            y = self.layer.update(on(self.device, token), pool=after, slots=zero)
            done.append((y[0], after[0]))
        return done


@layers
@sides
@pytest.mark.parametrize("trees", [False, True], ids=["chain", "tree"])
def test_packed_rows_are_each_as_alone(
    layer: Layer, device: str, on_triton: Switch, triton: bool, trees: bool
) -> None:
    """Outputs, and a state in every draft's slot; nothing beyond a row's drafts."""
    with on_triton() if triton else nullcontext():

        @given(rows_of(trees, triton))
        @settings(max_examples=2 if triton else 15, **RUNS)
        def check(rows: list[Row]) -> None:
            batch = Batch(layer, rows, packed=True, device=device)
            count = batch.count * batch.most
            pool = layer.states(batch.count + count, torch.float16).to(device)
            before = pool.clone()
            table = torch.arange(count).view(batch.count, -1) + batch.count
            parents = batch.parents(trees)
            out = batch.verify(pool, draft_slots=table, parents=parents)
            changed = []
            for number, row in enumerate(rows):
                wanted = batch.updates(number, before[number + 1])
                for draft in range(len(row.parents)):
                    changed.append(int(table[number, draft]))
                    same(out[batch.token(number, draft)], wanted[draft][0], triton)
                    same(pool[changed[-1]], wanted[draft][1], triton)
            others = [slot for slot in range(len(pool)) if slot not in changed]
            assert torch.equal(pool[others], before[others])
            assert out[sum(len(row.parents) for row in rows) :].isnan().all()

        check()


@layers
@sides
@pytest.mark.parametrize("recorded", [False, True], ids=["columns", "record"])
def test_packed_rows_without_a_slot_are_left_out(
    layer: Layer, device: str, on_triton: Switch, triton: bool, recorded: bool
) -> None:
    """They are another kernel's, and may be longer than the tables."""
    lengths, most = [2, 5, 1], 2
    inputs = on(device, layer.make(sum(lengths)))
    slots = torch.tensor([1, -1, 2], dtype=torch.int32, device=device)
    pool = layer.states(3 + len(lengths) * most, torch.float32).to(device)
    out = torch.full((sum(lengths), *layer.out), NAN, device=device)
    columns = torch.arange(len(lengths) * most, device=device).view(-1, most) + 3
    kept = layer.record(pool, len(lengths), most)
    tables = {"record": kept.record} if recorded else {"draft_slots": columns}
    if recorded:
        kept.record[1] = NAN
    before = pool.clone()
    with on_triton() if triton else nullcontext():
        layer.verify(
            inputs,
            pool=pool,
            slots=slots,
            cu_seqlens=cu_seqlens(lengths).to(device),
            out=out,
            **tables,
        )
    assert out[2:7].isnan().all()
    assert not out[:2].isnan().any() and not out[7:].isnan().any()
    assert torch.equal(pool[:3], before[:3])
    assert torch.equal(pool[columns[1]], before[columns[1]])
    if recorded:
        assert kept.record[1].isnan().all()
    else:
        assert not torch.equal(pool[columns[0]], before[columns[0]])


@layers
@sides
@pools
@pytest.mark.parametrize("trees", [False, True], ids=["chain", "tree"])
def test_a_commit_gives_the_state_of_accepted_drafts_run_one_by_one(
    layer: Layer,
    device: str,
    on_triton: Switch,
    triton: bool,
    dtype: torch.dtype,
    trees: bool,
) -> None:
    """So are the outputs; no state is kept before."""
    with on_triton() if triton else nullcontext():

        @given(rows_of(trees, triton), st.booleans())
        @settings(max_examples=2 if triton else 12, **RUNS)
        def check(rows: list[Row], packed: bool) -> None:
            batch = Batch(layer, rows, packed, device)
            check_commit(batch, dtype, trees, triton)

        check()


def check_commit(batch: Batch, dtype: torch.dtype, trees: bool, triton: bool) -> None:
    """Verify, commit, and compare outputs and all slots."""
    exact = triton and has_bits_of_updates(batch.layer, trees)
    pool = batch.layer.states(batch.count + 1, dtype).to(batch.device)
    before = pool.clone()
    kept = batch.layer.record(pool, batch.count + 1, batch.most)
    parents = batch.parents(trees)
    out = batch.verify(pool, record=kept.record, parents=parents)
    assert torch.equal(pool, before)
    commit(kept, batch, parents)
    for number, row in enumerate(batch.rows):
        if not row.accepted:
            assert torch.equal(pool[number + 1], before[number + 1])
            continue
        last = row.accepted - 1
        y, state = batch.updates(number, before[number + 1])[last]
        # Without a delta rule, what a token adds depends on no other token.
        same(
            pool[number + 1],
            state,
            exact or (triton and batch.layer.module is not gated_delta_rule),
        )
        rounded = dtype if triton else None
        same(out[batch.token(number, last)], y, exact, rounded)
    assert torch.equal(pool[:1], before[:1])
    assert torch.equal(pool[batch.count :], before[batch.count :])


def _a_draft_too_few(last: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
    return reference_nodes(last, parents)[:, :-1]


def _backwards(last: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
    return reference_nodes(last, parents).flip(1)


def _along_the_tables(last: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
    return reference_nodes(last, None)


# A window of one input holds the last draft's, whatever the path.
@pytest.mark.parametrize(
    "layer",
    [layer for layer in REPLAYED if layer.item[-1] > 1],
    ids=lambda layer: layer.name,
)
@pytest.mark.parametrize("breakage", [_a_draft_too_few, _backwards, _along_the_tables])
def test_a_broken_path_is_noticed(
    layer: Layer, breakage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(layer, [Row((-1, 0, 0, 1, 0), 4)], packed=True, device="cpu")
    check_commit(batch, torch.float32, trees=True, triton=False)
    monkeypatch.setattr(reference, "_nodes", breakage)
    with pytest.raises(AssertionError):
        check_commit(batch, torch.float32, trees=True, triton=False)


def _a_little_more(*given: torch.Tensor) -> torch.Tensor:
    """A state whose last row is off by less than float16 could tell."""
    after = reference_fold(*given)
    after[..., -1] *= 1 + 1e-4
    return after


@pytest.mark.parametrize(
    "layer",
    [layer for layer in REPLAYED if layer.module is not causal_conv1d],
    ids=lambda layer: layer.name,
)
def test_values_that_are_hardly_broken_are_noticed(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(layer, [Row((-1,), 1)], packed=True, device="cpu")
    check_commit(batch, torch.float32, trees=True, triton=False)
    monkeypatch.setattr(reference, "fold", _a_little_more)
    with pytest.raises(AssertionError):
        check_commit(batch, torch.float32, trees=True, triton=False)


def has_bits_of_updates(layer: Layer, trees: bool) -> bool:
    """Whether what Triton records gives the bits of tokens that are run one by one."""
    return trees or layer.module not in IN_MATRICES


def same(
    mine: torch.Tensor,
    wanted: torch.Tensor,
    exact: bool,
    dtype: torch.dtype | None = None,
) -> None:
    """PyTorch's vectorised exp differs with the layout; Triton's does not.

    Args:
        mine: what is tested.
        wanted: what it should be.
        exact: whether bits must be equal.
        dtype: what is rounded to on the way; None if to nothing but `mine`'s.
    """
    if exact:
        assert torch.equal(mine, wanted)
    else:
        assert_near("values", mine, wanted, ROUNDING[dtype or mine.dtype])


def commit(
    kept: replay.States | replay.Windows, batch: Batch, parents: torch.Tensor | None
) -> None:
    states = [kept] if isinstance(kept, replay.States) else []
    windows = [kept] if isinstance(kept, replay.Windows) else []
    tables = {
        "slots": batch.slots(),
        "accepted": batch.accepted(),
        "parents": parents,
    }
    if batch.most:
        replay.commit(replay.Layers(states, windows), **on(batch.device, tables))


@layers
@sides
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_record_keeps_what_slots_would(
    layer: Layer, device: str, on_triton: Switch, triton: bool, dtype: torch.dtype
) -> None:
    """Outputs and every draft's state: those of `verify` with a slot for each draft."""
    row = Row((-1, 0, 0, 1, 1, 3, 2, -1), 0)
    batch = Batch(layer, [row, row], packed=False, device=device)
    parents = batch.parents(True)
    count = 3 + 3 * batch.most
    pool = layer.states(count, dtype).to(device)
    before = pool.clone()
    table = torch.arange(3, count).view(3, -1)
    with on_triton() if triton else nullcontext():
        wanted = batch.verify(pool, draft_slots=table, parents=parents)
        other = before.clone()
        kept = layer.record(other, 3, batch.most)
        out = batch.verify(other, record=kept.record, parents=parents)
        assert torch.equal(out[:2], wanted[:2])
        for draft in range(batch.most):
            other.copy_(before)
            batch.rows = [Row(row.parents, draft + 1)] * 2
            commit(kept, batch, parents)
            assert torch.equal(other[1:3], pool[table[:2, draft]])
            # The test would see another draft's state.
            rest = [node for node in range(batch.most) if node != draft]
            for node in rest if layer.module is not causal_conv1d else ():
                assert not torch.equal(other[1], pool[table[0, node]])


@sides
@pytest.mark.parametrize("trees", [False, True], ids=["chain", "tree"])
def test_all_layers_are_committed_in_one_launch(
    device: str,
    on_triton: Switch,
    triton: bool,
    trees: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one model: states, and convolutions of several sizes, in pools of a type."""
    rows = [Row((-1, 0, 1, 1, 2), 4), Row((-1, 0), 0), Row((-1, -1, 1), 3)]
    rows = rows if trees else [Row(tuple(range(-1, 4)), n) for n in (4, 0, 5)]
    state = kimi(1, 2, 12, 5, fused=True)
    model = [state, *REPLAYED[6:], convolution(30, 4), state]
    batches = [Batch(layer, rows, True, device) for layer in model]
    kept = []
    with on_triton() if triton else nullcontext():
        for batch in batches:
            pool = batch.layer.states(5, torch.float16).to(device)
            kept.append(batch.layer.record(pool, 4, batch.most))
            batch.verify(pool, record=kept[-1].record, parents=batch.parents(trees))
        states = [each for each in kept if isinstance(each, replay.States)]
        windows = [each for each in kept if isinstance(each, replay.Windows)]
        assert len(states) == 2 and len({x.pool.shape for x in windows}) == 5
        wanted = []
        for each, batch in zip(kept, batches, strict=True):
            wanted.append(each.pool.clone())
            for number, row in enumerate(rows):
                if row.accepted:
                    states_of = batch.updates(number, wanted[-1][number + 1])
                    wanted[-1][number + 1] = states_of[row.accepted - 1][1]
        tables = {"slots": batch.slots(), "accepted": batch.accepted()}
        tables |= {"parents": batch.parents(trees)}
        together = replay.Layers(states, windows)
        launches = count_launches(monkeypatch) if triton else [1]
        replay.commit(together, **on(device, tables))
    assert len(launches) == 1
    for each, expected in zip(kept, wanted, strict=True):
        if triton:
            assert torch.equal(each.pool, expected)
        else:
            assert_near("pool", each.pool, expected, 1e-3)


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from hybrid_kernels.replay import triton

    kernel, grids = triton._commit_kernel, []

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton, "_commit_kernel", Counted())
    return grids


@sides
def test_states_of_a_hundred_steps_are_those_of_updates(
    device: str, on_triton: Switch, triton: bool
) -> None:
    """What one step leaves in the main slot, the next goes on from."""
    layer, steps = REPLAYED[1], 4 if triton else 100
    pool = layer.states(2, torch.float16).to(device)
    expected = pool[1].clone()
    kept = layer.record(pool, 2, 3)
    with on_triton() if triton else nullcontext():
        for step in range(steps):
            row = Row((-1, 0, 1), step % 4)
            batch = Batch(layer, [row], packed=False, device=device)
            batch.verify(pool, record=kept.record)
            commit(kept, batch, None)
            if row.accepted:
                expected = batch.updates(0, expected)[row.accepted - 1][1]
    same(pool[1], expected, triton and has_bits_of_updates(layer, trees=False))


@layers
def test_a_record_or_slots_must_fit(layer: Layer) -> None:
    inputs, pool = layer.make(2, 3), layer.states(8, torch.float16)
    slots, drafts = torch.arange(2), torch.arange(2, 8).view(2, 3)
    record = layer.record(pool, 2, 3).record
    layer.verify(inputs, pool=pool, slots=slots, record=record)
    layer.verify(inputs, pool=pool, slots=slots)
    packed = layer.make(6)
    bounds = torch.tensor([0, 3, 6])
    layer.verify(packed, pool=pool, slots=slots, cu_seqlens=bounds, record=record)
    layer.verify(packed, pool=pool, slots=slots, cu_seqlens=bounds)
    wrong: list[tuple[Tensors, dict[str, torch.Tensor]]] = [
        (inputs, {"record": record, "draft_slots": drafts}),
        (inputs, {"record": record[:1]}),
        (inputs, {"record": record[:, :2]}),
        (inputs, {"record": record[..., :-1]}),
        (inputs, {"record": record[0]}),
        (inputs, {"record": record.double()}),
        (inputs, {"parents": drafts - 3}),
        (inputs, {"cu_seqlens": bounds}),
        (packed, {"record": record}),
        (packed, {"cu_seqlens": bounds[:2], "record": record}),
        (packed, {"cu_seqlens": bounds.float(), "record": record}),
        (packed, {"cu_seqlens": torch.arange(6)[::2], "record": record}),
        (inputs, {"slots": torch.arange(4)[::2], "record": record}),
        (packed, {"cu_seqlens": bounds, "draft_slots": drafts[:1]}),
        (packed, {"cu_seqlens": bounds, "draft_slots": drafts[0]}),
        (packed, {"cu_seqlens": bounds, "draft_slots": drafts[:, :2]}),
        (packed, {"cu_seqlens": bounds, "record": record[:, :2]}),
        (packed, {"cu_seqlens": bounds, "record": record, "parents": drafts[:, :2]}),
    ]
    for tokens, tables in wrong:
        with pytest.raises(ValueError):
            layer.verify(tokens, pool=pool, **{"slots": slots, **tables})


def test_layers_that_do_not_fit_together_are_refused() -> None:
    delta, conv = REPLAYED[0], REPLAYED[-1]
    states = delta.record(delta.states(4), 2, 3)
    windows = conv.record(conv.states(4), 2, 3)
    assert isinstance(states, replay.States) and isinstance(windows, replay.Windows)
    other = REPLAYED[1].record(REPLAYED[1].states(4), 2, 3)
    half = delta.record(delta.states(4, torch.float16), 2, 3)
    longer = conv.record(conv.states(4), 2, 4)
    halves = conv.record(conv.states(4, torch.float16), 2, 3)
    transposed = states.pool.mT.contiguous().mT
    record, inputs = states.record, windows.record
    for one, two in (
        ([], []),
        ([states, other], []),
        ([states, half], []),
        ([states], [longer]),
        ([], [windows, halves]),
        ([replay.States(transposed, record, 1)], []),
        ([replay.States(states.pool, record, 3)], []),
        ([replay.States(states.pool, record, 2)], []),
        ([replay.States(states.pool, record.double(), 1)], []),
        ([replay.States(states.pool[0], record, 1)], []),
        ([], [replay.Windows(windows.pool, inputs.half())]),
        ([], [replay.Windows(windows.pool, inputs[..., 1:])]),
        ([], [replay.Windows(windows.pool[..., :0], inputs)]),
        ([], [replay.Windows(windows.pool[0], inputs)]),
    ):
        with pytest.raises(ValueError):
            replay.Layers(one, two)
    together = replay.Layers([states], [windows])
    slots, accepted = torch.arange(2), torch.tensor([0, 1])
    tree = torch.tensor([[-1, 0], [-1, 0]])
    record.zero_(), inputs.zero_()
    replay.commit(together, slots, accepted, parents=tree)
    for tables in (
        {"slots": torch.arange(3), "accepted": torch.arange(3)},
        {"slots": slots, "accepted": torch.arange(3)},
        {"slots": slots.float(), "accepted": accepted},
        {"slots": torch.arange(4)[::2], "accepted": accepted},
        {"slots": slots, "accepted": torch.zeros(4).long()[::2]},
        {"slots": slots, "accepted": torch.tensor([0, 4])},
        {"slots": slots, "accepted": torch.tensor([0, 3]), "parents": tree},
        {"slots": slots, "accepted": accepted, "parents": tree[0]},
        {"slots": slots, "accepted": accepted, "parents": tree.repeat(1, 2)},
    ):
        with pytest.raises(ValueError):
            replay.commit(together, **tables)
