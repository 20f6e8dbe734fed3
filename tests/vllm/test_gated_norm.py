# SPDX-License-Identifier: Apache-2.0
"""The norm that vLLM runs with a gated delta net, on our kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.layernorm import RMSNormGated

from hybrid_plugin.upstream.hookpoints import resolve
from hybrid_plugin.vllm import contracts, patches
from hybrid_plugin.vllm.kernels import gated_delta_net, gated_norm, layers

TOKENS, HEADS, WIDTH, COLUMNS = 3, 4, 64, 80
HALF = torch.bfloat16
Call = tuple[Any, ...]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Calls of vLLM's norm, which the hook is on."""
    seen: list[Call] = []
    owner, name = resolve(contracts.GDN_NORM)
    monkeypatch.setattr(owner, name, lambda *args: seen.append(args))
    monkeypatch.setattr(patches, "require", lambda contracts: None)
    patches._patch_norm_behind_drafts()
    return seen


def norm_with(**change: Any) -> Any:
    """As vLLM's layer has it."""
    given = {"eps": 1e-6, "norm_before_gate": True, "activation": "silu"}
    norm = SimpleNamespace(group_size=None, bias=None, **given)
    norm.weight = torch.nn.Parameter(torch.randn(WIDTH, dtype=HALF))
    vars(norm).update(change)
    return norm


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and gates within what one projection made."""
    made = torch.randn(TOKENS, COLUMNS + HEADS * WIDTH, dtype=HALF)
    gate = made[:, COLUMNS:].unflatten(-1, (HEADS, WIDTH))
    return torch.randn(TOKENS, HEADS, WIDTH, dtype=HALF), gate


def call(norm: Any, x: torch.Tensor, gate: torch.Tensor, *, ours: bool) -> Any:
    """As the hook behind our kernels calls it, for a layer on ours or on vLLM's."""
    layer = SimpleNamespace(norm=norm)
    if ours:
        setattr(layer, layers._OURS, object())
    owner, name = resolve(contracts.GDN_NORM)
    getattr(owner, name)(layer, x, gate, x)
    return layer


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("group_size", [None, WIDTH])
def test_ours_gives_what_vllms_defines(
    theirs: list[Call], activation: str, group_size: int | None
) -> None:
    norm = norm_with(activation=activation, group_size=group_size)
    x, gate = rows()
    wanted = RMSNormGated.forward_static(
        x, gate, norm.weight, norm.eps, HALF, group_size, True, activation
    )
    call(norm, x, gate, ours=True)
    assert not theirs
    torch.testing.assert_close(x, wanted.detach())


@pytest.mark.parametrize(
    "change",
    [
        {"norm_before_gate": False},
        {"group_size": WIDTH // 2},
        {"bias": torch.zeros(WIDTH)},
        {"activation": "relu"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_norm_stays_with_vllms(
    theirs: list[Call], change: dict[str, Any]
) -> None:
    x, gate = rows()
    before = x.clone()
    layer = call(norm_with(**change), x, gate, ours=True)
    ((first, *tensors),) = theirs
    assert first is layer
    given = (x, gate, x)
    assert all(one is other for one, other in zip(tensors, given, strict=True))
    assert torch.equal(x, before)


def test_a_layer_on_vllms_kernels_keeps_vllms_norm(theirs: list[Call]) -> None:
    x, gate = rows()
    call(norm_with(), x, gate, ours=False)
    assert len(theirs) == 1


def test_with_drafts_the_norm_is_hooked_beside_the_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(patches, "require", lambda *contracts: None)
    monkeypatch.setattr(patches, "wrap", lambda target, wrapper: seen.append(target))
    patches.patch_kernels([layers.Mixer.GATED_DELTA_NET])
    assert contracts.GDN_NORM not in seen
    patches.patch_kernels([layers.Mixer.GATED_DELTA_NET], drafts=True)
    assert contracts.GDN_NORM in seen


@pytest.mark.parametrize("is_run_with_the_layer", [True, False])
def test_warming_up_runs_it_on_gates_that_lie_as_vllms_do(
    is_run_with_the_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is compiled for strides and types, so they have to be those."""
    seen: list[Call] = []
    monkeypatch.setattr(gated_delta_net, "run", lambda *tensors: None)
    monkeypatch.setattr(gated_norm, "run", lambda *given: seen.append(given))
    states = torch.zeros(1, HEADS, WIDTH, 8)
    layer = SimpleNamespace(
        kv_cache=(None, states),
        norm=object(),
        enable_fused_gdn_spec_decode=is_run_with_the_layer,
    )
    weights: Any = SimpleNamespace(convolution=torch.zeros(COLUMNS, 4, dtype=HALF))
    state_pass: Any = SimpleNamespace(tokens=TOKENS)
    gated_delta_net.warm_up(layer, weights, state_pass)
    if not is_run_with_the_layer:
        assert not seen
        return
    ((norm, x, gate, out),) = seen
    like_x, like_gate = rows()
    assert norm is layer.norm and out is x
    for tensor, like in ((x, like_x), (gate, like_gate)):
        assert tensor.dtype == like.dtype
        assert tensor.shape == like.shape and tensor.stride() == like.stride()
