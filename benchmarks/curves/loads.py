# SPDX-License-Identifier: Apache-2.0
"""All workloads by name, and what one consists of."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.curves.agents import agents
from benchmarks.curves.conversations import chats, thinking_chats
from benchmarks.curves.prompts import (
    documents,
    few_shot,
    system_prompts,
    with_one_offs,
)
from benchmarks.curves.protocol import Load
from benchmarks.curves.traces import mooncake, sessions
from benchmarks.prefix_workloads import Reply


def own_loads() -> dict[str, Load]:
    """Those that need no file, by the short names of the command line."""
    groups = {
        "system-200": system_prompts(
            200, groups=24, questions=8, question=(40, 200), answer=32, concurrency=8
        ),
        "system-2k": system_prompts(
            2000, groups=16, questions=10, question=(40, 300), answer=48, concurrency=8
        ),
        # The pattern that SGLang publishes measurements of.
        "system-10k": system_prompts(
            10_240,
            groups=16,
            questions=8,
            question=(256, 256),
            answer=128,
            concurrency=5,
        ),
    }
    single = {
        "few-shot": few_shot(),
        "chats": chats(),
        "thinking": thinking_chats(),
        "agents": agents(),
        "documents": documents(),
    }
    mixed = {
        f"{name}+": with_one_offs({**groups, **single}[name])
        for name in ("system-2k", "chats", "agents", "documents")
    }
    return groups | single | mixed


@dataclass(frozen=True)
class Traces:
    """Where published traces lie, as far as they are here."""

    mooncake: Path | None = None
    sessions: Path | None = None

    def loads(self) -> dict[str, Load]:
        """Every workload that can be served."""
        found = own_loads()
        if self.mooncake is not None:
            found["mooncake"] = mooncake(self.mooncake)
        if self.sessions is not None:
            found["sessions"] = sessions(self.sessions)
        return found


@dataclass(frozen=True)
class Stream:
    """The requests of a workload, in the order in which an idle engine gets them."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    concurrency: int
    """Requests that were in flight together, at most."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request at its end."""
        both = zip(self.prompts, self.answers, strict=True)
        return [len(prompt) + len(answer) for prompt, answer in both]


def record(load: Load, seed: int) -> Stream:
    """What a workload asks for, without an engine."""
    prompts: list[Sequence[int]] = []
    answers: list[Sequence[int]] = []
    inside = most = 0

    async def ask(prompt: Sequence[int], answer: Sequence[int]) -> Reply:
        nonlocal inside, most
        prompts.append(list(prompt))
        answers.append(list(answer))
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        inside -= 1
        return Reply(tuple(answer), len(prompt), 0, 0.0)

    async def run() -> None:
        await load.run(ask, random.Random(seed))

    asyncio.run(run())
    return Stream(prompts, answers, most)
