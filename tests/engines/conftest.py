# SPDX-License-Identifier: Apache-2.0
"""The engine under test, and its servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

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
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Fields of `Setup`, for tests that look at counters and not at answers.

    On a CPU a step of this model takes a fraction of the bundled one's, which has
    experts and computes in bfloat16.  On a GPU that one is as quick.
    """
    from tests.engines import slow_decay

    if torch.cuda.is_available():
        return {}
    folder = tmp_path_factory.mktemp("quick")
    return {"model": slow_decay.write_nemotron_h(folder), "dtype": "float32"}


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
