# SPDX-License-Identifier: Apache-2.0
"""Phases that want state slots, KV pages, and both."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

from benchmarks.prefix_workloads import (
    WARM_UP,
    Ask,
    Reply,
    Workload,
    at_most,
    text,
)


@dataclass(frozen=True)
class Scale:
    """How much traffic: a GPU's share, or less of it where tokens are dear."""

    chats: int = 2000
    """Short requests of a phase."""
    assistants: int = 8
    """Each with a system prompt of its own; a chat is with one of them."""
    system_tokens: int = 500
    chat_tokens: int = 100
    """Of the longest question; the shortest has a third."""
    chat_answer: int = 32
    clients: int = 256
    """Chats at once, and sequences that an engine runs at once."""
    documents: int = 4
    document_tokens: int = 100_000
    """Of the longest; the shortest has a fifth less."""
    questions: int = 4
    """That each document is asked, after all others had theirs."""
    question_tokens: int = 50
    document_answer: int = 64
    readers: int = 2
    """Documents asked at once."""

    phase_limit: int = 240
    """Seconds after which an engine is taken to hang in a phase, or warming up."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.document_tokens + self.question_tokens + self.document_answer


GPU = Scale()
"""With Qwen3-Next's shapes a token has 24 KiB of KV: the documents take 9 GB."""
CPU = Scale(
    chats=120,
    assistants=4,
    system_tokens=64,
    chat_tokens=40,
    chat_answer=32,
    clients=64,
    document_tokens=3000,
    question_tokens=20,
    document_answer=16,
)


def phases(scale: Scale) -> dict[str, Workload]:
    """By name, in the order in which they are sent."""

    async def chat(ask: Ask, rng: random.Random, count: int) -> list[Reply]:
        systems = [text(rng, scale.system_tokens) for _ in range(scale.assistants)]
        least, most = scale.chat_tokens // 3, scale.chat_tokens
        prompts = [
            rng.choice(systems) + text(rng, rng.randint(least, most))
            for _ in range(count)
        ]
        asks = [ask(prompt, scale.chat_answer) for prompt in prompts]
        return await at_most(scale.clients, asks)

    async def read(ask: Ask, rng: random.Random, count: int) -> list[Reply]:
        least = scale.document_tokens * 4 // 5
        documents = [
            text(rng, rng.randint(least, scale.document_tokens)) for _ in range(count)
        ]
        asks = [
            ask(document + text(rng, scale.question_tokens), scale.document_answer)
            for _ in range(scale.questions)
            for document in documents
        ]
        return await at_most(scale.readers, asks)

    async def short_chats(ask: Ask, rng: random.Random) -> list[Reply]:
        return await chat(ask, rng, scale.chats)

    async def long_documents(ask: Ask, rng: random.Random) -> list[Reply]:
        return await read(ask, rng, scale.documents)

    async def both(ask: Ask, rng: random.Random) -> list[Reply]:
        chats, reads = random.Random(rng.random()), random.Random(rng.random())
        answers = await asyncio.gather(
            chat(ask, chats, scale.chats // 2),
            read(ask, reads, scale.documents // 2),
        )
        return [reply for replies in answers for reply in replies]

    return {
        "A: short chats": short_chats,
        "B: long documents": long_documents,
        "C: both": both,
    }


async def warm_up(ask: Ask, scale: Scale) -> None:
    """Compile what the first request of a kind compiles: each phase, but shorter."""
    rng = random.Random(WARM_UP)
    length = scale.system_tokens + scale.chat_tokens
    for count in (1, 8, scale.clients):
        prompts = [text(rng, length) for _ in range(count)]
        await asyncio.gather(*(ask(prompt, 8) for prompt in prompts))
    shorter = replace(
        scale,
        chats=2 * scale.clients,
        documents=2,
        document_tokens=scale.document_tokens // 4,
        questions=2,
    )
    for phase in phases(shorter).values():
        await phase(ask, rng)
