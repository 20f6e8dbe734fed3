# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in SGLang: each has turns of its own, which are restored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from tests.engines import draft_heads, slow_decay
from tests.engines.conftest import StartServer
from tests.engines.drivers.sglang import ON_GPU, generate
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.traffic import encode

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(ON_GPU, reason="SGLang's norms take no float32 on a GPU"),
]

TOKENS = 12
PROMPTS = tuple(
    encode(f"{number}. What was said about it " * 9)[:230] for number in range(3)
)
"""Of more than two passes each; whole turns of several chats are told apart by them."""
AGAIN = encode(" And what came of it?")
TIE = 0.05
"""Nats between two implementations in float32, with an adapter as large as weights."""
FAR = 0.5
"""Nats by which answers of other weights miss, at least."""
SEEDS = {"first": 1, "second": 2}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj")
"""SGLang takes adapters of queries, keys and values together only."""


@dataclass(frozen=True)
class Checkpoints:
    """A model and its adapters."""

    base: Path
    adapters: dict[str, Path]
    weights: dict[str | None, Path]
    """By adapter, the checkpoint whose answers are right: its weights have it."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("adapters")
    base = slow_decay.write_nemotron_h(folder / "base")
    weights: dict[str | None, Path] = {None: base}
    adapters = {}
    for name, seed in SEEDS.items():
        weights[name] = folder / f"merged-{name}"
        adapters[name] = draft_heads.write_adapter(
            folder / name, base, weights[name], seed, LAYERS
        )
    return Checkpoints(base, adapters, weights)


@pytest.fixture(scope="module")
def server(start_server: StartServer, checkpoints: Checkpoints) -> Iterator[Server]:
    paths = [f"{name}={path}" for name, path in checkpoints.adapters.items()]
    with start_server(
        "adapters",
        model=checkpoints.base,
        dtype="float32",
        flags=("--lora-paths", *paths),
    ) as running:
        yield running


def ask(server: Server, adapter: str | None, prompt: Sequence[int]) -> Answer:
    """Send one request, with an adapter or without."""
    return generate(server.url, prompt, TOKENS, lora_path=adapter)


def ask_all(
    server: Server, turns: Sequence[tuple[str | None, tuple[int, ...]]]
) -> list[Answer]:
    """As many at a time as there are adapters, so that batches have several."""
    with ThreadPoolExecutor(len(SEEDS) + 1) as clients:
        return list(clients.map(lambda turn: ask(server, *turn), turns))


def worst(
    model: Path, prompts: Sequence[tuple[int, ...]], given: list[Answer]
) -> float:
    """By how many nats a model has other tokens likelier, at most."""
    return max(gaps(model, [Ask(prompt, TOKENS) for prompt in prompts], given))


def test_adapters_share_nothing_and_restore_their_own_turns(
    server: Server, checkpoints: Checkpoints
) -> None:
    """Right answers are those of checkpoints whose weights have the adapter."""
    names = list(checkpoints.weights)
    first = [(name, prompt) for prompt in PROMPTS for name in names]
    answers = ask_all(server, first)
    assert [answer.cached_tokens for answer in answers] == [0] * len(first)
    second = [
        (name, (*prompt, *answer.tokens, *AGAIN))
        for (name, prompt), answer in zip(first, answers, strict=True)
    ]
    more = ask_all(server, second)
    for (_, prompt), answer in zip(second, more, strict=True):
        turn = len(prompt) - len(AGAIN)
        assert turn - 1 <= answer.cached_tokens <= turn
    given = list(zip([*first, *second], [*answers, *more], strict=True))
    for name in names:
        prompts = [prompt for (one, prompt), _ in given if one == name]
        mine = [answer for (one, _), answer in given if one == name]
        assert worst(checkpoints.weights[name], prompts, mine) <= TIE
        for other in set(names) - {name}:
            assert worst(checkpoints.weights[other], prompts, mine) > FAR
    stats = server.metrics()
    assert stats["kv{used}"] == stats["state{used}"] == 0
