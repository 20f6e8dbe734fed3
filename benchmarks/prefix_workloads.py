# SPDX-License-Identifier: Apache-2.0
"""Traffic with shared prefixes, for an engine that takes token ids."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WARM_UP = "warm up"
"""Seed of what no round sends: of a whole number, `random` takes the absolute value."""
VOCABULARY = 32768


@dataclass(frozen=True)
class Outcome:
    """One workload under one configuration."""

    prompt_tokens: int
    cached_tokens: int
    ttft_ms_p50: float
    ttft_ms_p95: float
    wall_s: float
    failed: int


@dataclass(frozen=True)
class Reply:
    """One answer."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


Ask = Callable[[Sequence[int], int], Coroutine[Any, Any, Reply]]
"""Prompt and number of tokens to generate; answers greedily, past any end token."""
AnswerLength = Callable[[random.Random], int]
Workload = Callable[[Ask, random.Random], Coroutine[Any, Any, list[Reply]]]


def text(rng: random.Random, count: int) -> list[int]:
    """Random tokens: nothing is shared by accident."""
    return [rng.randrange(10, VOCABULARY) for _ in range(count)]


async def at_most(count: int, tasks: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run so many at a time, in order."""
    gate = asyncio.Semaphore(count)

    async def one(task: Coroutine[Any, Any, Any]) -> Any:
        async with gate:
            return await task

    return await asyncio.gather(*(one(task) for task in tasks))


def shared_system(tokens: int) -> Workload:
    """40 prompts behind one system prompt, four clients."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        system = text(rng, tokens)
        prompts = [system + text(rng, rng.randint(40, 200)) for _ in range(40)]
        return await at_most(4, [ask(prompt, 32) for prompt in prompts])

    return run


def conversations(
    count: int, at_once: int, *, turns: int, opening: int, answer: AnswerLength
) -> Workload:
    """So many chats, some at a time; every turn contains the last answer.

    Args:
        count: chats.
        at_once: chats at a time.
        turns: of each.
        opening: tokens before the first turn's own.
        answer: draws the tokens of an answer.
    """

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        async def chat(seed: int) -> list[Reply]:
            own = random.Random(seed)
            history, replies = text(own, opening), []
            for _ in range(turns):
                history += text(own, own.randint(60, 300))
                reply = await ask(history, answer(own))
                history = history + list(reply.tokens)
                replies.append(reply)
            return replies

        chats = [chat(rng.randrange(1 << 30)) for _ in range(count)]
        return [reply for replies in await at_most(at_once, chats) for reply in replies]

    return run


async def branches(ask: Ask, rng: random.Random) -> list[Reply]:
    """A trunk, four limbs, six leaves each, shuffled; four clients."""
    trunk = text(rng, 1000)
    limbs = [trunk + text(rng, 700) for _ in range(4)]
    prompts = [
        limb + text(rng, rng.randint(50, 300)) for limb in limbs for _ in range(6)
    ]
    rng.shuffle(prompts)
    return await at_most(4, [ask(prompt, 32) for prompt in prompts])


async def crowd(ask: Ask, rng: random.Random) -> list[Reply]:
    """256 requests at once over 8 prefixes, far more than the cache holds."""
    prefixes = [text(rng, 2000) for _ in range(8)]
    prompts = [rng.choice(prefixes) + text(rng, 400) for _ in range(256)]
    return await asyncio.gather(*(ask(prompt, 64) for prompt in prompts))


async def generated_shared_prefix(ask: Ask, rng: random.Random) -> list[Reply]:
    """The pattern of SGLang's `bench_serving`, a quarter of its groups, at once.

    16 groups of 16 prompts behind a system prompt of 2048, questions of 128.
    """
    systems = [text(rng, 2048) for _ in range(16)]
    prompts = [system + text(rng, 128) for system in systems for _ in range(16)]
    rng.shuffle(prompts)
    return await asyncio.gather(*(ask(prompt, 64) for prompt in prompts))


def system_prompts_in_groups(rate: float | None = None) -> Workload:
    """The pattern that SGLang publishes: 16 system prompts of 10,240, 8 questions each.

    Five at a time, or at the times of a Poisson process.

    Args:
        rate: requests per second; None for five at a time.
    """

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        own = random.Random(
            f"{rng.random()} {rate}"
        )  # shares nothing with another rate
        systems = [text(own, 10_240) for _ in range(16)]
        prompts = [system + text(own, 256) for system in systems for _ in range(8)]
        own.shuffle(prompts)
        if rate is None:
            return await at_most(5, [ask(prompt, 128) for prompt in prompts])
        due, tasks = 0.0, []

        async def later(delay: float, prompt: Sequence[int]) -> Reply:
            await asyncio.sleep(delay)
            return await ask(prompt, 128)

        for prompt in prompts:
            due += own.expovariate(rate)
            tasks.append(later(due, prompt))
        return list(await asyncio.gather(*tasks))

    return run


async def two_at_a_time(ask: Ask, rng: random.Random) -> list[Reply]:
    """60 prompts of 2,000 tokens that share 700 to 1,900 with others, two at a time."""
    trunk = text(rng, 1900)
    prompts = []
    for _ in range(60):
        shared = rng.randint(700, 1900)
        prompts.append(trunk[:shared] + text(rng, 2000 - shared))
    return await at_most(2, [ask(prompt, 32) for prompt in prompts])


WORKLOADS: dict[str, Workload] = {
    "system prompt of 200": shared_system(200),
    "system prompt of 2000": shared_system(2000),
    "chats": conversations(10, 10, turns=6, opening=150, answer=lambda own: 120),
    "branches": branches,
    "crowd": crowd,
    "generated shared prefix": generated_shared_prefix,
    "system prompts of 10240": system_prompts_in_groups(),
    "system prompts of 10240, Poisson": system_prompts_in_groups(rate=3.0),
    "two at a time": two_at_a_time,
}


async def warm_up(ask: Ask) -> None:
    """Compile what the first request of a kind compiles."""
    rng = random.Random(WARM_UP)
    for length in (8, 100, 1000, 5000):
        await asyncio.gather(*(ask(text(rng, length), 8) for _ in range(8)))
    prompt = text(rng, 3000)
    for _ in range(3):
        await ask(prompt, 8)


def percentiles(
    name: str, values: Sequence[float], digits: int = 2
) -> dict[str, float]:
    """Median and 95th percentile, by `name` with `_p50` and `_p95`; empty of no values.

    Args:
        name: of the quantity, with its unit.
        values: in any order.
        digits: behind the point.
    """
    if not values:
        return {}
    ordered = sorted(values)
    return {
        f"{name}_p50": round(statistics.median(ordered), digits),
        f"{name}_p95": round(ordered[int(0.95 * (len(ordered) - 1))], digits),
    }


async def run_once(
    name: str, ask: Ask, seed: int, workloads: Mapping[str, Workload] = WORKLOADS
) -> Outcome:
    """Run a workload once; other seeds share no prefix with it."""
    await ask(text(random.Random(f"{name} {seed}"), 64), 8)  # wakes a rested engine
    begin = time.monotonic()
    replies = await workloads[name](ask, random.Random(seed))
    wall = time.monotonic() - begin
    ttft = percentiles("ttft_ms", [1000 * r.ttft_s for r in replies])
    return Outcome(
        prompt_tokens=sum(r.prompt_tokens for r in replies),
        cached_tokens=sum(r.cached_tokens for r in replies),
        **ttft,
        wall_s=round(wall, 3),
        failed=sum(not r.tokens for r in replies),
    )
