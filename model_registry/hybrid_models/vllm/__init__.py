# SPDX-License-Identifier: Apache-2.0
"""The package's model classes in vLLM.

`register` names them to vLLM, in every process that it starts.  The classes are made
when vLLM asks for one: ``hybrid_models.vllm:BambaForCausalLM``.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point of `vllm.general_plugins`: names our classes for what vLLM lacks."""
    from hybrid_models.vllm.registration import register_missing

    register_missing()


def __getattr__(name: str) -> Any:
    from hybrid_models.catalogue import BY_NAME

    if name not in BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hybrid_models.vllm.model import model_class

    return model_class(BY_NAME[name])
