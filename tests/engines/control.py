# SPDX-License-Identifier: Apache-2.0
"""How far a stock engine is from itself: what the bounds of the drivers rest on.

The traffic of `test_equality.py`, its reference, and its comparison, but without
the plugin: the same requests at another concurrency, with no cache and with the
engine's own.  Not collected by default; prints the largest gap of each:

    python -m pytest -s tests/engines/control.py
"""

from __future__ import annotations

import pytest

from tests.engines.conftest import DRIVER, StartServer
from tests.engines.drivers import Driver
from tests.engines.reference import Reference, make_reference, replay

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params={} if DRIVER is None else DRIVER.models)
def reference(
    request: pytest.FixtureRequest,
    start_server: StartServer,
    driver: Driver,
    tmp_path_factory: pytest.TempPathFactory,
) -> Reference:
    """The stock engine without a cache, four requests at a time."""
    folder = tmp_path_factory.mktemp("model")
    return make_reference(start_server, driver, request.param, folder)


@pytest.mark.parametrize("cache", [False, True], ids=["cache off", "cache on"])
def test_stock_stays_within_the_bound_of_itself(
    start_server: StartServer, reference: Reference, cache: bool
) -> None:
    with start_server(
        "again",
        plugin=False,
        prefix_cache=cache,
        dtype=reference.dtype,
        model=reference.model,
    ) as server:
        outcome, answers = replay(server, reference)
    reused = sum(a.cached_tokens for a in answers)
    print(f"cache {cache}", reference.dtype, f"{reused} tokens reused", outcome)
    assert len(outcome.wrong) <= reference.stray, outcome.wrong
    assert outcome.compared >= 250
    assert (reused > 0) == cache
