# SPDX-License-Identifier: Apache-2.0
"""What SGLang's processes do first, and all alike: done once, in the fork server.

They import the modules that the plugin hooks, and those of all models, through which
SGLang looks for one.  Nothing is hooked here.
"""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import torch._dynamo.config
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.models import registry

from hybrid_plugin.sglang.contracts import ENGINE_HOOKS
from hybrid_plugin.upstream.hookpoints import LiveView, problems
from tests.engines.drivers import hook_names

NAP_S = 1e-3
"""Less than a tenth of a step."""

on_idle = Scheduler.on_idle


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


@functools.wraps(on_idle)
def idle_and_nap(scheduler: Any) -> None:
    """Leave the core to whom a scheduler waits for, or to other tests.

    While a transfer is under way, it looks for its end again and again.
    """
    on_idle(scheduler)
    if not scheduler.is_fully_idle():
        time.sleep(NAP_S)


# SGLang compiles some small functions when they are first called, on a CPU with a C++
# compiler: that takes a process longer than all of its calls.
torch._dynamo.config.disable = True
hook_names.bind_no_methods()
Scheduler.on_idle = idle_and_nap
problems(ENGINE_HOOKS, LiveView("sglang"))
registry.import_model_classes("sglang.srt.models")
registry._ModelRegistry._load_default_models = load_models
registry.ModelRegistry.models = {}
registry.ModelRegistry._default_models_loaded = False
# What is here for good is not looked through in each process again.
gc.collect()
gc.freeze()
