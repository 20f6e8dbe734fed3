# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin was asked for, with which options, in every process alike.

The command line is parsed once, in the server.  What was asked for travels to
the scheduler processes in two environment variables, which `spawn` inherits;
users of `sglang.Engine(...)` set them themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from hybrid_plugin.config import (
    ENABLE_VARIABLE,
    OPTIONS_VARIABLE,
    ConfigError,
    HybridConfig,
    environment_options,
    parse_options,
    switched_off_by_environment,
)
from hybrid_plugin.engine.refusals import ending_the_server
from hybrid_plugin.sglang.log import logger

_LISTENERS: list[Callable[[], None]] = []
FLAG = "--enable-hybrid-plugin"
OPTIONS_FLAG = "--hybrid-config"


def requested() -> bool:
    """Whether this process, or the one that started it, was asked for the plugin.

    Before the command line is parsed, a flag counts as argparse would read it; one
    in a file that `--config` names is seen once it is parsed.

    Raises:
        ConfigError: if the environment variable says neither yes nor no.
    """
    enabled = _enabled_by_options()
    if enabled is False:
        return False
    if os.environ.get(ENABLE_VARIABLE, "").strip():
        return not switched_off_by_environment()
    return enabled is True or any(map(_means_flag, sys.argv))


def _enabled_by_options() -> bool | None:
    """The option `enabled`; None without one that can be read."""
    try:
        enabled = environment_options().get("enabled")
    except ConfigError:  # told of where the options are read
        return None
    return enabled if isinstance(enabled, bool) else None


def _means_flag(argument: str) -> bool:
    """Whether argparse would take an argument for our flag, abbreviated or not."""
    return len(argument) > len("--enable-") and FLAG.startswith(argument)


def read_options() -> HybridConfig:
    """The options of this process, from the environment; each text is parsed once.

    Raises:
        ConfigError: for what is no JSON object, or not valid options.
    """
    return _parse(os.environ.get(OPTIONS_VARIABLE, "").strip() or "{}")


@lru_cache(maxsize=1)
def _parse(text: str) -> HybridConfig:
    return HybridConfig.from_mapping(parse_options(text, OPTIONS_VARIABLE))


def when_taken(listener: Callable[[], None]) -> None:
    """Have a function called once the command line's options are in the environment.

    It is called before SGLang makes its arguments, and may raise `ConfigError`.
    """
    if listener not in _LISTENERS:
        _LISTENERS.append(listener)


def add_arguments(result: Any, parser: argparse.ArgumentParser) -> None:
    """Add our two flags to SGLang's parser."""
    group = parser.add_argument_group("hybrid-plugin")
    group.add_argument(
        FLAG,
        action="store_true",
        help="Let hybrid-plugin keep the caches of a model with state layers, or with "
        "windows beside full attention.",
    )
    group.add_argument(
        OPTIONS_FLAG,
        type=str,
        default=None,
        metavar="JSON",
        help="Options of hybrid-plugin, as a JSON object; see docs/options.md.",
    )


def take_arguments(_cls: type, args: argparse.Namespace) -> None:
    """Pass on to child processes what the command line says.

    Options of the command line go before those of the environment, name by name.

    Raises:
        SystemExit: for options that are not valid.
    """
    flag: bool = getattr(args, "enable_hybrid_plugin", False)
    text: str | None = getattr(args, "hybrid_config", None)
    with ending_the_server():
        if flag or text is not None:
            _pass_on(flag, {} if text is None else parse_options(text, OPTIONS_FLAG))
        for listener in _LISTENERS:
            listener()


def set_option(name: str, value: Any) -> None:
    """Set an option of this process and its children, as the command line would.

    Args:
        name: of the option.
        value: as in JSON.

    Raises:
        ConfigError: if it does not go with the others.
    """
    merged = environment_options() | {name: value}
    HybridConfig.from_mapping(merged)
    _write_options(merged)


def _write_options(merged: dict[str, Any]) -> None:
    """Leave options where `read_options` finds them, here and in child processes."""
    os.environ[OPTIONS_VARIABLE] = json.dumps(merged)


def _pass_on(flag: bool, given: dict[str, Any]) -> None:
    """Leave what was asked for in the environment.

    Args:
        flag: whether `--enable-hybrid-plugin` was given.
        given: options of the command line.

    Raises:
        ConfigError: for options that are not valid, or contradict the flag.
    """
    merged = environment_options() | given
    options = HybridConfig.from_mapping(merged)
    if not flag and options.enabled is None and not requested():
        raise ConfigError(f"{OPTIONS_FLAG} needs {FLAG}.")
    _write_options(merged)
    if options.enabled is False:
        logger.info('hybrid-plugin is inactive: the option "enabled" is false.')
        return
    if os.environ.get(ENABLE_VARIABLE, "").strip() and switched_off_by_environment():
        asked = FLAG if flag else OPTIONS_FLAG
        raise ConfigError(f"{asked} is given and {ENABLE_VARIABLE} says no.")
    os.environ[ENABLE_VARIABLE] = "1"
