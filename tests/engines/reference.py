# SPDX-License-Identifier: Apache-2.0
"""Mixed requests, a stock engine's answers to them, and how near others must come."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.engines.compare import Comparison, compare
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver, Model
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.traffic import Mix, mixed, next_turns

EVERYTHING = "HYBRID_TEST_ALL" in os.environ
"""More requests, and all variants of all models: for a GPU, or a night."""
FIRST_TURNS = 200 if EVERYTHING else 100


@dataclass(frozen=True)
class Reference:
    """Requests, and the stock engine's answers to them without any cache."""

    model: Path
    dtype: str
    bound: float
    stray: int
    asks: Sequence[Ask]
    answers: Sequence[Answer]


def make_reference(
    start_server: StartServer, driver: Driver, name: str, folder: Path
) -> Reference:
    """First turns, and second turns of half of them, four at a time.

    Args:
        start_server: the fixture.
        driver: of the engine.
        name: of one of the driver's models.
        folder: where to write the model if it is not the bundled one.
    """
    return reference_of(start_server, driver, driver.models[name], folder)


def reference_of(
    start_server: StartServer, driver: Driver, entry: Model, folder: Path
) -> Reference:
    """The same of a model that `driver.models` need not have.

    Args:
        start_server: the fixture.
        driver: of the engine.
        entry: the model.
        folder: where to write the model if it is not the bundled one.
    """
    model = entry.checkpoint(folder)
    first = mixed(Mix(driver.page_size, requests=FIRST_TURNS))
    whole = _with_logprobs(first)
    with start_server(
        "stock", plugin=False, prefix_cache=False, dtype=entry.dtype, model=model
    ) as stock:
        answers = stock.ask_all(whole, concurrency=4)
        half = FIRST_TURNS // 2
        second = next_turns(whole[:half], answers[:half], seed=1)
        answers += stock.ask_all(_with_logprobs(second), concurrency=4)
    return Reference(
        model, entry.dtype, entry.bound, entry.stray, [*first, *second], answers
    )


def replay(server: Server, reference: Reference) -> tuple[Comparison, list[Answer]]:
    """Send the reference's requests, first turns first, 16 at a time."""
    first, second = reference.asks[:FIRST_TURNS], reference.asks[FIRST_TURNS:]
    answers = server.ask_all(first, concurrency=16)
    answers += server.ask_all(second, concurrency=16)
    return compare(reference.answers, answers, reference.bound), answers


def _with_logprobs(asks: Sequence[Ask]) -> list[Ask]:
    """The same without aborts, so that every answer can be compared to its end."""
    return [replace(ask, abort_after=None, logprobs=5) for ask in asks]
