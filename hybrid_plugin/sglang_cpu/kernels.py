# SPDX-License-Identifier: Apache-2.0
"""Puts our kernels in the place of SGLang's, in one process, all or none.

SGLang's own hook registry is not used: it logs a hook that fails and goes on, and
applying it here, in the middle of an import, would apply hooks of others twice.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from hybrid_plugin.config import ConfigError
from hybrid_plugin.sglang_cpu import draft_blocks
from hybrid_plugin.sglang_cpu.adapters import adapt_in_plain_memory
from hybrid_plugin.sglang_cpu.compressed_keys import (
    choose_as_few_as_asked,
    choose_in_torch,
    keep_waiting_keys_in_float32,
)
from hybrid_plugin.sglang_cpu.draft_attention import verify_with_a_mask
from hybrid_plugin.sglang_cpu.draft_trees import links_of_mask
from hybrid_plugin.sglang_cpu.experts import leave_experts_to_their_rank
from hybrid_plugin.sglang_cpu.headless_models import leave_models_without_heads
from hybrid_plugin.sglang_cpu.replacements import (
    INSTALLED,
    MISSING_NAMES,
    REPLACEMENTS,
    TREE_MASKS,
)
from hybrid_plugin.sglang_cpu.residual_streams import (
    embed_in_the_models_type,
    mix_in_the_models_type,
)
from hybrid_plugin.sglang_cpu.sparse_latents import (
    plan_in_plain_memory,
    read_chosen_latents,
)
from hybrid_plugin.sglang_cpu.window_attention import read_windows_in_their_pool
from hybrid_plugin.upstream.hookpoints import HookPoint, LiveView, problems, resolve

_PACKAGE = "hybrid_plugin.sglang_cpu"


def install() -> None:
    """Replace every kernel in `hooks`; a second call changes nothing.

    Raises:
        ConfigError: naming each hook point that this SGLang moved.
    """
    import_tree_masks()
    require(INSTALLED)
    for replacement in REPLACEMENTS:
        replace(replacement.point.target, load(replacement.ours))
    for missing in MISSING_NAMES:
        module = importlib.import_module(missing.point.module)
        setattr(module, missing.name, load(missing.ours))
    read_windows_in_their_pool()
    verify_with_a_mask()
    draft_blocks.attend_in_torch()
    draft_blocks.sample_blocks()
    read_chosen_latents()
    plan_in_plain_memory()
    adapt_in_plain_memory()
    choose_in_torch()
    choose_as_few_as_asked()
    keep_waiting_keys_in_float32()
    mix_in_the_models_type()
    embed_in_the_models_type()
    leave_models_without_heads(replace)
    leave_experts_to_their_rank(replace)


def require(points: Iterable[HookPoint]) -> None:
    """Check what this package relies on.

    Raises:
        ConfigError: naming each hook point that this SGLang moved.
    """
    view = LiveView("sglang")
    found = problems(points, view)
    if found:
        raise ConfigError(
            f"hybrid-plugin's CPU platform does not fit SGLang {view.version}: "
            f"{'; '.join(found)}. Install a version it supports."
        )


def import_tree_masks() -> None:
    """Symptom: n-gram drafts do not start, "No module named 'sgl_kernel'".

    Cause: off CUDA a module takes the function that reads masks of trees from a
    package that is compiled for other machines.
    Fix: import it with ours in that function's place.
    Delete when: `reconstruct_tree` asks the platform for it.
    """
    standing_in = ModuleType("sgl_kernel.speculative")
    standing_in.reconstruct_indices_from_tree_mask = links_of_mask  # type: ignore[attr-defined]
    names = ("sgl_kernel", standing_in.__name__)
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.setdefault("sgl_kernel", ModuleType("sgl_kernel"))
    sys.modules[standing_in.__name__] = standing_in
    try:
        importlib.import_module(TREE_MASKS.module)
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def load(ours: str) -> Callable[..., Any]:
    """The function that `module:function` names in this package."""
    module, _, name = ours.partition(":")
    function = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
    assert callable(function)
    return function


def replace(target: str, function: Callable[..., Any]) -> None:
    """Bind `target`, and what other modules imported of it, to `function`."""
    owner, name = resolve(target)
    original = getattr(owner, name)
    if original is function:
        return
    setattr(owner, name, function)
    if isinstance(owner, ModuleType):
        _rebind(original, function)


def _rebind(original: Any, function: Callable[..., Any]) -> None:
    """Follow `from module import name` in modules that are imported already."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, function)
