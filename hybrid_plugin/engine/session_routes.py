# SPDX-License-Identifier: Apache-2.0
"""The HTTP endpoints of saved sessions, equal in both engines.

They are below `/v1`, where each engine asks for its API key; one that knows keys for
administrators asks for that (`guard`).  A conversation is told by
its tokens: a body holds what a completion request would hold, and messages or text are
rendered by the server's own `/tokenize`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import httpx

from hybrid_plugin.engine.session_desk import Answer

PREFIX: Final = "/v1/hybrid/sessions"
POLL_SECONDS: Final = 0.02
"""Between two questions for what takes time: a file takes longer."""
_INNER: Final = "http://server"
"""Names the server to itself."""

Order: TypeAlias = dict[str, Any]
Request: TypeAlias = Any
"""Starlette's."""
Ask: TypeAlias = Callable[[Order], Awaitable[Answer]]
"""Has the cache's process take an order."""
Describe: TypeAlias = Callable[[Request, Mapping[str, Any]], Order]
"""What of a request's body names the adapter and the salt, for an order.

Raises:
    ValueError: with a sentence, for what cannot be read.
"""

Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]


def _as_it_is(endpoint: Endpoint) -> Endpoint:
    """The default of `guard`."""
    return endpoint


def _no_key() -> str | None:
    """The default of `key`."""
    return None


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A request that cannot become an order."""

    status: int
    sentence: str


class SessionRoutes:
    """The endpoints of one server."""

    def __init__(
        self,
        app: Any,
        ask: Ask,
        describe: Describe,
        longest: Callable[[], int],
        *,
        guard: Callable[[Endpoint], Endpoint] = _as_it_is,
        key: Callable[[], str | None] = _no_key,
    ) -> None:
        """Add them to a server.

        Args:
            app: FastAPI's application.
            ask: reaches the cache.
            describe: reads what else than tokens must be equal.
            longest: tokens that a request of the server may have.
            guard: marks an endpoint as one for administrators, in the server's way.
            key: that the server's `/tokenize` asks for; None where it takes what came
                with the request.
        """
        self._app = app
        self._ask = ask
        self._describe = describe
        self._longest = longest
        self._key = key
        one = PREFIX + "/{name:path}"
        for path, endpoint, method in (
            (one + "/save", self._save, "POST"),
            (one + "/load", self._load, "POST"),
            (PREFIX, self._list, "GET"),
            (one, self._remove, "DELETE"),
        ):
            app.add_route(path, guard(endpoint), methods=[method])

    # --------------------------------------------------------------- endpoints

    async def _save(self, request: Request) -> Any:
        body = await _body(request)
        order = self._order("save", request, body)
        if isinstance(order, _Refusal) or isinstance(body, _Refusal):
            return _answer(order)
        tokens = await self._tokens(request, body)
        if isinstance(tokens, _Refusal):
            return _answer(tokens)
        if len(tokens) > self._longest():
            sentence = f"this server's requests have up to {self._longest()} tokens"
            return _answer(_Refusal(400, f"{sentence}, unlike {len(tokens)}"))
        order |= {"tokens": tokens, "created": int(time.time())}
        return await self._take(order)

    async def _load(self, request: Request) -> Any:
        order = self._order("load", request, await _body(request))
        if isinstance(order, _Refusal):
            return _answer(order)
        return await self._take(order)

    async def _list(self, request: Request) -> Any:
        return await self._take({"action": "list"})

    async def _remove(self, request: Request) -> Any:
        name = request.path_params["name"]
        return await self._take({"action": "remove", "name": name})

    # ---------------------------------------------------------------- internal

    def _order(
        self, action: str, request: Request, body: dict[str, Any] | _Refusal
    ) -> Order | _Refusal:
        if isinstance(body, _Refusal):
            return body
        try:
            rest = self._describe(request, body)
        except ValueError as error:
            return _Refusal(400, f"{error}")
        return {"action": action, "name": request.path_params["name"], **rest}

    async def _take(self, order: Order) -> Any:
        """Have an order taken, and wait for what becomes of it."""
        answer = await self._ask(order)
        while "ticket" in answer:
            await asyncio.sleep(POLL_SECONDS)
            answer = await self._ask({"action": "poll", "ticket": answer["ticket"]})
        return _answer(answer)

    async def _tokens(
        self, request: Request, body: Mapping[str, Any]
    ) -> list[int] | _Refusal:
        """The tokens of a body, which a completion request with it would have."""
        prompt, messages = body.get("prompt"), body.get("messages")
        if (prompt is None) == (messages is None):
            return _Refusal(400, "give a session's messages or its prompt")
        if isinstance(prompt, list):
            return prompt
        key, given = self._key(), request.headers.get("authorization")
        given = given if key is None else f"Bearer {key}"
        headers = {} if given is None else {"authorization": given}
        transport = httpx.ASGITransport(app=self._app)
        async with httpx.AsyncClient(transport=transport, base_url=_INNER) as client:
            found = await client.post("/tokenize", json=dict(body), headers=headers)
        if found.status_code != 200:
            return _Refusal(found.status_code, _sentence_of(found))
        tokens: list[int] = found.json()["tokens"]
        return tokens


async def _body(request: Request) -> dict[str, Any] | _Refusal:
    content = await request.body()
    try:
        body = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return _Refusal(400, "the body must be a JSON object")
    return body


def _sentence_of(found: httpx.Response) -> str:
    """What an engine says is wrong, in either one's form."""
    try:
        said = found.json()
    except ValueError:
        return found.text
    error = said.get("error", said) if isinstance(said, dict) else said
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)


def _answer(answer: Answer | _Refusal) -> Any:
    from starlette.responses import JSONResponse

    if isinstance(answer, _Refusal):
        return JSONResponse({"error": answer.sentence}, answer.status)
    content = dict(answer)
    return JSONResponse(content, content.pop("status"))


def text_of(body: Mapping[str, Any], name: str) -> str | None:
    """An entry of a body that is a text, if it is there.

    Raises:
        ValueError: for anything else.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a string")
    return value
