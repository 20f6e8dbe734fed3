# SPDX-License-Identifier: Apache-2.0
"""What makes answers depend on the batch is refused, with the way out."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm.envs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hybrid_plugin.config import ConfigError
from hybrid_plugin.upstream.hookpoints import resolve
from hybrid_plugin.vllm import contracts, deterministic, patches
from hybrid_plugin.vllm.wrapping import WRAPPED


def configuration(**scheduling: Any) -> Any:
    defaults = {
        "policy": "fcfs",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "long_prefill_token_threshold": 0,
    }
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**defaults | scheduling),
        lora_config=None,
        model_config=SimpleNamespace(enforce_eager=False, multimodal_config=None),
    )


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    monkeypatch.setattr(vllm.envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", True, raising=False)


@pytest.mark.usefixtures("on_a_gpu")
def test_nothing_stands_in_the_way_of_what_is_deterministic() -> None:
    assert list(deterministic.obstacles(configuration())) == []


@pytest.mark.usefixtures("on_a_gpu")
def test_each_obstacle_has_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = deterministic.obstacles(configuration(policy="priority"))
    assert "drop --scheduling-policy." in found
    adapters = configuration()
    adapters.lora_config = object()
    (found,) = deterministic.obstacles(adapters)
    assert "drop --enable-lora." in found
    pictures = configuration()
    pictures.model_config.multimodal_config = SimpleNamespace(language_model_only=False)
    (found,) = deterministic.obstacles(pictures)
    assert "give --language-model-only" in found
    pictures.model_config.multimodal_config.language_model_only = True
    assert list(deterministic.obstacles(pictures)) == []
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", False, raising=False)
    (found,) = deterministic.obstacles(configuration())
    assert "set VLLM_BATCH_INVARIANT=1." in found


@pytest.mark.usefixtures("on_a_gpu")
def test_compiled_passes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False, raising=False)
    (found,) = deterministic.obstacles(configuration())
    assert "set VLLM_USE_BREAKABLE_CUDAGRAPH=1." in found
    eager = configuration()
    eager.model_config.enforce_eager = True
    assert list(deterministic.obstacles(eager)) == []


@pytest.mark.parametrize("step", [64, 192])
def test_a_whole_chunk_must_fit_beside_all_that_decode(step: int) -> None:
    deterministic.check_budget(configuration(), step)
    with pytest.raises(ConfigError, match=f"-tokens to {64 + step} at least"):
        deterministic.check_budget(
            configuration(max_num_batched_tokens=64 + step - 1), step
        )


@pytest.mark.parametrize(("share", "refused"), [(0, 0), (32, 1), (64, 1), (65, 0)])
def test_a_whole_chunk_must_fit_into_a_long_prompts_share(
    share: int, refused: int
) -> None:
    one = configuration(long_prefill_token_threshold=share)
    with pytest.raises(ConfigError, match="to 65 at") if refused else nullcontext():
        deterministic.check_budget(one, 64)


def test_backends_of_layers_that_ours_can_run_are_let_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = []
    for name in contracts.STATE_BACKENDS:
        owner, attribute = resolve(name)
        backends.append(getattr(owner, attribute))
    for backend in backends:
        monkeypatch.setattr(backend, "supports_batch_invariance", lambda: False)
    patches.patch_batch_invariance()
    assert all(backend.supports_batch_invariance() for backend in backends)
    for kind in ("GDN_ATTN", "MAMBA2", "SHORT_CONV", "LINEAR"):
        served = MambaAttentionBackendEnum[kind].get_class()
        assert served.supports_batch_invariance(), kind
    other = MambaAttentionBackendEnum["MAMBA1"].get_class()
    assert not other.supports_batch_invariance()


def test_the_gated_norm_takes_as_many_rows_in_every_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, name = resolve(contracts.GATED_NORM_ROWS)
    monkeypatch.setattr(module, name, getattr(module, name))
    patches.patch_gated_norm()
    rows = getattr(module, name)
    assert {rows(count, "cuda") for count in (1, 264, 265, 10_000)} == {1}


def test_attention_is_told_the_same_length_in_every_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("flash_attention")

    class Builder:
        def build(self, prefix: int, passed: Any, fast_build: bool = False) -> Any:
            return SimpleNamespace(max_query_len=passed.max_query_len, prefix=prefix)

    module.Builder = Builder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(contracts, "ATTENTION_HOOKS", ())
    monkeypatch.setattr(contracts, "ATTENTION_BUILD", "flash_attention:Builder.build")
    patches.patch_attention_tiles(1624)
    for tokens in (1, 8, 1000):
        built = Builder().build(3, SimpleNamespace(max_query_len=tokens))
        assert (built.max_query_len, built.prefix) == (1624, 3)


@pytest.mark.parametrize("names", [["FLASH_ATTN"], ["FLASH_ATTN", "FLASHINFER"]])
def test_other_attention_is_refused(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    backends = [SimpleNamespace(get_name=lambda name=name: name) for name in names]
    monkeypatch.setattr(
        type(current_platform), "_find_non_ssm_backends", lambda self, _: backends
    )
    if len(names) == 1:
        deterministic.check_attention(configuration())
    else:
        with pytest.raises(ConfigError, match="bits FLASHINFER gives"):
            deterministic.check_attention(configuration())


def test_a_worker_applies_all_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No patch takes away what the next one asks for."""
    for target in (contracts.GATED_NORM_ROWS, contracts.ATTENTION_BUILD):
        owner, name = resolve(target)
        monkeypatch.setattr(owner, name, getattr(owner, name))
    patches.patch_batch_invariance()
    patches.patch_gated_norm()
    patches.patch_attention_tiles(1624)
    owner, name = resolve(contracts.ATTENTION_BUILD)
    assert hasattr(getattr(owner, name), WRAPPED)
