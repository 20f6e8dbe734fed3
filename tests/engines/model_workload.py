# SPDX-License-Identifier: Apache-2.0
"""What every model of the registry is asked on a real engine, in the same order.

Chats of two turns, whose prompts are longer than a step; prompts that begin alike;
a crowd that is preempted, and its second turns; and the first chats again with
snapshots that are zeroed on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.models.kinds import Kind

MAX_MODEL_LEN = 1024
STEP = 96
"""Tokens of a step."""
PAGE = 32
TURNS = (300, 97, 50)
"""Prompt lengths of chats."""
SHARED = 250
ANSWER = 10
CROWD = 6
CROWD_ANSWER = 40
REFUSED_EVERY = 23
"""Times that a sequence of the crowd grows and gets no page once."""
Tokens = list[list[int]]


class Engine(Protocol):
    """An engine in this process."""

    def ask(self, prompts: Tokens, length: int) -> tuple[Tokens, list[int]]:
        """Greedy answers, and the tokens that were restored for each prompt."""

    def forget(self) -> None:
        """Drop everything cached."""

    def stats(self) -> dict[str, Any]:
        """Of the plugin's cache."""

    def pressure(self) -> Any:
        """A context in which requests are preempted."""


@dataclass
class Found:
    """What came out, phase by phase."""

    cached: dict[str, list[int]] = field(default_factory=dict)
    gaps: dict[str, list[float]] = field(default_factory=dict)
    distinct: dict[str, int] = field(default_factory=dict)
    """Different tokens of all answers together."""
    stats: dict[str, Any] = field(default_factory=dict)


def serve(engine: Engine, kind: Kind, checkpoint: Path) -> Found:
    """Serve all phases, and compare the answers with the reference's."""
    asked: dict[str, tuple[Tokens, Tokens]] = {}
    found = Found()

    def ask(phase: str, prompts: Tokens, length: int = ANSWER) -> None:
        answers, found.cached[phase] = engine.ask(prompts, length)
        asked[phase] = prompts, answers
        found.distinct[phase] = len({token for answer in answers for token in answer})

    def second_turns(phase: str) -> Tokens:
        more = prompts_of(3, [20] * CROWD)
        turns = zip(*asked[phase], more, strict=False)
        return [prompt + answer + new for prompt, answer, new in turns]

    first = prompts_of(1, TURNS)
    ask("first", first)
    ask("second", second_turns("first"))
    common = prompts_of(2, [SHARED])[0]
    for number, end in enumerate(prompts_of(4, [30] * 3)):
        ask(f"shared {number}", [common + end])
    before = engine.stats()
    with engine.pressure():
        ask("crowd", prompts_of(5, [100] * CROWD), CROWD_ANSWER)
    found.stats = engine.stats() | {"before": before}
    ask("crowd again", second_turns("crowd"))
    engine.forget()
    ask("first again", first)
    with zeroed_snapshots():
        ask("zeroed", second_turns("first again"))
    reference = kind.reference(checkpoint)
    for phase, (prompts, answers) in asked.items():
        pairs = zip(prompts, answers, strict=True)
        found.gaps[phase] = [gap(reference, p, a) for p, a in pairs]
    return found


def gap(
    reference: Callable[[Sequence[int]], Any], prompt: list[int], answer: list[int]
) -> float:
    """By how many nats another token was likelier than the one chosen, at most."""
    import torch

    logits = reference([*prompt, *answer])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return float((logits.max(1).values - chosen).max())


def zeroed_snapshots() -> AbstractContextManager[None]:
    """A cache that restores no states."""
    return zeroed_copies("state")


@contextmanager
def zeroed_copies(pool: str) -> Iterator[None]:
    """A cache whose hits find zeros in place of what is copied of a pool's content."""
    from hybrid_plugin.core.cache import HybridCache
    from hybrid_plugin.core.commands import Command, Copy, Zero

    drain = HybridCache.drain_commands

    def forgetful(cache: HybridCache) -> list[Command]:
        return [
            Zero(pool, command.destination)
            if isinstance(command, Copy) and command.pool == pool
            else command
            for command in drain(cache)
        ]

    HybridCache.drain_commands = forgetful  # type: ignore[method-assign]
    try:
        yield
    finally:
        HybridCache.drain_commands = drain  # type: ignore[method-assign]


def prompts_of(seed: int, lengths: Sequence[int]) -> Tokens:
    """Random ones, the same for a seed."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 250) for _ in range(length)] for length in lengths]
