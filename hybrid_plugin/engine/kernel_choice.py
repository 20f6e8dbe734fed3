# SPDX-License-Identifier: Apache-2.0
"""Whose kernels run a model's state layers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from hybrid_plugin.config import HybridConfig


class Mixer(StrEnum):
    """A kind of state layer that `hybrid_plugin.mixers` runs."""

    GATED_DELTA_NET = "gated_delta_net"
    KDA = "kda"
    MAMBA2 = "mamba2"
    LIGHTNING = "lightning"
    SHORT_CONV = "short_conv"


class Phase(StrEnum):
    """What a forward pass does with a sequence."""

    PREFILL = "prefill"
    DECODE = "decode"


AS_FAST: Mapping[Mixer, frozenset[Phase]] = {}
"""Where ours served at least as fast as the engines' in every measured shape, on a GPU
and inside an engine (`benchmarks/results`).  None was measured so far."""


def are_ours(
    options: HybridConfig, mixer: Mixer, phase: Phase, device_type: str
) -> bool:
    """Whether our kernels run a kind of layer.

    Args:
        options: of the plugin; `deterministic` needs ours everywhere.
        mixer: the kind of layer.
        phase: prefill or decode.
        device_type: "cpu" or "cuda", as torch calls it.  On a CPU ours are a plain
            reference, which only `ours` asks for.
    """
    if options.kernels != "auto":
        return options.kernels == "ours"
    if options.is_deterministic:
        return True
    return device_type != "cpu" and phase in AS_FAST.get(mixer, frozenset())
