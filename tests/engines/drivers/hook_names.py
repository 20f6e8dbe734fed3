# SPDX-License-Identifier: Apache-2.0
"""Has SGLang look for a hook's other names only where there may be some."""

from __future__ import annotations

from sglang.srt.plugins import hook_registry

propagate = hook_registry._propagate_patch


def propagate_unless_method(original: object, wrapped: object, source: object) -> int:
    """Bind a hook wherever a module has imported what it wraps.

    For each of a hundred hooks, SGLang looks through all names of all modules, which
    takes seconds.  Most hooks wrap methods, and no module has a method as a name.
    """
    if "." in getattr(original, "__qualname__", ""):
        return 0
    return propagate(original, wrapped, source)


def bind_no_methods() -> None:
    """From now on, in this process and those forked from it."""
    hook_registry._propagate_patch = propagate_unless_method
