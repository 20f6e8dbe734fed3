# SPDX-License-Identifier: Apache-2.0
"""One policy for all engines: each reports the hits that the core alone has.

The same trace with the same pools gives the same hits in every engine, because
each equals the core's.  One request at a time: how requests that run side by side
are batched is the engine's affair.
"""

from __future__ import annotations

import random
import re

import pytest

from hybrid_plugin.config import HybridConfig
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.replay import replay
from tests.engines.traffic import encode, system_prompt

pytestmark = pytest.mark.engine

# A page size that every engine takes here; far fewer pages than the trace fills.
OPTIONS = {"page_size": 32}
POOLS = (61, 7)
CHUNK = 96
"""Tokens in a prefill chunk, by the flags of every driver."""
REQUESTS = 60


def prompts_of(rng: random.Random, systems: list[tuple[int, ...]]) -> tuple[int, ...]:
    """A prompt that begins like others do."""
    system = rng.choice(systems)
    start = system[: rng.choice([len(system), len(system), len(system) // 2])]
    return start + encode(system_prompt(rng, rng.randint(1, 60)))


def test_hits_equal_those_of_the_core_alone(
    start_server: StartServer, driver: Driver
) -> None:
    """Shared prompts, branches and chats, with evictions of pages and states."""
    rng = random.Random(20)
    systems = [encode(system_prompt(rng, n)) for n in (40, 150, 300)]
    stream: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    cached: list[int] = []
    with start_server("hits", options=OPTIONS, pools=POOLS) as server:
        for _ in range(REQUESTS):
            earlier = rng.choice(stream) if stream and rng.random() < 0.4 else None
            history = earlier[0] + earlier[1] if earlier else ()
            prompt = (history + prompts_of(rng, systems))[:700]
            answer = server.ask(prompt, rng.randint(1, 40))
            assert answer.error is None
            stream.append((prompt, answer.tokens))
            cached.append(answer.cached_tokens)
        metrics = server.metrics()
        slot = re.search(r"state slots of ([\d.]+) KiB", server.log_text())
    assert slot is not None
    slot_bytes = float(slot[1]) * 2**10
    options = HybridConfig(**OPTIONS)
    by_chunk = driver.name == "vllm"
    assert cached == replay(
        stream, options, POOLS, CHUNK, slot_bytes, chunk_by_chunk=by_chunk
    )
    assert sum(cached) > 0.2 * sum(len(prompt) for prompt, _ in stream)
    assert metrics["pages_evicted"] > 0
    assert metrics["snapshots_evicted"] > 0
