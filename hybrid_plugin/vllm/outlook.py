# SPDX-License-Identifier: Apache-2.0
"""What vLLM and the plugin would do with a model, without loading weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hybrid_plugin.config import ConfigError
from hybrid_plugin.engine.outlook import Outlook, Prospect
from hybrid_plugin.vllm import activation, lone_rank

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

    parser, serve = FlexibleArgumentParser(prog="vllm"), ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    parsed = parser.parse_args(["serve", model, *flags])
    parsed.model = model
    serve.validate(parsed)
    _load_parsers(parsed)
    args = AsyncEngineArgs.from_cli_args(parsed)
    return args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def _load_parsers(parsed: Namespace) -> None:
    """Load files that bring parsers of answers, as the server does first of all.

    Raises:
        ValueError: naming the flag whose parser there is not, in no file either.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if parsed.tool_parser_plugin:
        ToolParserManager.import_tool_parser(parsed.tool_parser_plugin)
    if parsed.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(parsed.reasoning_parser_plugin)
    for flag, name, manager in (
        ("--tool-call-parser", parsed.tool_call_parser, ToolParserManager),
        ("--reasoning-parser", parsed.reasoning_parser, ReasoningParserManager),
    ):
        if name and name not in manager.list_registered():
            raise ValueError(f"{flag} names {name}, and vLLM has no such parser.")


def _failure(error: BaseException) -> Outlook:
    """vLLM wraps what the plugin raises while it validates a configuration."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError):
            return Outlook(Prospect.REFUSED, str(cause))
        cause = cause.__cause__ or cause.__context__
    words = _words(error)
    if "hybrid-plugin" in words or "hybrid_plugin" in words:
        return Outlook(Prospect.REFUSED, words)
    if isinstance(error, SystemExit):
        return Outlook(Prospect.FAILS, "vLLM does not take these flags; see above.")
    return Outlook(Prospect.FAILS, words)


def _words(error: BaseException) -> str:
    """What an error says, without the frame in which pydantic shows it."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error) or repr(error)
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    return str(cause or first["msg"])


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
    try:
        with lone_rank.built(config):
            pass
    except ValueError as error:
        return Outlook(
            Prospect.FAILS,
            f"{missing}, and its Transformers backend cannot run it: {error}",
        )
    return Outlook(
        Prospect.LEFT_ALONE, f"{missing}; for its Transformers backend {idle}"
    )


def _lay_out(config: VllmConfig) -> CacheLayout:
    """Plan for the layers that the model has."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from hybrid_plugin.vllm import (
        context_parallel,
        page_layout,
        page_size,
        planning,
        servable,
    )

    with lone_rank.built(config):
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
        return planning.make_layout(
            planning.make_groups(specs(), context_parallel.page_ranks(config)),
            packed=packed,
            page_size=config.cache_config.block_size,
        )


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
