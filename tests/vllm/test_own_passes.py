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
from hybrid_plugin.engine import kernel_choice
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.vllm.kernels import model_class, passes, prefill_graphs
from hybrid_plugin.vllm.kernels.layers import StateLayers, kind_of

SHAPE = (StateTensor((4, 3), torch.float32, is_conv=True),)
PASS = StatePass(0, 3, torch.zeros(0, dtype=torch.int32), None)


def layer(*, captured: bool = False) -> StateLayer:
    """One by itself."""
    compiling = SimpleNamespace(static_forward_context={})
    config: Any = SimpleNamespace(compilation_config=compiling)

    def nothing(*_: Any) -> None:
        raise AssertionError("no pass was run")

    return StateLayer(
        SHAPE, nothing, width=4, name="layer", vllm_config=config, captured=captured
    )


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


def wanted(option: bool | None, found: StateLayers) -> bool | None:
    """Whether a GPU's passes with prompts are to replay graphs."""
    model = SimpleNamespace(multimodal_config=None)
    parallel = SimpleNamespace(data_parallel_size=1, decode_context_parallel_size=1)
    config: Any = SimpleNamespace(
        use_v2_model_runner=True, model_config=model, parallel_config=parallel
    )
    return prefill_graphs.are_wanted(option, config, found, "cuda")


def test_graphs_hold_prompts_of_layers_that_say_so() -> None:
    found = StateLayers({"layer": layer(captured=True)}, "ours", "cuda")
    assert wanted(True, found) is True and wanted(False, found) is False


def test_one_layer_that_does_not_keeps_all_prompts_out_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_choice, "MODEL_CLASSES_TRIED", True)
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: True)
    both = {"layer": layer(captured=True), "other": layer()}
    found = StateLayers(both, "ours", "cuda")
    assert wanted(None, found) is False
    with pytest.raises(ConfigError, match="a CUDA graph can hold, and other is none"):
        wanted(True, found)


def test_one_line_has_auto_keep_states_and_replay_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: True)
    one = layer(captured=True)
    assert not StateLayers({"layer": one}, "auto", "cuda").mixers
    assert wanted(None, StateLayers({"layer": one}, "ours", "cuda")) is False
    monkeypatch.setattr(kernel_choice, "MODEL_CLASSES_TRIED", True)
    found = StateLayers({"layer": one}, "auto", "cuda")
    assert found.keep_interior and found.is_whole
    assert wanted(None, found) is None, "it may"
    assert not StateLayers({"layer": one}, "auto", "cpu").mixers
    assert not StateLayers({"layer": one}, "engine", "cuda").mixers


def test_the_kind_goes_by_the_class() -> None:
    kind = kind_of(layer())
    assert kind is not None and kind.mixer is Mixer.MODEL_CLASS
