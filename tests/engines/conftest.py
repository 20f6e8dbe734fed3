# SPDX-License-Identifier: Apache-2.0
"""The engine under test, and its servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from tests.engines.drivers import Driver, Setup, installed_driver
from tests.engines.server import Server

StartServer = Callable[..., AbstractContextManager[Server]]

DRIVER = installed_driver()


@pytest.fixture(scope="session")
def driver() -> Driver:
    """Of the engine under test."""
    if DRIVER is None:
        pytest.skip("no engine is installed")
    return DRIVER


@pytest.fixture(scope="session")
def start_server(
    driver: Driver, tmp_path_factory: pytest.TempPathFactory
) -> StartServer:
    """Start a server: a name for its log, and fields of `Setup`."""

    @contextmanager
    def start(name: str, **setup: Any) -> Iterator[Server]:
        log = tmp_path_factory.mktemp("servers") / f"{name}.log"
        with Server(driver, Setup(**setup), log) as server:
            yield server

    return start
