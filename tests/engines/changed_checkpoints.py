# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the registry's kinds with LoRA adapters, or quantised."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

Tensors = dict[str, torch.Tensor]
RANK, SCALE = 4, 2.0
"""Of adapters, and what they are multiplied with."""
OF_WEIGHTS, OF_TOKENS = 63, 127
"""Greatest whole numbers of W8A8.

On a CPU without VNNI oneDNN adds two products of bytes in 16 bits, and vLLM's whole
range of weights overflows there; half of it does not.
"""
FILE = "model.safetensors"
_NO_LINEAR = ("embed_tokens", "lm_head", "conv", "router")
_INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
"""Weights with a scale for each output, tokens with one each."""


def linear_layers(tensors: Tensors) -> Iterator[str]:
    """Names of modules whose weight is a linear layer's."""
    for name, weight in sorted(tensors.items()):
        module, _, kind = name.rpartition(".")
        left_out = any(part in name for part in _NO_LINEAR)
        if kind == "weight" and weight.dim() == 2 and not left_out:
            yield module


def write_adapter(checkpoint: Path, folder: Path, merged: Path) -> None:
    """Write a random adapter of all linear layers, and the checkpoint with it added.

    Args:
        checkpoint: with one file of tensors.
        folder: of the adapter, in the form that PEFT writes.
        merged: the other checkpoint.
    """
    shutil.copytree(checkpoint, merged)
    tensors = load_file(checkpoint / FILE)
    generator = torch.Generator().manual_seed(3)
    adapter: Tensors = {}
    for module in linear_layers(tensors):
        weight = tensors[f"{module}.weight"]
        outs, inner = weight.shape
        down = torch.randn(RANK, inner, generator=generator) * inner**-0.5
        up = torch.randn(outs, RANK, generator=generator) * 0.1
        adapter[f"base_model.model.{module}.lora_A.weight"] = down
        adapter[f"base_model.model.{module}.lora_B.weight"] = up
        tensors[f"{module}.weight"] = weight + SCALE * (up @ down)
    save_file(tensors, merged / FILE, metadata={"format": "pt"})
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": SCALE * RANK,
        "target_modules": sorted({name.split(".")[-3] for name in adapter}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))


def write_quantised(checkpoint: Path, folder: Path, rounded: Path) -> list[str]:
    """Write the checkpoint as W8A8 in the form of compressed-tensors.

    Args:
        checkpoint: with one file of tensors.
        folder: of the quantised one.
        rounded: another one, with the same weights in float32.

    Returns:
        Names of its quantised modules.
    """
    for copy in (folder, rounded):
        shutil.copytree(checkpoint, copy)
    tensors = load_file(checkpoint / FILE)
    modules = list(linear_layers(tensors))
    again = dict(tensors)
    for module in modules:
        name = f"{module}.weight"
        numbers, scales = _rounded(tensors[name], OF_WEIGHTS)
        again[name] = numbers * scales
        tensors[name] = numbers.to(torch.int8)
        tensors[f"{name}_scale"] = scales
    save_file(again, rounded / FILE, metadata={"format": "pt"})
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": W8A8}
    path.write_text(json.dumps(config))
    return modules


def round_inputs(model: nn.Module, modules: list[str]) -> None:
    """Have linear layers of a reference round their tokens as W8A8 does."""

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        numbers, scales = _rounded(x, OF_TOKENS)
        return functional.linear(numbers * scales, layer.weight, layer.bias)

    for name in modules:
        layer = model.get_submodule(name)
        layer.forward = forward.__get__(layer)  # type: ignore[method-assign]


def _rounded(x: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers of at most `most`, and scales, of the last dimension."""
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / most
    return (x / scales).round(), scales
