# SPDX-License-Identifier: Apache-2.0
"""Conversations of one or more turns, as plans that do not depend on any engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.prefix_workloads import text


@dataclass(frozen=True)
class Turn:
    """What a conversation is continued with."""

    tokens: tuple[int, ...]
    answer: int
    """Tokens to generate."""


Conversation = tuple[Turn, ...]
"""Each turn's prompt is all that was said before it, and its own tokens."""
Plan = Callable[[random.Random, int, float], list[Conversation]]
"""Random numbers, number of requests, and a factor for all lengths."""

ANSWERS = (16, 128)
"""Tokens of the shortest and of the longest answer."""
TURNS = 4


def _answer(rng: random.Random, scale: float) -> int:
    """Of a length whose logarithm is evenly distributed: most answers are short."""
    shortest, longest = ANSWERS
    factor: float = (longest / shortest) ** rng.random()
    return max(1, round(scale * shortest * factor))


def _tokens(rng: random.Random, scale: float, least: int, most: int) -> tuple[int, ...]:
    return tuple(text(rng, max(1, round(scale * rng.randint(least, most)))))


def _single(rng: random.Random, tokens: tuple[int, ...], scale: float) -> Conversation:
    return (Turn(tokens, _answer(rng, scale)),)


def system_prompt(tokens: int) -> Plan:
    """Questions of 40 to 200 tokens behind one system prompt."""

    def plan(rng: random.Random, requests: int, scale: float) -> list[Conversation]:
        system = _tokens(rng, scale, tokens, tokens)
        return [
            _single(rng, system + _tokens(rng, scale, 40, 200), scale)
            for _ in range(requests)
        ]

    return plan


def chats(rng: random.Random, requests: int, scale: float) -> list[Conversation]:
    """Chats of four turns of 60 to 300 tokens, a system prompt for each."""
    return [
        tuple(
            Turn(
                _tokens(rng, scale, *((210, 450) if turn == 0 else (60, 300))),
                _answer(rng, scale),
            )
            for turn in range(TURNS)
        )
        for _ in range(-(-requests // TURNS))
    ]


def branches(rng: random.Random, requests: int, scale: float) -> list[Conversation]:
    """A trunk of 1,000 tokens, three limbs of 700 more, leaves of 50 to 300."""
    trunk = _tokens(rng, scale, 1000, 1000)
    limbs = [trunk + _tokens(rng, scale, 700, 700) for _ in range(3)]
    return [
        _single(rng, rng.choice(limbs) + _tokens(rng, scale, 50, 300), scale)
        for _ in range(requests)
    ]


def document(rng: random.Random, requests: int, scale: float) -> list[Conversation]:
    """Questions of 30 to 80 tokens about a document of 6,000."""
    return [
        _single(rng, shared + _tokens(rng, scale, 30, 80), scale)
        for shared in [_tokens(rng, scale, 6000, 6000)]
        for _ in range(requests)
    ]


def nothing_shared(
    rng: random.Random, requests: int, scale: float
) -> list[Conversation]:
    """Prompts of 200 to 2,000 tokens, all different from the first token on."""
    return [
        _single(rng, _tokens(rng, scale, 200, 2000), scale) for _ in range(requests)
    ]


PLANS: dict[str, Plan] = {
    "system prompt of 200": system_prompt(200),
    "system prompt of 2000": system_prompt(2000),
    "chats": chats,
    "branches": branches,
    "document": document,
    "nothing shared": nothing_shared,
}
