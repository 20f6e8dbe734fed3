# SPDX-License-Identifier: Apache-2.0
"""The kinds of layers that our kernels run in vLLM are there, and can be hooked."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.layers.mamba.abstract import MambaBase

from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.vllm import contracts, patches
from hybrid_plugin.vllm.kernels.layers import KINDS, Kind


@pytest.mark.parametrize("name", KINDS)
def test_the_class_is_vllms(name: str) -> None:
    module, _, cls = name.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), cls), MambaBase)


@pytest.mark.parametrize("kind", dict.fromkeys(KINDS.values()))
def test_the_kind_is_whole(kind: Kind) -> None:
    for name in ("weights_of", "run", "warm_up"):
        assert callable(getattr(kind.adapter, name))
    assert contracts.problems(contracts.KERNEL_HOOKS[kind.mixer]) == []
    assert kind.mixer in patches._PATCHES_OF_LAYERS
    assert contracts.BUILDERS[kind.mixer]


def test_every_mixer_has_a_kind_of_layer() -> None:
    assert {kind.mixer for kind in KINDS.values()} == set(Mixer)


@pytest.mark.parametrize("mixer", Mixer)
def test_hooks_are_put_once(mixer: Mixer) -> None:
    patches.patch_kernels([mixer])
    before = [
        getattr(*patches.resolve(f"{b}.build")) for b in contracts.BUILDERS[mixer]
    ]
    patches.patch_kernels([mixer])
    after = [getattr(*patches.resolve(f"{b}.build")) for b in contracts.BUILDERS[mixer]]
    assert before == after


def test_a_hook_point_that_moved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = contracts.HookPoint("vllm.forward_context:get_backward_context")
    hooks = {**contracts.KERNEL_HOOKS, Mixer.KDA: (gone,)}
    monkeypatch.setattr(contracts, "KERNEL_HOOKS", hooks)
    with pytest.raises(patches.ConfigError, match="get_backward_context"):
        patches.patch_kernels([Mixer.KDA])
