# SPDX-License-Identifier: Apache-2.0
"""What SGLang's processes do first, and all alike: done once, in the fork server.

They import the modules that the plugin hooks, and those of all models, through which
SGLang looks for one.  Nothing is hooked here.
"""

from __future__ import annotations

import gc
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.models import registry
from sglang.srt.plugins import hook_registry

from hybrid_plugin.sglang.contracts import ENGINE_HOOKS
from hybrid_plugin.upstream.hookpoints import LiveView, problems

propagate = hook_registry._propagate_patch


def propagate_unless_method(original: object, wrapped: object, source: object) -> int:
    """Bind a hook wherever a module has imported what it wraps.

    For each of a hundred hooks, SGLang looks through all names of all modules, which
    takes seconds.  Most hooks wrap methods, and no module has a method as a name.
    """
    if "." in getattr(original, "__qualname__", ""):
        return 0
    return propagate(original, wrapped, source)


def load_models(models: Any) -> None:
    """Have SGLang's models, and those of the package that the environment names now.

    SGLang looks for that package as it imports its registry, for a process of its own
    after the plugin has named it.
    """
    if models._default_models_loaded:
        return
    package = envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get()
    others = registry.import_model_classes(package) if package else {}
    own = registry.import_model_classes("sglang.srt.models")
    models.models = own | others | models.models
    models._default_models_loaded = True


hook_registry._propagate_patch = propagate_unless_method
problems(ENGINE_HOOKS, LiveView("sglang"))
registry.import_model_classes("sglang.srt.models")
registry._ModelRegistry._load_default_models = load_models
registry.ModelRegistry.models = {}
registry.ModelRegistry._default_models_loaded = False
# What is here for good is not looked through in each process again.
gc.collect()
gc.freeze()
