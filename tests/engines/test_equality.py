# SPDX-License-Identifier: Apache-2.0
"""The plugin changes no answer: mixed traffic against the stock engine, uncached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import DRIVER, StartServer
from tests.engines.drivers import Driver, Variant
from tests.engines.greedy import gaps
from tests.engines.reference import EVERYTHING, Reference, make_reference, replay

pytestmark = pytest.mark.engine


def pairs() -> Iterator[Any]:
    """Models, and the variants that each is tested with."""
    if DRIVER is None:
        return
    for name, model in DRIVER.models.items():
        for title, variant in DRIVER.variants.items():
            if title in model.unserved:
                continue
            if EVERYTHING or model.quick is None or title in model.quick:
                yield pytest.param(name, variant, id=f"{name}: {title}")


ROUNDING = 5e-3
"""Nats that two implementations in float32 may differ by: vLLM on a CPU by 0.0016."""
PAIRS = list(pairs())
MODELS = list(dict.fromkeys(pair.values[0] for pair in PAIRS))
CONTROLLED = MODELS if EVERYTHING else MODELS[:1]
"""Models of which it is shown that the comparison sees a wrong state."""


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """Those made so far, by model."""
    return {}


@pytest.fixture
def reference(
    request: pytest.FixtureRequest,
    references: dict[str, Reference],
    start_server: StartServer,
    driver: Driver,
    tmp_path: Path,
) -> Reference:
    """The stock engine without a cache, four requests at a time."""
    name = request.param
    if name not in references:
        references[name] = make_reference(start_server, driver, name, tmp_path)
    return references[name]


@pytest.mark.parametrize("reference", MODELS, indirect=True)
def test_the_reference_is_what_transformers_would_answer(reference: Reference) -> None:
    step = 1 if EVERYTHING else 4
    asks, answers = reference.asks[::step], reference.answers[::step]
    found = list(gaps(reference.model, asks, answers))
    print(f"{len(found)} answers, worst {max(found):.4f} nats")
    bound = max(reference.bound, ROUNDING)
    assert sum(gap > bound for gap in found) <= reference.stray
    assert any(len(answer.tokens) > 1 for answer in answers)


@pytest.mark.parametrize(("reference", "variant"), PAIRS, indirect=["reference"])
def test_greedy_answers_equal_stock(
    start_server: StartServer, reference: Reference, variant: Variant
) -> None:
    with start_server(
        "plugin",
        options=variant.options,
        pools=variant.pools,
        flags=variant.flags,
        environment=variant.environment,
        fault=variant.fault,
        dtype=reference.dtype,
        model=reference.model,
    ) as server:
        outcome, answers = replay(server, reference)
        metrics = server.metrics()
        assert variant.says in server.log_text()
    print(variant, outcome)  # shown with -s: how near, not just whether
    assert len(outcome.wrong) <= reference.stray, outcome.wrong
    assert outcome.compared >= 0.8 * len(reference.asks)
    assert outcome.differing <= (0.2 if reference.stray > 1 else 0.1) * outcome.compared
    reused = sum(a.cached_tokens for a in answers)
    assert reused > variant.least_reuse * sum(a.prompt_tokens for a in answers)
    if variant.preempts:
        assert metrics["preemptions"] > 0
    if variant.options.get("elastic"):
        assert metrics["moves"] > 0
    if variant.options.get("kernels") == "ours":
        assert metrics["interior_snapshots"] > 0


@pytest.mark.parametrize("reference", CONTROLLED, indirect=True)
def test_answers_change_when_snapshots_are_zeroed(
    start_server: StartServer, reference: Reference
) -> None:
    """Negative control: the comparison does see a wrong state."""
    with start_server(
        "zeroed", fault="zero_snapshots", dtype=reference.dtype, model=reference.model
    ) as server:
        outcome, _ = replay(server, reference)
    assert len(outcome.wrong) > 0.06 * len(reference.asks)
