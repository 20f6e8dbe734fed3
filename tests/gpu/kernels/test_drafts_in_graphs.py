# SPDX-License-Identifier: Apache-2.0
"""Mixers that verify drafts in a CUDA graph, in the tables that vLLM's passes have.

Rows are ragged, and fewer than the graph was captured with; windows lie in rows wider
than they are, as vLLM has them.  Outputs and states are, bit for bit, those of decoding
the tokens one by one, but for recorded chains with one decay a head: these are products
of matrices, which round otherwise, and so do the additions of a delta rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hybrid_kernels import replay

from hybrid_plugin.core.commands import Fold, Pool
from hybrid_plugin.device.draft_records import DraftRecords
from hybrid_plugin.mixers import gated_delta_net, kda, mamba2
from hybrid_plugin.mixers.verifications import Record, Verifications
from hybrid_plugin.vllm.kernels.verification_tables import VerificationTables

DEVICE = torch.device("cuda")
ROWS, TOKENS, SLOTS, TAPS = 6, 4, 40, 4
LENGTHS = (4, 1, 3, 2)
HEADS, VALUE_HEADS, SIZE = 2, 4, 64
_NEAR = {torch.bfloat16: 2**-6, torch.float32: 2**-18}
"""Of the greatest number: two units of bfloat16's last place, or sums of float32."""


@dataclass
class Layer:
    """A mixer with random weights and states."""

    mixer: Any
    weights: Any
    inputs: tuple[torch.Tensor, ...]
    """``[ROWS * TOKENS, ...]`` each."""
    windows: torch.Tensor
    """``[SLOTS, D, TAPS - 1]``, each in a row of more."""
    states: torch.Tensor
    key_heads: int
    wide_decay: bool = False

    def pools(self, *, copied: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Its windows and states."""
        both = self.windows, self.states
        return (both[0].clone(), both[1].clone()) if copied else both

    def record(self) -> Record:
        """Room for what all rows' tokens do."""
        heads = self.key_heads
        size = replay.record_size(self.states, heads, wide_decay=self.wide_decay)
        channels = self.windows.shape[1]
        return Record(
            torch.zeros(ROWS, TOKENS, size, device=DEVICE),
            torch.zeros(
                ROWS, TOKENS, channels, dtype=self.windows.dtype, device=DEVICE
            ),
        )


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def layer_of(kind: str, state_dtype: torch.dtype) -> Layer:
    torch.manual_seed(0)
    tokens, inner = ROWS * TOKENS, VALUE_HEADS * SIZE
    channels = inner + 2 * HEADS * SIZE
    wide = draw(SLOTS, TAPS - 1 + TOKENS - 1, channels)
    windows = wide.transpose(1, 2)[..., : TAPS - 1]
    states = draw(SLOTS, VALUE_HEADS, SIZE, SIZE, dtype=state_dtype)
    convolution, bias = draw(channels, TAPS) / 2, draw(channels)
    rates = -draw(VALUE_HEADS, dtype=torch.float32).abs()
    mixed = draw(tokens, channels)
    if kind == "mamba2":
        weights = mamba2.Weights(
            convolution, bias, "silu", rates, draw(VALUE_HEADS), draw(VALUE_HEADS)
        )
        steps = draw(tokens, VALUE_HEADS)
        return Layer(mamba2, weights, (mixed, steps), windows, states, HEADS)
    depth = (SIZE,) if kind == "kda" else ()
    weights = gated_delta_net.Weights(
        convolution, bias, "silu", rates, draw(VALUE_HEADS, *depth), HEADS
    )
    gates = draw(tokens, VALUE_HEADS, *depth), draw(tokens, VALUE_HEADS)
    mixer = kda if kind == "kda" else gated_delta_net
    wide_decay = kind == "kda"
    return Layer(mixer, weights, (mixed, *gates), windows, states, HEADS, wide_decay)


def table(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def passes(recorded: bool) -> tuple[Verifications, Verifications]:
    """Padding, as a graph is captured with, and a pass."""
    columns = torch.arange(1, 1 + ROWS * TOKENS, device=DEVICE).view(ROWS, TOKENS)
    columns = columns[: len(LENGTHS)].int()
    nothing = torch.full((ROWS, TOKENS), -1, dtype=torch.int32, device=DEVICE)
    starts = [0]
    for length in LENGTHS:
        starts.append(starts[-1] + length)
    # Two sequences go on from columns behind their own slots.
    slots = table(*columns[:, 0].tolist())
    if not recorded:
        slots[0], slots[2] = columns[0, 2], columns[2, 1]
    full = torch.arange(0, ROWS * TOKENS + 1, TOKENS, dtype=torch.int32, device=DEVICE)
    return (
        Verifications(full, nothing[:, 0], None if recorded else nothing),
        Verifications(table(*starts), slots, None if recorded else columns),
    )


def one_by_one(
    layer: Layer, given: Verifications
) -> tuple[torch.Tensor, list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Outputs of all tokens, and by row the states behind each of them."""
    outs, found = [], []
    starts = given.cu_seqlens.tolist()
    for row, slot in enumerate(given.slots.tolist()):
        windows, states = layer.pools(copied=True)
        behind = []
        for token in range(starts[row], starts[row + 1]):
            one = [part[token : token + 1] for part in layer.inputs]
            outs.append(
                layer.mixer.decode(layer.weights, table(slot), *one, windows, states)
            )
            behind.append((windows[slot].clone(), states[slot].clone()))
        found.append(behind)
    return torch.cat(outs), found


def same(found: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> None:
    """Assert that they are equal, or near."""
    if exact:
        assert torch.equal(found, expected)
    else:
        most = _NEAR[found.dtype] * expected.abs().max()
        assert (found - expected).abs().max() <= most


def capture(work: Callable[[], object]) -> Callable[[], object]:
    """Run once, which compiles, and capture."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


kinds = pytest.mark.parametrize("kind", ["gated_delta_net", "kda", "mamba2"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@kinds
@dtypes
def test_each_column_has_the_state_of_decoding(kind: str, dtype: torch.dtype) -> None:
    layer = layer_of(kind, dtype)
    padding, given = passes(recorded=False)
    tables = VerificationTables(ROWS, TOKENS, DEVICE)
    held = tables.hold(padding)
    out = draw(ROWS * TOKENS, VALUE_HEADS, SIZE)
    before = layer.pools(copied=True)
    replayed = capture(
        lambda: layer.mixer.verify(
            layer.weights, held, *layer.inputs, *layer.pools(), out
        )
    )
    for pool, old in zip(layer.pools(), before, strict=True):
        assert torch.equal(pool, old)
    expected, behind = one_by_one(layer, given)
    tables.hold(given)
    replayed()
    assert torch.equal(out[: sum(LENGTHS)], expected)
    windows, states = layer.pools()
    assert given.columns is not None
    columns = given.columns.tolist()
    for row, length in enumerate(LENGTHS):
        for token in range(length):
            slot, (window, state) = columns[row][token], behind[row][token]
            assert torch.equal(windows[slot], window)
            assert torch.equal(states[slot], state)
        for slot in columns[row][length:]:
            assert torch.equal(states[slot], before[1][slot])


@kinds
@dtypes
def test_folded_states_are_those_of_decoding(kind: str, dtype: torch.dtype) -> None:
    layer = layer_of(kind, dtype)
    record, records = layer.record(), DraftRecords(ROWS, DEVICE)
    records.fold_into(
        replay.Layers(
            [
                replay.States(
                    layer.states, record.states, layer.key_heads, layer.wide_decay
                )
            ],
            [replay.Windows(layer.windows, record.inputs)],
        )
    )
    padding, given = passes(recorded=True)
    tables = VerificationTables(ROWS, TOKENS, DEVICE, records)
    held = tables.hold(padding)
    out = draw(ROWS * TOKENS, VALUE_HEADS, SIZE)
    replayed = capture(
        lambda: layer.mixer.verify(
            layer.weights, held, *layer.inputs, *layer.pools(), out, record
        )
    )
    before = layer.pools(copied=True)
    expected, behind = one_by_one(layer, given)
    verified = tables.hold(given)
    replayed()
    found = out[: sum(LENGTHS)]
    same(found, expected, exact=layer.wide_decay)
    for pool, old in zip(layer.pools(), before, strict=True):
        assert torch.equal(pool, old)
    records.recorded(verified.slots)
    records.accepted(table(3, 1, 1, 2))
    ended = given.slots.tolist()[2]
    records.fold([Fold(Pool.STATE, ended, 2)])
    slots = given.slots.tolist()
    for row, count in enumerate((3, 1, 2, 2)):
        window, state = behind[row][count - 1]
        assert torch.equal(layer.windows[slots[row]], window)
        same(layer.states[slots[row]], state, exact=kind != "gated_delta_net")
    rest = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(layer.states[rest], before[1][rest])
