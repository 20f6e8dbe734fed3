# SPDX-License-Identifier: Apache-2.0
"""Our model classes in SGLang: for what it lacks, or what an option names."""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from hybrid_models.catalogue import BY_NAME, CATALOGUE
from hybrid_models.sglang import configs, contracts, registration
from hybrid_models.sglang import kit as kits
from hybrid_models.sglang.kit import refuse_adapters, refuse_padding
from hybrid_models.sglang.model import one_window
from hybrid_models.sglang.patches import patch_shapes
from sglang.srt.configs import linear_attn_model_registry as hybrids
from sglang.srt.layers import radix_attention
from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
from sglang.srt.utils.hf_transformers import common
from transformers import BambaConfig

from hybrid_plugin.config import ENABLE_VARIABLE, OPTIONS_VARIABLE, ConfigError
from hybrid_plugin.sglang import activation, addressing
from hybrid_plugin.upstream.hookpoints import HookPoint
from tests.sglang.kernel_passes import Row, backend_of, batch_of, pools_of

OURS = "BambaForCausalLM"
BAMBA: dict[str, Any] = {
    "architectures": [OURS],
    "num_hidden_layers": 4,
    "attn_layer_indices": [1],
    "hidden_size": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "dtype": "float32",
}
JAMBA: dict[str, Any] = {"architectures": ["JambaForCausalLM"], "dtype": "float32"}


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's own, restored afterwards."""
    monkeypatch.delenv(OPTIONS_VARIABLE, raising=False)
    monkeypatch.setattr(registration, "_CHOSEN", {})
    monkeypatch.setattr(hybrids, "_LINEAR_ATTN_MODEL_REGISTRY", [])
    monkeypatch.setattr(common, "_CONFIG_REGISTRY", {})
    yield


def test_what_sglang_lacks_is_ours() -> None:
    registration._choose_by_options()
    registration._choose_by_options()
    assert BY_NAME[OURS] in registration.chosen()
    assert common._CONFIG_REGISTRY["bamba"] is configs.config_class("bamba")
    specs = [s for s in hybrids._LINEAR_ATTN_MODEL_REGISTRY if OURS in s.arch_names]
    assert len(specs) == 1


def test_a_class_of_sglang_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "classes_of_sglang", lambda: frozenset({OURS}))
    registration._choose_by_options()
    assert BY_NAME[OURS] not in registration.chosen()
    assert "bamba" not in common._CONFIG_REGISTRY


def test_unless_an_option_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "classes_of_sglang", lambda: frozenset({OURS}))
    monkeypatch.setattr(activation, "_LISTENERS", [])
    monkeypatch.setattr(registration, "register_configs", lambda: None)
    monkeypatch.setenv(registration.PACKAGE_VARIABLE, registration._OURS)
    monkeypatch.setenv(ENABLE_VARIABLE, "")
    monkeypatch.setenv(OPTIONS_VARIABLE, "")
    registration.register_missing()
    assert BY_NAME[OURS] not in registration.chosen()
    options = json.dumps({"models": [OURS]})
    arguments = argparse.Namespace(enable_hybrid_plugin=True, hybrid_config=options)
    activation.take_arguments(object, arguments)
    assert BY_NAME[OURS] in registration.chosen()


@pytest.mark.parametrize("options", ["{", json.dumps({"models": ["NoSuchModel"]})])
def test_options_of_a_plugin_that_nobody_asks_for_end_no_server(
    monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, options)
    monkeypatch.delenv(ENABLE_VARIABLE, raising=False)
    registration._choose_by_options()
    assert BY_NAME[OURS] in registration.chosen()


def test_an_unknown_name_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps({"models": ["NoSuchModel"]}))
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    with pytest.raises(ConfigError, match='"models" names NoSuchModel'):
        registration._choose_by_options()


def test_classes_are_found_in_the_source_of_sglang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registration.classes_of_sglang.cache_clear()
    assert OURS not in registration.classes_of_sglang()
    names = (*CATALOGUE, BY_NAME[OURS].__class__("Lfm2ForCausalLM", "lfm2", ""))
    monkeypatch.setattr(registration, "CATALOGUE", names)
    registration.classes_of_sglang.cache_clear()
    assert "Lfm2ForCausalLM" in registration.classes_of_sglang()
    registration.classes_of_sglang.cache_clear()


def test_moved_registries_leave_sglang_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = HookPoint("sglang.srt.environ:Gone")
    monkeypatch.setattr(contracts, "CONFIG_HOOKS", (gone,))
    registration.register_missing()
    assert registration.chosen() == ()
    assert "environ:Gone is missing" in caplog.text


def test_a_class_for_other_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_models.sglang.model import model_class

    model_class.cache_clear()
    gone = HookPoint("sglang.srt.layers.linear:Gone")
    monkeypatch.setattr(contracts, "BUILD_HOOKS", (gone,))
    with pytest.raises(ConfigError, match="linear:Gone is missing"):
        model_class(BY_NAME[OURS])


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_every_class_can_be_made(entry: Any) -> None:
    from hybrid_models.sglang.model import model_class

    cls = model_class(entry)
    assert cls.__name__ == entry.name
    assert model_class(entry) is cls


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What runs before SGLang looks at a model's shapes."""
    from sglang.srt.configs import model_config
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooked: dict[str, Any] = {}
    monkeypatch.setattr(
        HookRegistry,
        "register",
        lambda target, hook, kind: hooked.update({target: hook}),
    )
    before = model_config.PURE_SSM_ARCHITECTURES
    monkeypatch.setattr(model_config, "PURE_SSM_ARCHITECTURES", before)
    patch_shapes(lambda: CATALOGUE)
    return hooked["sglang.srt.configs.model_config.ModelConfig._derive_model_shapes"]


def model_of(architecture: str) -> Any:
    return SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))


def test_a_model_without_attention_is_on_the_list_of_sglang(shapes: Any) -> None:
    from sglang.srt.configs import model_config

    before = model_config.PURE_SSM_ARCHITECTURES
    shapes(model_of(OURS))
    assert model_config.PURE_SSM_ARCHITECTURES is before
    shapes(model_of("xLSTMForCausalLM"))
    shapes(model_of("xLSTMForCausalLM"))
    found = model_config.PURE_SSM_ARCHITECTURES
    assert found == (*before, "xLSTMForCausalLM")


def test_a_moved_list_refuses_models_without_attention_alone(
    shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = HookPoint("sglang.srt.configs.model_config:Gone")
    monkeypatch.setattr(contracts, "STATES_ALONE_HOOKS", (gone,))
    shapes(model_of(OURS))
    with pytest.raises(ConfigError, match="model_config:Gone is missing"):
        shapes(model_of("xLSTMForCausalLM"))


def test_a_users_own_package_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooked: list[str] = []
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, *args, **kwargs: hooked.append(target)
    )
    monkeypatch.setenv(registration.PACKAGE_VARIABLE, "their.models")
    registration._offer_classes()
    assert hooked == ["sglang.srt.model_loader.utils.get_model_architecture"]
    monkeypatch.delenv(registration.PACKAGE_VARIABLE)
    registration._offer_classes()
    import os

    assert os.environ[registration.PACKAGE_VARIABLE] == "hybrid_models.sglang.entries"
    assert len(hooked) == 1


def test_classes_are_added_beside_a_users_package() -> None:
    from sglang.srt.models.registry import ModelRegistry

    registration._choose_by_options()
    before = dict(ModelRegistry.models)
    try:
        registration._add_classes(None)
        assert ModelRegistry.models[OURS].__module__ == "hybrid_models.sglang.model"
    finally:
        ModelRegistry.models.clear()
        ModelRegistry.models.update(before)


def test_a_configuration_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MAMBA_CONV_DTYPE", raising=False)
    config = configs.config_class("bamba")(**BAMBA)
    assert isinstance(config, BambaConfig)
    assert config.full_attention_layer_ids == [1]
    assert config.linear_layer_ids == [0, 2, 3]
    params = config.mamba2_cache_params
    assert params.layers == [0, 2, 3]
    assert params.shape.conv == [(4 * 64 + 2 * 16, 3)]
    assert params.shape.temporal == (4, 64, 16)
    assert params.dtype.conv == params.dtype.temporal == torch.float32
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")
    assert config.mamba2_cache_params.dtype.conv == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
def test_recurrent_states_have_the_type_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    """SGLang puts its argument into the environment, in every process."""
    monkeypatch.delenv("SGLANG_MAMBA_SSM_DTYPE", raising=False)
    if dtype is not None:
        monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", dtype)
    wanted = getattr(torch, dtype or "float32")
    for model_type, fields in (("bamba", BAMBA), ("jamba", JAMBA)):
        config = configs.config_class(model_type)(**fields)
        assert config.mamba2_cache_params.dtype.temporal == wanted


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_elastic_pools_have_slots_beyond_32_bits(
    monkeypatch: pytest.MonkeyPatch, entry: Any
) -> None:
    """Kernels of ours count in 64 bits: nothing but the memory bounds the slots."""
    for name in ("hybrid_gdn_config", "hybrid_kda_config"):
        monkeypatch.setattr(addressing, name, lambda _: None)
    params = SimpleNamespace(
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.bfloat16)
    )
    cls = configs.config_class(entry.model_type)
    (base,) = cls.__bases__  # as SGLang's own classes have it
    for kind, reach in ((cls, None), (base, addressing.LIMIT * 2)):
        config = object.__new__(kind)  # some need what a checkpoint says
        model = SimpleNamespace(hf_config=config)
        assert addressing.addressable_bytes(model, params) == reach


def test_a_configuration_is_pickled_by_name() -> None:
    config = configs.config_class("bamba")(**BAMBA)
    again = pickle.loads(pickle.dumps(config))
    assert type(again) is type(config)
    assert again.full_attention_layer_ids == [1]
    with pytest.raises(AttributeError):
        _ = configs.no_such_config


def test_one_window_is_announced_and_two_are_refused() -> None:
    assert one_window(set()) is None
    assert one_window({31}) == 31
    with pytest.raises(ValueError, match=r"one window .* not 32, 64 tokens"):
        one_window({31, 63})


def test_adapters_are_refused() -> None:
    refuse_adapters(SimpleNamespace(enable_lora=None, lora_paths=None))
    for given in ({"enable_lora": True}, {"lora_paths": ["one"]}):
        arguments = {"enable_lora": None, "lora_paths": None} | given
        with pytest.raises(ValueError, match="take no LoRA adapters in SGLang"):
            refuse_adapters(SimpleNamespace(**arguments))


def test_heads_that_sglang_adds_are_refused() -> None:
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=1)
    refuse_padding(config)
    config.original_num_attention_heads, config.original_total_num_kv_heads = 4, 1
    refuse_padding(config)
    config.num_key_value_heads, config.num_attention_heads = 2, 8
    with pytest.raises(ValueError, match=r"pads the 4 heads .*num_attention_heads"):
        refuse_padding(config)
    config.num_attention_heads = 4
    with pytest.raises(ValueError, match=r"pads the 1 heads .*num_key_value_heads"):
        refuse_padding(config)


def test_a_model_that_captures_no_prefills_has_no_layers_in_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hybrid_models.sglang.patches import patch_graph_layers
    from sglang.srt.model_executor.model_runner import ModelRunner

    theirs = ModelRunner.get_cuda_graph_layers
    theirs = getattr(theirs, "_hybrid_models_original", theirs)
    monkeypatch.setattr(ModelRunner, "get_cuda_graph_layers", theirs)
    patch_graph_layers()
    patch_graph_layers()
    layer = SimpleNamespace(self_attn=SimpleNamespace(attn="attention"))
    model = SimpleNamespace(layers=[layer, layer])
    runner: Any = SimpleNamespace()
    find = ModelRunner.get_cuda_graph_layers
    assert find(runner, model).attention_layers == ["attention"] * 2
    model.captures_prefills = True
    assert find(runner, model).attention_layers == ["attention"] * 2
    model.captures_prefills = False
    assert find(runner, model).attention_layers == [None, None]


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_no_class_captures_prefills(entry: Any) -> None:
    assert not entry.load().captures_prefills


def test_a_pass_with_prompts_reads_no_slots_from_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registration._choose_by_options()
    (spec,) = {
        (one.backend_class_name, one.hybrid_backend_class_name)
        for one in hybrids._LINEAR_ATTN_MODEL_REGISTRY
    }
    found = hybrids.import_backend_class(spec[0])
    backend = backend_of(found, pools_of((4, 3), (4, 2)))
    backend._cache_indices_buf = None

    batch = batch_of([Row(3, 100, 70), Row(1, 0, 66)])

    def read(_: torch.Tensor) -> list[int]:
        raise AssertionError("the pass before has to end first")

    monkeypatch.setattr(torch.Tensor, "tolist", read)
    monkeypatch.setattr(torch.Tensor, "item", read)
    backend.init_forward_metadata(batch)
    handle = backend.conv_state_metadata(0, batch)
    monkeypatch.undo()
    assert handle.cache_indices.tolist() == [3, 1]


def test_attention_over_another_layers_keys_writes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    class Backend:
        """Takes down what it is asked for."""

        def forward(
            self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool
        ) -> Any:
            shapes = [tuple(x.shape) for x in (k, v)]
            asked.append(
                {"layer": layer.layer_id, "keeps": save_kv_cache, "shapes": shapes}
            )
            return q

    monkeypatch.setattr(radix_attention, "get_attn_backend", Backend)
    monkeypatch.setattr(
        radix_attention, "padded_extend_real_tokens", lambda q, batch: None
    )
    kit: Any = object.__new__(kits.SglangKit)  # without SGLang's arguments
    kit.ranks, kit.windows, kit._quantisation = 1, set(), None
    source = kit.attention(1, 4, 2, 8, scale=1.0, name="first", window=64)
    reader = kit.attention(3, 8, 2, 8, scale=1.0, name="second", source=source)
    k = v = torch.zeros(5, 16)
    with set_forward_batch(SimpleNamespace()):
        source(torch.zeros(5, 32), k, v)
        reader(torch.zeros(5, 64), k, v)
    shapes = [(5, 2, 8)] * 2
    assert asked == [
        {"layer": 1, "keeps": True, "shapes": shapes},
        {"layer": 1, "keeps": False, "shapes": shapes},
    ]
    assert kit.windows == {63}


@pytest.mark.parametrize(
    ("model_type", "given", "longest"),
    [
        ("recurrent_gemma", {}, 8192),
        ("xlstm", {}, 32_768),
        ("bamba", {"max_position_embeddings": 4096}, 4096),
        ("recurrent_gemma", {"max_position_embeddings": 4096}, 4096),
    ],
)
def test_sequences_are_as_long_as_in_training_where_nothing_is_said(
    model_type: str, given: dict[str, int], longest: int
) -> None:
    """SGLang would serve 2,048 tokens, and refuse more."""
    config = configs.config_class(model_type)(**given)
    assert config.max_position_embeddings == longest
