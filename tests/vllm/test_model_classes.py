# SPDX-License-Identifier: Apache-2.0
"""Our model classes in vLLM's registry: for what it lacks, or what an option names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from hybrid_models.catalogue import CATALOGUE
from hybrid_models.engine_kit import EngineKit
from hybrid_models.kit import Placed, own_part_of_keys
from hybrid_models.vllm import adapters, contracts, registration, states
from hybrid_models.vllm.kit import LAYERS, VllmKit
from hybrid_models.vllm.states import pass_of
from hybrid_models.weights import EXPERTS, TILES
from vllm import ModelRegistry
from vllm.config.compilation import CompilationConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.interfaces import is_attention_free, is_hybrid

from hybrid_plugin.config import OPTIONS_VARIABLE, ConfigError
from hybrid_plugin.upstream.hookpoints import HookPoint
from hybrid_plugin.vllm import model_sources

OURS = "BambaForCausalLM"
TINY = Path(__file__).parents[1] / "assets" / "tiny-qwen3-next"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's own, restored afterwards."""
    before = dict(ModelRegistry.models)
    monkeypatch.delenv(OPTIONS_VARIABLE, raising=False)
    for entry in CATALOGUE:
        if registration.is_ours(entry.name):
            del ModelRegistry.models[entry.name]
    yield ModelRegistry
    ModelRegistry.models.clear()
    ModelRegistry.models.update(before)


def test_what_vllm_lacks_is_ours() -> None:
    assert OURS not in ModelRegistry.models
    registration.register_missing()
    registration.register_missing()
    assert registration.is_ours(OURS)
    assert CompilationConfig._attention_ops.count(registration.STATES_OP) == 1


def test_without_attention_it_is_treated_as_mamba() -> None:
    registration.register_missing()
    theirs = MODELS_CONFIG_MAP["MambaForCausalLM"]
    ours = {e.name for e in CATALOGUE if MODELS_CONFIG_MAP.get(e.name) is theirs}
    assert ours == {entry.name for entry in CATALOGUE if entry.has_states_alone}


def test_a_class_of_vllm_stays(registry: Any) -> None:
    theirs = registry.models["LlamaForCausalLM"]
    registry.models[OURS] = theirs  # as if vLLM brought it
    registration.register_missing()
    assert registry.models[OURS] is theirs
    assert not registration.is_ours(OURS)


def test_what_vllm_has_for_gpus_alone_is_ours_on_a_cpu(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If vLLM brings a class for CPUs, ours must not take its place."""
    from vllm.platforms import current_platform

    name = "KimiLinearForCausalLM"
    module, cls = model_sources.installed().generating[name]
    registry.register_model(name, f"{module}:{cls}")
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    registration.register_missing()
    assert not registration.is_ours(name)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: True)
    registration.register_missing()
    assert registration.is_ours(name)


def test_unless_the_environment_names_it(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.models[OURS] = registry.models["LlamaForCausalLM"]
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps({"models": [OURS]}))
    registration.register_missing()
    assert registration.is_ours(OURS)


def test_or_the_command_line(
    registry: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    registry.models[OURS] = registry.models["LlamaForCausalLM"]
    registration.register_missing()
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps({"page_size": 32}))
    options = {"hybrid_plugin": {"models": [OURS]}}
    # A folder: a model's name would be looked up in the Hub.
    model = str(tmp_path / "nowhere")
    arguments = EngineArgs(model=model, additional_config=options)
    with pytest.raises(Exception, match="nowhere"):
        arguments.create_model_config()
    assert registration.is_ours(OURS)
    import os

    # Processes that this one starts read it there.
    inherited = json.loads(os.environ[OPTIONS_VARIABLE])
    assert inherited == {"page_size": 32, "models": [OURS]}


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps({"models": ["NoSuchModel"]}))
    with pytest.raises(ConfigError, match='"models" names NoSuchModel'):
        registration.register_missing()


def test_a_moved_registry_leaves_vllm_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = HookPoint("vllm.model_executor.models.registry:Gone")
    monkeypatch.setattr(contracts, "REGISTRY_HOOKS", (gone,))
    registration.register_missing()
    assert not registration.is_ours(OURS)
    assert "registry:Gone is missing" in caplog.text


def test_a_class_for_other_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import hybrid_models.vllm as ours
    from hybrid_models.vllm.model import model_class

    model_class.cache_clear()
    gone = HookPoint("vllm.model_executor.layers.linear:Gone")
    monkeypatch.setattr(contracts, "BUILD_HOOKS", (gone,))
    with pytest.raises(ConfigError, match="linear:Gone is missing"):
        getattr(ours, OURS)


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_every_class_can_be_made(entry: Any) -> None:
    import hybrid_models.vllm as ours

    cls = getattr(ours, entry.name)
    assert cls.__name__ == entry.name
    assert is_hybrid(cls) != entry.has_states_alone
    assert is_attention_free(cls) == entry.has_states_alone
    assert getattr(ours, entry.name) is cls


def test_registering_imports_no_layers() -> None:
    program = (
        "import sys, hybrid_models.vllm as ours; ours.register();"
        "assert 'hybrid_models.vllm.model' not in sys.modules;"
        "assert 'hybrid_models.architectures.bamba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def metadata_of_a_pass() -> Any:
    """Two single tokens, the second one padding, and prompts of three and four."""
    return SimpleNamespace(
        num_decodes=2,
        num_decode_tokens=2,
        num_prefills=2,
        num_prefill_tokens=7,
        state_indices_tensor_d=torch.tensor([[5], [0]], dtype=torch.int32),
        state_indices_tensor_p=torch.tensor([7, 9], dtype=torch.int32),
        query_start_loc_p=torch.tensor([0, 3, 7], dtype=torch.int32),
        has_initial_states_p=torch.tensor([True, False]),
    )


def test_a_pass() -> None:
    found = pass_of(metadata_of_a_pass())
    assert found.tokens == 9 and found.decodes == 2
    assert found.decode_slots.tolist() == [5, -1]
    assert found.prefills is not None
    assert found.prefills.slots.tolist() == [7, 9]
    assert found.prefills.cu_seqlens.tolist() == [0, 3, 7]
    assert found.prefills.has_initial.tolist() == [True, False]


def test_layers_share_the_pass_of_a_context_and_leave_zeros_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[Any] = []

    def mix(state_pass: Any, inputs: Any, pools: Any, out: torch.Tensor) -> None:
        passes.append(state_pass)
        out[: state_pass.tokens] = 1

    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={})
    )
    layers = [
        states.StateLayer([], mix, width=3, name=name, vllm_config=config)
        for name in ("first", "second", "of another group")
    ]
    one, other = metadata_of_a_pass(), metadata_of_a_pass()
    metadata = dict(zip(("first", "second"), (one, one), strict=True))
    metadata["of another group"] = other
    for _ in range(2):
        context = SimpleNamespace(attn_metadata=metadata)
        monkeypatch.setattr(states, "get_forward_context", lambda c=context: c)
        for layer in layers:
            out = torch.full((11, 3), torch.nan)
            layer.run([], out)
            assert out[:9].eq(1).all() and out[9:].eq(0).all()
    first, second, third, again, *_ = passes
    assert first is second and third is not first and again is not first
    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(states, "get_forward_context", lambda: context)
    out = torch.full((11, 3), torch.nan)
    layers[0].run([], out)
    assert out.eq(0).all() and len(passes) == 6


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What vLLM's layers ask when they are made."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    with set_current_vllm_config(VllmConfig()):
        yield


class Kit(EngineKit):
    """vLLM's layers for some ranks, without a process for each."""

    def __init__(self, ranks: int) -> None:
        f32 = torch.float32
        super().__init__(LAYERS, Placed(ranks, f32, f32, f32), 0, None)


@pytest.mark.parametrize(
    ("build", "size"),
    [
        (lambda kit: kit.column(8, [6, 9], name="it"), 9),
        (lambda kit: kit.column(8, [9, 9], name="it", whole=[True, False]), 9),
        (lambda kit: kit.row(9, 8, name="it"), 9),
        (lambda kit: kit.qkv(8, 4, 3, 2, name="it"), 3),
        (lambda kit: kit.qkv(8, 4, 6, 3, name="it"), 3),
    ],
)
def test_what_ranks_do_not_divide_is_refused(build: Any, size: int) -> None:
    with pytest.raises(ValueError, match=f"of 2 does not divide {size} heads or"):
        build(Kit(2))


def test_several_ranks_may_have_one_head_of_keys() -> None:
    kit = Kit(4)
    assert [own_part_of_keys(kit, heads) for heads in (1, 2, 4, 8)] == [1, 1, 1, 2]
    with pytest.raises(ValueError, match="does not divide 3"):
        own_part_of_keys(kit, 3)


class Projections(torch.nn.Module):
    """As a layer has them."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.one = kit.column(8, [8], name="one")
        self.two = kit.column(8, [8, 8], name="two")
        self.known = kit.column(8, [8, 8], name="known")
        self.back = kit.row(8, 8, name="back")
        self.qkv = kit.qkv(8, 4, 2, 2, name="qkv")


@pytest.mark.usefixtures("one_rank")
def test_merged_projections_of_one_module_are_wrapped_for_adapters() -> None:
    model = Projections(Kit(1))
    packed = adapters.with_single({"known": ["left", "right"]}, model)
    # vLLM cuts a projection of one part right only where it is of no merged class.
    assert type(model.one).__name__ == "ColumnParallelLinear"
    assert packed == {"known": ["left", "right"], "two": ["two"], "qkv": ["qkv"]}


@pytest.mark.parametrize(
    ("attribute", "sentence"),
    [
        (EXPERTS, "with experts are not served with LoRA: start the server without"),
        (TILES, "every rank has parts of inner whole, and an adapter would be cut"),
    ],
)
def test_what_adapters_cannot_change_is_refused(attribute: str, sentence: str) -> None:
    model = torch.nn.Module()
    model.inner = torch.nn.Module()
    served = SimpleNamespace(lora_config=SimpleNamespace())
    adapters.check(served, model)
    setattr(model.inner, attribute, None)
    with pytest.raises(ValueError, match=sentence):
        adapters.check(served, model)
    adapters.check(SimpleNamespace(lora_config=None), model)


@pytest.fixture
def engine() -> Iterator[Any]:
    """A configuration of vLLM, in which layers enter themselves."""
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config

    given = VllmConfig()
    given.model_config = ModelConfig(
        model=str(TINY), dtype="float32", skip_tokenizer_init=True
    )
    with set_current_vllm_config(given):
        yield given


def reading(engine: Any) -> tuple[Any, Any]:
    """Attention with a cache, and attention of other heads that reads it."""
    kit: Any = object.__new__(VllmKit)  # without processes for ranks
    kit._config, kit.ranks, kit._quantisation = engine, 1, None
    source = kit.attention(1, 4, 2, 32, scale=1.0, name="model.layers.1.attn")
    name = "model.layers.3.attn"
    return source, kit.attention(3, 8, 2, 32, scale=1.0, name=name, source=source)


def test_attention_over_another_layers_keys_has_no_cache(engine: Any) -> None:
    from vllm.v1.worker.gpu import attn_utils

    source, reader = reading(engine)
    assert source.kv_sharing_target_layer_name is None
    assert reader.impl.kv_sharing_target_layer_name == "model.layers.1.attn"
    assert set(attn_utils.get_kv_cache_spec(engine)) == {"model.layers.1.attn"}
    assert attn_utils.get_shared_kv_cache_layers(engine) == {
        "model.layers.3.attn": "model.layers.1.attn"
    }


def test_it_is_refused_where_vllm_would_hand_it_the_last_tokens_alone(
    engine: Any,
) -> None:
    engine.cache_config.kv_sharing_fast_prefill = True
    with pytest.raises(ValueError, match="without --kv-sharing-fast-prefill"):
        reading(engine)


@pytest.mark.parametrize(("kind", "longest"), [("default", 9000), ("yarn", 4096)])
def test_positions_are_turned_as_far_as_the_engine_serves(
    kind: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RecurrentGemma names no longest sequence; other kinds of rope depend on it."""
    from hybrid_models.vllm import kit

    made: list[int] = []
    monkeypatch.setattr(
        kit, "get_rope", lambda *_, max_position, **__: made.append(max_position)
    )
    one: Any = object.__new__(kit.VllmKit)
    one._config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=9000))
    one.rope(32, {"rope_type": kind, "rope_theta": 1e4}, 4096)
    assert made == [longest]
