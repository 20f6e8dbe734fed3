# SPDX-License-Identifier: Apache-2.0
"""Drafts change no answer in vLLM, and every turn goes on where it ended.

Drafts are an oracle's, which knows the stock engine's answers (see `oracle_vllm`), or
come of the prompt itself ("ngram").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import quantiles
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines import oracle_vllm as oracle
from tests.engines.compare import compare
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.drivers.vllm import ON_GPU, PAGE_SIZE
from tests.engines.faults import counting_live, planted
from tests.engines.messages import Answer, Ask
from tests.engines.model_findings import ROUNDING
from tests.engines.server import Server
from tests.engines.traffic import Mix, mixed, next_turns

pytestmark = pytest.mark.engine

REQUESTS = 40
DRAFTS = 3
COLUMNS = {"kernels": "engine"} if ON_GPU else {}
"""On vLLM's kernels, which `auto` takes on a CPU."""
DEFAULT: dict[str, Any] = {}
OURS = {"kernels": "ours"}
REPLAY = {"draft_states": "replay"}
GRAPHS = {**OURS, "prefill_graphs": True}
GRAPH_FLAGS = (
    "--max-num-batched-tokens=512",  # room for several sequences in a graph
    "--kv-cache-memory-bytes=128M",  # and for what more of them at once hold
    "--cudagraph-capture-sizes",
    *map(str, (4, 8, 16, 32, 64, 128)),
)
ON_GRAPHS = [GRAPHS, {**GRAPHS, **REPLAY}] if ON_GPU else []
NAMES_ON_GRAPHS = ["prefill graphs", "prefill graphs, replay"] if ON_GPU else []
EVERY = [COLUMNS, OURS, REPLAY, *ON_GRAPHS]
NAMES = ["vllm", "our kernels", "replay", *NAMES_ON_GRAPHS]
ORACLE = {"method": "custom_class", "model": f"{oracle.__name__}.Oracle"}
NGRAM = {"method": "ngram", "prompt_lookup_max": 4}
if ON_GPU:  # where `oracle_vllm_v2` is what "ngram_gpu" proposes
    ORACLE = {"method": "ngram_gpu", "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Chats:
    """Two turns of each chat, and the stock engine's answers without drafts."""

    model: Path
    dtype: str
    bound: float
    stray: int
    first: Sequence[Ask]
    second: Sequence[Ask]
    answers: Sequence[Answer]
    """To the first turns, then to the second ones."""
    file: Path
    """What the oracle reads."""
    is_gated: bool
    """Whether its state layers are gated delta nets."""

    def on_ours(self, options: dict[str, Any]) -> bool:
        """Whether our kernels run the state layers."""
        return options != COLUMNS

    def in_graphs(self, options: dict[str, Any]) -> bool:
        """Whether prompts replay graphs beside drafts."""
        by_default = ON_GPU and self.is_gated and self.on_ours(options)
        return options in ON_GRAPHS or by_default

    def recorded(self, options: dict[str, Any]) -> bool:
        """Whether no draft has a state of its own."""
        if options == DEFAULT:
            return self.on_ours(options)
        return options.get("draft_states") == "replay"


@pytest.fixture(scope="module")
def made() -> dict[str, Chats]:
    """Those made so far, by model."""
    return {}


@pytest.fixture(params=["gated delta net, bfloat16", "mamba-2, float32"])
def chats(
    request: pytest.FixtureRequest,
    made: dict[str, Chats],
    start_server: StartServer,
    driver: Driver,
    tmp_path_factory: pytest.TempPathFactory,
) -> Chats:
    """Chats with a model, four at a time."""
    name = request.param
    if name not in made:
        entry, folder = driver.models[name], tmp_path_factory.mktemp("chats")
        model = entry.checkpoint(folder / "model")
        first = _plain(mixed(Mix(driver.page_size, requests=REQUESTS)))
        with start_server(
            "stock", plugin=False, prefix_cache=False, dtype=entry.dtype, model=model
        ) as stock:
            answers = stock.ask_all(first, concurrency=4)
            second = _plain(next_turns(first, answers, seed=1))
            answers += stock.ask_all(second, concurrency=4)
        file = folder / "oracle.json"
        oracle.write(file, [*first, *second], answers)
        made[name] = Chats(
            model,
            entry.dtype,
            entry.bound,
            entry.stray,
            first,
            second,
            answers,
            file,
            is_gated=name.startswith("gated"),
        )
    return made[name]


def _plain(asks: Sequence[Ask]) -> list[Ask]:
    """Without aborts, and with what tells a near tie."""
    return [replace(ask, abort_after=None, logprobs=5) for ask in asks]


@pytest.fixture
def serve(start_server: StartServer, chats: Chats) -> Any:
    """Start a server that verifies drafts of the chats."""

    def start(
        name: str,
        drafting: dict[str, Any],
        flags: Sequence[str] = (),
        fault: str | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        **setup: Any,
    ) -> AbstractContextManager[Server]:
        told = json.dumps({**drafting, "num_speculative_tokens": DRAFTS})
        if chats.in_graphs(setup["options"]):
            flags = (*GRAPH_FLAGS, *flags)
        # n-gram search would have PyTorch's threads wait for one another.
        environment = {"NUMBA_NUM_THREADS": "1", **environment}
        environment |= planted(fault or "none")
        if drafting is ORACLE:
            environment[oracle.FILE] = str(chats.file)
        return start_server(
            name,
            model=chats.model,
            dtype=chats.dtype,
            flags=("--speculative-config", told, *flags),
            environment=environment,
            **setup,
        )

    return start


def ask(server: Server, chats: Chats, concurrency: int = 16) -> list[Answer]:
    """All first turns, then all second ones."""
    answers = server.ask_all(chats.first, concurrency)
    return answers + server.ask_all(chats.second, concurrency)


def wrong(chats: Chats, answers: Sequence[Answer]) -> tuple[str, ...]:
    """Answers that differ from the stock engine's beyond the bound."""
    return compare(chats.answers, answers, chats.bound).wrong


def lost(chats: Chats, answers: Sequence[Answer]) -> list[int]:
    """Tokens of each chat's first turn that its second did not restore.

    Chats whose first answer was another one than the stock engine's are left out.
    """
    known, second = chats.answers[:REQUESTS], answers[REQUESTS:]
    return [
        len(first.prompt) + len(answer.tokens) - later.cached_tokens
        for first, expected, answer, later in zip(
            chats.first, known, answers, second, strict=False
        )
        if answer.tokens == expected.tokens
    ]


def drift(chats: Chats, answers: Sequence[Answer]) -> float:
    """How far the stock engine's second turns begin from these, in nats: the third
    quartile.

    Left out are those behind another first answer than the stock engine's.
    """
    known, second = chats.answers[:REQUESTS], chats.answers[REQUESTS:]
    turns = zip(known, answers, second, answers[REQUESTS:], strict=False)
    gaps = [
        _first_gap(expected, got)
        for first, answer, expected, got in turns
        if first.tokens == answer.tokens
    ]
    return quantiles(gaps, n=4)[-1]


def _first_gap(expected: Answer, got: Answer) -> float:
    """The largest difference of a likely first token's logprob."""
    ours, theirs = got.logprobs[0], expected.logprobs[0]
    both = ours.keys() & theirs.keys()
    return max((abs(ours[token] - theirs[token]) for token in both), default=inf)


@pytest.mark.parametrize(
    ("drafting", "options"),
    [
        *((ORACLE, DEFAULT), (NGRAM, COLUMNS), (ORACLE, OURS), (ORACLE, REPLAY)),
        *((ORACLE, options) for options in ON_GRAPHS),
        *([(ORACLE, COLUMNS)] if ON_GPU else []),
    ],
    ids=[
        *("default", "ngram", "our kernels", "replay"),
        *NAMES_ON_GRAPHS,
        *(["columns"] if ON_GPU else []),
    ],
)
def test_answers_and_turn_ends(
    serve: Any, chats: Chats, drafting: dict[str, Any], options: dict[str, Any]
) -> None:
    """Turns end exactly: but for the last token, which may be sampled alone, all of a
    first turn is restored.
    """
    with serve("drafts", drafting, options=options) as server:
        answers = ask(server, chats)
        metrics, log = server.metrics(), server.log_text()
        assert ("kernels of hybrid-plugin run" in log) == chats.on_ours(options)
        assert ("sequences replay CUDA graphs" in log) == chats.in_graphs(options)
    assert len(wrong(chats, answers)) <= chats.stray, wrong(chats, answers)
    assert drift(chats, answers) < max(chats.bound, ROUNDING)
    assert metrics["turn_ends_exact"] == 2 * REQUESTS
    assert metrics["turn_ends_missed"] == 0
    missing = lost(chats, answers)
    assert len(missing) > 0.8 * REQUESTS
    assert set(missing) <= {0, 1}, metrics
    # A stop token that was a draft is restored, too.
    assert 0 in missing
    assert (metrics["drafts_lent"] > 0) == (not chats.recorded(options))
    assert metrics["draft_slots"] == metrics["state{used}"] == 0
    if drafting is ORACLE:
        # A quarter of the chats accepts nothing, a quarter all, the rest half.
        assert 0.5 < metrics["accepted_drafts"] < 2.5


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_answers_change_when_a_wrong_column_is_kept(
    serve: Any, chats: Chats, options: dict[str, Any]
) -> None:
    """Negative control: hits are as long, and the comparison sees the difference.

    With replay the state is one to which fewer tokens than the accepted are folded.
    How many answers change varies: in bfloat16 from 6 to 12 of 80.
    """
    with serve("wrong", ORACLE, options=options, fault="wrong_column") as server:
        answers = ask(server, chats)
    assert set(lost(chats, answers)) <= {0, 1}
    assert drift(chats, answers) > max(chats.bound, ROUNDING)
    assert len(wrong(chats, answers)) > 0


SLOTS = 6
PAGES = 6400 // PAGE_SIZE


@pytest.mark.parametrize("options", [COLUMNS, REPLAY], ids=["vllm", "replay"])
def test_drafts_take_no_sequence_its_place(
    serve: Any, chats: Chats, options: dict[str, Any], tmp_path: Path
) -> None:
    """With slots for six, six run at once: drafts make way, and come again.

    With replay they need none, and every step verifies.
    """
    most = tmp_path / "most"
    with serve(
        "pressed",
        ORACLE,
        options=options,
        pools=(PAGES, SLOTS + 1),
        environment=counting_live(most),
    ) as server:
        answers = ask(server, chats)
        metrics = server.metrics()
    assert len(wrong(chats, answers)) <= chats.stray, wrong(chats, answers)
    assert most.read_text() == str(SLOTS)
    assert metrics["preemptions"] == 0
    lends = options is not REPLAY
    assert (metrics["drafts_lent"] > 0) == (metrics["drafts_refused"] > 0) == lends
    assert metrics["turn_ends_exact"] == 2 * REQUESTS


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_preempted_requests_go_on(
    serve: Any, chats: Chats, options: dict[str, Any]
) -> None:
    """Preempted in the middle of verified drafts: the state they left is exact."""
    with serve("preempted", ORACLE, options=options, fault="refuse_pages") as server:
        answers = ask(server, chats)
        metrics = server.metrics()
    assert len(wrong(chats, answers)) <= chats.stray, wrong(chats, answers)
    assert metrics["preemptions"] > 0
    assert metrics["turn_ends_missed"] == 0


@pytest.mark.parametrize("options", [COLUMNS, REPLAY], ids=["vllm", "replay"])
def test_aborted_requests_leave_what_is_exact(
    serve: Any, chats: Chats, options: dict[str, Any]
) -> None:
    """Dropped in the middle of an answer, and asked again from the beginning."""
    with serve("aborted", ORACLE, options=options) as server:
        cut = [replace(ask, abort_after=1 + i % 6) for i, ask in enumerate(chats.first)]
        assert any(a.aborted for a in server.ask_all(cut, 8))
        answers = ask(server, chats)
        metrics = server.metrics()
    assert len(wrong(chats, answers)) <= chats.stray, wrong(chats, answers)
    assert metrics["state{used}"] == metrics["draft_slots"] == 0
