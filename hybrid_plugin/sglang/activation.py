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
from typing import Any

from hybrid_plugin.config import (
    ENABLE_VARIABLE,
    ConfigError,
    HybridConfig,
    switched_off_by_environment,
)

FLAG = "--enable-hybrid-plugin"
OPTIONS_FLAG = "--hybrid-config"
OPTIONS_VARIABLE = "HYBRID_CONFIG"


def requested() -> bool:
    """Whether this process, or the one that started it, was asked for the plugin.

    Raises:
        ConfigError: if the environment variable says neither yes nor no.
    """
    if os.environ.get(ENABLE_VARIABLE, "").strip():
        return not switched_off_by_environment()
    return FLAG in sys.argv


def read_options() -> HybridConfig:
    """The options of this process, from the environment.

    Raises:
        ConfigError: for what is no JSON object, or not valid options.
    """
    return parse_options(os.environ.get(OPTIONS_VARIABLE) or "{}")


def parse_options(text: str) -> HybridConfig:
    """Parse the JSON that `--hybrid-config` takes.

    Raises:
        ConfigError: for what is no JSON object, or not valid options.
    """
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{OPTIONS_FLAG} takes JSON: {error}.") from error
    if not isinstance(options, dict):
        raise ConfigError(
            f"{OPTIONS_FLAG} takes a JSON object of options, got {text!r}."
        )
    return HybridConfig.from_mapping(options)


def add_arguments(result: Any, parser: argparse.ArgumentParser) -> None:
    """Add our two flags to SGLang's parser."""
    group = parser.add_argument_group("hybrid-plugin")
    group.add_argument(
        FLAG,
        action="store_true",
        help="Let hybrid-plugin keep the caches of a model with state layers.",
    )
    group.add_argument(
        OPTIONS_FLAG,
        type=str,
        default=None,
        metavar="JSON",
        help="Options of hybrid-plugin, as a JSON object; see its README.",
    )


def take_arguments(_cls: type, args: argparse.Namespace) -> None:
    """Pass on to child processes what the command line says.

    Raises:
        SystemExit: for options that are not valid.
    """
    options: str | None = getattr(args, "hybrid_config", None)
    if not getattr(args, "enable_hybrid_plugin", False):
        if options is not None:
            raise SystemExit(f"hybrid-plugin: {OPTIONS_FLAG} needs {FLAG}.")
        return
    try:
        if os.environ.get(ENABLE_VARIABLE, "").strip() and (
            switched_off_by_environment()
        ):
            raise ConfigError(f"{FLAG} is given and {ENABLE_VARIABLE} says no.")
        if options is not None:
            parse_options(options)
            os.environ[OPTIONS_VARIABLE] = options
    except ConfigError as error:
        raise SystemExit(f"hybrid-plugin: {error}") from error
    os.environ[ENABLE_VARIABLE] = "1"
