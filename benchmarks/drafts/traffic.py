# SPDX-License-Identifier: Apache-2.0
"""Traffic for engines that draft: chats, a crowd, and steady decoding."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.prefix_workloads import Ask, Reply, Workload, at_most, text

CHATS, CROWD = "chats", "crowd"
DECODE = "decode"
"""Names of steady decoding begin with it, and end with how many decode at once."""


@dataclass(frozen=True)
class Scale:
    """Numbers and lengths, in tokens."""

    chats: int
    """All at once."""
    turns: int
    opening: int
    question: tuple[int, int]
    """The shortest and the longest."""
    answer: int

    crowd: int
    """Requests, all at once; more than fit."""
    prefixes: int
    """Of the crowd: each request begins with one of them."""
    prefix: int
    rest: int
    crowd_answer: int

    prompt: int
    """Of a sequence that only decodes; nothing of it is shared."""
    decode_answer: int
    decoding: tuple[int, ...]
    """Sequences that decode at once."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        chat = self.opening + self.turns * (self.question[1] + self.answer)
        return max(
            chat,
            self.prefix + self.rest + self.crowd_answer,
            self.prompt + self.decode_answer,
        )

    @property
    def crowd_tokens(self) -> int:
        """Of a sequence of the crowd."""
        return self.prefix + self.rest + self.crowd_answer

    def shorter(self) -> Scale:
        """To warm up with: prompts of the same lengths, fewer, and short answers."""
        return replace(
            self,
            chats=min(self.chats, 4),
            turns=2,
            answer=16,
            crowd=min(self.crowd, 24),
            crowd_answer=16,
            decode_answer=16,
        )


GPU = Scale(
    chats=16,
    turns=6,
    opening=400,
    question=(60, 300),
    answer=160,
    crowd=256,
    prefixes=8,
    prefix=2000,
    rest=400,
    crowd_answer=128,
    prompt=32,
    decode_answer=256,
    decoding=(1, 32, 128),
)
CPU = Scale(
    chats=3,
    turns=3,
    opening=40,
    question=(10, 30),
    answer=24,
    crowd=16,
    prefixes=2,
    prefix=200,
    rest=40,
    crowd_answer=24,
    prompt=16,
    decode_answer=48,
    decoding=(1, 4),
)


def workloads(scale: Scale) -> dict[str, Workload]:
    """By name, in the order in which they are measured."""
    steady = {f"{DECODE} {n}": decode(scale, n) for n in scale.decoding}
    return {CHATS: chats(scale), CROWD: crowd(scale), **steady}


def chats(scale: Scale) -> Workload:
    """Chats, all at once; every turn contains the last answer."""

    async def chat(ask: Ask, rng: random.Random) -> list[Reply]:
        said, replies = text(rng, scale.opening), []
        for _ in range(scale.turns):
            said += text(rng, rng.randint(*scale.question))
            reply = await ask(said, scale.answer)
            said = said + list(reply.tokens)
            replies.append(reply)
        return replies

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        own = [random.Random(rng.random()) for _ in range(scale.chats)]
        held = await at_most(scale.chats, [chat(ask, one) for one in own])
        return [reply for replies in held for reply in replies]

    return run


def crowd(scale: Scale) -> Workload:
    """More requests at once than fit, behind a few prefixes."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        prefixes = [text(rng, scale.prefix) for _ in range(scale.prefixes)]
        prompts = [
            rng.choice(prefixes) + text(rng, scale.rest) for _ in range(scale.crowd)
        ]
        asked = [ask(prompt, scale.crowd_answer) for prompt in prompts]
        return list(await asyncio.gather(*asked))

    return run


def decode(scale: Scale, sequences: int) -> Workload:
    """So many sequences that begin at once, share nothing, and generate."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        prompts = [text(rng, scale.prompt) for _ in range(sequences)]
        asked = [ask(prompt, scale.decode_answer) for prompt in prompts]
        return list(await asyncio.gather(*asked))

    return run


def spelled_with(vocabulary: int, ask: Ask) -> Ask:
    """Asks a model that knows fewer tokens than traffic has, with others for them."""

    async def known(prompt: Sequence[int], max_tokens: int) -> Reply:
        return await ask([token % vocabulary for token in prompt], max_tokens)

    return known


def decoding(name: str) -> int | None:
    """Sequences of a workload that only decodes; None for another one."""
    kind, _, count = name.partition(" ")
    return int(count) if kind == DECODE else None


SCALES: Mapping[str, Scale] = {"gpu": GPU, "cpu": CPU}
