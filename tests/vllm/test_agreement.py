# SPDX-License-Identifier: Apache-2.0
"""All ranks and the engine core agree on what passes keep, or nothing starts."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.engine import kernel_choice
from hybrid_plugin.engine.kernel_choice import EVERY, TRITON, Mixer, Phase
from hybrid_plugin.mixers import flashinfer_rule
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.vllm.kernels import agreement, layers
from hybrid_plugin.vllm.kernels.agreement import InteriorSpecs, RecordingSpecs
from hybrid_plugin.vllm.kernels.layers import Kind, StateLayers
from hybrid_plugin.vllm.planning import make_config, make_groups
from hybrid_plugin.vllm.pool_memory import PoolMemory
from tests.vllm.fakes import SPECS


class Known(SimpleNamespace):
    """A layer that our kernels run."""


class Unknown(SimpleNamespace):
    """Another one."""


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{Known.__module__}.{Known.__qualname__}"
    adapter = SimpleNamespace(weights_of=lambda layer: SimpleNamespace())
    monkeypatch.setattr(Kind, "adapter", adapter)
    kind = Kind(Mixer.GATED_DELTA_NET, "gated_delta_net")
    monkeypatch.setattr(layers, "KINDS", {name: kind})


def test_the_specs_of_a_worker_carry_its_answer() -> None:
    told = pickle.loads(pickle.dumps(InteriorSpecs(SPECS)))
    assert told == SPECS
    assert agreement.keep_interior([told, told])
    assert not agreement.keep_interior([SPECS, SPECS])


def test_ranks_that_disagree_are_an_error() -> None:
    with pytest.raises(ConfigError, match="on some ranks only"):
        agreement.keep_interior([InteriorSpecs(SPECS), SPECS])
    ranks = [InteriorSpecs(SPECS), RecordingSpecs(SPECS)]
    assert agreement.keep_interior(ranks)
    with pytest.raises(ConfigError, match='"draft_states" to "columns"'):
        agreement.record_drafts(ranks)


@pytest.mark.parametrize("planned", [True, False])
def test_a_worker_holds_the_engine_core_to_it(planned: bool) -> None:
    agreement.check(planned, planned)
    with pytest.raises(ConfigError, match="on some ranks only"):
        agreement.check(planned, not planned)


@pytest.mark.parametrize("interior", [True, False])
def test_the_pools_know_of_interior_snapshots_if_they_are_planned(
    interior: bool,
) -> None:
    from vllm.v1.kv_cache_interface import KVCacheLayout

    cache = SimpleNamespace(prefix_cache_retention_interval=None)
    config: Any = SimpleNamespace(cache_config=cache)
    groups = make_groups(SPECS)
    planned = make_config(config, groups, PoolSizes(9, 5), interior=interior)
    pools = PoolMemory()
    pools.allocate(planned, torch.device("cpu"), KVCacheLayout.LBHNC)
    assert (pools.executor.interior is not None) == interior


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the GPU that the table of kernels was measured on."""
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: True)


@pytest.mark.usefixtures("measured")
def test_one_foreign_layer_keeps_prompts_pausing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = {phase: {TRITON: EVERY} for phase in Phase}
    monkeypatch.setattr(kernel_choice, "AS_FAST", {Mixer.GATED_DELTA_NET: every})
    ours, foreign = Known(), Unknown()
    assert StateLayers({"a": ours}, "auto", "cuda").keep_interior
    assert not StateLayers({"a": ours, "b": foreign}, "auto", "cuda").keep_interior
    assert not StateLayers({"a": ours}, "auto", "cpu").keep_interior
    assert not StateLayers({"a": ours}, "engine", "cuda").keep_interior
    assert not StateLayers({}, "ours", "cuda").keep_interior


@pytest.mark.usefixtures("measured")
def test_a_layer_is_ours_wholly_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = {Phase.DECODE: {TRITON: EVERY}}
    monkeypatch.setattr(kernel_choice, "AS_FAST", {Mixer.GATED_DELTA_NET: decode})
    assert not StateLayers({"a": Known()}, "auto", "cuda").mixers


@pytest.mark.usefixtures("measured")
def test_what_vllm_takes_otherwise_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {phase: {TRITON: EVERY} for phase in Phase}
    monkeypatch.setattr(kernel_choice, "AS_FAST", {Mixer.GATED_DELTA_NET: every})
    layer = Known()
    layer.gdn_prefill_backend = "cutedsl"  # type: ignore[attr-defined]
    assert not StateLayers({"a": layer}, "auto", "cuda").mixers
    layer.gdn_prefill_backend = TRITON  # type: ignore[attr-defined]
    assert StateLayers({"a": layer}, "auto", "cuda").mixers
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: False)
    assert not StateLayers({"a": layer}, "auto", "cuda").mixers
    assert StateLayers({"a": layer}, "ours", "cuda").mixers


def beside_flashinfer(**settings: Any) -> StateLayers:
    layer = Known()
    layer.gdn_prefill_backend = "flashinfer"  # type: ignore[attr-defined]
    return StateLayers({"a": layer}, "auto", "cuda", **settings)


def prefill(tokens: int, *, decodes: int = 0, keeps: bool = False) -> StatePass:
    """A pass with one prompt of so many tokens."""
    none = torch.zeros(0, dtype=torch.int32)
    prompt = Prefills(
        cu_seqlens=torch.tensor([0, tokens]),
        slots=torch.ones(1),
        has_initial=torch.zeros(1, dtype=torch.bool),
        offsets=torch.zeros(1),
        boundary_slots=torch.zeros((1, 16)) if keeps else None,
    )
    return StatePass(decodes, decodes + tokens, none, prompt)


@pytest.mark.usefixtures("measured")
def test_long_prefills_are_the_faster_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    reaches = {Phase.PREFILL: {"flashinfer": 128}, Phase.DECODE: {TRITON: EVERY}}
    monkeypatch.setattr(kernel_choice, "AS_FAST", {Mixer.GATED_DELTA_NET: reaches})
    found = beside_flashinfer()
    assert found.keep_interior and found.is_whole
    assert "prefill of up to 128 tokens" in found.describe()
    found.hang()
    (kernels,) = found._ours.values()
    none = torch.zeros(0, dtype=torch.int32)
    assert kernels.serve(StatePass(500, 500, none, None))
    assert kernels.serve(prefill(128, decodes=500))
    assert not kernels.serve(prefill(129))
    assert kernels.serve(prefill(8192, keeps=True)), "vLLM's kernels would keep nothing"
    # What vLLM does without metadata is to warm up its own kernels.
    assert not layers.run(kernels.layer, None)
    kernels.longest = EVERY
    assert layers.run(kernels.layer, None)
    # Ours keep the inputs of convolutions elsewhere where drafts are verified.
    verifying = {**reaches, Phase.VERIFY: {TRITON: EVERY}}
    monkeypatch.setattr(kernel_choice, "AS_FAST", {Mixer.GATED_DELTA_NET: verifying})
    assert not beside_flashinfer(drafts=3).mixers


@pytest.mark.usefixtures("measured")
def test_flashinfer_runs_what_it_is_faster_in_if_it_keeps_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function() -> None:
        """As much of FlashInfer's as is looked at here."""

    monkeypatch.setattr(flashinfer_rule, "find", lambda: function)
    found = beside_flashinfer()
    (kernels,) = found._ours.values()
    assert kernels.long is not None
    assert (kernels.long.function, kernels.long.beyond) == (function, 128)
    assert "FlashInfer's runs most of what is longer" in found.describe()
    monkeypatch.setattr(flashinfer_rule, "find", lambda: None)
    old = beside_flashinfer()
    assert next(iter(old._ours.values())).long is None
    assert "FlashInfer as it is installed keeps none" in old.describe()
    # Where ours run everything, nothing is divided.
    monkeypatch.setattr(flashinfer_rule, "find", lambda: function)
    layer = Known()
    layer.gdn_prefill_backend = "flashinfer"  # type: ignore[attr-defined]
    for found in (StateLayers({"a": Known()}, "auto", "cuda"), demanded(layer)):
        assert next(iter(found._ours.values())).long is None
        assert "FlashInfer" not in found.describe()


def demanded(layer: Known) -> StateLayers:
    return StateLayers({"a": layer}, "ours", "cuda", round_states=True)


def test_a_layer_that_ours_cannot_run_is_refused_where_they_are_demanded() -> None:
    with pytest.raises(ConfigError, match='"ours", and layer b, a Unknown'):
        StateLayers({"a": Known(), "b": Unknown()}, "ours", "cuda")
