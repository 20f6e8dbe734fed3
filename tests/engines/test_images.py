# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: what is behind an image is shared with the same image alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import with_images
from tests.engines.conftest import DRIVER, StartServer
from tests.engines.drivers import Driver
from tests.engines.server import Server

IS_VLLM = DRIVER is not None and DRIVER.name == "vllm"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        IS_VLLM and not (find_spec("torchvision") or with_images.TORCHVISION.is_dir()),
        reason="vLLM takes images with torchvision, which is not installed",
    ),
]

BEFORE = "Here are instructions that all requests have in common, word for word. " * 3
BEHIND = (
    " Say what you see in this image, and then what you make of it, at length. " * 2
)
GOES_ON = "And what is in the corner at the left?"
FLAGS = {"vllm": (), "sglang": ("--enable-cache-report",)}
"""With which answers tell what was restored, where the driver does not give them."""
NEAR = 1e-3
"""Nats that a log probability may move by in float32; in bfloat16 none moves where
prompts are split alike, as they are here."""
Turn = tuple[list[Any], int, int]


def turns(server: Server, model: Path, seed: int) -> list[Turn]:
    """A question about an image, and one that goes on from the answer."""
    url = with_images.image(seed)
    messages: list[Any] = [with_images.question(BEFORE, url, BEHIND)]
    first = with_images.ask(server.url, str(model), messages)
    messages += [
        {"role": "assistant", "content": "".join(one["token"] for one in first[0])},
        {"role": "user", "content": GOES_ON},
    ]
    return [first, with_images.ask(server.url, str(model), messages)]


def same(one: Turn, other: Turn) -> bool:
    """Whether answers are the same, and as likely."""
    pairs = list(zip(one[0], other[0], strict=True))
    return all(
        a["token"] == b["token"] and abs(a["logprob"] - b["logprob"]) < NEAR
        for a, b in pairs
    )


def test_images_are_told_apart_and_found_again(
    start_server: StartServer, driver: Driver, tmp_path: Path
) -> None:
    model = with_images.write_qwen3_5(tmp_path / "model")
    serving: dict[str, Any] = {"model": model, "dtype": "float32"}
    if IS_VLLM and not torch.cuda.is_available():
        serving["dtype"] = "bfloat16"  # of its gated delta nets on CPUs
        if with_images.TORCHVISION.is_dir():
            serving |= with_images.with_torchvision()
    with start_server("stock", plugin=False, prefix_cache=False, **serving) as server:
        expected = {seed: turns(server, model, seed) for seed in (1, 2, 3)}
    assert not same(expected[1][0], expected[2][0]), "the image changes nothing"
    with start_server("plugin", flags=FLAGS[driver.name], **serving) as server:
        found = [(seed, turns(server, model, seed)) for seed in (1, 2, 3, 1)]
    for seed, answers in found:
        for one, stock in zip(answers, expected[seed], strict=True):
            assert same(one, stock)
    (_, fresh), _, (_, other), (_, again) = found
    tokens = fresh[0][1]
    image = tokens - len(BEFORE) - len(BEHIND)
    assert fresh[0][2] == 0
    # Where prompts part, at the image's first place, is known from the second one on.
    assert len(BEFORE) - driver.page_size <= other[0][2] <= len(BEFORE) + image
    assert again[0][2] >= tokens - driver.page_size
    # Answers of random weights are no text, so that the chat parts where they begin;
    # what is restored of it ends behind the image.
    for _, second in (fresh, other, again):
        assert second[2] > len(BEFORE) + image
