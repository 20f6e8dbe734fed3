# SPDX-License-Identifier: Apache-2.0
"""Weights that are updated while a server runs, and memory that it gives back."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.drivers.driver import Model
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.traffic import next_turns, system_prompt

pytestmark = pytest.mark.engine

CHATS = 4
LENGTH = 16
MODELS = {
    # vLLM's CPU build does not load weights of gated delta nets again.
    "vllm": Model("nemotron_h", "float32", 0.0),
    "sglang": Model("bundled", "bfloat16", 0.0),
}
ON_GPU = torch.cuda.is_available()
RELEASING = {
    "vllm": ("--enable-sleep-mode",) if ON_GPU else (),
    "sglang": ("--enable-memory-saver",),
}
"""Flags without which an engine keeps its memory."""
POOLS = [pytest.param(True, id="elastic"), pytest.param(False, id="fixed")]
Served = list[tuple[tuple[int, ...], int]]


def write_others(model: Path, folder: Path) -> Path:
    """Write a model with other weights, which forget at other rates too."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    generator = torch.Generator().manual_seed(0)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator)
        moved = weight.float() * (1 + 0.1 * noise)
        if name.endswith("A_log"):
            moved = weight.float() + 1.0
        weights[name] = moved.to(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def chat(server: Server) -> tuple[Served, Served]:
    """Serve chats of two turns to a server that knows none of them.

    Returns:
        What was answered in the first turns and in the second ones, and how much of
        each prompt was restored.
    """
    first = [
        Ask(tuple(system_prompt(random.Random(n), 200).encode()), LENGTH)
        for n in range(CHATS)
    ]
    answers = server.ask_all(first, 1)
    again = server.ask_all(next_turns(first, answers, seed=2), 1)
    assert [a.error for a in (*answers, *again)] == [None] * 2 * CHATS
    assert answers[0].cached_tokens == 0, "it is the first of all"
    assert all(answer.cached_tokens > 100 for answer in again)
    return _served(answers), _served(again)


def _served(answers: list[Answer]) -> Served:
    return [(answer.tokens, answer.cached_tokens) for answer in answers]


@pytest.mark.parametrize("elastic", POOLS if ON_GPU else POOLS[:1])
def test_nothing_is_left_of_old_weights_or_released_memory(
    start_server: StartServer, driver: Driver, tmp_path: Path, elastic: bool
) -> None:
    """With our kernels, which compute rates from the weights; in every tier."""
    kind = MODELS[driver.name]
    model = kind.checkpoint(tmp_path / "model")
    others = write_others(model, tmp_path / "others")
    options = {
        "kernels": "ours",
        "elastic": elastic,
        "gpu_memory_budget": "32MiB",
        "host_memory": "64MiB",
        "disk": {"path": str(tmp_path / "files"), "size": "256MiB"},
    }
    fresh = {"model": others, "options": {"kernels": "ours"}}
    with start_server("others", dtype=kind.dtype, **fresh) as server:
        expected = chat(server)
    updated = {"model": model, "options": options, "flags": RELEASING[driver.name]}
    with start_server("updated", dtype=kind.dtype, **updated) as server:
        loaded = chat(server)
        assert [said for said, _ in loaded[0]] != [said for said, _ in expected[0]]
        driver.update_weights(server.url, others)
        assert chat(server) == expected
        driver.update_weights(server.url, model)
        assert chat(server) == loaded
        driver.sleep(server.url)
        assert ("hybrid-plugin released" in server.log_text()) == elastic
        driver.wake_up(server.url)
        assert chat(server) == loaded
        stats = server.metrics()
        assert stats["kv{used}"] == stats["state{used}"] == 0
