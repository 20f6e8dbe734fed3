# SPDX-License-Identifier: Apache-2.0
"""When conversations begin: at the times of a Poisson process, or N at a time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import accumulate

from benchmarks.low_load.traffic import Conversation
from benchmarks.prefix_workloads import Ask, Reply, at_most


def poisson(rng: random.Random, rate: float, count: int) -> list[float]:
    """Seconds from the first of `count` arrivals to each of them.

    Args:
        rng: random numbers; the same give the same times.
        rate: arrivals per second, on average.
        count: of arrivals.
    """
    gaps = (rng.expovariate(rate) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))


async def hold(ask: Ask, conversation: Conversation) -> list[Reply]:
    """Ask one turn after the other, each as soon as the last is answered."""
    said: list[int] = []
    replies = []
    for turn in conversation:
        said += turn.tokens
        reply = await ask(said, turn.answer)
        said += reply.tokens
        replies.append(reply)
    return replies


async def at_times(
    ask: Ask, conversations: Sequence[Conversation], times: Sequence[float]
) -> list[Reply]:
    """Begin each conversation at its time, whatever else runs then.

    Args:
        ask: how to ask the engine.
        conversations: to hold.
        times: in seconds from now.
    """
    start = time.monotonic()

    async def one(conversation: Conversation, due: float) -> list[Reply]:
        await asyncio.sleep(max(0.0, start + due - time.monotonic()))
        return await hold(ask, conversation)

    pairs = zip(conversations, times, strict=True)
    held = await asyncio.gather(*(one(*pair) for pair in pairs))
    return [reply for replies in held for reply in replies]


async def so_many_at_a_time(
    ask: Ask, conversations: Sequence[Conversation], running: int
) -> list[Reply]:
    """Begin a conversation whenever fewer than `running` are held."""
    held = await at_most(running, [hold(ask, one) for one in conversations])
    return [reply for replies in held for reply in replies]
