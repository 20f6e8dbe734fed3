# SPDX-License-Identifier: Apache-2.0
"""What a GPU's memory leaves for the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybrid_plugin.config import ConfigError
from hybrid_plugin.sizes import gib
from hybrid_plugin.tools.plan.model import stored_weight_bytes
from hybrid_plugin.tools.plan.shape import ModelShape


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Bytes for KV and states, and how they come about."""

    bytes: int
    steps: tuple[str, ...]


def cache_budget(
    shape: ModelShape,
    config: Path,
    gpu_memory: int,
    *,
    utilization: float = 0.9,
    weights: int | None = None,
    ranks: int = 1,
) -> CacheBudget:
    """Subtract the weights from what an engine may use.

    Args:
        shape: of one rank.
        config: the model's config.json, beside which its weights may lie.
        gpu_memory: bytes of one GPU.
        utilization: share of them that the engine may use; the rest is for
            activations and whatever else needs memory.
        weights: bytes of the weights on one GPU; by default what the checkpoint
            says, or an estimate from the shape.
        ranks: GPUs that share the weights.

    Raises:
        ConfigError: if nothing is left.
    """
    usable = int(gpu_memory * utilization)
    stored = stored_weight_bytes(config)
    if weights is not None:
        source = "as given"
    elif stored is not None:
        weights, source = -(-stored // ranks), f"the checkpoint's size / {ranks} GPUs"
    else:
        weights = int(shape.parameters * shape.weight_bytes)
        source = (
            f"estimated: {shape.parameters / 1e9:.2f} billion x "
            f"{shape.weight_bytes:g} bytes"
        )
    left = usable - weights
    if left <= 0:
        raise ConfigError(
            f"The weights take {gib(weights)} ({source}) of {gib(usable)} that may be "
            "used, and leave nothing for the cache; give more --gpu-memory, more "
            "--tensor-parallel, or the real size by --weights."
        )
    return CacheBudget(
        left,
        (
            f"GPU memory: {gib(gpu_memory)} x {utilization:g} = {gib(usable)}",
            f"weights: {gib(weights)} ({source})",
            f"cache: {gib(usable)} - {gib(weights)} = {gib(left)}",
        ),
    )
