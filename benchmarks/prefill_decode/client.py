# SPDX-License-Identifier: Apache-2.0
"""Asks servers as clients do, and tells what a workload was like."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.host_tier.served import Asked
from benchmarks.prefix_workloads import Ask, Reply, Workload, percentiles

MODEL = "model"
"""The name that servers know their model by."""
SHOWN = 200
"""Characters of an error."""


@dataclass(frozen=True)
class Question:
    """A request, and what came of it."""

    prompt: str
    """Digest of its tokens."""
    wanted: int
    """Tokens that the answer should have."""
    asked: Asked
    error: str | None

    @property
    def is_whole(self) -> bool:
        """Whether it was answered to its end."""
        return self.error is None and len(self.asked.reply.tokens) == self.wanted


class Client:
    """Asks at one URL, and keeps what came of it."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        """Ask nothing yet.

        Args:
            url: of a server or a router.
            http: to ask by.
        """
        self._url = url
        self._http = http
        self.questions: list[Question] = []

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Reply:
        """An `Ask`; an answer that broke off has the tokens that came."""
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        first, error = 0.0, None
        begin = time.monotonic()
        try:
            async for event in self._events(prompt, max_tokens):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                first = first or (time.monotonic() - begin if tokens else 0.0)
        except (httpx.HTTPError, ValueError, RuntimeError) as failure:
            error = f"{type(failure).__name__}: {failure}"[:SHOWN]
        details = usage.get("prompt_tokens_details") or {}
        reply = Reply(
            tokens=tuple(tokens),
            prompt_tokens=len(prompt),
            cached_tokens=details.get("cached_tokens") or 0,
            ttft_s=first,
        )
        asked = Asked(reply, time.monotonic() - begin)
        self.questions.append(Question(digest(prompt), max_tokens, asked, error))
        return reply

    async def _events(
        self, prompt: Sequence[int], max_tokens: int
    ) -> AsyncIterator[dict[str, Any]]:
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        url = f"{self._url}/v1/completions"
        async with self._http.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                said = (await answer.aread()).decode(errors="replace")
                raise RuntimeError(f"{answer.status_code}: {said}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                yield event


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Client]:
    """Connections to a server, for one workload."""
    # A server may close a connection that waits just when it is used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        yield Client(url, http)


async def timed(workload: Workload, ask: Ask, rng: random.Random) -> float:
    """Run a workload; its seconds."""
    begin = time.monotonic()
    await workload(ask, rng)
    return time.monotonic() - begin


def digest(tokens: Sequence[int]) -> str:
    """A short name of some tokens."""
    text = ",".join(map(str, tokens))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def outcome(
    questions: Sequence[Question], wall_s: float, *, answers: bool
) -> dict[str, Any]:
    """What one run of a workload was like; times are those of whole answers.

    Args:
        questions: of the run.
        wall_s: seconds of the run.
        answers: whether answers mean something: digests of them, by their prompts'.
    """
    whole = [one.asked for one in questions if one.is_whole]
    replies = [one.reply for one in whole]
    per_token = [n for one in whole if (n := one.ms_per_token) is not None]
    found: dict[str, Any] = {
        "requests": len(questions),
        "failed": len(questions) - len(whole),
        "prompt_tokens": sum(one.prompt_tokens for one in replies),
        "cached_tokens": sum(one.cached_tokens for one in replies),
        "generated": sum(len(one.tokens) for one in replies),
        "wall_s": round(wall_s, 3),
        **percentiles("ttft_ms", [1000 * one.ttft_s for one in replies], 3),
        **percentiles("token_ms", per_token, 3),
        **percentiles("request_ms", [1000 * one.seconds for one in whole], 3),
    }
    errors = [one.error for one in questions if one.error is not None]
    if errors:
        found["errors"] = sorted(set(errors))[:3]
    if answers:
        found["answers"] = {
            one.prompt: digest(one.asked.reply.tokens)
            for one in questions
            if one.is_whole
        }
    return found
