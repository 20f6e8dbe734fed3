# SPDX-License-Identifier: Apache-2.0
"""SGLang with drafts and the plugin: answers stay, and turns end where they end.

The drafts are those of `oracle_sglang`: all right for a third of the requests, none for
another, and for the rest a number that changes from step to step.  It knows more of
each answer than is asked for, so that limits lie within what a step accepts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines import oracle_sglang as oracle
from tests.engines.compare import Comparison, compare
from tests.engines.conftest import DRIVER, StartServer
from tests.engines.drivers import Driver
from tests.engines.drivers.sglang import GRAPH_FLAGS, ON_GPU, RETRACTING
from tests.engines.faults import planted
from tests.engines.messages import Answer, Ask
from tests.engines.reference import EVERYTHING
from tests.engines.server import Server
from tests.engines.test_pressure import burst, wait_until_idle
from tests.engines.traffic import Mix, encode, mixed
from tests.engines.watch import read, watch_environment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        DRIVER is None or DRIVER.name != "sglang", reason="they are SGLang's drafts"
    ),
]

CHATS = 24
ROOM = (512, 160)
"""Pages and slots for all of them: nothing is evicted."""
BEYOND = 6
"""Tokens of each answer that the oracle knows and nobody asks for."""
QUESTION = encode(" And the code for ember? ")
GDN, MAMBA2 = list(DRIVER.models)[:2] if DRIVER else ("", "")
CHAIN, TREE = (1, 4), (3, 7)
"""Children of a draft, and tokens that a step verifies."""
NO_OVERLAP = ("--disable-overlap-schedule",)
REPLAY: dict[str, Any] = {"draft_states": "replay"}
COLUMNS: dict[str, Any] = {"draft_states": "columns"}
ELASTIC: dict[str, Any] = {
    "elastic": True,
    "gpu_memory_budget": (512 if ON_GPU else 64) << 20,
}
"""Room for all of them, likewise."""
BUDGET = 10 << 20
"""A row takes a tenth of it with a chain, and a slot a third of that."""


@dataclass(frozen=True)
class Chats:
    """First and second turns, and the stock engine's answers without drafts."""

    model: Path
    dtype: str
    bound: float
    stray: int
    asks: Sequence[Ask]
    answers: Sequence[Answer]
    known: Path
    """What the oracle reads."""


@pytest.fixture(scope="module")
def made() -> dict[str, Chats]:
    """Those made so far, by model."""
    return {}


@pytest.fixture
def chats(
    request: pytest.FixtureRequest,
    made: dict[str, Chats],
    start_server: StartServer,
    driver: Driver,
    tmp_path_factory: pytest.TempPathFactory,
) -> Chats:
    name = request.param
    if name not in made:
        folder = tmp_path_factory.mktemp("drafts")
        made[name] = _make(start_server, driver, name, folder)
    return made[name]


def _make(start_server: StartServer, driver: Driver, name: str, folder: Path) -> Chats:
    entry = driver.models[name]
    model = entry.checkpoint(folder)
    first = [replace(a, abort_after=None) for a in mixed(Mix(driver.page_size, CHATS))]
    with start_server(
        "stock", plugin=False, prefix_cache=False, dtype=entry.dtype, model=model
    ) as stock:
        answers = stock.ask_all([_more(ask) for ask in first], concurrency=4)
        second = [
            Ask(ask.prompt + answer.tokens[: ask.max_tokens] + QUESTION, 12)
            for ask, answer in zip(first, answers, strict=True)
        ]
        answers += stock.ask_all([_more(ask) for ask in second], concurrency=4)
    asks = [*first, *second]
    shares = ("all", "none", "some")
    known = folder / "oracle.json"
    oracle.write(
        known,
        [
            (ask.prompt, answer.tokens, shares[index % 3])
            for index, (ask, answer) in enumerate(zip(asks, answers, strict=True))
        ],
    )
    asked = [
        replace(
            answer,
            tokens=answer.tokens[: ask.max_tokens],
            logprobs=answer.logprobs[: ask.max_tokens],
        )
        for ask, answer in zip(asks, answers, strict=True)
    ]
    return Chats(model, entry.dtype, entry.bound, entry.stray, asks, asked, known)


def _more(ask: Ask) -> Ask:
    return replace(ask, max_tokens=ask.max_tokens + BEYOND, logprobs=5)


def drafting(chats: Chats, shape: tuple[int, int]) -> dict[str, Any]:
    """What a server needs that verifies the oracle's drafts."""
    topk, width = shape
    return {
        "dtype": chats.dtype,
        "model": chats.model,
        "flags": (
            f"--speculative-algorithm={oracle.NAME}",
            f"--speculative-eagle-topk={topk}",
            f"--speculative-num-draft-tokens={width}",
            f"--speculative-num-steps={width - 1}",
        ),
        "environment": {oracle.VARIABLE: str(chats.known)} | planted("none"),
    }


def served(
    start_server: StartServer,
    chats: Chats,
    shape: tuple[int, int],
    flags: Sequence[str] = (),
    fault: str | None = None,
    **setup: Any,
) -> tuple[Comparison, list[Answer], dict[str, float]]:
    """Serve both turns, eight requests at a time."""
    wanted = drafting(chats, shape)
    wanted["flags"] += tuple(flags)
    wanted["environment"] |= planted(fault or "none")
    if not setup.get("options", {}).get("elastic"):
        wanted["pools"] = ROOM
    with start_server("drafts", **wanted, **setup) as server:
        answers = ask(server, chats)
        metrics = server.metrics()
        verified = server.counter("sglang:spec_verify_calls_total")
    generated = sum(len(answer.tokens) - 1 for answer in answers)
    assert verified < 0.8 * generated, "drafts were accepted"
    return compare(chats.answers, answers, chats.bound), answers, metrics


def ask(server: Server, chats: Chats) -> list[Answer]:
    """Both turns."""
    answers = server.ask_all(chats.asks[:CHATS], concurrency=8)
    return answers + server.ask_all(chats.asks[CHATS:], concurrency=8)


def unrestored(chats: Chats, answers: Sequence[Answer]) -> Iterator[int]:
    """Tokens of first turns that second turns computed again, answers alike."""
    for number in range(CHATS):
        if answers[number].tokens == chats.answers[number].tokens:
            turn = len(chats.asks[CHATS + number].prompt) - len(QUESTION)
            yield turn - answers[CHATS + number].cached_tokens


RUNS = [
    pytest.param(MAMBA2, CHAIN, (), id="chain, overlap"),
    pytest.param(MAMBA2, TREE, NO_OVERLAP, id="tree, no overlap"),
    pytest.param(GDN, TREE, (), id="delta net, tree, overlap"),
]
REPLAYS = [
    pytest.param(MAMBA2, CHAIN, (), REPLAY, id="chain, overlap"),
    pytest.param(MAMBA2, TREE, NO_OVERLAP, REPLAY, id="tree, no overlap"),
    pytest.param(GDN, TREE, (), REPLAY | ELASTIC, id="delta net, elastic"),
]
IN_ELASTIC_POOLS = [pytest.param(GDN, CHAIN, (), id="delta net, chain")]
CROWDS = [pytest.param(MAMBA2, CHAIN, (), True, id="chain")]
if EVERYTHING or ON_GPU:
    IN_ELASTIC_POOLS += [
        pytest.param(MAMBA2, TREE, (), id="tree"),
        pytest.param(GDN, TREE, NO_OVERLAP, id="delta net, tree, no overlap"),
    ]
if EVERYTHING:
    RUNS += [
        pytest.param(model, shape, flags)
        for model in (MAMBA2, GDN)
        for shape in (CHAIN, TREE)
        for flags in ((), NO_OVERLAP, ("--page-size=1",))
    ]
    CROWDS += [
        pytest.param(model, shape, flags, packed)
        for model in (MAMBA2, GDN)
        for shape, flags in ((CHAIN, NO_OVERLAP), (TREE, ()))
        for packed in (True, False)
    ]


@pytest.mark.parametrize(("chats", "shape", "flags"), RUNS, indirect=["chats"])
def test_answers_and_hits_are_those_without_drafts(
    start_server: StartServer,
    chats: Chats,
    shape: tuple[int, int],
    flags: Sequence[str],
) -> None:
    check(chats, *served(start_server, chats, shape, flags))


@pytest.mark.parametrize(
    ("chats", "shape", "flags"), IN_ELASTIC_POOLS, indirect=["chats"]
)
def test_elastic_pools_change_neither(
    start_server: StartServer,
    chats: Chats,
    shape: tuple[int, int],
    flags: Sequence[str],
) -> None:
    found = served(start_server, chats, shape, flags, options=ELASTIC | COLUMNS)
    check(chats, *found)
    assert found[2]["scratch{used}"] == 0 < found[2]["mapped_bytes{scratch}"]


def check(
    chats: Chats,
    outcome: Comparison,
    answers: Sequence[Answer],
    metrics: dict[str, float],
) -> None:
    """Answers are those without drafts, and second turns resume where first end."""
    print(outcome)
    assert len(outcome.wrong) <= chats.stray, outcome.wrong
    assert outcome.compared == len(chats.asks)
    lost = list(unrestored(chats, answers))
    assert len(lost) > 0.8 * CHATS
    assert max(lost) <= 1
    assert metrics["turn_ends_missed"] == 0
    assert metrics["turn_ends_exact"] >= len(chats.asks)


@pytest.mark.parametrize(
    ("chats", "shape", "flags", "options"), REPLAYS, indirect=["chats"]
)
def test_replay_changes_no_answer_and_no_hit(
    start_server: StartServer,
    chats: Chats,
    shape: tuple[int, int],
    flags: Sequence[str],
    options: dict[str, Any],
) -> None:
    check(chats, *served(start_server, chats, shape, flags, options=options))


@pytest.mark.skipif(not ON_GPU, reason="passes are replayed on GPUs")
@pytest.mark.parametrize("chats", [GDN], indirect=True)
@pytest.mark.parametrize("options", [COLUMNS, REPLAY], ids=["columns", "replay"])
def test_prompts_in_cuda_graphs_change_neither(
    start_server: StartServer, chats: Chats, options: dict[str, Any]
) -> None:
    graphs = {"kernels": "ours", "prefill_graphs": True}
    check(
        chats,
        *served(start_server, chats, CHAIN, GRAPH_FLAGS, options=graphs | options),
    )


@pytest.mark.skipif(
    "float32" not in MAMBA2, reason="bfloat16 differs from itself by as much"
)
@pytest.mark.parametrize("chats", [MAMBA2], indirect=True)
@pytest.mark.parametrize(
    "options", [{}, ELASTIC, REPLAY], ids=["fixed", "elastic", "replay"]
)
def test_the_state_after_another_draft_is_seen(
    start_server: StartServer, chats: Chats, options: dict[str, Any]
) -> None:
    """Negative control: what is hit is as much, and some of it is wrong."""
    outcome, answers, _ = served(
        start_server, chats, CHAIN, fault="wrong_drafts", options=options
    )
    assert len(outcome.wrong) > 0.1 * CHATS
    assert max(unrestored(chats, answers)) <= 1


@pytest.mark.skipif(ON_GPU, reason="the host's memory is looked at")
@pytest.mark.parametrize(
    ("chats", "shape", "flags", "packed"), CROWDS, indirect=["chats"]
)
def test_a_crowd_shares_its_memory_with_what_it_verifies(
    start_server: StartServer,
    chats: Chats,
    shape: tuple[int, int],
    flags: Sequence[str],
    packed: bool,
    tmp_path: Path,
) -> None:
    """Elastic pools for a few of the chats, requests sent back, aborts, long prompts.

    Rows take the memory of what is cached while many run, and give it to pages when
    few do.
    """
    wanted = drafting(chats, shape)
    watched = watch_environment(tmp_path / "report.json", packed=packed)
    paths = [watched["PYTHONPATH"], wanted["environment"]["PYTHONPATH"]]
    wanted["environment"] |= RETRACTING | watched | {"PYTHONPATH": ":".join(paths)}
    wanted["flags"] += tuple(flags)
    options = {"elastic": True, "gpu_memory_budget": BUDGET}
    with start_server("crowd", options=options, **wanted) as server:
        answers = ask(server, chats)
        crowded = read(tmp_path / "report.json")
        aborted = server.ask_all(burst(0)[:16], concurrency=16)
        idle = wait_until_idle(server)
        long = server.ask_all(long_prompts(), concurrency=1)
        alone = read(tmp_path / "report.json")
        idle_again = wait_until_idle(server)
        assert server.is_alive()
    outcome = compare(chats.answers, answers, chats.bound)
    print(outcome, crowded, alone, idle)
    assert not outcome.wrong
    assert outcome.compared == len(chats.asks)
    assert [one.error for one in (*aborted, *long) if one.error] == []
    assert idle["preemptions"] > 0 and idle["turn_ends_missed"] == 0
    assert idle["snapshots_evicted"] > 0 and idle["pages_evicted"] > 0
    for levels in (idle, idle_again):
        assert levels["kv{used}"] == levels["state{used}"] == 0
        assert levels["scratch{used}"] == 0
    assert crowded["grown_scratch"] > 0
    assert crowded["most_mapped_scratch"] > 2 * alone["mapped_scratch"]
    assert alone["mapped_kv"] > crowded["mapped_kv"]
    assert alone["most_resident"] <= alone["most_mapped"] <= BUDGET


def long_prompts() -> list[Ask]:
    """Prompts that share nothing, and fill most of the memory with their pages."""
    rng = random.Random(3)
    return [Ask(tuple(rng.randrange(3, 250) for _ in range(900)), 4) for _ in range(6)]


@pytest.mark.skipif(not EVERYTHING, reason="it is SGLang's own way, on our platform")
@pytest.mark.parametrize(("chats", "shape", "flags"), RUNS, indirect=["chats"])
def test_stock_drafts_change_no_answer(
    start_server: StartServer,
    chats: Chats,
    shape: tuple[int, int],
    flags: Sequence[str],
) -> None:
    outcome, _, _ = served(
        start_server, chats, shape, flags, plugin=False, prefix_cache=False
    )
    assert len(outcome.wrong) <= chats.stray, outcome.wrong
