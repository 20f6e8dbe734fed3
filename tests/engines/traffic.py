# SPDX-License-Identifier: Apache-2.0
"""Requests that stress a prefix cache, from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.engines.messages import Answer, Ask

Generate = Callable[[Sequence[Ask]], Sequence[Answer]]

WORDS = (
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "flint",
    "grove",
    "harbor",
    "island",
    "jasper",
    "kernel",
    "lumen",
    "meadow",
    "nectar",
    "orbit",
    "pebble",
    "quartz",
    "river",
    "summit",
    "tundra",
    "umbra",
    "valley",
    "willow",
    "xenon",
    "yonder",
    "zephyr",
    "anchor",
    "beacon",
    "copper",
    "dagger",
    "engine",
    "falcon",
    "garnet",
    "hollow",
)


def encode(text: str) -> tuple[int, ...]:
    """Tokens of the bundled model: one per byte."""
    return tuple(text.encode())


@dataclass(frozen=True)
class Mix:
    """Shape of the mixed traffic."""

    page_size: int
    requests: int = 300
    max_tokens: int = 24
    seed: int = 0


def system_prompt(rng: random.Random, tokens: int) -> str:
    """A text of exactly so many tokens."""
    text = "You know these codes."
    while len(text) < tokens:
        text += f" The code for {rng.choice(WORDS)} is {rng.randrange(1000, 9999)}."
    return text[:tokens]


def mixed(mix: Mix) -> list[Ask]:
    """First turns and lone prompts: short, long, sharing prefixes, some aborted.

    Lengths run from one token to four pages and beyond, so that every position
    in a page is an end of something.
    """
    rng = random.Random(mix.seed)
    shared = [system_prompt(rng, n) for n in (40, 3 * mix.page_size, 150, 333)]
    asks = []
    for _ in range(mix.requests):
        kind = rng.random()
        if kind < 0.25:
            length = rng.randint(1, 4 * mix.page_size)
            text = system_prompt(random.Random(rng.randrange(12)), length)
        else:
            text = rng.choice(shared)[: rng.choice((None, None, 100))]
            text += f" What is the code for {rng.choice(WORDS)}? "[: rng.randint(0, 40)]
        abort = rng.randint(1, 8) if rng.random() < 0.1 else None
        asks.append(Ask(encode(text), rng.randint(1, mix.max_tokens), abort))
    return asks


def next_turns(asks: Sequence[Ask], answers: Sequence[Answer], seed: int) -> list[Ask]:
    """Go on with the chats: prompt, answer, a new question."""
    rng = random.Random(seed)
    turns = []
    for ask, answer in zip(asks, answers, strict=True):
        question = f" And the code for {rng.choice(WORDS)}? "
        prompt = ask.prompt + answer.tokens + encode(question)
        turns.append(Ask(prompt, ask.max_tokens))
    return turns
