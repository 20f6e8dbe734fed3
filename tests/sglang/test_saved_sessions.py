# SPDX-License-Identifier: Apache-2.0
"""Sessions between SGLang's processes: its server's endpoints, and its schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("sglang")

from fastapi import FastAPI
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import (
    DumperControlReqInput,
    DumperControlReqOutput,
    msgpack_decode,
    msgpack_encode,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_context
from sglang.srt.utils.auth import add_api_key_middleware

from hybrid_plugin.core.commands import Fetch, Write, WriteRecord
from hybrid_plugin.sglang import patches, saved_sessions
from hybrid_plugin.tiers.agreement import Lost, Outcome
from hybrid_plugin.tiers.failure import Failure, Reason
from tests.sglang.test_disk import DiskBench
from tests.sglang.test_host_memory import LENGTH, HostBench

PATH = "/v1/hybrid/sessions"
TOKENS = [*range(LENGTH + 1)]


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


# ------------------------------------------------------------------- endpoints


class Api:
    """A server with the endpoints, whose scheduler answers as it is told."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, key: str = "", admin: str = ""
    ) -> None:
        self.orders: list[DumperControlReqInput] = []
        self.answer = DumperControlReqOutput(
            success=True, response=[{"status": 200, "sessions": []}]
        )
        self.app = FastAPI()
        monkeypatch.setattr(http_server, "app", self.app)
        manager = SimpleNamespace(
            dumper_control=self._control,
            model_config=SimpleNamespace(context_len=100),
        )
        state = SimpleNamespace(tokenizer_manager=manager)
        monkeypatch.setattr(http_server, "get_global_state", lambda: state)
        saved_sessions.attach()
        saved_sessions.attach()  # once
        add_api_key_middleware(self.app, api_key=key, admin_api_key=admin)

    async def _control(self, request: Any) -> list[Any]:
        # As it travels.
        self.orders.append(msgpack_decode(msgpack_encode(request)))
        return [msgpack_decode(msgpack_encode(self.answer))]

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://test"
            ) as client:
                return await client.request(method, PATH + path, **more)

        return asyncio.run(go())


def test_orders_go_to_the_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(monkeypatch)
    body = {"prompt": [1, 2], "cache_salt": "ü", "extra_key": "e"}
    assert api.call("POST", "/tea/save", json=body).is_success
    (request,) = api.orders
    assert request.method == saved_sessions.METHOD
    expected = {"action": "save", "name": "tea", "tokens": [1, 2]}
    assert expected | {"salt": "ü", "extra_key": "e"} == {
        name: value for name, value in request.body.items() if name != "created"
    }
    paths = [getattr(route, "path", "") for route in api.app.routes]
    assert paths.count(PATH) == 1


def test_a_scheduler_that_fails_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(monkeypatch)
    api.answer = DumperControlReqOutput(success=False, response=[], error="it broke")
    done = api.call("GET", "")
    assert (done.status_code, done.json()) == (500, {"error": "it broke"})


@pytest.mark.parametrize(
    ("key", "admin", "opens"), [("k", "", "k"), ("", "a", "a"), ("k", "a", "a")]
)
def test_endpoints_ask_for_the_highest_key_that_is_set(
    key: str, admin: str, opens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api(monkeypatch, key=key, admin=admin)
    for given in ("", "other", "k", "a"):
        headers = {"Authorization": f"Bearer {given}"} if given else {}
        for method, path in (("GET", ""), ("DELETE", "/x"), ("POST", "/x/load")):
            done = api.call(method, path, headers=headers)
            assert done.status_code == (200 if given == opens else 401), (
                given,
                method,
            )


def test_an_administrators_text_is_tokenized_by_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`/tokenize` takes the API key, and the administrator's is none."""
    api = Api(monkeypatch, key="k", admin="a")

    async def tokenize() -> dict[str, list[int]]:
        return {"tokens": [4, 5]}

    api.app.post("/tokenize")(tokenize)
    headers, body = {"Authorization": "Bearer a"}, {"prompt": "tea"}
    with get_context().override_server_args(api_key="k", admin_api_key="a"):
        done = api.call("POST", "/tea/save", headers=headers, json=body)
    assert done.is_success, done.text
    assert api.orders[0].body["tokens"] == [4, 5]


def test_a_process_without_a_server_gets_no_endpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(saved_sessions.sys.modules, saved_sessions.SERVER)
    assert not saved_sessions.server_is_loaded()


# ------------------------------------------------------------------ schedulers


def hooked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What stands before the scheduler's handler."""
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(
        patches, "_hook", lambda target, _, hook: hooks.update({target: hook})
    )
    patches._take_session_orders()
    return hooks["sglang.srt.managers.scheduler.Scheduler.handle_dumper_control"]


def test_a_scheduler_takes_orders_and_leaves_the_dumper_its_own(
    monkeypatch: pytest.MonkeyPatch, bench: DiskBench
) -> None:
    take, asked = hooked(monkeypatch), []
    scheduler = SimpleNamespace(tree_cache=bench.cache)

    def dumper(self: Any, request: Any) -> None:
        asked.append(request.method)

    order = DumperControlReqInput(method=saved_sessions.METHOD, body={"action": "list"})
    output = take(dumper, scheduler, order)
    assert output.success and output.response[0]["sessions"] == []
    assert (
        take(dumper, scheduler, DumperControlReqInput(method="get_state", body={}))
        is None
    )
    assert asked == ["get_state"]
    stock = SimpleNamespace(tree_cache=object())
    assert take(dumper, stock, order).response[0]["status"] == 409
    assert Scheduler.handle_dumper_control


def test_a_cache_without_files_says_what_it_needs() -> None:
    answer = HostBench().cache.take_session_order({"action": "list"})
    assert answer["status"] == 409 and "host_memory and disk" in answer["error"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[DiskBench]:
    """A prompt of `LENGTH` tokens from 0 on is cached."""
    bench = DiskBench(tmp_path / "disk")
    bench.serve("one", 0)
    yield bench
    bench.disk.close()


def take(bench: DiskBench, lost: Lost | None = None, **order: Any) -> dict[str, Any]:
    """Have an order taken, and make rounds until it is over, as a scheduler does."""
    answer = bench.cache.take_session_order(order)
    for _ in range(20):
        if "ticket" not in answer:
            return answer
        assert not bench.cache.may_sleep, "nobody would make a round"
        bench.cache.plan_waits(bench.scheduler.waiting_queue)
        bench.cache.idle()
        for command in bench.take():
            if isinstance(command, Write | WriteRecord | Fetch):
                bench.files.done.append(Outcome(command.ticket, lost, 1, 0.1))
        poll = {"action": "poll", "ticket": answer["ticket"]}
        answer = bench.cache.take_session_order(poll)
    raise AssertionError(f"{order} goes on")


def test_a_session_is_saved_while_nothing_runs(bench: DiskBench) -> None:
    saved = take(bench, action="save", name="tea", tokens=TOKENS, created=7)
    assert saved["status"] == 200 and saved["tokens"] >= LENGTH
    assert bench.cache.may_sleep
    assert take(bench, action="load", name="tea")["tokens"] == saved["tokens"]
    refused = take(bench, action="load", name="tea", salt="bob")
    assert refused["status"] == 409 and "cache_salt" in refused["error"]
    assert take(bench, action="remove", name="tea")["status"] == 200
    bench.assert_conserved()


def test_a_disk_that_fails_is_an_answer(bench: DiskBench) -> None:
    lost = Lost(0, Failure(Reason.IO))
    answer = take(bench, lost, action="save", name="tea", tokens=TOKENS, created=7)
    assert answer["status"] == 503 and Reason.IO in answer["error"]
    bench.assert_conserved()
