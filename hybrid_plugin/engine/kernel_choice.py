# SPDX-License-Identifier: Apache-2.0
"""Whose kernels run a model's state layers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


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
    VERIFY = "verify"


AS_FAST: Mapping[Mixer, frozenset[Phase]] = {}
"""Where ours served at least as fast as the engines' in every measured shape, on a GPU
and inside an engine (`benchmarks/results`).  None was measured so far."""


def are_ours(option: str, mixer: Mixer, phase: Phase, device_type: str) -> bool:
    """Whether our kernels run a kind of layer.

    Args:
        option: `wanted_kernels` of `HybridConfig`.
        mixer: the kind of layer.
        phase: what the pass does.
        device_type: "cpu" or "cuda", as torch calls it.  On a CPU ours are a plain
            reference, which only `ours` asks for.
    """
    if option != "auto":
        return option == "ours"
    return device_type != "cpu" and phase in AS_FAST.get(mixer, frozenset())
