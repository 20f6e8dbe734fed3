# SPDX-License-Identifier: Apache-2.0
"""Whatever we rely on is renamed in the installed vLLM: the plugin must not serve."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from enum import EnumMeta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm.v1.engine.core as core
from vllm import __version__
from vllm.config import VllmConfig

from hybrid_plugin.config import ConfigError
from hybrid_plugin.upstream.hookpoints import Contract
from hybrid_plugin.vllm import activation, contracts, patches
from tests.compat.take_away import take_away


def _used(*groups: tuple[Contract, ...]) -> list[Any]:
    here = [c for group in groups for c in group if c.applies_to(__version__)]
    return [pytest.param(c, id=c.target) for c in here if not _is_member(c.target)]


def _is_member(target: str) -> bool:
    """Whether it is a member of an enumeration, which cannot be taken away."""
    module, path = target.split(":")
    holder: Any = import_module(module)
    for name in path.split(".")[:-1]:
        holder = getattr(holder, name, None)
    return isinstance(holder, EnumMeta)


@pytest.fixture
def hybrid_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A configuration of a hybrid model, as far as it is looked at before checks.

    The plugin is applied, and would serve it.
    """
    patches.patch_config()
    monkeypatch.setattr(activation, "activate", lambda config: None)
    monkeypatch.setattr(activation, "is_active", lambda config: True)
    yield SimpleNamespace(
        model_config=SimpleNamespace(
            is_hybrid=True, is_attention_free=False, has_inner_state=True
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None,
        additional_config={},
    )


@pytest.mark.parametrize(
    "contract",
    _used(
        contracts.OPTION_HOOKS,
        contracts.ENGINE_HOOKS,
        contracts.WORKER_HOOKS,
        contracts.CPU_HOOKS,
    ),
)
def test_hybrid_model_is_refused_by_name(
    contract: Contract,
    hybrid_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    take_away(contract, "vllm", monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="does not fit vLLM") as refusal:
        VllmConfig.try_verify_and_update_config(hybrid_model)
    assert contract.target in str(refusal.value)


@pytest.mark.parametrize(
    "contract",
    _used(contracts.SPECULATION_HOOKS),
)
def test_drafts_are_refused_by_name(
    contract: Contract,
    hybrid_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    hybrid_model.speculative_config = object()
    take_away(contract, "vllm", monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="does not fit vLLM") as refusal:
        VllmConfig.try_verify_and_update_config(hybrid_model)
    assert contract.target in str(refusal.value)


@pytest.mark.parametrize("contract", _used(contracts.SAVED_SESSION_HOOKS))
def test_a_server_whose_endpoints_moved_is_refused_by_name(
    contract: Contract,
    hybrid_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    import_module("vllm.entrypoints.launchers.app")  # of a process with an API
    take_away(contract, "vllm", monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="does not fit vLLM") as refusal:
        VllmConfig.try_verify_and_update_config(hybrid_model)
    assert contract.target in str(refusal.value)


@pytest.mark.parametrize("contract", _used(contracts.PEER_HOOKS))
def test_peers_are_refused_by_name(
    contract: Contract,
    hybrid_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    options = {"host_memory": 1 << 20, "peers": {}}
    hybrid_model.additional_config = {"hybrid_plugin": options}
    take_away(contract, "vllm", monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="does not fit vLLM") as refusal:
        VllmConfig.try_verify_and_update_config(hybrid_model)
    assert contract.target in str(refusal.value)


@pytest.mark.parametrize("contract", _used(contracts.CONTEXT_PARALLEL_HOOKS))
def test_context_parallelism_is_refused_by_name(
    contract: Contract,
    hybrid_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    hybrid_model.parallel_config.decode_context_parallel_size = 2
    take_away(contract, "vllm", monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="does not fit vLLM") as refusal:
        VllmConfig.try_verify_and_update_config(hybrid_model)
    assert contract.target in str(refusal.value)


@pytest.mark.parametrize("contract", _used(contracts.HIT_CHECK_HOOKS))
def test_checks_of_hits_are_refused_by_name(
    contract: Contract,
    hybrid_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    hybrid_model.additional_config = {"hybrid_plugin": {"verify_fraction": 0.5}}
    take_away(contract, "vllm", monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="does not fit vLLM") as refusal:
        VllmConfig.try_verify_and_update_config(hybrid_model)
    # A class whose initializer is gone lacks what others rely on, too.
    target = contract.target.removesuffix(".__init__")
    assert target in str(refusal.value)


@pytest.mark.parametrize("contract", _used(contracts.CONFIG_HOOKS))
def test_plugin_stays_idle_and_says_why(
    contract: Contract,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    take_away(contract, "vllm", monkeypatch, tmp_path)
    patches.patch_config()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"hybrid-plugin is inactive: {contract.target} is missing" in caplog.text


@pytest.mark.parametrize(
    "contract", _used(contracts.CORE_HOOKS, contracts.WORKER_HOOKS)
)
def test_other_models_need_none_of_it(
    contract: Contract, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM loads plugins in every process, whatever it serves."""
    monkeypatch.setitem(sys.modules, core.__name__, core)
    take_away(contract, "vllm", monkeypatch, tmp_path)
    patches.apply()
    assert patches.is_applied()
    VllmConfig.try_verify_and_update_config(SimpleNamespace(model_config=None))


def test_untested_version_is_served_with_a_warning(
    hybrid_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.32.77")
    with pytest.raises(AttributeError):  # vLLM itself wants more of a configuration
        VllmConfig.try_verify_and_update_config(hybrid_model)
    assert (
        "vLLM 0.32.77 is not in the compatibility matrix: all hook points hold, but no "
        "test has run on it."
    ) in caplog.messages


def test_nothing_is_refused_as_installed() -> None:
    assert contracts.problems(contracts.HOOKS) == []
