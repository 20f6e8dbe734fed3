# SPDX-License-Identifier: Apache-2.0
"""Traffic that makes passes of a kind, one kind after the other."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path

from benchmarks.passes import log
from benchmarks.passes.costs import Timed
from benchmarks.passes.engines import Running
from benchmarks.passes.log import busy_seconds, isolated
from benchmarks.prefix_workloads import text

SETTLE_S = 0.05
"""After an answer, until the passes that were launched ahead of it have ended."""


class Probe:
    """Sends prompts that share nothing, and collects their passes."""

    def __init__(self, running: Running, seed: int) -> None:
        """Have nothing yet; probes of other seeds share no prompts."""
        self._ask = running.ask
        self._path: Path = running.passes
        self._rng = random.Random(seed)
        self.passes: list[Timed] = []

    async def prefills(self, sizes: Iterable[int], sequences: int, times: int) -> None:
        """Prompts of each size, so many at once, one batch after the other."""
        for size in sizes:
            for _ in range(times):
                begin = time.monotonic()
                prompts = [text(self._rng, size) for _ in range(sequences)]
                await asyncio.gather(*(self._ask(prompt, 1) for prompt in prompts))
                await self._collect(begin, beside=0)

    async def prefills_beside(
        self, sizes: Sequence[int], decodes: int, answer: int
    ) -> None:
        """Prompts one after the other while others generate, until the first is done.

        Args:
            sizes: of the prompts, again and again.
            decodes: sequences that generate.
            answer: tokens that each of them generates.

        Raises:
            RuntimeError: if they never generate all at once.
        """
        start = time.monotonic()
        others = [asyncio.create_task(self._generate(answer)) for _ in range(decodes)]
        while not any(one.decodes == decodes for one in log.read(self._path, start)):
            if any(task.done() for task in others):
                await asyncio.gather(*others)
                raise RuntimeError(
                    f"{decodes} sequences do not generate at once with answers of "
                    f"{answer} tokens; give them longer ones, or more memory."
                )
            await asyncio.sleep(SETTLE_S)
        begin = end = time.monotonic()
        for size in cycle(sizes):
            await self._ask(text(self._rng, size), 1)
            if any(task.done() for task in others):
                break
            end = time.monotonic()
        await asyncio.gather(*others)
        await self._collect(begin, beside=decodes, end=end)

    async def decodes(self, batches: Iterable[int], steps: int) -> None:
        """Answers of so many steps, at once."""
        for batch in batches:
            begin = time.monotonic()
            await asyncio.gather(*(self._generate(steps) for _ in range(batch)))
            await self._collect(begin, beside=0, decodes=batch)

    async def _generate(self, tokens: int) -> None:
        await self._ask(text(self._rng, 16), tokens)

    async def _collect(
        self,
        begin: float,
        *,
        beside: int,
        decodes: int | None = None,
        end: float = float("inf"),
    ) -> None:
        """Keep what ran.

        Of prefills alone only passes that overlap no other, of answers only the steps
        that all took part in.
        """
        await asyncio.sleep(SETTLE_S)
        passes = log.read(self._path, begin, end)
        if decodes is None and not beside:
            passes = isolated(passes)
        for one, busy in zip(passes, busy_seconds(passes), strict=True):
            if decodes is not None and (one.prefills or one.decodes != decodes):
                continue
            launch = one.launched - one.began
            kind = (one.prefill_tokens, one.prefills, one.decodes, beside)
            self.passes.append(Timed(*kind, launch, busy))
