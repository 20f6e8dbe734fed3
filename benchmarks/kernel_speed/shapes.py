# SPDX-License-Identifier: Apache-2.0
"""State layers of models, each whole on one GPU, and inputs for them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import torch

from .timing import ROTATE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where inputs lie; without a GPU points can be built, and nothing timed."""


@dataclass(frozen=True)
class Head:
    """A layer with `keys` key heads (groups) of `depth`, `values` heads of `width`."""

    model: str
    keys: int
    values: int
    depth: int
    width: int

    def pool(self, slots: int, fill: float | None = None) -> torch.Tensor:
        """Float32 states; random without `fill`."""
        shape = (slots, self.values, self.width, self.depth)
        if fill is None:
            return torch.randn(shape, device=DEVICE)
        return torch.full(shape, fill, device=DEVICE)


DELTA = [
    Head("Qwen3-Next-80B-A3B", 16, 32, 128, 128),
    Head("Qwen3.5-397B-A17B", 16, 64, 128, 128),
]
KDA = [Head("Kimi-Linear-48B-A3B", 32, 32, 128, 128)]
SSD = [
    Head("Nemotron-H-8B", 8, 128, 128, 64),
    Head("Falcon-H1-34B", 2, 32, 256, 128),
]
CHANNELS = 8192
"""Of the convolution: Qwen3-Next's queries, keys and values."""
BATCHES = (1, 8, 32, 64, 128, 256, 512)
VERIFY_BATCHES = (1, 8, 32, 128)
"""A state for each draft of larger ones leaves no room for the peers'."""
PREFILLS = (
    (1, 8192),  # first: peers tune themselves here
    (1, 128),
    (1, 1024),
    (1, 32768),
    (1, 131072),
    (8, 1024),
    (64, 128),
)
"""Sequences, and tokens of each."""


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal random numbers."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def rotating_slots(batch: int, scattered: bool = True) -> tuple[int, torch.Tensor]:
    """How many slots a pool needs, and `ROTATE` disjoint lists; slot 0 is unused.

    Without `scattered` they lie in order, for peers that know no slots.
    """
    count = ROTATE * batch
    order = torch.randperm(count) if scattered else torch.arange(count)
    return count + 1, (order + 1).view(ROTATE, batch).int().to(DEVICE)


def peer(module: str, name: str) -> Any:
    """A function of another library, or None if it cannot be imported."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # an import may fail in any way
        print(f"no {module}.{name}: {error!r}", file=sys.stderr)
        return None
