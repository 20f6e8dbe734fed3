# SPDX-License-Identifier: Apache-2.0
"""Long passes of a gated delta net, divided between our kernels and FlashInfer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from hybrid_plugin.core.commands import COLUMNS
from hybrid_plugin.mixers import flashinfer_rule, gated_delta_net
from hybrid_plugin.mixers.gated_delta_net import Weights
from hybrid_plugin.mixers.long_prefill import divide, takes
from hybrid_plugin.mixers.prefills import Prefills

from .fake_flashinfer import chunk_gated_delta_rule

HEADS, VALUES, SIZE, TAPS, SLOTS = 1, 2, 128, 4, 24
CHANNELS = 2 * HEADS * SIZE + VALUES * SIZE
BOUND = 1.5e-2
"""Queries and keys of norm 1 are rounded to bfloat16; a state of another token is off
by more than 0.5 here."""
Function = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """A sequence of a pass."""

    slot: int
    start: int
    """Tokens before it."""
    length: int
    kept: dict[int, int] | None = None
    """By column of `boundary_slots`, where the state goes."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written is NaN."""

    def poisoned(function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = function(*args, **kwargs)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return call

    torch.manual_seed(0)
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def prefills_of(rows: Sequence[Row]) -> Prefills:
    """As an engine's adapter describes them."""
    ends = torch.tensor([0, *(row.length for row in rows)]).cumsum(0)
    starts = torch.tensor([row.start for row in rows])
    table = torch.full((len(rows), COLUMNS), -1, dtype=torch.int32)
    for index, row in enumerate(rows):
        for column, slot in (row.kept or {}).items():
            table[index, column] = slot
    return Prefills(
        cu_seqlens=ends.int(),
        slots=torch.tensor([row.slot for row in rows], dtype=torch.int32),
        has_initial=starts > 0,
        offsets=(starts % 64).int(),
        boundary_slots=table,
    )


def divided(rows: Sequence[Row], function: Function = chunk_gated_delta_rule) -> Any:
    """The same, with what the host knows of them."""
    prefills = prefills_of(rows)
    if not any(row.kept for row in rows):
        prefills = replace(prefills, boundary_slots=None)
    columns = {column for row in rows for column in row.kept or {}}
    starts, lengths = [row.start for row in rows], [row.length for row in rows]
    return replace(prefills, long=divide(function, prefills, starts, lengths, columns))


@dataclass
class Layer:
    """Weights, tokens and pools, equal for equal rows."""

    tokens: tuple[torch.Tensor, ...]
    weights: Weights
    pools: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def of(rows: Sequence[Row], state: torch.dtype, padding: int = 0) -> Layer:
        rng = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng).bfloat16()

        total = sum(row.length for row in rows) + padding
        # Nobody may read a slot that no sequence goes on from.
        conv = torch.full((SLOTS, CHANNELS, TAPS - 1), torch.nan).bfloat16()
        states = torch.full((SLOTS, VALUES, SIZE, SIZE), torch.nan, dtype=state)
        for row in rows:
            if row.slot >= 0 and row.start:
                conv[row.slot] = draw(CHANNELS, TAPS - 1)
                states[row.slot] = draw(VALUES, SIZE, SIZE).to(state)
        weights = Weights(
            convolution=draw(CHANNELS, TAPS) / 2,
            bias=None,
            activation="silu",
            A=-draw(VALUES).float().abs() * 0.1,
            dt_bias=draw(VALUES),
            key_heads=HEADS,
        )
        sizes = (CHANNELS, VALUES, VALUES)
        return Layer(
            tuple(draw(total, size) for size in sizes), weights, (conv, states)
        )

    def run(self, prefills: Prefills, out: torch.Tensor | None = None) -> torch.Tensor:
        return gated_delta_net.prefill(
            self.weights, prefills, *self.tokens, *self.pools, out
        )


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in the 2-norm; NaN stays NaN."""
    difference = (got.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def compare(
    rows: Sequence[Row],
    function: Function = chunk_gated_delta_rule,
    state: torch.dtype = torch.float32,
    padding: int = 0,
) -> None:
    """Outputs and every slot beside our kernels'."""
    ours, theirs = Layer.of(rows, state, padding), Layer.of(rows, state, padding)
    tokens = sum(row.length for row in rows)
    plan = divided(rows, function)
    assert plan.long is not None
    expected = ours.run(prefills_of(rows))[:tokens]
    got = theirs.run(plan)[:tokens]
    assert error(got, expected) < BOUND
    assert torch.equal(
        theirs.pools[0].view(torch.int16), ours.pools[0].view(torch.int16)
    )
    written = [slot for slot in range(SLOTS) if not ours.pools[1][slot].isnan().any()]
    for slot in range(SLOTS):
        mine, other = theirs.pools[1][slot], ours.pools[1][slot]
        if slot in written:
            assert error(mine, other) < BOUND, f"slot {slot}"
        else:
            assert mine.isnan().all(), f"slot {slot}"
    assert {slot for row in rows for slot in (row.kept or {}).values()} <= {*written}


PASSES: dict[str, tuple[Row, ...]] = {
    "cold, one state near the end": (Row(1, 0, 300, {3: 2}),),
    "cold, the last multiple is the end": (Row(1, 0, 256, {3: 2}),),
    "cold, several": (Row(1, 0, 530, {1: 2, 3: 3, 7: 4}),),
    "goes on at a multiple": (Row(1, 128, 300, {0: 2, 3: 3}),),
    "goes on in a chunk": (Row(1, 100, 300, {0: 2, 2: 3, 4: 4}),),
    "goes on in a chunk, kept at its end only": (Row(1, 127, 200, {0: 2}),),
    "several, all cold": (
        Row(1, 0, 300, {3: 2}),
        Row(3, 0, 200, {1: 4}),
        Row(5, 0, 70, {0: 6}),
    ),
    "several, on and off the grid": (
        Row(1, 0, 300, {1: 2}),
        Row(3, 33, 200, {0: 4, 2: 5}),
        Row(6, 64, 130),
        Row(7, 1, 62),  # ends within its first chunk
        Row(8, 10, 54, {0: 9}),  # ends on the grid
        Row(10, 700, 1),
    ),
    "the last goes on in a chunk": (Row(1, 0, 128, {1: 2}), Row(3, 90, 200, {2: 4})),
    "padding": (
        Row(-1, 0, 0),
        Row(1, 0, 200, {2: 2}),
        Row(-1, 0, 0),
        Row(3, 5, 190, {1: 4}),
        Row(-1, 0, 0),
    ),
    "tokens without a slot": (Row(1, 0, 200, {2: 2}), Row(-1, 0, 90)),
    "nothing is kept": (Row(1, 0, 300), Row(3, 33, 200), Row(6, 64, 1)),
}
passes = pytest.mark.parametrize("rows", PASSES.values(), ids=PASSES)


@passes
def test_states_and_outputs_are_ours(rows: tuple[Row, ...]) -> None:
    compare(rows)
    compare(rows, padding=5)


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16], ids=str)
def test_slots_of_half_precision(state: torch.dtype) -> None:
    compare(PASSES["several, on and off the grid"], state=state)


def off_by_a_step(**call: Any) -> Any:
    """A kernel that counts one checkpoint too far."""
    result = chunk_gated_delta_rule(**call)
    kept = call["state_checkpoints"]
    kept.copy_(kept.roll(1, 0))
    return result


def forgetful(**call: Any) -> Any:
    """A kernel that starts every sequence from zeros."""
    return chunk_gated_delta_rule(
        **{**call, "initial_state": torch.zeros_like(call["initial_state"])}
    )


def silent(**call: Any) -> Any:
    """A kernel that writes no checkpoint."""
    kept = torch.empty_like(call["state_checkpoints"])
    return chunk_gated_delta_rule(**{**call, "state_checkpoints": kept})


@pytest.mark.parametrize("broken", [off_by_a_step, forgetful, silent])
def test_a_broken_kernel_is_seen(broken: Function) -> None:
    with pytest.raises(AssertionError):
        compare(PASSES["goes on in a chunk"], broken)


def test_a_pass_counted_from_the_wrong_chunk_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    span = "hybrid_plugin.mixers.long_prefill._Span"
    monkeypatch.setattr(f"{span}.column", lambda self, chunks: chunks)
    with pytest.raises(AssertionError):
        compare(PASSES["cold, several"])


@pytest.mark.parametrize(
    ("rows", "every", "checkpoints"),
    [
        (PASSES["cold, one state near the end"], 256, 1),
        (PASSES["cold, several"], 128, 4),
        ((Row(1, 100, 300, {2: 3, 4: 4}),), 128, 2),
        (PASSES["goes on in a chunk, kept at its end only"], 256, 0),
        ((Row(1, 0, 8192, {119: 2}),), 7680, 1),
        # Of a column, the host knows no sequence: with and without a head counts.
        (PASSES["the last goes on in a chunk"], 64, 4),
        ((Row(1, 0, 1024, {15: 2}), Row(3, 0, 300, {3: 4})), 256, 5),
    ],
)
def test_checkpoints_are_as_few_as_meet_all(
    monkeypatch: pytest.MonkeyPatch,
    rows: tuple[Row, ...],
    every: int,
    checkpoints: int,
) -> None:
    monkeypatch.setattr(f"{__name__}.COLUMNS", 128)
    body = divided(rows).long.body
    assert (body.every, len(body.kept)) == (every, checkpoints)
    assert len(body.kept) <= sum(row.length for row in rows) // 64


def test_nothing_is_divided_that_is_all_head() -> None:
    assert divided([Row(1, 100, 20), Row(2, 1, 63, {0: 3})]).long is None


def test_neighbours_are_not_copied() -> None:
    body = divided(PASSES["goes on in a chunk"]).long.body
    assert body.neighbours == slice(28, 300)
    assert body.tokens.tolist() == [*range(28, 300)]
    several = divided(PASSES["several, on and off the grid"]).long.body
    assert several.neighbours is None
    assert len(several.tokens) == 300 + 169 + 130


def test_a_layer_of_another_form_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    long = divided(PASSES["cold, several"]).long
    states = torch.zeros(2, VALUES, SIZE, SIZE)
    half = torch.zeros(1, dtype=torch.bfloat16)
    assert takes(long, half, states)
    assert not takes(long, half.float(), states)
    assert not takes(long, half, states.double())
    assert not takes(long, half, states[..., :64])
    assert not takes(long, half, states.mT)
    many = replace(long.body, kept=torch.zeros(1).expand(2**31 // (2 * SIZE**2)))
    assert not takes(replace(long, body=many), half, states)
    called: list[Any] = []
    plan = divided(PASSES["cold, several"], lambda **call: called.append(call))
    layer = Layer.of(PASSES["cold, several"], torch.float64)
    layer.run(plan)
    assert not called


def test_an_output_of_other_strides() -> None:
    rows = PASSES["goes on in a chunk"]
    expected = Layer.of(rows, torch.float32).run(divided(rows))
    wide = torch.empty(300, VALUES, 2 * SIZE, dtype=torch.bfloat16)
    got = Layer.of(rows, torch.float32).run(divided(rows), wide[..., :SIZE])
    assert torch.equal(got, expected)


def test_a_flashinfer_that_keeps_no_states_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("flashinfer.gdn_prefill")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    monkeypatch.setattr(flashinfer_rule, "_MODULE", "flashinfer.gdn_prefill")
    monkeypatch.setitem(__import__("sys").modules, "flashinfer.gdn_prefill", module)
    assert flashinfer_rule.find() is chunk_gated_delta_rule
    module.chunk_gated_delta_rule = lambda q, k, v: None  # type: ignore[attr-defined]
    assert flashinfer_rule.find() is None
    del module.chunk_gated_delta_rule
    assert flashinfer_rule.find() is None


def test_no_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_rule, "_MODULE", "no_flashinfer_here")
    assert flashinfer_rule.find() is None
