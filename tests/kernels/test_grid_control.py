# SPDX-License-Identifier: Apache-2.0
"""The negative control of deterministic answers: passes that end inside a chunk.

Its bits must differ from those of whole chunks, or equal bits would prove nothing about
the grid.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hybrid_kernels import gated_delta_rule, lightning_attention, ssd

from hybrid_plugin.core.commands import CHUNK
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from tests.core.device import ContentError
from tests.core.traffic import Traffic
from tests.engines.faults.sitecustomize import _grid_of_16

from .common import cu_seqlens
from .layers import SMALL, Layer, names

PAGE, LENGTH = 16, 333
BUDGETS = (80, 100, 144)
POLICY = SnapshotPolicy(PAGE, grid=CHUNK, canonical=True)
CHUNKED = [x for x in SMALL if x.module in (gated_delta_rule, ssd, lightning_attention)]
"""Those whose CPU reference sums over chunks, as all the GPU kernels do."""


@pytest.fixture
def grid_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("step", "is_interior"):  # so that they are put back
        monkeypatch.setattr(SnapshotPolicy, name, vars(SnapshotPolicy)[name])
    _grid_of_16()


def passes(budget: int) -> Iterator[slice]:
    """Tokens of the passes over a prompt, none longer than the budget."""
    start = 0
    while start < LENGTH:
        end = min(start + budget, LENGTH)
        if end < LENGTH:
            end = POLICY.align_chunk_end(start, end, LENGTH)
        yield slice(start, end)
        start = end


def prefill(layer: Layer, budget: int) -> bytes:
    """Outputs and the last state of a prompt, bit for bit."""
    torch.manual_seed(0)
    inputs, pool = layer.make(LENGTH), layer.states(1)
    outs = [
        layer.prefill(
            layer.part(inputs, tokens),
            cu_seqlens=cu_seqlens([tokens.stop - tokens.start]),
            pool=pool,
            slots=torch.zeros(1, dtype=torch.int32),
            offsets=torch.tensor([tokens.start % CHUNK], dtype=torch.int32),
        )
        for tokens in passes(budget)
    ]
    parts = [torch.cat(outs), pool.clone()]
    return b"".join(part.contiguous().numpy().tobytes() for part in parts)


@pytest.mark.parametrize("layer", SMALL, ids=names(SMALL))
def test_passes_of_whole_chunks_have_the_bits_of_one_pass(layer: Layer) -> None:
    assert {prefill(layer, budget) for budget in BUDGETS} == {prefill(layer, LENGTH)}


@pytest.mark.usefixtures("grid_of_16")
@pytest.mark.parametrize("layer", CHUNKED, ids=names(CHUNKED))
def test_passes_that_end_inside_a_chunk_have_others(layer: Layer) -> None:
    whole = prefill(layer, LENGTH)
    assert all(prefill(layer, budget) != whole for budget in BUDGETS)


@pytest.mark.usefixtures("grid_of_16")
def test_snapshots_lie_inside_chunks_and_are_paused_for() -> None:
    assert POLICY.align_chunk_end(0, 100, LENGTH) == 96
    assert not POLICY.is_interior(96) and POLICY.is_interior(128)
    assert POLICY.prefill_positions(length=LENGTH, hit=0, kv_length=100)
    with pytest.raises(AssertionError, match="pages are as long as chunks"):
        SnapshotPolicy(CHUNK, grid=CHUNK, canonical=True).align_chunk_end(0, 1, 2)


@pytest.mark.usefixtures("grid_of_16")
def test_the_cache_offers_what_depends_on_how_it_was_computed() -> None:
    setups = (Traffic.seeded(seed, PAGE) for seed in range(40))
    canonical = [one for one in setups if one.engine.setup.chunk == 2 * PAGE]
    with pytest.raises(ContentError, match="bits depend on how it was computed"):
        for traffic in canonical:
            for _ in range(300):
                traffic.operate()
                traffic.engine.check()
