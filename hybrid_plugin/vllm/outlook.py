# SPDX-License-Identifier: Apache-2.0
"""What vLLM and the plugin would do with a model, without loading weights."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_plugin.config import ConfigError
from hybrid_plugin.engine.outlook import Outlook, Prospect
from hybrid_plugin.vllm import activation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from hybrid_plugin.core.memory.layout import CacheLayout


def foresee(model: str, flags: Sequence[str], cache_bytes: int) -> Outlook:
    """Configure an engine as `vllm serve MODEL FLAGS` does, and lay its cache out.

    Args:
        model: a folder with a config.json, or a name vLLM takes.
        flags: of `vllm serve`.
        cache_bytes: of both pools together, on one rank.
    """
    try:
        config = _configure(model, flags)
    except (Exception, SystemExit) as error:
        return _failure(error)
    if not activation.is_active(config):
        return _why_not(config)
    if config.parallel_config.world_size > 1:
        note = "sizes are worked out for one rank; leave the parallel sizes out"
        return Outlook(Prospect.SERVED, note=note)
    try:
        layout = _lay_out(config)
    except ConfigError as error:
        return Outlook(Prospect.REFUSED, str(error))
    except Exception as error:
        note = f"vLLM could not build the model without weights ({error!r})"
        return Outlook(Prospect.SERVED, note=note)
    return _sized(config, layout, cache_bytes)


def _configure(model: str, flags: Sequence[str]) -> VllmConfig:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers())
    parsed = parser.parse_args(["serve", model, *flags])
    parsed.model = model
    args = AsyncEngineArgs.from_cli_args(parsed)
    return args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def _failure(error: BaseException) -> Outlook:
    """vLLM wraps what the plugin raises while it validates a configuration."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError):
            return Outlook(Prospect.REFUSED, str(cause))
        cause = cause.__cause__ or cause.__context__
    if "hybrid-plugin" in str(error) or "hybrid_plugin" in str(error):
        return Outlook(Prospect.REFUSED, str(error))
    if isinstance(error, SystemExit):
        return Outlook(Prospect.FAILS, "vLLM does not take these flags; see above.")
    return Outlook(Prospect.FAILS, str(error) or repr(error))


def _why_not(config: VllmConfig) -> Outlook:
    options = activation.read_options(config)
    idle = activation.reason_to_stay_idle(config, options)
    if idle is not None and config.model_config.using_transformers_backend():
        return _without_an_implementation(config, idle)
    if idle is not None:
        return Outlook(Prospect.LEFT_ALONE, idle)
    return Outlook(Prospect.REFUSED, next(activation.conflicts(config)))


def _without_an_implementation(config: VllmConfig, idle: str) -> Outlook:
    """A model that vLLM runs by transformers' code, which it can for attention only.

    Such a model counts as one without state layers, whatever it has.
    """
    architectures = getattr(config.model_config.hf_config, "architectures", None)
    missing = f"vLLM has no implementation of {', '.join(architectures or ())}"
    if config.parallel_config.world_size == 1:
        try:
            _build(config)
        except ValueError as error:
            return Outlook(
                Prospect.FAILS,
                f"{missing}, and its Transformers backend cannot run it: {error}",
            )
    return Outlook(
        Prospect.LEFT_ALONE, f"{missing}; for its Transformers backend {idle}"
    )


def _build(config: VllmConfig) -> None:
    """Build the model without memory; its layers enter the configuration."""
    import torch
    from vllm.config.vllm import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with (
        tempfile.TemporaryDirectory() as folder,
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
    ):
        meeting_point = f"file://{Path(folder, 'rank0')}"
        init_distributed_environment(1, 0, meeting_point, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            initialize_model(config)


def _lay_out(config: VllmConfig) -> CacheLayout:
    """Plan for the layers that the model has."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from hybrid_plugin.vllm import page_layout, page_size, planning, servable

    _build(config)
    layers = config.compilation_config.static_forward_context

    def specs() -> dict[str, KVCacheSpec]:
        return {
            name: spec
            for name, layer in layers.items()
            if isinstance(layer, AttentionLayerBase)
            and (spec := layer.get_kv_cache_spec(config)) is not None
        }

    reason = servable.find_out(config, specs)
    if reason is not None:
        raise servable.UnservableError(reason)
    page_size.choose(config)
    packed = page_layout.obstacle(config) is None
    return planning.make_layout(planning.make_groups(specs()), packed=packed)


def _sized(config: VllmConfig, layout: CacheLayout, cache_bytes: int) -> Outlook:
    from hybrid_plugin.vllm import planning

    options, limits = activation.read_options(config), planning.limits_of(config)
    found = Outlook.sized(layout, cache_bytes, options, limits, activation.logger)
    drafts = config.num_speculative_tokens
    if not drafts or not layout.states:
        return found
    note = (
        f"a sequence that verifies drafts borrows {drafts} more state slots, and "
        "decodes without drafts where there are none"
    )
    return replace(found, note=note)
