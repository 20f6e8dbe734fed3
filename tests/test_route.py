# SPDX-License-Identifier: Apache-2.0
"""The router, between a client and servers that are made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from hybrid_plugin import cli
from hybrid_plugin.tools.route.router import Router, of_prompt

PARAMS = {"do_remote_prefill": True, "remote_host": "h", "hybrid_peer": {"name": "n"}}
BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "stream": True}


class Servers:
    """What servers were asked, and what they say."""

    def __init__(self, **says: Callable[[httpx.Request], httpx.Response]) -> None:
        self.says = says
        self.asked: list[tuple[str, str, Any]] = []
        self.starting = 0
        """How often probes come to nothing yet."""

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.url.host, request.url.path, body))
        if request.url.path == "/model_info":
            return httpx.Response(self.probed(request))
        if request.url.host in self.says:
            return self.says[request.url.host](request)
        if "prefill" in request.url.host:
            return httpx.Response(200, json={"kv_transfer_params": PARAMS})
        return httpx.Response(200, content=b"data: 1\n\ndata: [DONE]\n\n")

    def probed(self, request: httpx.Request) -> int:
        """The status of the page by which a router tells SGLang."""
        if self.starting:
            self.starting -= 1
            return 503
        if "sglang" not in request.url.host:
            return 404
        return 200 if request.headers.get("authorization") == "Bearer key" else 401

    def to(self, host: str) -> list[Any]:
        """Bodies of what a server was asked of completions."""
        return [
            body for name, path, body in self.asked if name == host and "/v1" in path
        ]


def through(
    servers: Servers,
    *bodies: Any,
    prefill: tuple[str, ...] = ("http://prefill/",),
    decode: tuple[str, ...] = ("http://decode",),
    path: str = "/v1/completions",
    method: str = "POST",
) -> list[httpx.Response]:
    """What clients get that ask one after the other."""

    async def run() -> list[httpx.Response]:
        upstream = httpx.AsyncClient(transport=httpx.MockTransport(servers.answer))
        app: Any = Router(prefill, decode, upstream)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://router"
        ) as client:
            return [
                await client.request(
                    method,
                    path,
                    content=body if isinstance(body, bytes) else json.dumps(body),
                    headers={"Authorization": "Bearer key", "X-Request-Id": "one"},
                )
                for body in bodies
            ]

    return asyncio.run(run())


def test_a_request_goes_to_both_with_what_the_first_one_says() -> None:
    servers = Servers()
    (answer,) = through(servers, BODY)
    assert answer.status_code == 200
    assert answer.text == "data: 1\n\ndata: [DONE]\n\n"
    (first,), (second,) = servers.to("prefill"), servers.to("decode")
    assert first["max_tokens"] == 1 and first["stream"] is False
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second == BODY | {"kv_transfer_params": PARAMS}


def test_chats_are_routed_alike() -> None:
    servers = Servers()
    through(servers, BODY, path="/v1/chat/completions")
    assert servers.asked[0][:2] == ("prefill", "/v1/chat/completions")
    assert servers.to("decode")[0]["kv_transfer_params"] == PARAMS


def test_sglang_gets_it_where_it_reads_it() -> None:
    servers = Servers()
    asked = BODY | {"custom_params": {"hybrid_ttl": 5}}
    through(servers, asked, BODY, decode=("http://sglang",))
    first, second = servers.to("sglang")
    told = '{"name": "n"}'
    assert first["custom_params"] == {"hybrid_ttl": 5, "hybrid_peer": told}
    assert second["custom_params"] == {"hybrid_peer": told}
    assert "kv_transfer_params" not in first
    probes = [path for _, path, _ in servers.asked if path == "/model_info"]
    assert len(probes) == 1


def test_a_server_that_is_starting_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = Servers()
    servers.starting = 1
    through(servers, BODY, BODY, BODY, decode=("http://sglang",))
    first, second, third = servers.to("sglang")
    assert "custom_params" not in first
    assert (
        second["custom_params"]
        == third["custom_params"]
        == {"hybrid_peer": '{"name": "n"}'}
    )
    assert "http://sglang answers 503 to /model_info" in caplog.text


@pytest.mark.parametrize(
    ("entries", "routed"),
    [
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1, 2], [3]]}, False),
        ({"prompt": "a"}, True),
        ({"prompt": ["a"]}, True),
        ({"prompt": [[1, 2]]}, True),
        ({"echo": True, "logprobs": 0}, False),
        ({"echo": True, "logprobs": False}, True),
        ({"echo": True, "logprobs": 1}, False),
        ({"echo": True}, True),
        ({"logprobs": 1}, True),
        ({"prompt_logprobs": 0}, False),
    ],
)
def test_what_no_server_can_go_on_with_is_not_computed_twice(
    entries: dict[str, Any], routed: bool
) -> None:
    servers = Servers()
    (answer,) = through(servers, BODY | entries)
    assert answer.status_code == 200
    assert bool(servers.to("prefill")) == routed
    (asked,) = servers.to("decode")
    assert ("kv_transfer_params" in asked) == routed


def test_a_server_stops_when_its_client_hangs_up() -> None:
    """Otherwise it would generate an answer that nobody reads."""

    async def run() -> list[str]:
        seen: list[str] = []

        class Endless(httpx.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                try:
                    while True:
                        yield b"data: 1\n\n"
                        await asyncio.sleep(0)
                finally:
                    seen.append("stopped")

        transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Endless()))
        router = Router(
            ("http://p",), ("http://d",), httpx.AsyncClient(transport=transport)
        )
        begun = asyncio.Event()
        messages = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in messages:
                return message
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                begun.set()

        scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        await asyncio.wait_for(router(scope, receive, send), 10)
        return seen

    assert asyncio.run(run()) == ["stopped"]


def test_servers_are_taken_in_turn() -> None:
    servers = Servers()
    through(
        servers,
        *[BODY] * 4,
        prefill=("http://prefill1", "http://prefill2"),
        decode=("http://d1", "http://d2", "http://d3"),
    )
    hosts = [host for host, path, _ in servers.asked if "/v1" in path]
    pairs = list(zip(hosts[::2], hosts[1::2], strict=True))
    assert pairs == [
        ("prefill1", "d1"),
        ("prefill2", "d2"),
        ("prefill1", "d3"),
        ("prefill2", "d1"),
    ]


def gone(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("gone", request=request)


@pytest.mark.parametrize(
    "says",
    [
        gone,
        lambda _: httpx.Response(500),
        lambda _: httpx.Response(400, json={"error": "?"}),
        lambda _: httpx.Response(200, content=b"no JSON"),
        lambda _: httpx.Response(200, json={}),
        lambda _: httpx.Response(200, json={"kv_transfer_params": None}),
        lambda _: httpx.Response(200, json={"kv_transfer_params": "x"}),
    ],
)
def test_where_the_first_one_fails_the_second_one_computes(says: Any) -> None:
    servers = Servers(prefill=says)
    (answer,) = through(servers, BODY)
    assert answer.status_code == 200
    assert servers.to("decode") == [BODY]


def test_what_the_second_one_says_is_passed_on() -> None:
    refusal = httpx.Response(422, json={"error": "no"}, headers={"x-of": "decode"})
    (answer,) = through(Servers(decode=lambda _: refusal), BODY)
    assert (answer.status_code, answer.json()) == (422, {"error": "no"})
    assert answer.headers["x-of"] == "decode"
    (answer,) = through(Servers(decode=gone), BODY)
    assert answer.status_code == 502


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[]"])
def test_what_is_no_request_is_for_the_second_one_to_refuse(body: bytes) -> None:
    servers = Servers(decode=lambda _: httpx.Response(400))
    servers.answer = lambda request: httpx.Response(  # type: ignore[method-assign]
        400 if request.content == body else 500
    )
    (answer,) = through(servers, body)
    assert answer.status_code == 400


def test_other_paths_go_to_a_server_that_answers() -> None:
    servers = Servers(decode=lambda _: httpx.Response(200, json={"data": []}))
    (answer,) = through(servers, b"", path="/v1/models", method="GET")
    assert answer.json() == {"data": []}
    assert [host for host, _, _ in servers.asked] == ["decode"]


def test_headers_are_passed_on() -> None:
    seen: list[httpx.Headers] = []

    def note(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return httpx.Response(200, json={"kv_transfer_params": PARAMS})

    through(Servers(prefill=note, decode=note), BODY)
    for headers in seen:
        assert headers["authorization"] == "Bearer key"
        assert headers["x-request-id"] == "one"
    assert [headers["host"] for headers in seen] == ["prefill", "decode"]


def test_a_prompt_alone_asks_for_one_token() -> None:
    request = BODY | {
        "max_completion_tokens": 9,
        "stream_options": {"include_usage": True},
        "min_tokens": 4,
        "n": 3,
        "cache_salt": "s",
    }
    asked = of_prompt(request)
    assert asked["max_tokens"] == asked["max_completion_tokens"] == 1
    assert asked["cache_salt"] == "s" and asked["prompt"] == [1, 2, 3]
    assert not asked.keys() & {"stream_options", "min_tokens", "n"}


def test_the_application_lives_and_ends() -> None:
    async def run() -> list[Any]:
        client = httpx.AsyncClient()
        app, sent = Router(["http://p"], ["http://d"], client), []
        heard = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

        async def receive() -> Any:
            return next(heard)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await app({"type": "lifespan"}, receive, send)
        await app({"type": "websocket"}, receive, send)
        return [*sent, client.is_closed]

    assert asyncio.run(run()) == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
        True,
    ]


def test_the_command_needs_servers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["route", "--prefill", "http://a"])
    assert "--decode" in capsys.readouterr().err
