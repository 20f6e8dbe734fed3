# SPDX-License-Identifier: Apache-2.0
"""Words that every refusal of the plugin has, in whichever engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hybrid_plugin.config import ConfigError

_NAME = "hybrid-plugin"


def cannot_serve(reason: str) -> ConfigError:
    """What to raise for a configuration or model that the plugin has no support for.

    Args:
        reason: a sentence with the way out.
    """
    return ConfigError(f"it cannot serve this: {reason}")


@contextmanager
def named() -> Iterator[None]:
    """Where an engine calls the plugin: say in each refusal whose it is, once."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith(_NAME):
            raise
        raise ConfigError(f"{_NAME}: {error}") from error


@contextmanager
def ending_the_server() -> Iterator[None]:
    """Where a server reads its arguments: a refusal ends it, without a traceback.

    Raises:
        SystemExit: with the refusal.
    """
    try:
        with named():
            yield
    except ConfigError as error:
        raise SystemExit(str(error)) from error
