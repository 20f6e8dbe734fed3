# SPDX-License-Identifier: Apache-2.0
"""No model fails to start because the plugin is installed."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
)

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.memory.attention_windows import (
    FULL_ATTENTION,
    ChunkedLocal,
    SlidingWindow,
)
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.engine import untried
from hybrid_plugin.engine.outlook import Prospect
from hybrid_plugin.vllm import (
    activation,
    outlook,
    page_size,
    patches,
    rings,
    servable,
    specs,
)
from hybrid_plugin.vllm.kernels import agreement, state_layers
from hybrid_plugin.vllm.planning import make_config, make_groups
from tests.engines.drivers.process import environment, overheard
from tests.vllm.hybrid_models import SERVED, WINDOWS, write

FLAGS = ("--skip-tokenizer-init", "--max-model-len=512", "--enforce-eager")

ATTENTION = FullAttentionSpec(
    block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32
)
CROSS = CrossAttentionSpec(
    block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32
)
STATE = MambaSpec(block_size=512, shapes=((3, 5),), dtypes=(torch.float32,))


def configured(folder: Path, *, plugin: bool = True, **options: Any) -> Any:
    """The engine configuration and what the plugin logged."""
    with environment(plugin), overheard("vllm.hybrid_plugin") as lines:
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            max_model_len=512,
            enforce_eager=True,
            additional_config={"hybrid_plugin": options},
        ).create_engine_config()
    return config, lines


def _hybrid_architectures() -> dict[str, str]:
    """Modules by architecture, of those whose source makes hybrid models."""
    found = {}
    for name, entry in ModelRegistry.models.items():
        module = entry.module_name
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        origin = Path(spec.origin)
        in_package = origin.name == "__init__.py"
        files = origin.parent.rglob("*.py") if in_package else [origin]
        if any("IsHybrid" in file.read_text() for file in files):
            found[name] = module
    return found


# ------------------------------------------------ known from source and config


def test_every_kind_with_a_pool_is_named() -> None:
    named = servable.KINDS_WITH_POOLS | {rings.KIND}
    assert {kind.__name__ for kind in specs._OURS} == named


def test_side_caches_are_seen_in_the_source_of_every_hybrid_model() -> None:
    known = servable.KINDS_WITH_POOLS | servable._NO_CACHE
    unknown = {
        name: sorted(servable._built_by(module) - known)
        for name, module in _hybrid_architectures().items()
    }
    assert len(unknown) > 20
    flagged = {name: kinds for name, kinds in unknown.items() if kinds}
    assert flagged.pop("Glm5NextForCausalLM") == ["CircularBufferSpec"]
    assert flagged.pop("Qwen4ExpForCausalLM") == ["CircularBufferSpec"]
    assert all(name.startswith(("Glm5Next", "Qwen4Exp")) for name in flagged)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        ("vllm.models.glm5next", "caches of the kind CircularBufferSpec"),
        ("vllm.model_executor.models.qwen3_next", None),
        (None, None),
    ],
)
def test_obstacle_in_the_source(module: str | None, sentence: str | None) -> None:
    found = list(servable.obstacles(configuration(module)))
    assert (sentence is None) == (found == [])
    assert sentence is None or sentence in found[0]


def test_models_with_index_keys_are_left_to_vllm() -> None:
    """With drafts too: docs/recipes has a command with some, of GLM-5.3-Flash."""
    config = configuration(None)
    config.model_config.architecture = "Glm5NextForConditionalGeneration"
    config.model_config.registry = ModelRegistry
    assert list(servable.obstacles(config)) == [
        "Glm5NextForConditionalGeneration keeps caches of the kind CircularBufferSpec, "
        "which is not supported yet; HYBRID_PLUGIN=0 leaves the model to vLLM."
    ]


def configuration(
    module: str | None, kind: str = "auto", dtype: torch.dtype = torch.float32
) -> Any:
    """As far as it tells what a model needs."""
    model = SimpleNamespace(
        architecture="A",
        dtype=dtype,
        hf_text_config=SimpleNamespace(layer_types=["linear", "full_attention"]),
        registry=SimpleNamespace(models={"A": SimpleNamespace(module_name=module)}),
    )
    cache = SimpleNamespace(sliding_window=None, cache_dtype=kind)
    return SimpleNamespace(model_config=model, cache_config=cache)


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM chooses a backend there")
@pytest.mark.parametrize(
    ("kind", "dtype", "misread"),
    [
        ("fp8", torch.float32, False),
        ("fp8_e5m2", torch.bfloat16, False),
        ("bfloat16", torch.bfloat16, False),
        ("bfloat16", torch.float32, True),
        ("int8_per_token_head", torch.bfloat16, True),
    ],
)
def test_types_of_kv_that_a_cpu_misreads(
    kind: str, dtype: torch.dtype, misread: bool
) -> None:
    found = list(servable.obstacles(configuration(None, kind, dtype)))
    sentence = "vLLM's attention on CPUs misreads KV of this type; "
    assert found == ([f"{sentence}drop --kv-cache-dtype."] if misread else [])


@pytest.mark.parametrize(
    ("kind", "is_refused"),
    [
        ("auto", False),
        ("fp8", False),
        ("fp8_ds_mla", False),
        ("int8_per_token_head", False),
        ("fp8_per_token_head", True),
        ("nvfp4", True),
        ("turboquant_k8v4", True),
    ],
)
def test_kv_with_scales_is_refused_on_gpus_until_its_test_has_passed(
    monkeypatch: pytest.MonkeyPatch, kind: str, is_refused: bool
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.delenv(untried.TRIED, raising=False)
    sentence = (
        "KV with scales beside it is served as int8_per_token_head alone; choose "
        "that or fp8 for --kv-cache-dtype."
    )
    found = list(servable.obstacles(configuration(None, kind)))
    assert found == ([sentence] if is_refused else [])
    monkeypatch.setenv(untried.TRIED, untried.SCALES)
    assert not list(servable.obstacles(configuration(None, kind)))


# ------------------------------------------------------- known once it is built


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A marked configuration of a worker that has loaded its model."""
    monkeypatch.setattr(
        page_size,
        "choose",
        lambda config: setattr(config.cache_config, "block_size", 32),
    )
    return SimpleNamespace(
        additional_config={},
        cache_config=SimpleNamespace(block_size=128),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None,
        num_speculative_tokens=0,
        scheduler_config=SimpleNamespace(
            scheduler_cls=activation.SCHEDULER, enable_chunked_prefill=True
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={"s": SimpleNamespace()}
        ),
    )


@pytest.mark.parametrize(
    "layers", [{"a": ATTENTION, "s": STATE}, {"s": STATE}], ids=["both", "states alone"]
)
def test_served_as_built(built: Any, layers: dict[str, KVCacheSpec]) -> None:
    assert servable.find_out(built, lambda: layers) is None
    assert built.cache_config.block_size == 128


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ({"a": ATTENTION, "w": CROSS, "s": STATE}, "cannot serve layer w"),
        (
            {"a": ATTENTION, "b": ATTENTION.copy_with_new_block_size(64), "s": STATE},
            "agree on one page size",
        ),
        ({}, "keep nothing for later tokens"),
    ],
)
def test_not_served_as_built(built: Any, layers: Any, sentence: str) -> None:
    reason = servable.find_out(built, lambda: layers)
    assert reason is not None and sentence in reason
    assert built.cache_config.block_size == 128


def test_a_platform_without_chunked_prefill(built: Any) -> None:
    built.scheduler_config.enable_chunked_prefill = False
    reason = servable.find_out(built, dict)
    assert reason == "vLLM switched chunked prefill off for this model."


class _LoadedWorker:
    """What a platform's worker does, as far as the plugin looks."""

    def __init__(self, config: Any, layers: dict[str, KVCacheSpec]) -> None:
        self.vllm_config = config
        self.layers = layers
        self.ran: list[str] = []

    def load_model(self) -> None:
        self.ran.append("load")

    def get_model(self) -> Any:
        return SimpleNamespace(load_weights=lambda weights: None)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.layers

    def determine_available_memory(self) -> int:
        return 7

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.ran.append(f"initialize {kv_cache_config}")

    def execute_model(self, scheduler_output: Any) -> str:
        return "executed"

    def sample_tokens(self, grammar: Any) -> str:
        return "sampled"


@pytest.fixture
def worker_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    from hybrid_plugin.vllm import patches
    from hybrid_plugin.vllm.worker import RunsCommands

    monkeypatch.setattr(patches, "is_applied", lambda: True)

    class Worker(RunsCommands, _LoadedWorker):
        pass

    return Worker


def test_worker_steps_aside_and_the_engine_core_follows(
    built: Any, worker_of: Any
) -> None:
    worker = worker_of(built, {"a": ATTENTION, "w": CROSS, "s": STATE})
    worker.load_model()
    assert not activation.is_active(built)
    told = pickle.loads(pickle.dumps(worker.get_kv_cache_spec()))
    assert told == worker.layers
    reason = servable.reason_among([told, told])
    assert reason is not None and "CrossAttentionSpec" in reason
    assert worker.determine_available_memory() == 7
    worker.initialize_from_config("stock")
    assert worker.ran == ["load", "initialize stock"]
    assert worker.execute_model(SimpleNamespace()) == "executed"
    assert worker.sample_tokens(None) == "sampled"


def test_worker_that_serves_says_nothing(built: Any, worker_of: Any) -> None:
    worker = worker_of(built, {"a": ATTENTION, "s": STATE})
    worker.load_model()
    assert activation.is_active(built)
    assert servable.reason_among([worker.get_kv_cache_spec()]) is None


def test_worker_says_that_passes_keep_states(
    built: Any, worker_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = SimpleNamespace(keep_interior=True, records=None)
    monkeypatch.setattr(state_layers, "take_over", lambda *_: ours)
    worker = worker_of(built, {"a": ATTENTION, "s": STATE})
    worker.load_model()
    told = pickle.loads(pickle.dumps(worker.get_kv_cache_spec()))
    assert agreement.keep_interior([told, told])
    assert not agreement.record_drafts([told, told])
    ours.records = object()
    told = pickle.loads(pickle.dumps(worker.get_kv_cache_spec()))
    assert agreement.keep_interior([told]) and agreement.record_drafts([told])


def test_worker_refuses_a_plan_that_its_layers_do_not_keep(
    built: Any, worker_of: Any
) -> None:
    worker = worker_of(built, {"a": ATTENTION, "s": STATE})
    worker.load_model()
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None)
    )
    groups = make_groups({"a": ATTENTION, "s": STATE})
    planned = make_config(config, groups, PoolSizes(9, 5), interior=True)
    with pytest.raises(ConfigError, match="on some ranks only"):
        worker.initialize_from_config(planned)


def test_worker_refuses_where_the_plugin_was_asked_for(
    built: Any, worker_of: Any
) -> None:
    built.additional_config = {"hybrid_plugin": {"enabled": True}}
    worker = worker_of(built, {"a": ATTENTION, "w": CROSS, "s": STATE})
    with pytest.raises(ConfigError, match=r"cannot serve this: .* layer w"):
        worker.load_model()


def test_ranks_that_disagree_are_an_error() -> None:
    aside = servable.StockSpecs({"w": CROSS}, "no pool.")
    with pytest.raises(ConfigError, match=r"some ranks only: no pool\."):
        servable.reason_among([aside, {"a": ATTENTION}])


# ---------------------------------------------- whole models, without weights


@pytest.mark.parametrize("architecture", SERVED)
def test_hybrid_model_is_served(architecture: str, tmp_path: Path) -> None:
    folder = write(tmp_path, architecture, SERVED[architecture])
    with environment(True):
        found = outlook.foresee(str(folder), FLAGS, 1 << 30)
    if found.prospect is Prospect.FAILS:
        with environment(False):
            stock = outlook.foresee(str(folder), FLAGS, 1 << 30)
        assert stock.prospect is Prospect.FAILS
        pytest.skip(f"vLLM alone cannot configure it here: {stock.reason}")
    assert (found.prospect, found.reason) == (Prospect.SERVED, "")


@pytest.mark.parametrize("architecture", WINDOWS)
def test_model_with_windows_is_served_where_the_plugin_was_asked_for(
    architecture: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, architecture, WINDOWS[architecture])
    asked = ("--additional-config", '{"hybrid_plugin": {"enabled": true}}')
    with environment(True):
        found = outlook.foresee(str(folder), (*FLAGS, *asked), 1 << 30)
    assert (found.prospect, found.reason) == (Prospect.SERVED, "")
    assert found.layout is not None
    full, local = found.layout.attention
    assert (full.window, len(full.layers)) == (FULL_ATTENTION, 2)
    assert (local.window, len(local.layers)) in (
        (SlidingWindow(128), 2),
        (ChunkedLocal(128), 2),
    )


@pytest.mark.parametrize(
    ("has_states_alone", "end"),
    [
        (False, "without a prefix cache now; set HYBRID_PLUGIN=0 to get its own."),
        (True, "without a prefix cache as it does by itself."),
    ],
)
def test_no_cache_of_vllm_is_promised_that_it_has_not(
    has_states_alone: bool, end: str
) -> None:
    model = SimpleNamespace(is_attention_free=has_states_alone, has_inner_state=True)
    executor = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model))
    told = patches._WITHOUT_A_CACHE % ("It is odd.", patches._way_out(executor))
    assert told.startswith("hybrid-plugin is inactive: It is odd. vLLM serves")
    assert told.endswith(end)
