# SPDX-License-Identifier: Apache-2.0
"""Phases that want state slots, KV pages, and both."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.prefix_workloads import Ask, Reply, Workload, at_most, text


@dataclass(frozen=True)
class Scale:
    """How much traffic: a GPU's share, or less of it where tokens are dear."""

    chats: int = 600
    """Short requests of a phase, and as many at once as the engine runs."""
    chat_tokens: int = 300
    answer_tokens: int = 128
    prompts: int = 8
    """Long requests of a phase."""
    prompt_tokens: int = 100_000
    clients: int = 256

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.answer_tokens


GPU = Scale()
CPU = Scale(
    chats=120,
    chat_tokens=40,
    answer_tokens=32,
    prompts=6,
    prompt_tokens=3000,
    clients=64,
)


def phases(scale: Scale) -> dict[str, Workload]:
    """By name, in the order in which they are sent."""

    def chat(rng: random.Random) -> list[int]:
        return text(rng, rng.randint(scale.chat_tokens // 3, scale.chat_tokens))

    def long(rng: random.Random) -> list[int]:
        least = scale.prompt_tokens * 4 // 5
        return text(rng, rng.randint(least, scale.prompt_tokens))

    async def short_chats(ask: Ask, rng: random.Random) -> list[Reply]:
        asks = [ask(chat(rng), scale.answer_tokens) for _ in range(scale.chats)]
        return await at_most(scale.clients, asks)

    async def long_prompts(ask: Ask, rng: random.Random) -> list[Reply]:
        asks = [ask(long(rng), scale.answer_tokens) for _ in range(scale.prompts)]
        return await at_most(scale.clients, asks)

    async def mixed(ask: Ask, rng: random.Random) -> list[Reply]:
        prompts = [chat(rng) for _ in range(scale.chats // 2)]
        prompts += [long(rng) for _ in range(scale.prompts // 2)]
        rng.shuffle(prompts)
        asks = [ask(prompt, scale.answer_tokens) for prompt in prompts]
        return await at_most(scale.clients, asks)

    return {
        "A: short chats": short_chats,
        "B: long prompts": long_prompts,
        "C: both": mixed,
    }
