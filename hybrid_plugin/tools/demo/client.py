# SPDX-License-Identifier: Apache-2.0
"""Talks to a server over the OpenAI chat API, one streamed answer at a time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from hybrid_plugin.tools.demo.patience import Patience
from hybrid_plugin.tools.demo.workloads import Message

TOP_LOGPROBS = 5


@dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    text: str = ""
    tokens: tuple[str, ...] = ()
    logprobs: tuple[Mapping[str, float], ...] = ()
    """For each token of the answer, the likeliest tokens and their logprobs."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    error: str | None = None


class Client:
    """A connection to one server; asks greedily, so that answers can be compared."""

    def __init__(
        self,
        url: str,
        model: str,
        extra: Mapping[str, Any],
        *,
        logprobs: bool = True,
        patience: Patience | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            url: of the server.
            model: the name it serves the model under.
            extra: what an engine needs in every request beyond the standard.
            logprobs: whether answers carry tokens and logprobs, not text alone.
            patience: how long the server may make no progress with any request.
        """
        self.patience = patience or Patience()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # `patience` ends what makes no progress; a slow machine is no failure.
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)
        self._model = model
        self._extra = extra
        self._logprobs = (
            {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if logprobs else {}
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        """Send one request; an error is an answer too."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            **self._logprobs,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        with self.patience.request():
            return await self._wait(asyncio.ensure_future(self._stream(body)))

    async def _wait(self, answer: asyncio.Future[Answer]) -> Answer:
        """Wait for an answer while the server makes progress with any request."""
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=self.patience.left_s)
                if not answer.done() and not self.patience.left_s:
                    limit = self.patience.limit_s
                    return Answer(error=f"no progress for {limit:.0f} seconds")
            return answer.result()
        except httpx.HTTPError as error:
            return Answer(error=f"{type(error).__name__}: {error}")
        finally:
            answer.cancel()

    async def _stream(self, body: Mapping[str, Any]) -> Answer:
        reader = _Reader()
        request = self._http.stream("POST", "/v1/chat/completions", json=body)
        async with request as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                return Answer(error=f"{response.status_code}: {text}")
            async for line in response.aiter_lines():
                self.patience.progress()
                if line.startswith("data: ") and line != "data: [DONE]":
                    reader.take(json.loads(line.removeprefix("data: ")))
        return reader.answer()


class _Reader:
    """Puts the events of one stream together."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._first: float | None = None
        self._text = ""
        self._tokens: list[str] = []
        self._logprobs: list[Mapping[str, float]] = []
        self._usage: Mapping[str, Any] = {}
        self._error: str | None = None
        self._stopped = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in one event."""
        if "error" in event:
            self._error = str(event["error"])
            return
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            self._text += choice["delta"].get("content") or ""
            self._stopped |= choice.get("finish_reason") == "stop"
            for token in (choice.get("logprobs") or {}).get("content") or ():
                self._tokens.append(token["token"])
                tops = token["top_logprobs"]
                self._logprobs.append({top["token"]: top["logprob"] for top in tops})
        if (self._tokens or self._text) and self._first is None:
            self._first = time.monotonic() - self._begin

    def answer(self) -> Answer:
        """The whole answer, once the stream has ended."""
        if not self._usage and self._error is None:
            self._error = "the stream ended early"
        if self._stopped and self._tokens:
            self._text = self._text.removesuffix(self._tokens[-1])
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            text=self._text,
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens") or 0,
            generated_tokens=self._usage.get("completion_tokens", 0),
            ttft_s=self._first or 0.0,
            error=self._error,
        )
