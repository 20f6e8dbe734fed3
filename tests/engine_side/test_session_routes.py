# SPDX-License-Identifier: Apache-2.0
"""The endpoints of sessions, on a server that is none of an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse

from hybrid_plugin.engine.session_routes import SessionRoutes, text_of

WORDS = {"hello": [7, 8, 9]}


class Server:
    """An application with a tokenizer, and a desk that answers as it is told."""

    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.tokenized: list[tuple[Any, str | None]] = []
        self.app = FastAPI()
        self.app.add_route("/tokenize", self._tokenize, methods=["POST"])
        self.routes = SessionRoutes(self.app, self._ask, self._describe, lambda: 9)

    async def _tokenize(self, request: Request) -> Any:
        body = await request.json()
        self.tokenized.append((body, request.headers.get("authorization")))
        if body.get("prompt") == "bad":
            return JSONResponse({"error": {"message": "it is bad"}}, 422)
        return JSONResponse({"tokens": WORDS["hello"], "count": 3})

    async def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        self.orders.append(order)
        return self.answers.pop(0)

    @staticmethod
    def _describe(request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"salt": text_of(body, "cache_salt")}

    def call(
        self, method: str, path: str, answers: list[Any] | None = None, **more: Any
    ) -> httpx.Response:
        self.answers = answers if answers is not None else [{"status": 200, "x": 1}]

        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://test"
            ) as client:
                url = "/v1/hybrid/sessions" + path
                return await client.request(method, url, **more)

        return asyncio.run(go())


@pytest.fixture
def server() -> Server:
    return Server()


def test_tokens_are_taken_as_they_are(server: Server) -> None:
    before = int(time.time())
    done = server.call("POST", "/tea/save", json={"prompt": [1, 2], "max_tokens": 5})
    assert (done.status_code, done.json()) == (200, {"x": 1})
    (order,) = server.orders
    assert before <= order.pop("created") <= time.time()
    assert order == {
        "action": "save",
        "name": "tea",
        "tokens": [1, 2],
        "salt": None,
    }
    assert not server.tokenized


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hello"},
        {"messages": [{"role": "user", "content": "hello"}], "tools": [], "model": "m"},
    ],
)
def test_text_and_messages_are_rendered_by_the_server(
    server: Server, body: dict[str, Any]
) -> None:
    headers = {"Authorization": "Bearer key"}
    assert server.call("POST", "/tea/save", json=body, headers=headers).is_success
    assert server.orders[0]["tokens"] == WORDS["hello"]
    assert server.tokenized == [(body, "Bearer key")]


def test_what_the_tokenizer_refuses_is_passed_on(server: Server) -> None:
    done = server.call("POST", "/tea/save", json={"prompt": "bad"})
    assert (done.status_code, done.json()) == (422, {"error": "it is bad"})
    assert not server.orders


@pytest.mark.parametrize(
    "name", ["a/b", "../../etc/passwd", "a b", "ü茶", "x/save", "?a=b#c", "%2F"]
)
def test_a_name_is_anything_but_a_path(server: Server, name: str) -> None:
    from urllib.parse import quote

    place = "/" + quote(name, safe="").replace(".", "%2E")
    server.call("POST", place + "/save", json={"prompt": [1]})
    server.call("POST", place + "/load")
    server.call("DELETE", place)
    assert [order["name"] for order in server.orders] == [name] * 3
    assert [order["action"] for order in server.orders] == ["save", "load", "remove"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1]", "JSON object"),
        (b"{", "JSON object"),
        (b"\xff", "JSON object"),
        (b"[" * 100_000, "JSON object"),
        (b"{}", "messages or its prompt"),
        (b'{"prompt": [1], "messages": []}', "messages or its prompt"),
        (b'{"prompt": [1], "cache_salt": 3}', "cache_salt must be a string"),
        (b'{"prompt": [1,2,3,4,5,6,7,8,9,0]}', "up to 9 tokens, unlike 10"),
    ],
)
def test_a_body_that_is_none(server: Server, content: bytes, words: str) -> None:
    done = server.call("POST", "/tea/save", content=content)
    assert done.status_code == 400 and words in done.json()["error"]
    assert not server.orders


def test_what_takes_time_is_waited_for(server: Server) -> None:
    answers = [{"ticket": 3}, {"ticket": 3}, {"status": 507, "error": "no room"}]
    done = server.call("POST", "/tea/load", answers, json={"cache_salt": "s"})
    assert (done.status_code, done.json()) == (507, {"error": "no room"})
    poll = {"action": "poll", "ticket": 3}
    assert server.orders == [
        {"action": "load", "name": "tea", "salt": "s"},
        poll,
        poll,
    ]


def test_all_are_listed(server: Server) -> None:
    done = server.call("GET", "", [{"status": 200, "sessions": []}])
    assert done.json() == {"sessions": []}
    assert server.orders == [{"action": "list"}]


def test_other_methods_are_refused(server: Server) -> None:
    assert server.call("GET", "/tea/save").status_code == 405
    assert server.call("POST", "").status_code == 405
    assert server.call("PUT", "/tea").status_code == 405
    assert not server.orders
