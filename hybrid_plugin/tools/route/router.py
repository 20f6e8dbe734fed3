# SPDX-License-Identifier: Apache-2.0
"""Sends a request to a server that computes its prompt, then to one that answers.

It speaks the `kv_transfer_params` of vLLM's NixlConnector, as other routers do.  If the
second server is SGLang, it puts what the first one says where SGLang reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any, TypeAlias

import httpx

from hybrid_plugin.tiers.peers.params import OWN, PARAMS

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's own example of such a router says to the first server."""
_OF_THE_ANSWER = (
    "stream_options",
    "min_tokens",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
)
"""Entries of a request that a server which answers nothing has no use for."""
_OF_A_CONNECTION = ("host", "content-length", "connection", "transfer-encoding")
"""Headers that are not passed on."""
_SGLANG_PROBE = "/model_info"
"""What SGLang answers, and vLLM does not."""
_KEY = ("authorization",)
"""Headers with what a server may ask for."""

logger = logging.getLogger(__name__)


class Router:
    """An ASGI application."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], client: httpx.AsyncClient
    ) -> None:
        """Route among servers, in turn.

        Args:
            prefill: URLs of servers that compute prompts.
            decode: URLs of servers that answer.
            client: asks them.
        """
        self._prefill = itertools.cycle([url.rstrip("/") for url in prefill])
        self._decode = itertools.cycle([url.rstrip("/") for url in decode])
        self._first = decode[0].rstrip("/")
        self._client = client
        self._is_sglang: dict[str, bool] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            return
        body = await _body(receive)
        headers = {
            name.decode(): value.decode()
            for name, value in scope["headers"]
            if name.decode() not in _OF_A_CONNECTION
        }
        path, method = scope["path"], scope["method"]
        request = _object(body) if path in COMPLETIONS and method == "POST" else None
        answering = asyncio.ensure_future(
            self._route(method, path, headers, request, body, send)
        )
        leaving = asyncio.ensure_future(_left(receive))
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not answering.done():
            answering.cancel()  # nobody reads the answer: its server need not go on
        with contextlib.suppress(asyncio.CancelledError):
            await answering

    # ---------------------------------------------------------------- internal

    async def _route(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        request: dict[str, Any] | None,
        body: bytes,
        send: Send,
    ) -> None:
        """Have a request answered.

        Args:
            method, path, headers, body: of the request.
            request: the body, if it asks for a completion; None for others.
            send: to the client.
        """
        url = self._first
        if request is not None:
            url = next(self._decode)
            params = None
            if goes_on(request):
                params = await self._prefilled(path, request, headers)
            if params is not None:
                request |= await self._carried(url, request, params, headers)
                body = json.dumps(request).encode()
        await self._pass_on(method, url + path, headers, body, send)

    async def _prefilled(
        self, path: str, request: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Mapping[str, Any] | None:
        """Have a prompt computed; what is said of it, None if that failed.

        The second server computes then what the first one could not, or refuses it.
        """
        url = next(self._prefill)
        try:
            answer = await self._client.post(
                url + path, json=of_prompt(request), headers=headers
            )
            answer.raise_for_status()
            params = answer.json().get(PARAMS)
        except (httpx.HTTPError, ValueError) as error:
            logger.warning("hybrid-plugin route: %s does not compute: %s", url, error)
            return None
        return params if isinstance(params, dict) else None

    async def _carried(
        self,
        url: str,
        request: Mapping[str, Any],
        params: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> dict[str, Any]:
        """Entries of the request to a server that goes on."""
        if not await self._knows_sglang(url, headers):
            return {PARAMS: params}
        own = dict(request.get("custom_params") or {})
        return {"custom_params": own | {OWN: json.dumps(params.get(OWN))}}

    async def _knows_sglang(self, url: str, headers: Mapping[str, str]) -> bool:
        """Whether SGLang serves at a URL; asked anew until the answer tells.

        Args:
            url: of the server.
            headers: of a client's request: they may have the key that it asks for.
        """
        if url not in self._is_sglang:
            key = {name: headers[name] for name in _KEY if name in headers}
            try:
                answer = await self._client.get(url + _SGLANG_PROBE, headers=key)
            except httpx.HTTPError:
                return False  # it may come back
            if answer.status_code not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
                logger.warning(
                    "hybrid-plugin route: %s answers %d to %s, so it is taken for vLLM",
                    *(url, answer.status_code, _SGLANG_PROBE),
                )
                return False
            self._is_sglang[url] = answer.status_code == HTTPStatus.OK
        return self._is_sglang[url]

    async def _pass_on(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        send: Send,
    ) -> None:
        """Have a server answer, piece by piece."""
        begun = False
        try:
            async with self._client.stream(
                method, url, headers=headers, content=body
            ) as answer:
                kept = [
                    (name.lower().encode(), value.encode())
                    for name, value in answer.headers.multi_items()
                    if name.lower() not in (*_OF_A_CONNECTION, "content-encoding")
                ]
                await _begin(send, answer.status_code, kept)
                begun = True
                async for part in answer.aiter_bytes():
                    await _more(send, part)
        except httpx.HTTPError as error:
            logger.warning("hybrid-plugin route: %s does not answer: %s", url, error)
            if begun:
                raise  # the client sees that the answer is not whole
            await _begin(send, 502, [(b"content-type", b"application/json")])
            said = {"error": {"message": f"{url} does not answer", "code": 502}}
            await _more(send, json.dumps(said).encode())
        await _end(send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                await self._client.aclose()
                return


def goes_on(request: Mapping[str, Any]) -> bool:
    """Whether a server can go on with what another one has computed of a request.

    Not if it returns the prompt's log probabilities, which it computes itself; and an
    answer to several prompts at once tells of the first one alone.
    """
    prompt = request.get("prompt")
    several = (
        isinstance(prompt, list)
        and len(prompt) > 1
        and not all(isinstance(token, int) for token in prompt)
    )
    logprobs = request.get("logprobs")  # a number, 0 among them; of chats true or false
    has_logprobs = logprobs is not None and logprobs is not False
    echoes = bool(request.get("echo")) and has_logprobs
    return not (several or echoes or request.get("prompt_logprobs") is not None)


def of_prompt(request: Mapping[str, Any]) -> dict[str, Any]:
    """A request for its prompt alone."""
    kept = {name: one for name, one in request.items() if name not in _OF_THE_ANSWER}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = 1
    return kept | {"max_tokens": 1, "stream": False, PARAMS: _PREFILL}


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


async def _body(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _left(receive: Receive) -> None:
    """Return once the client has hung up, or has its whole answer."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _begin(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})
