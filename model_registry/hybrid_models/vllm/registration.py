# SPDX-License-Identifier: Apache-2.0
"""Which of our classes vLLM is told of."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from hybrid_models import fitting
from hybrid_models.catalogue import BY_NAME, CATALOGUE, Entry, check_names
from hybrid_models.own_configs import register_configs
from hybrid_models.vllm import contracts
from hybrid_plugin.config import OPTIONS_VARIABLE, HybridConfig, environment_options
from hybrid_plugin.upstream.hookpoints import Contract
from hybrid_plugin.vllm import model_sources
from hybrid_plugin.vllm.wrapping import wrap

STATES_OP = "vllm::hybrid_models_states"
"""The operation of our state layers; graphs of a compiled model are cut at it."""
_ARGUMENTS = "vllm.engine.arg_utils"
_OURS = "hybrid_models.vllm"


def register_missing() -> None:
    """Name our class for every architecture that vLLM has none for here.  Idempotent.

    On a CPU, one that vLLM has for GPUs alone is none.

    Raises:
        ConfigError: if the environment's option `models` names what we have not.
    """
    from vllm import ModelRegistry
    from vllm.config.compilation import CompilationConfig
    from vllm.logger import init_logger

    moved = fitting.unregistered("vLLM", contracts.problems(_hooks()))
    if moved is not None:
        init_logger("vllm.hybrid_plugin").warning("%s", moved)
        return
    register_configs()
    supported = ModelRegistry.get_supported_archs()
    _name(
        entry.name
        for entry in CATALOGUE
        if entry.name not in supported or _cannot_run_here(entry.name)
    )
    prefer(HybridConfig.from_mapping(environment_options()).models)
    if STATES_OP not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(STATES_OP)
    if _ARGUMENTS in sys.modules:
        _patch_arguments()


def _hooks() -> tuple[Contract, ...]:
    """Those that can be looked at here without imports that this process spares."""
    here = _ARGUMENTS in sys.modules
    return tuple(
        hook
        for hook in contracts.REGISTRY_HOOKS
        if here or not hook.target.startswith(_ARGUMENTS)
    )


def _cannot_run_here(name: str) -> bool:
    """Whether vLLM's class of an architecture needs a GPU, and there is none."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    module = getattr(ModelRegistry.models.get(name), "module_name", "")
    needs_gpu = model_sources.installed().is_for_gpus(module)
    return needs_gpu and bool(current_platform.is_cpu())


def prefer(names: Iterable[str]) -> None:
    """Have our classes serve architectures that vLLM may have classes for.

    Raises:
        ConfigError: if we have none for one of them.
    """
    names = tuple(names)
    check_names(names)
    _name(names)


def chosen() -> tuple[Entry, ...]:
    """Architectures that our classes serve, after `register_missing`."""
    return tuple(entry for entry in CATALOGUE if is_ours(entry.name))


def is_ours(name: str) -> bool:
    """Whether vLLM serves an architecture by our class, after `register_missing`."""
    from vllm import ModelRegistry

    found = ModelRegistry.models.get(name)
    return name in BY_NAME and getattr(found, "module_name", None) == _OURS


def _name(names: Iterable[str]) -> None:
    from vllm import ModelRegistry

    from hybrid_models.vllm import convertor, states_alone

    for name in names:
        entry = BY_NAME[name]
        ModelRegistry.register_model(name, f"{_OURS}:{name}")
        if entry.is_latent:
            convertor.register(entry)
        if entry.has_states_alone:
            states_alone.register(entry)


def _patch_arguments() -> None:
    """Symptom: the option `models` of `--additional-config` comes too late.

    Cause: vLLM looks the model's class up before a plugin sees the configuration, and
    once more in each worker, which is not told of it.
    Fix: read the option before, and leave it in the environment, which processes that
    this one starts inherit.
    Delete when: a model's class can be named in the configuration.
    """

    def create(original: Callable[..., Any], engine_args: Any) -> Any:
        from hybrid_plugin.vllm.activation import given_options

        options = given_options(engine_args.additional_config)
        models = HybridConfig.from_mapping(options).models
        if models:
            prefer(models)
            everything = environment_options() | {"models": list(models)}
            os.environ[OPTIONS_VARIABLE] = json.dumps(everything)
        return original(engine_args)

    wrap(f"{_ARGUMENTS}:EngineArgs.create_model_config", create)
