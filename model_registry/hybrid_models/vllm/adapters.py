# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on the linear layers of our classes, which vLLM puts there.

vLLM wraps a merged projection only if it knows which modules of a checkpoint it is made
of.  For those that a checkpoint has as one module nothing says so, and adapters of them
would be left out without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
)

from hybrid_models import fitting
from hybrid_models.vllm import contracts
from hybrid_models.weights import EXPERTS, TILES

Packed = Mapping[str, list[str]]
"""A module here, and those of the checkpoint that it is made of."""


def with_single(packed: Packed, model: nn.Module) -> dict[str, list[str]]:
    """What `packed` says, and merged projections that a checkpoint has as one module.

    Args:
        packed: of the architecture, by the last parts of names.
        model: with vLLM's layers.
    """
    merged = (MergedColumnParallelLinear, QKVParallelLinear)
    found = {name: list(parts) for name, parts in packed.items()}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, merged):
            found.setdefault(last, [last])
    return found


def check(vllm_config: Any, model: nn.Module) -> None:
    """Refuse a model that cannot be served with adapters, if they are asked for.

    Raises:
        ConfigError: if vLLM's layers for adapters are not as we know them.
        ValueError: for experts, and for projections some of whose parts every rank has
            whole.
    """
    if vllm_config.lora_config is None:
        return
    fitting.require("vLLM", contracts.problems(contracts.ADAPTER_HOOKS))
    for name, module in model.named_modules():
        if hasattr(module, EXPERTS):
            raise ValueError(
                "model classes of hybrid-plugin with experts are not served with LoRA: "
                "start the server without --enable-lora"
            )
        if hasattr(module, TILES):
            raise ValueError(
                f"every rank has parts of {name} whole, and an adapter would be cut "
                "otherwise: use --tensor-parallel-size 1, or leave out --enable-lora"
            )
