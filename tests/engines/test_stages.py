# SPDX-License-Identifier: Apache-2.0
"""Two stages of a pipeline on two GPUs: answers of the engine alone, in stages too.

On a GPU steps are scheduled ahead, passes are CUDA graphs, and memory moves by the
driver's calls, which wait for the device and so for other stages: none of which a CPU
has.  There `test_equality.py` serves stages, and this with HYBRID_TEST_ALL alone.

    python -m pytest -rA tests/engines/test_stages.py

Each server's counts are printed, with what the plugin logged: `-rA` shows them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engines.conftest import DRIVER, StartServer
from tests.engines.drivers import Driver, Variant
from tests.engines.reference import EVERYTHING, Reference, reference_of, replay
from tests.engines.server import Server
from tests.engines.test_pressure import (
    burst,
    test_64_requests_into_a_pool_for_two,
    wait_until_idle,
)
from tests.engines.test_reuse import (
    test_branches_in_the_middle_are_found,
    test_counters_agree_with_the_answers,
    test_next_turn_reuses_prompt_and_answer,
    test_reset_forgets_everything,
    test_salt_separates,
    test_third_request_with_a_short_system_prompt_hits,
)

__all__ = [
    "test_64_requests_into_a_pool_for_two",
    "test_branches_in_the_middle_are_found",
    "test_counters_agree_with_the_answers",
    "test_next_turn_reuses_prompt_and_answer",
    "test_reset_forgets_everything",
    "test_salt_separates",
    "test_third_request_with_a_short_system_prompt_hits",
]
"""Run here on servers in stages: they find the fixtures of this module."""

GPUS = torch.cuda.device_count()
if GPUS:
    SKIPPED, REASON = GPUS < 2, f"needs two GPUs, and there is {GPUS}"
else:
    SKIPPED = not EVERYTHING
    REASON = "for two GPUs; on a CPU set HYBRID_TEST_ALL, test_equality.py has stages"
pytestmark = [pytest.mark.engine, pytest.mark.skipif(SKIPPED, reason=REASON)]

COUNTS = (
    "queried_tokens",
    "hit_tokens",
    "snapshots_taken",
    "interior_snapshots",
    "snapshots_evicted",
    "pages_evicted",
    "preemptions",
    "moves",
    "moved_bytes",
)
"""Printed of every server."""


def pairs() -> Iterator[Any]:
    """Models, and the variants that each is tested with."""
    if DRIVER is None:
        return
    for name, model in DRIVER.stages.models.items():
        for title, variant in DRIVER.stages.variants.items():
            quick = model.quick is None or title in model.quick
            if quick or (EVERYTHING and GPUS):
                yield pytest.param(name, variant, id=f"{name}: {title}")


PAIRS = list(pairs())
FIRST = PAIRS[0].values[0] if PAIRS else ""
"""The model that is served where answers are not compared."""


@pytest.fixture(scope="module")
def start_server(start_server: StartServer, driver: Driver) -> StartServer:
    """The same in two stages, which prints what a server counted and said.

    On a CPU vLLM alone serves no stages without its compiler: there, one does.
    """

    @contextmanager
    def start(name: str, **setup: Any) -> Iterator[Server]:
        plugin = setup.get("plugin", True)
        staged = driver.stages.setup(**setup) if plugin or GPUS else setup
        print(f"--- {name}: {staged}")
        with start_server(name, **staged) as server:
            try:
                yield server
            finally:
                describe(server, plugin=plugin)

    return start


def describe(server: Server, *, plugin: bool) -> None:
    """Print what the plugin in a server said and counted, or how the server ended."""
    text = server.log_text()
    try:
        found = server.metrics() if plugin else {}
    except httpx.TransportError:
        print(f"the server does not answer:\n{text[-8000:]}")
        return
    for line in text.splitlines():
        if "hybrid-plugin" in line or "ERROR" in line:
            print(line[:300])
    print({count: found[count] for count in COUNTS if count in found})


@pytest.fixture(scope="module")
def small(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Fields of `Setup` for the first of the models that are served in stages."""
    entry = driver.stages.models[FIRST]
    folder = tmp_path_factory.mktemp("small")
    return {"model": entry.checkpoint(folder), "dtype": entry.dtype}


@pytest.fixture(scope="module")
def quick_model(small: dict[str, Any]) -> dict[str, Any]:
    """For the tests of pressure."""
    return small


@pytest.fixture(scope="module")
def server(start_server: StartServer, small: dict[str, Any]) -> Iterator[Server]:
    """The plugin with its defaults, for the tests of reuse."""
    with start_server("reuse", **small) as running:
        yield running


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
    """The stock engine without a cache in two stages, four requests at a time."""
    name = request.param
    if name not in references:
        entry = driver.stages.models[name]
        references[name] = reference_of(start_server, driver, entry, tmp_path)
    return references[name]


@pytest.mark.parametrize(("reference", "variant"), PAIRS, indirect=["reference"])
def test_greedy_answers_equal_stock_in_stages(
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
        text = server.log_text()
    reused = sum(answer.cached_tokens for answer in answers)
    prompts = sum(answer.prompt_tokens for answer in answers)
    print(
        f"{outcome.compared} answers compared, {outcome.differing} differ, at worst by "
        f"{outcome.worst_gap:.4f} nats; {reused} of {prompts} tokens were restored"
    )
    print(*outcome.wrong, sep="\n")
    assert variant.says in text
    assert len(outcome.wrong) <= reference.stray, outcome.wrong
    assert outcome.compared >= 0.8 * len(reference.asks)
    assert outcome.differing <= (0.2 if reference.stray > 1 else 0.1) * outcome.compared
    assert reused > variant.least_reuse * prompts
    if variant.preempts:
        assert metrics["preemptions"] > 0
    if variant.options.get("elastic"):
        assert metrics["moves"] > 0
    if variant.options.get("kernels") == "ours":
        assert metrics["interior_snapshots"] > 0


@pytest.mark.parametrize("reference", [FIRST], indirect=True)
def test_answers_change_when_snapshots_are_zeroed_in_stages(
    start_server: StartServer, reference: Reference
) -> None:
    """Negative control: the comparison does see a wrong state."""
    with start_server(
        "zeroed", fault="zero_snapshots", dtype=reference.dtype, model=reference.model
    ) as server:
        outcome, _ = replay(server, reference)
    print(outcome.compared, "compared,", len(outcome.wrong), "differ")
    assert len(outcome.wrong) > 0.06 * len(reference.asks)


def test_memory_goes_to_and_fro_in_stages(
    start_server: StartServer, driver: Driver, small: dict[str, Any]
) -> None:
    """64 requests at a time into few blocks, which both kinds of pool take in turn."""
    budget = driver.stages.elastic_budget
    options = {"elastic": True, "gpu_memory_budget": budget}
    with start_server("budget", options=options, max_running=64, **small) as server:
        for asks in (burst(0), burst(1)):
            answers = server.ask_all(asks, concurrency=64)
            assert [answer.error for answer in answers if answer.error] == []
            assert server.is_alive()
        levels = wait_until_idle(server)
    assert levels["kv{used}"] == levels["state{used}"] == 0
    assert levels["mapped_bytes{kv}"] + levels["mapped_bytes{state}"] <= budget
    assert levels["moved_bytes"] > budget, "nothing was taken from a pool"
    assert levels["snapshots_evicted"] > 0 and levels["pages_evicted"] > 0
