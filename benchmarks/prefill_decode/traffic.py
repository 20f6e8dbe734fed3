# SPDX-License-Identifier: Apache-2.0
"""Prompts and chats behind shared system prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from benchmarks.prefix_workloads import VOCABULARY, Ask, Reply, Workload, at_most
from hybrid_plugin.tools.demo.workloads import SENTENCES, THINGS

PROMPTS, CHATS = "prompts", "chats"
_FIRST_TOKEN = 10
"""Lower ones may be special."""


@dataclass(frozen=True)
class Scale:
    """Numbers, and lengths in tokens; of pairs the least and the most."""

    concurrency: int
    """Requests at a time."""
    systems: int
    system: int
    """Tokens of each system prompt."""
    prompts: int
    prompt: tuple[int, int]
    """With its system prompt."""
    chats: int
    turns: int
    opening: tuple[int, int]
    """Of a chat, with its system prompt."""
    turn: tuple[int, int]
    """What a chat adds to an answer."""
    answer: tuple[int, int]
    speaks: bool = False
    """Whether prompts are text that the bundled model was trained for."""
    limit_s: float = 240
    """After which a side is taken to hang in a workload."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        answer = self.answer[1]
        chat = self.opening[1] + (self.turns - 1) * (self.turn[1] + answer) + answer
        return max(self.prompt[1] + answer, chat)

    def shorter(self) -> Scale:
        """To warm up with: as long, at the same concurrency, in fewer requests."""
        return replace(
            self,
            prompts=min(self.prompts, self.concurrency),
            chats=min(self.chats, 4),
            turns=2,
        )


GPU = Scale(
    concurrency=32,
    systems=4,
    system=1000,
    prompts=96,
    prompt=(2000, 6000),
    chats=32,
    turns=3,
    opening=(2000, 3500),
    turn=(200, 800),
    answer=(64, 128),
)
SMALL = Scale(
    concurrency=4,
    systems=2,
    system=64,
    prompts=12,
    prompt=(150, 400),
    chats=4,
    turns=3,
    opening=(120, 250),
    turn=(70, 120),
    answer=(5, 12),
    limit_s=600,
    speaks=True,
)


def workloads(scale: Scale) -> dict[str, Workload]:
    """By name, in the order in which they are measured."""
    return {PROMPTS: prompts(scale), CHATS: chats(scale)}


def prompts(scale: Scale) -> Workload:
    """Prompts that share a system prompt and nothing else."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        systems = [text(rng, scale, scale.system) for _ in range(scale.systems)]
        asked = []
        for number in range(scale.prompts):
            own = rng.randint(*scale.prompt) - scale.system
            prompt = systems[number % scale.systems] + text(rng, scale, own)
            asked.append(ask(prompt, rng.randint(*scale.answer)))
        return await at_most(scale.concurrency, asked)

    return run


def chats(scale: Scale) -> Workload:
    """Chats whose every turn contains all that was said and answered before."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        systems = [text(rng, scale, scale.system) for _ in range(scale.systems)]

        async def chat(number: int, seed: int) -> list[Reply]:
            own = random.Random(seed)
            rest = own.randint(*scale.opening) - scale.system
            said = systems[number % scale.systems] + text(own, scale, rest)
            replies = []
            for _ in range(scale.turns):
                reply = await ask(list(said), own.randint(*scale.answer))
                said += reply.tokens
                said += text(own, scale, own.randint(*scale.turn))
                replies.append(reply)
            return replies

        seeds = [rng.randrange(1 << 30) for _ in range(scale.chats)]
        all_chats = [chat(number, seed) for number, seed in enumerate(seeds)]
        found = await at_most(scale.concurrency, all_chats)
        return [reply for replies in found for reply in replies]

    return run


def text(rng: random.Random, scale: Scale, count: int) -> list[int]:
    """Random tokens, or such text: nothing is shared by accident."""
    if scale.speaks:
        return list(_speech(rng, count).encode())
    return [rng.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(count)]


def _speech(rng: random.Random, count: int) -> str:
    """A fact, other sentences, and the fact again but for its end, one byte a token."""
    thing, code = rng.choice(THINGS), f"{rng.randrange(10_000):04d}"
    said = f"{rng.randrange(10**8):08d} The code for {thing} is {code}."
    while len(said) < count:
        said += " " + rng.choice(SENTENCES)
    end = f" The code for {thing} is "[-count:]
    return said[: count - len(end)] + end
