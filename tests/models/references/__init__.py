# SPDX-License-Identifier: Apache-2.0
"""Models that transformers does not have, written for the tests.

Each module has `build`, of a configuration as a dictionary, which makes a module of
token ids ``[T]`` to logits, whose parameters have the names of published checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn


def build(name: str, config: dict[str, Any]) -> nn.Module:
    """A model without weights of its own."""
    make: Callable[[dict[str, Any]], nn.Module] = import_module(
        f"{__name__}.{name}"
    ).build
    return make(config).float().eval()


def load(name: str, checkpoint: Path) -> nn.Module:
    """A model with the weights of a checkpoint."""
    from safetensors.torch import load_file

    model = build(name, json.loads((checkpoint / "config.json").read_text()))
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    return model


def causal(scores: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Weights of attention, of products ``[..., T, T]`` of one sequence."""
    count = scores.shape[-1]
    distance = torch.arange(count)[:, None] - torch.arange(count)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)
