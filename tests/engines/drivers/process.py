# SPDX-License-Identifier: Apache-2.0
"""Configuring an engine in this process without leaving traces."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def overheard(name: str) -> Iterator[list[str]]:
    """What is logged under a name, whatever the engine does with its loggers."""
    lines: list[str] = []
    logger = logging.getLogger(name)
    level, handle = logger.level, logger.handle

    def overhear(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        handle(record)

    # Not a handler: vLLM takes those away as it configures its loggers.
    logger.handle = overhear  # type: ignore[method-assign]
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.handle = handle  # type: ignore[method-assign]
        logger.setLevel(level)


@contextmanager
def environment(plugin: bool, **variables: str) -> Iterator[None]:
    """The environment with the plugin on or off, restored afterwards."""
    before = dict(os.environ)
    os.environ.update(variables, HYBRID_PLUGIN="1" if plugin else "0")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
