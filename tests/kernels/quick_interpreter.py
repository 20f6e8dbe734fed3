# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without work that it repeats, a quarter of all that it does.

Whenever a kernel calls a function, it looks through all names of Triton's language for
those to replace, which the launch of the kernel has replaced already.  Whenever it
makes a tensor, it makes a table of all types.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


def speed_up(interpreter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter do each once, until the patch is undone.

    Args:
        interpreter: `triton.runtime.interpreter`, of a Triton whose launches undo what
            they replace; another is left as it is.
        monkeypatch: that undoes it.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    monkeypatch.setattr(interpreter, "_patch_lang", replaced_once(interpreter))
    monkeypatch.setattr(interpreter, "_get_np_dtype", types_once(interpreter))


def replaced_once(interpreter: ModuleType) -> Callable[[Any], Any]:
    """In place of `_patch_lang`: nothing where a launch has replaced all that it would.

    Args:
        interpreter: as above.
    """
    replace, language = interpreter._patch_lang, interpreter.tl
    replaced: list[ModuleType] = []

    def patch_lang(function: Any) -> Any:
        seen = function.__globals__.values()
        wanted = [m for m in (language, language.core) if any(v is m for v in seen)]
        new = [module for module in wanted if module not in replaced]
        if wanted and not new:
            return interpreter._LangPatchScope()
        scope = replace(function)
        undo = scope.restore

        def restore() -> None:
            undo()
            for module in new:
                replaced.remove(module)

        replaced.extend(new)
        scope.restore = restore
        return scope

    return patch_lang


def types_once(interpreter: ModuleType) -> Callable[[Any], Any]:
    """In place of `_get_np_dtype`: NumPy's type for Triton's, looked up once for each.

    Args:
        interpreter: as above.
    """
    look_up, core = interpreter._get_np_dtype, interpreter.tl.core
    known: dict[str, Any] = {}

    def np_type(of: Any) -> Any:
        element = of.element_ty if type(of) is core.block_type else of
        if type(element) is not core.dtype:
            return look_up(of)
        if element.name not in known:
            known[element.name] = look_up(of)
        return known[element.name]

    return np_type
