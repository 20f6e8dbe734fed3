# SPDX-License-Identifier: Apache-2.0
"""What the model classes change in SGLang, once one of them is built."""

from __future__ import annotations

import functools
from typing import Any

_OURS = "_hybrid_models_original"
"""Attribute of a wrapper: what it wraps."""


def patch_graph_layers() -> None:
    """Keep models that capture no prefills out of SGLang's graphs of them.  Idempotent.

    Symptom: prefills of a model whose layers all look like attention to SGLang, as
    those of Zaya and OLMo-Hybrid do, are captured, with the states of the capture's
    sequences in the graph.
    Cause: SGLang finds attention by names of attributes, and captures a model in which
    every layer has some.
    Fix: find none in a model that says `captures_prefills = False`; SGLang then says
    that it captures none, and why.
    Delete when: a model can say that it is not to be captured.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner.get_cuda_graph_layers
    if hasattr(original, _OURS):
        return

    @functools.wraps(original)
    def get_cuda_graph_layers(runner: Any, layer_model: Any) -> Any:
        found = original(runner, layer_model)
        if getattr(layer_model, "captures_prefills", True):
            return found
        nothing = [None] * len(found.attention_layers)
        return found._replace(attention_layers=nothing, mha_companion_layers=nothing)

    setattr(get_cuda_graph_layers, _OURS, original)
    ModelRunner.get_cuda_graph_layers = get_cuda_graph_layers
