# SPDX-License-Identifier: Apache-2.0
"""Conversations: every prompt contains what came before it, or most of it."""

from __future__ import annotations

import random

from benchmarks.curves.protocol import Ask, Gate, Load, child, clients, text
from benchmarks.prefix_workloads import Reply


def chats(concurrency: int = 8) -> Load:
    """32 open chats of two to ten turns behind one system prompt, about 190 turns."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        gate, system = Gate(concurrency), text(rng, 300)

        async def chat(own: random.Random) -> list[Reply]:
            history, replies = list(system), list[Reply]()
            due = 3 * own.random()
            for _ in range(own.randint(2, 10)):
                history += text(own, own.randint(40, 400))
                answer = text(own, own.randint(40, 160))
                async with gate.at(due):
                    replies.append(await ask(history, answer))
                history = history + answer
                due += own.expovariate(1)
            return replies

        return await clients([chat(child(rng)) for _ in range(32)])

    return Load("chats", concurrency, run)


def thinking_chats(concurrency: int = 8) -> Load:
    """24 open chats, five turns each, whose template drops an answer's thinking.

    The next prompt has only the visible part of the answer.
    """

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        gate, system = Gate(concurrency), text(rng, 300)

        async def chat(own: random.Random) -> list[Reply]:
            history, replies = list(system), list[Reply]()
            due = 3 * own.random()
            for _ in range(5):
                history += text(own, own.randint(40, 400))
                thinking = text(own, own.randint(80, 400))
                visible = text(own, own.randint(30, 120))
                async with gate.at(due):
                    replies.append(await ask(history, thinking + visible))
                history = history + visible
                due += own.expovariate(1)
            return replies

        return await clients([chat(child(rng)) for _ in range(24)])

    return Load("chats without their thinking", concurrency, run)
