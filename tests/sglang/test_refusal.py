# SPDX-License-Identifier: Apache-2.0
"""Whatever we rely on is renamed in the installed SGLang: the server must not start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang import __version__
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from hybrid_plugin.config import ConfigError
from hybrid_plugin.sglang import (
    activation,
    contracts,
    patches,
    register,
    saved_sessions,
)
from hybrid_plugin.sglang_cpu import kernels
from hybrid_plugin.sglang_cpu.cpu import HybridCpu
from hybrid_plugin.sglang_cpu.replacements import EMBEDS, INSTALLED
from hybrid_plugin.upstream.hookpoints import Contract
from tests.compat.take_away import take_away


def _used(*groups: tuple[Contract, ...]) -> list[Any]:
    once = {c.target: c for group in groups for c in group}
    here = [c for c in once.values() if c.applies_to(__version__)]
    return [pytest.param(c, id=c.target) for c in here]


@pytest.fixture(autouse=True)
def hook_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests share this process: what is checked first is what is tested."""
    monkeypatch.setattr(patches, "_hook", lambda *_: None)
    monkeypatch.setattr(patches, "_apply", lambda: None)


class Worker:
    """Stands for one of SGLang's."""

    def forward_batch_generation(self, batch: Any) -> None: ...


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(activation.ENABLE_VARIABLE, "1")
    monkeypatch.setenv(activation.OPTIONS_VARIABLE, "")
    monkeypatch.setattr(patches, "_ENGINE_HOOKED", False)


@pytest.mark.parametrize(
    "contract", _used(contracts.COMMAND_LINE_HOOKS, contracts.ENGINE_HOOKS)
)
def test_server_does_not_start(
    contract: Contract, asked_for: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    take_away(contract, "sglang", monkeypatch, tmp_path)
    with pytest.raises(SystemExit, match="does not fit SGLang") as refusal:
        register()
    assert contract.target in str(refusal.value)


@pytest.mark.parametrize("contract", _used(contracts.BLOCK_DRAFT_HOOKS))
def test_a_server_whose_blocks_of_drafts_moved_does_not_start(
    contract: Contract, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One with other drafts does."""
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(
        patches, "_hook", lambda target, _, hook: hooks.update({target: hook})
    )
    patches._verify_drafts()
    spec_info = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm"
    created = hooks[f"{spec_info}.create_worker"]
    monkeypatch.setattr(patches, "_is_ours", lambda: True)
    blocks, others = SpeculativeAlgorithm.DSPARK, SpeculativeAlgorithm.EAGLE
    assert issubclass(created(Worker, blocks, None), Worker)
    take_away(contract, "sglang", monkeypatch, tmp_path)
    assert issubclass(created(Worker, others, None), Worker)
    with pytest.raises(ConfigError, match="does not fit SGLang") as refusal:
        created(Worker, blocks, None)
    assert contract.target in str(refusal.value)


def test_dflash_needs_to_know_where_a_model_gets_embeddings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the CPU platform."""
    take_away(EMBEDS, "sglang", monkeypatch, tmp_path)
    assert HybridCpu().get_speculative_worker_cls("DSPARK") is None
    with pytest.raises(ConfigError, match="does not fit SGLang") as refusal:
        HybridCpu().get_speculative_worker_cls("DFLASH")
    assert EMBEDS.target in str(refusal.value)


@pytest.mark.parametrize("contract", _used(contracts.SAVED_SESSION_HOOKS))
def test_a_server_whose_endpoints_moved_does_not_start(
    contract: Contract, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(
        patches, "_hook", lambda target, _, hook: hooks.update({target: hook})
    )
    patches._take_session_orders()
    made = hooks["sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__"]
    monkeypatch.setattr(saved_sessions, "server_is_loaded", lambda: True)
    monkeypatch.setattr(saved_sessions, "attach", lambda: None)
    made(None, object())
    take_away(contract, "sglang", monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="does not fit SGLang") as refusal:
        made(None, object())
    assert contract.target in str(refusal.value)


@pytest.mark.parametrize("contract", _used(INSTALLED))
def test_platform_does_not_start(
    contract: Contract, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    take_away(contract, "sglang", monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="CPU platform does not fit") as refusal:
        kernels.install()
    assert contract.target in str(refusal.value)


@pytest.mark.parametrize("contract", _used(contracts.COMMAND_LINE_HOOKS))
def test_server_without_the_plugin_starts_and_says_so(
    contract: Contract,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(activation.ENABLE_VARIABLE, "0")
    take_away(contract, "sglang", monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING):
        register()
    assert contract.target in caplog.text


def test_untested_version_is_served_with_a_warning(
    asked_for: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sglang.__version__", "7.0.0")
    for step in ("_settle_arguments", "_build_cache", "_apply"):
        monkeypatch.setattr(patches, step, lambda *_: None)
    with caplog.at_level(logging.WARNING):
        register()
    assert patches._ENGINE_HOOKED
    assert (
        "SGLang 7.0.0 is newer than the compatibility matrix: all hook points hold, "
        "but no test has run on it."
    ) in caplog.messages
