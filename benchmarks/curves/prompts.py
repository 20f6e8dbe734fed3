# SPDX-License-Identifier: Apache-2.0
"""Independent prompts that share their beginnings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

from benchmarks.curves.protocol import Ask, Gate, Load, clients, text
from benchmarks.prefix_workloads import Reply

_Request = tuple[list[int], list[int]]


async def _in_order(ask: Ask, limit: int, requests: Sequence[_Request]) -> list[Reply]:
    gate = Gate(limit)

    async def one(number: int, request: _Request) -> list[Reply]:
        async with gate.at(number):
            return [await ask(*request)]

    return await clients([one(*numbered) for numbered in enumerate(requests)])


def system_prompts(
    tokens: int,
    *,
    groups: int,
    questions: int,
    question: tuple[int, int],
    answer: int,
    concurrency: int,
) -> Load:
    """Groups of questions behind a system prompt of their own, shuffled."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        systems = [text(rng, tokens) for _ in range(groups)]
        requests = [
            (system + text(rng, rng.randint(*question)), text(rng, answer))
            for system in systems
            for _ in range(questions)
        ]
        rng.shuffle(requests)
        return await _in_order(ask, concurrency, requests)

    return Load(f"system prompts of {tokens:,}", concurrency, run)


def few_shot(concurrency: int = 8) -> Load:
    """Instructions, four of five examples in every order, a question; 120 requests."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        instructions = text(rng, 400)
        examples = [text(rng, rng.randint(250, 600)) for _ in range(5)]
        requests = [
            (
                [*instructions, *(t for e in order for t in e), *text(rng, 80)],
                text(rng, 24),
            )
            for order in permutations(examples, 4)
        ]
        rng.shuffle(requests)
        return await _in_order(ask, concurrency, requests)

    return Load("few-shot permutations", concurrency, run)


def documents(concurrency: int = 4) -> Load:
    """16 documents of 4,000 to 12,000 tokens in rotation, eight questions each."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        instructions = text(rng, 120)
        texts = [instructions + text(rng, rng.randint(4000, 12000)) for _ in range(16)]
        requests = []
        for _ in range(8):
            rng.shuffle(texts)
            requests += [
                (document + text(rng, rng.randint(20, 120)), text(rng, 48))
                for document in texts
            ]
        return await _in_order(ask, concurrency, requests)

    return Load("documents in rotation", concurrency, run)


def with_one_offs(load: Load, share: float = 0.3) -> Load:
    """The same, with unrelated prompts of 100 to 6,000 tokens among its requests.

    A client asks one before a request of its own now and then, so that no more
    requests are in flight than without.

    Args:
        load: what they are mixed into.
        share: of all requests, that nobody repeats.
    """

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        seed, extra = rng.getrandbits(64), list[Reply]()

        async def mixed(prompt: Sequence[int], answer: Sequence[int]) -> Reply:
            # Drawn from the request, so that it does not depend on the order.
            key = (seed, len(prompt), *prompt[-4:], *answer[:4])
            own = random.Random(repr(key))
            while own.random() < share:
                length = int(100 * 60 ** own.random())
                extra.append(await ask(text(own, length), text(own, 32)))
            return await ask(prompt, answer)

        return await load.run(mixed, rng) + extra

    return Load(f"{load.name}, mixed", load.concurrency, run)
