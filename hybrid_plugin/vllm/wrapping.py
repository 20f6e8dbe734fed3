# SPDX-License-Identifier: Apache-2.0
"""How functions of vLLM are replaced: by wrappers, each once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hybrid_plugin.engine.refusals import named
from hybrid_plugin.upstream.hookpoints import resolve

WRAPPED = "_hybrid_plugin_original"
"""Attribute of a wrapper: what it wraps."""


def wrap(target: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by `wrapper(original, ...)`, once."""
    owner, name = resolve(target)
    original = getattr(owner, name)
    if not hasattr(original, WRAPPED):
        setattr(owner, name, _wrapped(original, wrapper))


def wrap_classmethod(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a class method by `wrapper(bound original, ...)`, once."""
    original = getattr(owner, name)
    if hasattr(original, WRAPPED):
        return
    function = original.__func__

    def method(cls: type, *args: Any, **kwargs: Any) -> Any:
        with named():
            return wrapper(function.__get__(cls), *args, **kwargs)

    functools.update_wrapper(method, function)
    setattr(method, WRAPPED, function)
    setattr(owner, name, classmethod(method))


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        with named():
            return wrapper(original, *args, **kwargs)

    setattr(function, WRAPPED, original)
    return function
