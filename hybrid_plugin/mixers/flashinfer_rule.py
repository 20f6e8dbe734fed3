# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's prefill of gated delta nets, where it can keep states on the way."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from hybrid_plugin.mixers.long_prefill import LongKernel

_MODULE = "flashinfer.gdn_prefill"
_NAME = "chunk_gated_delta_rule"
_NEEDED = frozenset(
    {
        "q",
        "k",
        "v",
        "g",
        "beta",
        "initial_state",
        "output_final_state",
        "cu_seqlens",
        "output",
        "output_state",
        "state_checkpoints",
        "checkpoint_cu_starts",
        "checkpoint_every_n_tokens",
        "backend",
        "max_seqlen",
    }
)
"""Its parameters that `long_prefill` names; 0.7.2 has them."""


def find() -> Callable[..., Any] | None:
    """The function; None if it is not installed, or keeps no states."""
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(_MODULE), _NAME)
        parameters = inspect.signature(function).parameters
    except (ImportError, AttributeError, RuntimeError, ValueError):
        return None  # an engine that takes its prefill says what is wrong with it
    return function if parameters.keys() >= _NEEDED else None


def beyond(tokens: int) -> LongKernel | None:
    """It for passes of more tokens; None as for `find`."""
    function = find()
    return None if function is None else LongKernel(function, tokens)


def words(kernel: LongKernel | None) -> str:
    """What follows, in a log, a sentence about passes that keep states."""
    if kernel is None:
        return "; FlashInfer as it is installed keeps none"
    return "; FlashInfer's runs most of what is longer"
