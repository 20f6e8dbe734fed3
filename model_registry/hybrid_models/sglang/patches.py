# SPDX-License-Identifier: Apache-2.0
"""What the model classes change in SGLang, once one of them is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from hybrid_models import fitting
from hybrid_models.catalogue import Entry
from hybrid_models.sglang import contracts

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


def patch_shapes(chosen: Callable[[], Iterable[Entry]]) -> None:
    """Have SGLang look for no attention in models without any.

    Symptom: "object has no attribute 'num_attention_heads'", of a model whose layers
    all keep states.
    Cause: SGLang knows models without attention by a list of their names.
    Fix: put ours on it before SGLang looks there.
    Delete when: `LinearAttnModelSpec` can say it.

    Args:
        chosen: architectures that our classes serve.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def enter(model: Any, *_: Any, **__: Any) -> None:
        asked = model.hf_config.architectures or ()
        alone = {e.name for e in chosen() if e.has_states_alone and e.name in asked}
        if alone:
            problems = contracts.problems(contracts.STATES_ALONE_HOOKS)
            fitting.require("SGLang", problems)
            enter_states_alone(alone)

    shapes = "sglang.srt.configs.model_config.ModelConfig._derive_model_shapes"
    HookRegistry.register(shapes, enter, HookType.BEFORE)


def enter_states_alone(names: Iterable[str]) -> None:
    """Put architectures on SGLang's list of those without attention.  Idempotent."""
    from sglang.srt.configs import model_config

    known = model_config.PURE_SSM_ARCHITECTURES
    new = sorted(set(names) - set(known))
    model_config.PURE_SSM_ARCHITECTURES = (*known, *new)
