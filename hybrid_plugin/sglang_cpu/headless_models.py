# SPDX-License-Identifier: Apache-2.0
"""Models without attention heads on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hybrid_plugin.upstream.hookpoints import resolve

DIVIDES_HEADS = "sglang.srt.configs.update_config:adjust_config_with_unaligned_cpu_tp"
_APPLIED = "_hybrid_plugin_original"


def leave_models_without_heads(
    replace: Callable[[str, Callable[..., Any]], None],
) -> None:
    """Symptom: on a CPU, models without attention layers do not start, "unsupported
    operand type(s) for %: 'NoneType' and 'int'".

    Cause: SGLang divides a model's attention heads by the ranks before it loads it.
    Fix: nothing is divided where there are none.
    Delete when: `adjust_config_with_unaligned_cpu_tp` asks whether there are heads.

    Args:
        replace: binds a target, wherever it was imported, to a function.
    """
    owner, name = resolve(DIVIDES_HEADS)
    original = getattr(owner, name)
    if not hasattr(original, _APPLIED):
        replace(DIVIDES_HEADS, _where_there_are_some(original))


def _where_there_are_some(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def adjust(model_config: Any, load_config: Any, tp_size: int) -> Any:
        if model_config.num_attention_heads is None:
            return model_config
        return original(model_config, load_config, tp_size)

    setattr(adjust, _APPLIED, original)
    return adjust
