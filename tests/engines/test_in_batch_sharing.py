# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive together and begin alike compute that beginning once."""

from __future__ import annotations

import random

import pytest

from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.messages import Ask
from tests.engines.traffic import encode, system_prompt

pytestmark = pytest.mark.engine

SHARED, REQUESTS = 700, 6
"""So many tokens take a leader several steps: the others come meanwhile."""


@pytest.mark.parametrize("waits", [True, False], ids=["by default", "switched off"])
def test_one_leads_and_the_others_follow(
    start_server: StartServer, driver: Driver, waits: bool
) -> None:
    options = {} if waits else {"in_batch_prefix_min_tokens": 0}
    shared = encode(system_prompt(random.Random(1), SHARED))
    asks = [Ask(shared + encode(f"{i}: who is there?"), 8) for i in range(REQUESTS)]
    with start_server("following", options=options) as server:
        answers = server.ask_all(asks, REQUESTS)
        metrics = server.metrics()
    assert [(a.error, len(a.tokens)) for a in answers] == [(None, 8)] * REQUESTS
    cached = sorted(answer.cached_tokens for answer in answers)
    whole = SHARED // driver.page_size * driver.page_size
    if waits:
        assert cached == [0] + [whole] * (REQUESTS - 1)
        assert metrics["in_batch_prefix_waits"] == REQUESTS - 1
    else:
        assert cached[1] < whole, "several computed it"
        assert metrics["in_batch_prefix_waits"] == 0
