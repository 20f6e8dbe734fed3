# SPDX-License-Identifier: Apache-2.0
"""Sends a workload to a server and sums up what came back."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx

from hybrid_plugin.tools.demo.client import Answer, Client
from hybrid_plugin.tools.demo.engines import Engine, Levels
from hybrid_plugin.tools.demo.patience import LEAST_LIMIT_S, Patience
from hybrid_plugin.tools.demo.server import DemoError, Server
from hybrid_plugin.tools.demo.workloads import (
    Conversation,
    Workload,
    message,
    shared_prompt,
)
from hybrid_plugin.tools.prometheus_text import Metrics

POLL_S = 0.1
SETTLE_S = 1.5
"""Waited before every measurement: vLLM's processes spin for a second after their
last step, which would slow down the first requests to the other server."""
WAKE_UP = shared_prompt(requests=4)
"""Sent after that, because a server is slow after a rest itself.  It tells, too, how
long this server is silent while it works."""


@dataclass(frozen=True)
class Target:
    """One of the two servers under comparison."""

    server: Server
    engine: Engine
    plugin: bool
    model: str = "tiny"


@dataclass
class Peaks:
    """The fullest a server was while a workload ran; None where it does not say."""

    pages: int | None = None
    slots: int | None = None
    running: int | None = None
    first: Levels = field(default_factory=Levels)
    last: Levels = field(default_factory=Levels)
    samples: int = 0

    def note(self, levels: Levels) -> None:
        """Take in what was seen at one moment."""
        if not self.samples:
            self.first = levels
        self.samples += 1
        self.last = levels
        self.pages = _most(self.pages, levels.pages)
        self.slots = _most(self.slots, levels.slots)
        self.running = _most(self.running, levels.running)

    @property
    def preemptions(self) -> int | None:
        """How many sequences were preempted meanwhile."""
        if self.first.preemptions is None or self.last.preemptions is None:
            return None
        return self.last.preemptions - self.first.preemptions

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a verification of drafts gave, on average."""
        first, last = self.first, self.last
        if last.verifications is None or last.accepted is None:
            return None
        # The counters appear with the first verification.
        count = last.verifications - (first.verifications or 0)
        accepted = last.accepted - (first.accepted or 0)
        return 1 + accepted / count if count else None

    @property
    def host_hit_tokens(self) -> int | None:
        """Tokens of prompts that came from host memory."""
        return _since(self.first.host_hit_tokens, self.last.host_hit_tokens)

    @property
    def disk_hit_tokens(self) -> int | None:
        """Tokens of prompts that came from disk."""
        return _since(self.first.disk_hit_tokens, self.last.disk_hit_tokens)

    @property
    def peer_hit_tokens(self) -> int | None:
        """Tokens of prompts that came from another server."""
        return _since(self.first.peer_hit_tokens, self.last.peer_hit_tokens)


@dataclass(frozen=True)
class Result:
    """A workload on one server, in numbers."""

    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    seconds: float
    right_answers: int
    """Answers that begin with the code that was asked for."""
    peak_pages: int | None
    """Held by live sequences; a page of stock vLLM is one of its blocks."""
    peak_slots: int | None
    peak_running: int | None
    preemptions: int | None
    acceptance_length: float | None = None
    """Tokens of a verification, on average; None without speculation."""
    host_hit_tokens: int | None = None
    """Of the cached tokens, those that came from host memory."""
    disk_hit_tokens: int | None = None
    """Of the cached tokens, those that came from disk."""
    peer_hit_tokens: int | None = None
    """Of the cached tokens, those that came from another server."""

    @property
    def cached_share(self) -> float:
        """Share of the prompts' tokens that was not computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class Run:
    """A workload on one server: the numbers, and the answers by conversation."""

    result: Result
    answers: Sequence[Sequence[Answer]]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of all values does not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarise(
    workload: Workload,
    answers: Sequence[Sequence[Answer]],
    peaks: Peaks,
    seconds: float,
) -> Result:
    """Sum up the answers to a workload."""
    flat = [answer for turns in answers for answer in turns]
    good = [answer for answer in flat if answer.error is None]
    times = [1000 * answer.ttft_s for answer in good]
    return Result(
        requests=workload.requests,
        failed=len(flat) - len(good),
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        cached_tokens=sum(answer.cached_tokens for answer in good),
        ttft_ms_p50=_rounded(percentile(times, 0.50)),
        ttft_ms_p95=_rounded(percentile(times, 0.95)),
        seconds=round(seconds, 2),
        right_answers=_right(workload, answers),
        peak_pages=peaks.pages,
        peak_slots=peaks.slots,
        peak_running=peaks.running,
        preemptions=peaks.preemptions,
        acceptance_length=_rounded(peaks.acceptance_length, 2),
        host_hit_tokens=peaks.host_hit_tokens,
        disk_hit_tokens=peaks.disk_hit_tokens,
        peer_hit_tokens=peaks.peer_hit_tokens,
    )


def measure(target: Target, workload: Workload, tick: Callable[[], None]) -> Run:
    """Send the workload to a server that is awake and has nothing cached; sum up.

    Args:
        target: the server.
        workload: what to send.
        tick: called after every answer.

    Raises:
        DemoError: if the server ended meanwhile, or will not forget its cache.
    """
    return asyncio.run(_measure(target, workload, tick))


def measure_turns(
    target: Target, workload: Workload, tick: Callable[[], None], *, forget: bool = True
) -> Sequence[Run]:
    """Ask every conversation's first question, then every one's second, and so on.

    Args:
        target: as for `measure`.
        workload: whose conversations have equal numbers of questions.
        tick: called after every answer.
        forget: whether the server forgets first what it has cached.

    Returns:
        The numbers of each turn.

    Raises:
        DemoError: as `measure`.
    """
    return asyncio.run(_measure_turns(target, workload, tick, forget=forget))


def continued(workload: Workload, runs: Sequence[Run]) -> Workload:
    """What is left to ask, after all that was said.

    Args:
        workload: of which the first questions were asked.
        runs: one for each of them.
    """
    openings = [conversation.opening for conversation in workload.conversations]
    asked = [conversation.questions for conversation in workload.conversations]
    for turn, run in enumerate(runs):
        openings = [
            (
                *opening,
                message("user", questions[turn].text),
                message("assistant", answers[0].text),
            )
            for opening, questions, answers in zip(
                openings, asked, run.answers, strict=True
            )
        ]
    return replace(
        workload,
        conversations=tuple(
            Conversation(opening, questions[len(runs) :])
            for opening, questions in zip(openings, asked, strict=True)
        ),
    )


async def _measure(target: Target, workload: Workload, tick: Callable[[], None]) -> Run:
    async with _prepared(target) as (client, admin):
        return await _run(target, workload, client, admin, tick)


async def _measure_turns(
    target: Target, workload: Workload, tick: Callable[[], None], *, forget: bool
) -> Sequence[Run]:
    runs: list[Run] = []
    async with _prepared(target, forget=forget) as (client, admin):
        left = workload
        while all(one.questions for one in left.conversations):
            turn = replace(
                left,
                conversations=tuple(
                    Conversation(one.opening, one.questions[:1])
                    for one in left.conversations
                ),
            )
            runs.append(await _run(target, turn, client, admin, tick))
            left = continued(left, runs[-1:])
    return runs


@asynccontextmanager
async def _prepared(
    target: Target, *, forget: bool = True
) -> AsyncIterator[tuple[Client, httpx.AsyncClient]]:
    """Connections to a server that is awake, and has forgotten if it is to."""
    client = Client(target.server.url, target.model, target.engine.request_extra)
    async with httpx.AsyncClient(
        base_url=target.server.url, timeout=LEAST_LIMIT_S
    ) as admin:
        await asyncio.sleep(SETTLE_S)
        await _wake_up(client)
        if forget:
            await _forget(target, admin)
        yield client, admin
    await client.close()
    target.server.check_alive()


async def _run(
    target: Target,
    workload: Workload,
    client: Client,
    admin: httpx.AsyncClient,
    tick: Callable[[], None],
) -> Run:
    gate, peaks = asyncio.Semaphore(workload.concurrency), Peaks()

    async def one(conversation: Conversation) -> list[Answer]:
        async with gate:
            return await converse(client, conversation, workload.max_tokens, tick)

    async with _watch(target, admin, peaks, client.patience):
        begin = time.monotonic()
        answers = await asyncio.gather(*(one(c) for c in workload.conversations))
        seconds = time.monotonic() - begin
    return Run(summarise(workload, answers, peaks, seconds), answers)


async def converse(
    client: Client,
    conversation: Conversation,
    max_tokens: int,
    tick: Callable[[], None],
) -> list[Answer]:
    """Ask one question after the other; a failure fails the rest as well."""
    history = list(conversation.opening)
    answers: list[Answer] = []
    for question in conversation.questions:
        if answers and answers[-1].error is not None:
            answers.append(Answer(error="an earlier turn failed"))
        else:
            history.append(message("user", question.text))
            answers.append(await client.ask(history, max_tokens))
            history.append(message("assistant", answers[-1].text))
        tick()
    return answers


async def _wake_up(client: Client) -> None:
    waking = (converse(client, c, 4, lambda: None) for c in WAKE_UP.conversations)
    await asyncio.gather(*waking)


async def _forget(target: Target, admin: httpx.AsyncClient) -> None:
    try:
        (await admin.post(target.engine.reset_path)).raise_for_status()
    except httpx.HTTPError as error:
        target.server.check_alive()
        raise DemoError(
            f"The {target.server.name} server did not clear its cache: {error}."
        ) from error


@asynccontextmanager
async def _watch(
    target: Target, admin: httpx.AsyncClient, peaks: Peaks, patience: Patience
) -> AsyncIterator[None]:
    """Look at the server's metrics now, again and again, and at the end.

    A change of them is progress, though no answer has got a token by it.
    """

    async def look() -> None:
        with contextlib.suppress(httpx.HTTPError):
            text = (await admin.get("/metrics")).text
            levels = target.engine.levels(Metrics(text), plugin=target.plugin)
            if peaks.samples and levels != peaks.last:
                patience.progress()
            peaks.note(levels)

    async def keep_looking() -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await look()

    await look()
    task = asyncio.create_task(keep_looking())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await look()


def _right(workload: Workload, answers: Sequence[Sequence[Answer]]) -> int:
    return sum(
        answer.error is None and answer.text.startswith(question.answer)
        for conversation, turns in zip(workload.conversations, answers, strict=True)
        for question, answer in zip(conversation.questions, turns, strict=True)
    )


def _rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def _since(first: int | None, last: int | None) -> int | None:
    """By how much a counter grew; it appears with the first admission."""
    return None if last is None else last - (first or 0)


def _most(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)
