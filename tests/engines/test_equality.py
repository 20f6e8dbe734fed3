# SPDX-License-Identifier: Apache-2.0
"""The plugin changes no answer: mixed traffic against the stock engine, uncached."""

from __future__ import annotations

import pytest

from tests.engines.conftest import DRIVER, StartServer
from tests.engines.drivers import Driver, Variant
from tests.engines.reference import Reference, make_reference, replay

pytestmark = pytest.mark.engine

MODELS = {} if DRIVER is None else DRIVER.models
VARIANTS = {} if DRIVER is None else DRIVER.variants


@pytest.fixture(scope="module", params=MODELS)
def reference(
    request: pytest.FixtureRequest,
    start_server: StartServer,
    driver: Driver,
    tmp_path_factory: pytest.TempPathFactory,
) -> Reference:
    """The stock engine without a cache, four requests at a time."""
    folder = tmp_path_factory.mktemp("model")
    return make_reference(start_server, driver, request.param, folder)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_greedy_answers_equal_stock(
    start_server: StartServer, reference: Reference, variant: Variant
) -> None:
    with start_server(
        "plugin",
        options=variant.options,
        flags=variant.flags,
        dtype=reference.dtype,
        model=reference.model,
    ) as server:
        outcome, answers = replay(server, reference)
        metrics = server.metrics()
    print(variant, outcome)  # shown with -s: how near, not just whether
    assert outcome.wrong == ()
    assert outcome.compared >= 250
    assert outcome.differing <= 0.1 * outcome.compared
    reused = sum(a.cached_tokens for a in answers)
    assert reused > variant.least_reuse * sum(a.prompt_tokens for a in answers)
    if variant.preempts:
        assert metrics["preemptions"] > 0


def test_answers_change_when_snapshots_are_zeroed(
    start_server: StartServer, reference: Reference
) -> None:
    """Negative control: the comparison does see a wrong state."""
    with start_server(
        "zeroed", fault="zero_snapshots", dtype=reference.dtype, model=reference.model
    ) as server:
        outcome, _ = replay(server, reference)
    assert len(outcome.wrong) > 20
