# SPDX-License-Identifier: Apache-2.0
"""Passes with prompts in the shape of a CUDA graph, for every architecture.

All sequences are rows of tables that stay, with padding behind them.  Whether a graph
may hold what the state layers do is seen on tensors without data.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybrid_plugin.mixers.fixed_prefills import FixedPrefills
from tests.models.kinds import Kind, find
from tests.models.on_meta import HostCopyError, captured, moved
from tests.models.plain_kit import MixCall, Session
from tests.models.test_architectures import EXACT, prompt, session

TOKENS, ROWS, SLOTS = 192, 4, 8
FIRST, SECOND = prompt(1, 230), prompt(2, 180)
PASSES: tuple[dict[int, list[int]], ...] = (
    {3: FIRST[:70]},
    {3: FIRST[70:99], 5: SECOND[:64]},
    {3: FIRST[99:100], 5: SECOND[64:150]},
    {5: SECOND[150:151], 3: FIRST[100:228]},
    {3: FIRST[228:229], 5: SECOND[151:180], 1: FIRST[:1]},
)
"""Fresh and resumed prompts, some of one token, beside steps of running sequences."""


def test_a_pass_of_a_graphs_shape_gives_the_same(kind: Kind, checkpoint: Path) -> None:
    normal, fixed = session(kind, checkpoint), session(kind, checkpoint)
    tables = FixedPrefills(TOKENS, ROWS, torch.device("cpu"))
    for sequences in PASSES:
        expected, found = normal.run(sequences), fixed.run(sequences, tables)
        for slot, logits in expected.items():
            assert (found[slot] - logits).abs().max() < EXACT
    for before, after in zip(states_of(normal), states_of(fixed), strict=True):
        torch.testing.assert_close(after[[1, 3, 5]], before[[1, 3, 5]], **CLOSE)
        assert after[[0, 2, 4, 6, 7]].isnan().all(), "padding has left a state"


CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4, "equal_nan": True}
"""Some states have numbers that no layer uses."""


def states_of(model: Session) -> list[torch.Tensor]:
    """The pools of all layers, of one rank."""
    pools = model._ranks[0].pools
    return [pool for layer in sorted(pools) for pool in pools[layer]]


def test_a_graph_may_hold_what_its_layers_do(
    kind: Kind, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = session(kind, checkpoint)
    tables = FixedPrefills(TOKENS, ROWS, torch.device("cpu"))
    model.run(PASSES[1], tables)
    import_kernels()
    model._models[0].to("meta")
    calls = model._ranks[0].calls
    assert set(calls) == set(kind.entry.load().state_layers(kind.config(checkpoint)))
    for call in calls.values():
        assert call.captured, "what the kit is told would keep graphs away"
        assert launches_of(call, monkeypatch)


def launches_of(call: MixCall, patch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The kernels of a call, whose layer has no data."""
    inputs, pools = moved(call.inputs), moved(call.pools)
    state_pass, out = moved(call.state_pass), moved(call.out)
    with captured(patch) as launches, torch.no_grad():
        call.mix(state_pass, inputs, pools, out)
    assert all(type(n) is int for _, grid in launches for n in grid)
    return launches


def import_kernels() -> None:
    """Importing one may make tensors, which no graph holds."""
    for name in (
        "causal_conv1d",
        "gated_delta_rule",
        "kda",
        "lightning_attention",
        "part_norm",
        "rg_lru",
        "selective_scan",
        "ssd",
        "state_copy",
    ):
        importlib.import_module(f"hybrid_kernels.{name}.triton")


@pytest.mark.parametrize("way", ["item", "nonzero", "from the host"])
def test_what_waits_for_the_device_is_seen(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    model = session(find("bamba"), find("bamba").write(tmp_path))
    model.run(PASSES[0])
    layer, call = next(iter(model._ranks[0].calls.items()))
    model._models[0].to("meta")
    import_kernels()

    def waits(state_pass: Any, inputs: Any, pools: Any, out: torch.Tensor) -> None:
        if way == "item":
            state_pass.prefills.slots[0].item()
        elif way == "nonzero":
            (state_pass.prefills.slots > 0).nonzero()
        else:
            out += torch.ones(1)

    wrong = MixCall(waits, call.state_pass, call.inputs, call.pools, call.out, True)
    with pytest.raises((RuntimeError, NotImplementedError, HostCopyError)):
        launches_of(wrong, monkeypatch)
    assert launches_of(call, monkeypatch), layer
    assert isinstance(model._models[0], nn.Module)
