# SPDX-License-Identifier: Apache-2.0
"""When the platform offers itself, and what it changes in PyTorch."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._device import _device_constructors

from hybrid_plugin import sglang_cpu
from hybrid_plugin.config import ConfigError
from hybrid_plugin.sglang_cpu import kernels, torch_shims
from hybrid_plugin.sglang_cpu.replacements import (
    MISSING_NAMES,
    REPLACEMENTS,
    Replacement,
)

CONV = "SGLANG_MAMBA_CONV_DTYPE"
DUMP = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No accelerator, no wishes, and PyTorch as it was afterwards."""
    for name in ("SGLANG_PLATFORM", "HYBRID_PLUGIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_device_module", torch.get_device_module)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)


def test_it_keeps_out_of_the_way() -> None:
    assert sglang_cpu.activate() is None


def test_the_variable_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "hybrid_cpu")
    assert sglang_cpu.activate() == sglang_cpu.PLATFORM


def test_the_plugin_s_flag_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server", "--enable-hybrid-plugin"])
    assert sglang_cpu.activate() == sglang_cpu.PLATFORM


def test_a_device_is_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("HYBRID_PLUGIN", "1")
    assert sglang_cpu.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "hybrid_cpu")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        sglang_cpu.activate()


def test_another_platform_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_PLUGIN", "1")
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert sglang_cpu.activate() is None


def test_shims_apply_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def cuda_build(device: object = None) -> object:
        return torch.cuda if device is None else torch.get_device_module(device)

    monkeypatch.setattr(torch, "get_device_module", cuda_build)
    torch_shims.apply()
    first = torch.get_device_module, torch.Tensor.pin_memory
    torch_shims.apply()
    assert (torch.get_device_module, torch.Tensor.pin_memory) == first
    assert torch.get_device_module() is torch.cpu
    tensor = torch.zeros(2)
    assert tensor.pin_memory() is tensor


def on_meta(create: str) -> bool:
    """Whether `torch.device` decides where a function of PyTorch creates a tensor."""
    argument: object = 3 if create in ("arange", "empty", "ones", "zeros") else [3.0]
    _device_constructors.cache_clear()  # as in a process that did not ask before
    with torch.device("meta"):
        tensor: torch.Tensor = getattr(torch, create)(argument)
    _device_constructors.cache_clear()
    return tensor.is_meta


def test_a_device_that_is_a_context_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows by identity which functions create tensors, and misses a replacement.

    Where it is not obeyed, transformers leaves memory uninitialised.
    """
    torch_shims.apply()
    if importlib.util.find_spec("sglang") is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", sglang_cpu.NAME)
        kernels.install()
    names = ("arange", "as_tensor", "empty", "ones", "tensor", "zeros")
    assert all(map(on_meta, names))
    original = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data: original(data))
    assert not on_meta("tensor")


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=lambda r: r.ours)
def test_ours_take_what_sglang_s_take(replacement: Replacement) -> None:
    if replacement.ours.startswith("draft_models:"):
        pytest.importorskip("sglang", reason="they are subclasses of SGLang's")
    function = kernels.load(replacement.ours)
    assert tuple(inspect.signature(function).parameters) == replacement.point.parameters


def test_installing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All or nothing, and where other modules imported a kernel by name too."""
    monkeypatch.setenv("SGLANG_PLATFORM", sglang_cpu.NAME)
    pytest.importorskip("sglang")
    from sglang.kernels.ops.attention.linear import fused_gdn_gating as module
    from sglang.srt.layers.attention.mamba import mamba

    stock = module.fused_gdn_gating
    with monkeypatch.context() as context:
        context.delattr("sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule")
        with pytest.raises(ConfigError, match=r"chunk_gated_delta_rule is missing"):
            kernels.install()
        assert module.fused_gdn_gating is stock
    kernels.install()
    kernels.install()
    assert module.fused_gdn_gating is kernels.load("delta_rule:gates")
    assert mamba.mamba_chunk_scan_combined is kernels.load("mamba2:prefill")
    for missing in MISSING_NAMES:
        where = importlib.import_module(missing.point.module)
        assert getattr(where, missing.name) is kernels.load(missing.ours)


def asked(dtype: str = "float32", **arguments: object) -> SimpleNamespace:
    """A server's arguments."""
    lora = {"enable_lora": None, "lora_paths": None, "lora_backend": "csgmv"}
    return SimpleNamespace(dtype=dtype, disaggregation_mode="null", **lora | arguments)


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ({}, "csgmv"),
        ({"enable_lora": True}, "torch_native"),
        ({"lora_paths": ["one=/adapter"]}, "torch_native"),
        ({"enable_lora": True, "lora_backend": "triton"}, "triton"),
    ],
)
def test_adapters_are_computed_in_torch(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], backend: str
) -> None:
    """Unless somebody named other kernels."""
    monkeypatch.setenv("SGLANG_PLATFORM", sglang_cpu.NAME)
    pytest.importorskip("sglang")
    from hybrid_plugin.sglang_cpu.adapters import adapt_in_torch

    given = asked(**arguments)
    adapt_in_torch(given)
    assert given.lora_backend == backend


def test_defaults_of_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 models keep their inputs; an idle server sleeps; none waits for CUDA."""
    monkeypatch.setenv("SGLANG_PLATFORM", sglang_cpu.NAME)
    pytest.importorskip("sglang")
    from hybrid_plugin.sglang_cpu.cpu import HybridCpu

    for name in (CONV, DUMP):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever is set
        monkeypatch.delenv(name)
    half, whole = asked("bfloat16"), asked("float32")
    HybridCpu().apply_server_args_defaults(half)
    assert half.sleep_on_idle and CONV not in os.environ
    assert os.environ[DUMP] == "0"
    HybridCpu().apply_server_args_defaults(whole)
    assert os.environ[CONV] == "float32"
    monkeypatch.setenv(CONV, "float16")
    HybridCpu().apply_server_args_defaults(whole)
    assert os.environ[CONV] == "float16"
