# SPDX-License-Identifier: Apache-2.0
"""Eviction policies other than the default, in a real engine short of slots."""

from __future__ import annotations

import pytest

from tests.engines.conftest import StartServer
from tests.engines.messages import Ask
from tests.engines.traffic import encode

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("policy", ["flop-aware", "flop-aware-tuned"])
def test_flop_aware_with_a_cap_per_path(start_server: StartServer, policy: str) -> None:
    """Chats go on and hit, while slots are so few that snapshots must go."""
    options = {
        "page_size": 32,
        "kv_pages": 120,
        "state_slots": 6,
        "eviction_policy": policy,
        "max_snapshots_per_path": 2,
    }
    with start_server("policies", options=options) as server:
        cached = []
        for chat in range(8):
            prompt = encode(f"{chat}: tell me all about the number {chat}. " * 6)
            (first,) = server.ask_all([Ask(prompt, 8)], 1)
            goes_on = prompt + first.tokens + encode("Go on.")
            (again,) = server.ask_all([Ask(goes_on, 8)], 1)
            assert (first.error, again.error) == (None, None)
            cached.append(again.cached_tokens)
        metrics = server.metrics()
    assert all(cached)
    assert metrics["snapshots_evicted"] > 0
