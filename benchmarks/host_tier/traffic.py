# SPDX-License-Identifier: Apache-2.0
"""Agents that come back, long prefixes that come back, and steady decoding."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.prefix_models import slot_bytes, token_bytes
from benchmarks.prefix_workloads import Ask, Reply, Workload, at_most, text

AGENTS, RETURN = "agents", "return"
ALONE, BESIDE = "decoding", "decoding beside prompts"
QUESTION = 64
"""Tokens that a prefix comes back with."""
OVERFLOW = 1.5
"""Bytes of other content, as a multiple of the cache, between a prefix and its
return: content is evicted by worth, not by age, so one cache full would leave some."""
_LEAST_ITEMSIZE = 2
"""Bytes of a number of the states: engines keep them in bfloat16 or wider."""


@dataclass(frozen=True)
class Scale:
    """Numbers and lengths, in tokens."""

    agents: int
    kinds: int
    """Of agents; those of a kind have one system prompt."""
    system: int
    opening: tuple[int, int]
    """The shortest and the longest context that an agent begins with."""
    turns: int
    result: tuple[int, int]
    """Of a tool, behind each answer."""
    answer: tuple[int, int]
    clients: int
    """Requests at a time."""

    prefixes: int
    prefix: int
    """Of each; they come back one at a time."""
    others: int
    """Prompts as long as a prefix, before the prefixes come back."""

    decoding: int
    """Sequences that decode at once."""
    decoded: int
    """Tokens that each of them generates."""
    prompt: int
    """Of each prompt that comes beside them."""
    pause_s: float
    """Between such prompts."""

    limit_s: float
    """After which an engine is taken to hang in a workload, or warming up."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        turn = self.result[1] + self.answer[1]
        return max(
            self.system + self.opening[1] + self.turns * turn,
            self.prefix + QUESTION + 2 * self.answer[1],
            QUESTION + self.decoded,
            self.prompt + 1,
        )

    def shorter(self) -> Scale:
        """To warm up with: prompts of the same lengths, fewer, and short answers."""
        return replace(
            self,
            agents=min(self.agents, 4),
            turns=2,
            prefixes=1,
            others=1,
            decoded=min(self.decoded, 48),
        )


GPU = Scale(
    agents=24,
    kinds=2,
    system=1500,
    opening=(3000, 7000),
    turns=4,
    result=(100, 800),
    answer=(32, 96),
    clients=6,
    prefixes=4,
    prefix=10_000,
    others=0,
    decoding=8,
    decoded=400,
    prompt=4000,
    pause_s=0.15,
    limit_s=240,
)
CPU = Scale(
    agents=16,
    kinds=2,
    system=64,
    opening=(150, 300),
    turns=3,
    result=(10, 60),
    answer=(4, 8),
    clients=2,
    prefixes=3,
    prefix=600,
    others=0,
    decoding=2,
    decoded=48,
    prompt=200,
    pause_s=0.3,
    limit_s=900,
)


def overflowing(scale: Scale, model: str, cache_bytes: int) -> Scale:
    """With as many other prompts as make a cache of this size forget the prefixes."""
    prompt = scale.prefix * token_bytes(model) + slot_bytes(model, _LEAST_ITEMSIZE)
    return replace(scale, others=-(-int(OVERFLOW * cache_bytes) // prompt))


@dataclass(frozen=True)
class Step:
    """A request of an agent: what it adds to all that was said before."""

    agent: int
    tokens: tuple[int, ...]
    answer: int
    """Tokens to generate."""


def workloads(scale: Scale) -> dict[str, Workload]:
    """By name, in the order in which they are measured."""
    return {
        AGENTS: agents(scale),
        RETURN: returning(scale),
        ALONE: decoding(scale, beside=False),
        BESIDE: decoding(scale, beside=True),
    }


def steps(rng: random.Random, scale: Scale) -> list[Step]:
    """What all agents ask, in the order in which they come to it.

    The pause of an agent between two of its steps, in which its tool works, has an
    exponential distribution; other agents' steps fall into it.
    """
    systems = [text(rng, scale.system) for _ in range(scale.kinds)]
    found: list[tuple[float, int, Step]] = []
    for agent in range(scale.agents):
        due = rng.uniform(0, scale.turns)
        opening = text(rng, rng.randint(*scale.opening))
        tokens = systems[agent % scale.kinds] + opening
        for _ in range(scale.turns):
            answer = rng.randint(*scale.answer)
            found.append((due, len(found), Step(agent, tuple(tokens), answer)))
            due += rng.expovariate(1)
            tokens = text(rng, rng.randint(*scale.result))
    return [step for _, _, step in sorted(found, key=lambda one: one[:2])]


def agents(scale: Scale) -> Workload:
    """Every step's prompt is all that its agent said and was answered before."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        said: dict[int, list[int]] = defaultdict(list)
        turn: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

        async def one(step: Step) -> Reply:
            # Locks, like the clients, take whoever comes first: steps stay in order.
            async with turn[step.agent]:
                said[step.agent] += step.tokens
                reply = await ask(list(said[step.agent]), step.answer)
                said[step.agent] += reply.tokens
                return reply

        tasks = [one(step) for step in steps(rng, scale)]
        return await at_most(scale.clients, tasks)

    return run


def returning(scale: Scale) -> Workload:
    """Prefixes, other content, and the prefixes again with more behind them.

    The first `scale.prefixes` replies are those to the prefixes, the last as many
    those to the prefixes that came back; nothing else runs beside either.
    """

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        answer = scale.answer[0]
        prefixes = [text(rng, scale.prefix) for _ in range(scale.prefixes)]
        first = [await ask(prefix, answer) for prefix in prefixes]
        others = [ask(text(rng, scale.prefix), 1) for _ in range(scale.others)]
        between = await at_most(scale.clients, others)
        last = [
            await ask([*prefix, *reply.tokens, *text(rng, QUESTION)], answer)
            for prefix, reply in zip(prefixes, first, strict=True)
        ]
        return [*first, *between, *last]

    return run


def decoding(scale: Scale, *, beside: bool) -> Workload:
    """So many sequences that begin at once and generate.

    Args:
        scale: of the traffic.
        beside: whether prompts that share nothing come meanwhile, one at a time; each
            leaves something for the host.
    """

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        prompts = [text(rng, QUESTION) for _ in range(scale.decoding)]
        tasks = [asyncio.create_task(ask(one, scale.decoded)) for one in prompts]
        replies = await _prompts(ask, rng, scale, tasks) if beside else []
        return [*await asyncio.gather(*tasks), *replies]

    return run


async def _prompts(
    ask: Ask, rng: random.Random, scale: Scale, until: Sequence[asyncio.Task[Reply]]
) -> list[Reply]:
    """Send prompts until the first of the tasks is done."""
    replies: list[Reply] = []
    while not any(task.done() for task in until):
        replies.append(await ask(text(rng, scale.prompt), 1))
        await asyncio.sleep(scale.pause_s)
    return replies
