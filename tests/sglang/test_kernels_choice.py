# SPDX-License-Identifier: Apache-2.0
"""Which models' state layers our kernels run, and what is said about it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("sglang")

from hybrid_models.catalogue import CATALOGUE
from hybrid_models.sglang.configs import config_class

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine import kernel_choice
from hybrid_plugin.engine.kernel_choice import EVERY, TRITON, Mixer, Phase
from hybrid_plugin.mixers import flashinfer_rule
from hybrid_plugin.sglang.architectures import EXAMPLES, Example, model_of
from hybrid_plugin.sglang.kernels import choice, model_class, state_layers
from hybrid_plugin.sglang.kernels.choice import mixer_of
from hybrid_plugin.sglang.kernels.state_layers import StateLayers
from tests.sglang.test_architectures import OTHERWISE

EXPECTED = {
    "KimiK3ForConditionalGeneration": Mixer.KDA,
    "NemotronH_Nano_Omni_Reasoning_V3": Mixer.MAMBA2,
    "BailingMoeV2_5ForCausalLM": Mixer.LIGHTNING,
    "BailingMoeV3ForCausalLM": Mixer.KDA,
    "FalconH1ForCausalLM": Mixer.MAMBA2,
    "FalconMambaForCausalLM": None,
    "GigaChat35ForCausalLM": Mixer.GATED_DELTA_NET,
    "Glm5NextForConditionalGeneration": Mixer.KDA,
    "GraniteMoeHybridForCausalLM": Mixer.MAMBA2,
    "InternS2PreviewForConditionalGeneration": Mixer.GATED_DELTA_NET,
    "JetNemotronForCausalLM": None,
    "JetVLMForConditionalGeneration": None,
    "KimiLinearForCausalLM": Mixer.KDA,
    "Lfm2ForCausalLM": Mixer.SHORT_CONV,
    "Lfm2MoeForCausalLM": Mixer.SHORT_CONV,
    "Lfm2VlForConditionalGeneration": Mixer.SHORT_CONV,
    "Mamba2ForCausalLM": Mixer.MAMBA2,
    "MambaForCausalLM": None,
    "NemotronHForCausalLM": Mixer.MAMBA2,
    "NemotronH_Nano_VL_V2": Mixer.MAMBA2,
    "Qwen3NextForCausalLM": Mixer.GATED_DELTA_NET,
    "Qwen3_5ForConditionalGeneration": Mixer.GATED_DELTA_NET,
    "Qwen3_5MoeForConditionalGeneration": Mixer.GATED_DELTA_NET,
    "Qwen4ExpForConditionalGeneration": None,
    "ZayaForCausalLM": None,
}
CLAMPED = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
}


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The arguments of a server that scores no multiple items."""
    features = SimpleNamespace(enable_mis=False)
    monkeypatch.setattr(
        state_layers, "get_exec", lambda: SimpleNamespace(features=features)
    )
    monkeypatch.setattr(state_layers, "check_cuda_graph_backend", lambda *_: False)
    mamba = SimpleNamespace(
        linear_attn_backend=TRITON,
        linear_attn_prefill_backend=None,
        linear_attn_decode_backend=None,
    )
    monkeypatch.setattr(choice, "get_exec", lambda: SimpleNamespace(mamba=mamba))
    monkeypatch.setattr(choice, "is_flashinfer_gdn_prefill_available", lambda: False)
    return features


def example(architecture: str, **fields: Any) -> Any:
    """SGLang's model by our example of it, with other fields."""
    found = next(e for e in EXAMPLES if e.architecture == architecture)
    changed = dict(found.fields) | fields
    return model_of(Example(architecture, found.config, changed))


def qwen() -> Any:
    return example("Qwen3NextForCausalLM")


def jet() -> Any:
    return example("JetNemotronForCausalLM")


def lfm() -> Any:
    return example("Lfm2ForCausalLM")


def test_every_served_architecture_has_its_kind() -> None:
    served = {
        e.architecture: mixer_of(model_of(e))
        for e in EXAMPLES
        if e.architecture not in OTHERWISE
    }
    assert served == EXPECTED


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("KimiLinearForCausalLM", {"linear_attn_config": CLAMPED}),
        ("BailingMoeV3ForCausalLM", {"kda_safe_gate": True, "kda_lower_bound": -5.0}),
        ("BailingMoeV2_5ForCausalLM", {"linear_backend": "minimax"}),
    ],
)
def test_what_computes_something_else_has_none(
    architecture: str, fields: dict[str, Any]
) -> None:
    assert mixer_of(example(architecture)) is not None
    assert mixer_of(example(architecture, **fields)) is None


@pytest.mark.parametrize("option", ["auto", "engine"])
@pytest.mark.parametrize("model", [qwen, jet])
def test_nothing_is_ours_unless_it_is_asked_for_or_was_measured(
    option: str, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    layers = StateLayers()
    with caplog.at_level(logging.INFO):
        layers.settle(model(), option, "cpu")
    assert layers.interior is None
    assert not any(layers.runs(mixer, phase) for mixer in Mixer for phase in Phase)
    assert not caplog.records


def test_what_is_asked_for_is_ours_and_said(caplog: pytest.LogCaptureFixture) -> None:
    layers = StateLayers()
    with caplog.at_level(logging.INFO, logger="sglang.hybrid_plugin"):
        layers.settle(qwen(), "ours", "cpu")
    ours = {(m, p) for m in Mixer for p in Phase if layers.runs(m, p)}
    phases = (Phase.PREFILL, Phase.DECODE)
    assert ours == {(Mixer.GATED_DELTA_NET, phase) for phase in phases}
    assert layers.interior is not None
    assert [record.getMessage() for record in caplog.records] == [
        "hybrid-plugin: its own kernels run prefill and decode of the gated delta net "
        "layers."
    ]


def test_layers_are_ours_wholly_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decode_only(
        option: str, mixer: Mixer, phase: Phase, device: str, theirs: object
    ) -> int:
        assert (option, mixer, device) == ("auto", Mixer.GATED_DELTA_NET, "cuda")
        return EVERY if phase is Phase.DECODE else 0

    monkeypatch.setattr(state_layers, "reach", decode_only)
    layers = StateLayers()
    layers.settle(qwen(), "auto", "cuda:0")
    assert not any(layers.runs(Mixer.GATED_DELTA_NET, phase) for phase in Phase)
    assert layers.interior is None


def test_auto_leaves_long_prefills_to_a_faster_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    available = False
    monkeypatch.setattr(
        choice, "is_flashinfer_gdn_prefill_available", lambda: available
    )
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: True)
    monkeypatch.setattr(state_layers.passes, "is_plain_prefill", lambda *_: True)
    monkeypatch.setattr(state_layers, "InteriorSnapshots", lambda _: interior)
    interior = InteriorSnapshots(torch.device("cpu"))
    mixer = Mixer.GATED_DELTA_NET

    def run(layers: StateLayers, tokens: int, metadata: Any = None) -> bool:
        batch = SimpleNamespace(extend_num_tokens=tokens)
        return layers.run_prefill(mixer, batch, metadata or SimpleNamespace())

    layers = StateLayers()
    layers.settle(qwen(), "auto", "cuda:0")
    assert run(layers, 8192)
    assert not layers.run_prefill(Mixer.KDA, None, None)
    available = True
    layers = StateLayers()
    monkeypatch.setattr(flashinfer_rule, "find", lambda: None)
    with caplog.at_level(logging.INFO, logger="sglang.hybrid_plugin"):
        layers.settle(qwen(), "auto", "cuda:0")
    assert "prefills of up to 128 tokens" in caplog.text
    assert "FlashInfer as it is installed keeps none" in caplog.text
    assert layers._long is None
    assert layers.interior is interior, "passes keep states, whoever runs the others"
    assert run(layers, 128) and not run(layers, 129)
    # A graph's pass is described before any layer runs.
    described = SimpleNamespace()
    state_layers.passes.keep(described, cast(Any, object()))
    assert run(layers, 129, described)
    order = SaveInPass(Pool.STATE, 1, 0, 2)
    interior.order([order])
    assert run(layers, 8192), "SGLang's kernels would keep nothing"


def test_ours_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="none for the state layers of this model"):
        StateLayers().settle(jet(), "ours", "cpu")


def test_ours_is_refused_where_multiple_items_are_scored(
    server: SimpleNamespace,
) -> None:
    server.enable_mis = True
    with pytest.raises(ConfigError, match="drop --enable-mis"):
        StateLayers().settle(qwen(), "ours", "cpu")


def test_ours_is_refused_where_whole_prefills_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(phase: str, backend: str) -> bool:
        return (phase, backend) == ("prefill", "full")

    monkeypatch.setattr(state_layers, "check_cuda_graph_backend", full)
    with pytest.raises(ConfigError, match="prefill breakable"):
        StateLayers().settle(qwen(), "ours", "cpu")


def captures(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    """Have SGLang capture prefills in graphs of this kind."""
    monkeypatch.setattr(
        state_layers,
        "check_cuda_graph_backend",
        lambda phase, backend: (phase, backend) == ("prefill", wanted),
    )


def test_ours_is_refused_where_graphs_do_not_break_at_state_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def falcon() -> Any:
        return example("FalconH1ForCausalLM")

    captures(monkeypatch, "disabled")
    StateLayers().settle(falcon(), "ours", "cpu")
    captures(monkeypatch, "breakable")
    StateLayers().settle(qwen(), "ours", "cpu")
    layers = StateLayers()
    layers.settle(falcon(), "auto", "cpu")
    assert not any(layers.runs(Mixer.MAMBA2, phase) for phase in Phase)
    with pytest.raises(ConfigError, match="--cuda-graph-backend-prefill disabled"):
        layers.settle(falcon(), "ours", "cpu")


def test_our_kernels_are_in_graphs_if_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures(monkeypatch, "breakable")
    layers = StateLayers()
    layers.settle(qwen(), "ours", "cpu")
    assert not layers.in_prefill_graphs
    layers.settle(qwen(), "ours", "cpu", prefill_graphs=True)
    assert layers.in_prefill_graphs


def test_by_default_layers_are_in_graphs_that_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settled(model: Any, option: str = "ours") -> bool:
        layers = StateLayers()
        layers.settle(model, option, "cpu", prefill_graphs=None)
        return layers.in_prefill_graphs

    captures(monkeypatch, "breakable")
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: True)
    both = frozenset({Mixer.GATED_DELTA_NET, Mixer.SHORT_CONV})
    monkeypatch.setattr(kernel_choice, "GRAPHED", {"sglang": both})
    assert settled(qwen())
    assert not settled(qwen(), "engine")
    assert not settled(lfm()), "SGLang breaks its graphs there"
    captures(monkeypatch, "disabled")
    assert not settled(qwen())
    captures(monkeypatch, "full")
    monkeypatch.setattr(state_layers, "attention_backends", lambda: ("fa3", "triton"))
    with pytest.raises(ConfigError, match="outside of graphs of whole prefills"):
        settled(qwen())
    assert not settled(qwen(), "auto")
    captures(monkeypatch, "breakable")
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: False)
    assert not settled(qwen())
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: True)
    monkeypatch.setattr(kernel_choice, "GRAPHED", {"sglang": frozenset()})
    assert not settled(qwen())


def test_our_kernels_are_in_graphs_of_the_whole_model_if_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures(monkeypatch, "full")
    monkeypatch.setattr(state_layers, "attention_backends", lambda: ("fa3", "triton"))
    layers = StateLayers()
    layers.settle(qwen(), "ours", "cpu", prefill_graphs=True)
    assert layers.in_prefill_graphs
    monkeypatch.setattr(state_layers, "attention_backends", lambda: ("triton", "fa3"))
    with pytest.raises(ConfigError, match="--attention-backend fa3, or --cuda-graph"):
        StateLayers().settle(qwen(), "ours", "cpu", prefill_graphs=True)


@pytest.mark.parametrize(
    ("model", "option", "backend", "sentence"),
    [
        (qwen, "auto", "breakable", 'set "kernels" to "ours"'),
        (jet, "auto", "breakable", 'set "kernels" to "ours"'),
        (lfm, "ours", "breakable", "keeps the short conv layers out"),
        (qwen, "ours", "disabled", "--cuda-graph-backend-prefill breakable"),
        (qwen, "ours", "tc_piecewise", "--cuda-graph-backend-prefill breakable"),
    ],
)
def test_graphs_of_prefills_are_refused(
    model: Any,
    option: str,
    backend: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures(monkeypatch, backend)
    layers = StateLayers()
    with pytest.raises(ConfigError, match=sentence) as caught:
        layers.settle(model(), option, "cpu", prefill_graphs=True)
    assert "prefill_graphs" in str(caught.value)
    assert not layers.in_prefill_graphs


def test_a_registered_model_counts_by_its_backend() -> None:
    model = example("GigaChat35ForCausalLM")
    spec, config = model.linear_attn_registry_result
    other = SimpleNamespace(**vars(spec) | {"backend_class_name": "elsewhere.Backend"})
    model.linear_attn_registry_result = (other, config)
    assert mixer_of(model) is None


@pytest.mark.parametrize("option", ["auto", "ours"])
def test_flashinfer_runs_what_it_is_faster_in_if_it_keeps_states(
    option: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def function() -> None:
        """As much of FlashInfer's as is looked at here."""

    monkeypatch.setattr(choice, "is_flashinfer_gdn_prefill_available", lambda: True)
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: True)
    monkeypatch.setattr(flashinfer_rule, "find", lambda: function)
    monkeypatch.setattr(state_layers, "InteriorSnapshots", lambda _: None)
    layers = StateLayers()
    with caplog.at_level(logging.INFO, logger="sglang.hybrid_plugin"):
        layers.settle(qwen(), option, "cuda:0", round_states=option == "ours")
    if option == "ours":
        assert layers._long is None and "FlashInfer" not in caplog.text
        return
    assert layers._long is not None
    assert (layers._long.function, layers._long.beyond) == (function, 128)
    assert "FlashInfer's runs most of what is longer" in caplog.text


# ------------------------------------------------------------ our own model classes


def own() -> Any:
    """A model that our own class runs."""
    given = {"hybrid_plugin_model_class": True}
    return SimpleNamespace(hf_config=type("Config", (), given)())


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers keep, forgotten afterwards."""
    monkeypatch.setattr(model_class, "_kept", None)


def test_own_classes_keep_states_inside_passes_where_ours_are_asked_for(
    kept: None,
) -> None:
    for option in ("auto", "engine"):
        layers = StateLayers()
        layers.settle(own(), option, "cuda:0")
        assert layers.interior is None and model_class.interior() is None
    layers = StateLayers()
    layers.settle(own(), "ours", "cpu")
    assert layers.interior is not None
    assert model_class.interior() is layers.interior


def test_another_model_leaves_own_layers_nothing_to_keep(kept: None) -> None:
    StateLayers().settle(qwen(), "ours", "cpu")
    assert model_class.interior() is None


def test_own_classes_are_not_deterministic(kept: None) -> None:
    with pytest.raises(ConfigError, match="was not tested with model classes"):
        StateLayers().settle(own(), "ours", "cpu", round_states=True)


def test_configurations_of_own_classes_say_so() -> None:
    entry = next(e for e in CATALOGUE if e.model_type == "bamba")
    assert getattr(config_class(entry.model_type), model_class.MARK)
