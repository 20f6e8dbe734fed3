# SPDX-License-Identifier: Apache-2.0
"""Which of our classes SGLang is told of, and how.

SGLang reads what a hybrid model keeps off its configuration, in every process, and
looks classes up when it loads the model.  Importing all of its models to see which
there are takes many seconds, so their source is searched instead.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybrid_models import fitting
from hybrid_models.catalogue import BY_NAME, CATALOGUE, Entry, check_names
from hybrid_models.own_configs import register_configs
from hybrid_models.sglang import contracts
from hybrid_models.sglang.patches import patch_shapes
from hybrid_plugin.config import ConfigError, HybridConfig, environment_options
from hybrid_plugin.sglang import activation
from hybrid_plugin.sglang.log import logger

PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
"""SGLang's: the one package of models besides its own."""
_OURS = "hybrid_models.sglang.entries"
_MODELS = "sglang.srt.models"
_BACKENDS = "sglang.srt.layers.attention"
_CHOSEN: dict[str, Entry] = {}
"""What we serve, by name."""


def chosen() -> tuple[Entry, ...]:
    """Architectures that our classes serve in this process."""
    return tuple(_CHOSEN.values())


def register_missing() -> None:
    """Name our classes, and what SGLang asks their configurations.  Idempotent.

    Raises:
        ConfigError: if the option `models` names what we have not, and the plugin is
            asked for.
    """
    moved = fitting.unregistered("SGLang", contracts.problems(contracts.CONFIG_HOOKS))
    if moved is not None:
        logger.warning("%s", moved)
        return
    register_configs()
    _choose_by_options()
    _offer_classes()
    patch_shapes(chosen)
    # This process reads its options before its command line.
    activation.when_taken(_choose_by_options)


def _choose_by_options() -> None:
    theirs = classes_of_sglang()
    models = _preferred()
    missing = (entry.name for entry in CATALOGUE if entry.name not in theirs)
    _choose((*missing, *models))


def _preferred() -> tuple[str, ...]:
    """The option `models`; options that cannot be read count where they are used.

    Raises:
        ConfigError: for those, and for what we have not, in a server that asks for the
            plugin.
    """
    try:
        models = HybridConfig.from_mapping(environment_options()).models
        check_names(models)
    except ConfigError:
        if activation.requested():
            raise
        return ()
    return models


def _choose(names: Iterable[str]) -> None:
    for name in names:
        if name not in _CHOSEN:
            _CHOSEN[name] = BY_NAME[name]
            _register_config(BY_NAME[name])


@lru_cache
def classes_of_sglang() -> frozenset[str]:
    """Names in the catalogue that the modules of SGLang's models define classes of."""
    package = importlib.util.find_spec(_MODELS)
    folders = None if package is None else package.submodule_search_locations
    names = "|".join(entry.name for entry in CATALOGUE)
    defines = re.compile(rf"^class ({names})\b", re.MULTILINE)
    return frozenset(
        name
        for folder in folders or ()
        for file in Path(folder).rglob("*.py")
        for name in defines.findall(file.read_text(errors="replace"))
    )


def _register_config(entry: Entry) -> None:
    """Have SGLang find the layers and states of an architecture."""
    from sglang.srt.configs.linear_attn_model_registry import (
        LinearAttnModelSpec,
        register_linear_attn_model,
    )
    from sglang.srt.utils.hf_transformers import common

    from hybrid_models.sglang.configs import config_class

    config = config_class(entry.model_type)
    common._CONFIG_REGISTRY[entry.model_type] = config
    register_linear_attn_model(
        LinearAttnModelSpec(
            config_class=config,
            arch_names=[entry.name],
            backend_class_name="hybrid_models.sglang.backend.StateBackend",
            hybrid_backend_class_name=f"{_BACKENDS}.hybrid_linear_attn_backend"
            ".ShortConvHybridAttnBackend",
        )
    )


def _offer_classes() -> None:
    """Have SGLang import our classes when it looks for one.

    Symptom: "Model architectures [...] are not supported for now", or the
    model runs on SGLang's Transformers backend, which knows no states.
    Cause: SGLang's registry takes one package of models besides its own.
    Fix: be that package; where a user has named another one, add ours just before a
    class is looked up.
    Delete when: SGLang takes classes from plugins.
    """
    named = os.environ.setdefault(PACKAGE_VARIABLE, _OURS)
    if named == _OURS:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_loader.utils.get_model_architecture",
        _add_classes,
        HookType.BEFORE,
    )


def _add_classes(*_: Any, **__: Any) -> None:
    from sglang.srt.models.registry import ModelRegistry

    from hybrid_models.sglang.model import model_class

    for entry in chosen():
        ModelRegistry.models[entry.name] = model_class(entry)
