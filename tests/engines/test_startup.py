# SPDX-License-Identifier: Apache-2.0
"""Servers that must not start: one sentence, a non-zero exit, no hanging.

Only what no configuration shows before processes start; `test_activation` has the rest.
"""

from __future__ import annotations

import re

import pytest

from tests.engines.conftest import DRIVER, StartServer
from tests.engines.drivers import Refusal
from tests.engines.server import ServerDiedError

pytestmark = pytest.mark.engine

REFUSALS = {} if DRIVER is None else DRIVER.refusals


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_server_refuses_to_start(start_server: StartServer, refusal: Refusal) -> None:
    with (
        pytest.raises(ServerDiedError) as death,
        start_server(
            "refused",
            options=refusal.options,
            flags=refusal.flags,
            fault=refusal.fault,
            cold=refusal.fault is not None,
        ),
    ):
        pass
    assert death.value.code != 0
    assert refusal.sentence in re.sub(r"\s+", " ", death.value.log)
