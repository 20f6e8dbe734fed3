# SPDX-License-Identifier: Apache-2.0
"""State layers of our own model classes, which run themselves.

They ask for their pass here, so that what is known of passes for other layers is known
to them: chunks at absolute multiples of 64 tokens, and states that a pass keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.vllm.kernels import layers, passes


@dataclass(frozen=True, slots=True)
class Weights:
    """None that could be looked up: a layer's weights are its model's own."""


def weights_of(layer: Any) -> Weights:
    """As the module has it."""
    return Weights()


def is_captured(layer: Any) -> bool:
    """Whether a CUDA graph may hold a layer's passes with prompts: its kit was told."""
    return bool(layer.captured)


def pass_of(layer: Any, metadata: Any) -> StatePass | None:
    """What a layer does in the pass that runs; None where nobody described it.

    Args:
        layer: a `hybrid_models.vllm.states.StateLayer`.
        metadata: vLLM's of the pass.
    """
    return None if layers.ours(layer) is None else passes.of(metadata)


def run(layer: Any, weights: Weights, state_pass: StatePass) -> None:
    """Nothing: no layer of vLLM's was hooked."""


def warm_up(layer: Any, weights: Weights, state_pass: StatePass) -> None:
    """Nothing: what such a layer is given, its model alone knows.  The first passes
    compile its kernels."""
