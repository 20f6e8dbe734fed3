# SPDX-License-Identifier: Apache-2.0
"""State layers of our own model classes are told of passes as vLLM's layers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from hybrid_models.kit import StateTensor
from hybrid_models.vllm.states import StateLayer

from hybrid_plugin.config import ConfigError
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.vllm.kernels import model_class, passes, prefill_graphs
from hybrid_plugin.vllm.kernels.layers import StateLayers, kind_of

SHAPE = (StateTensor((4, 3), torch.float32, is_conv=True),)
PASS = StatePass(0, 3, torch.zeros(0, dtype=torch.int32), None)


def layer() -> StateLayer:
    """One by itself."""
    compiling = SimpleNamespace(static_forward_context={})
    config: Any = SimpleNamespace(compilation_config=compiling)

    def nothing(*_: Any) -> None:
        raise AssertionError("no pass was run")

    return StateLayer(SHAPE, nothing, width=4, name="layer", vllm_config=config)


@pytest.mark.parametrize("option", ["auto", "engine"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_passes_are_as_before_unless_ours_are_asked_for(
    option: str, device: str
) -> None:
    one = layer()
    found = StateLayers({"layer": one}, option, device)
    found.hang()
    assert not found.mixers and not found.keep_interior
    assert model_class.pass_of(one, SimpleNamespace()) is None


def test_with_ours_a_layer_takes_the_pass_that_was_described() -> None:
    one = layer()
    found = StateLayers({"layer": one}, "ours", "cpu")
    found.hang()
    assert found.mixers == {Mixer.MODEL_CLASS} and found.keep_interior
    metadata = SimpleNamespace()
    with pytest.raises(RuntimeError, match="knows nothing of"):
        model_class.pass_of(one, metadata)
    passes.put(metadata, PASS)
    assert model_class.pass_of(one, metadata) is PASS
    found.refresh()
    one.kv_cache = (torch.zeros(2, 4, 3),)
    found.warm_up(4)


def test_a_layer_beside_it_without_kernels_is_still_refused() -> None:
    with pytest.raises(ConfigError, match="runs on vLLM's only"):
        StateLayers({"layer": layer(), "other": object()}, "ours", "cpu")


def test_graphs_of_prefills_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = StateLayers({"layer": layer()}, "ours", "cuda")
    monkeypatch.setattr(prefill_graphs.context_parallel, "page_ranks", lambda _: 1)
    model = SimpleNamespace(multimodal_config=None)
    config: Any = SimpleNamespace(use_v2_model_runner=True, model_config=model)
    said = list(prefill_graphs.obstacles(config, found, "cuda"))
    assert said == [
        "prefill_graphs was not tested with model classes of hybrid-plugin; leave it "
        "out."
    ]


def test_the_kind_goes_by_the_class() -> None:
    kind = kind_of(layer())
    assert kind is not None and kind.mixer is Mixer.MODEL_CLASS
