# SPDX-License-Identifier: Apache-2.0
"""Prompts that begin like one another, and differ where no grid does."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.engines.traffic import WORDS, encode, system_prompt

LONGEST = 1600
"""Tokens of a prompt at most."""
ANSWER = 24
"""Tokens of the longest answer."""
_TRUNKS = (65, 190, 333, 512, 777, 1100)


@dataclass(frozen=True)
class Prompt:
    """A request."""

    tokens: tuple[int, ...]
    answer: int
    """Tokens to generate."""


def prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Requests of which nearly all share a beginning with an earlier one.

    A third continue a whole trunk, a third one cut anywhere, a third an earlier
    prompt, as the next turn of a chat would.
    """
    rng = random.Random(seed)
    trunks = [system_prompt(rng, tokens) for tokens in _TRUNKS]
    found: list[str] = []
    for number in range(count):
        trunk = rng.choice(trunks)
        if number % 3 == 1:
            trunk = trunk[: rng.randint(1, len(trunk))]
        elif number % 3 == 2:
            trunk = rng.choice(found)
        tail = f" {number}: which code has {rng.choice(WORDS)}? "
        tail += system_prompt(rng, rng.randint(1, 300))
        found.append((trunk + tail)[:LONGEST])
    return [Prompt(encode(text), rng.randint(4, ANSWER)) for text in found]
