# SPDX-License-Identifier: Apache-2.0
"""Sessions between vLLM's processes, and over a restart of its files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from vllm.entrypoints.launchers import app as launchers_app
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.v1.engine.core import EngineCore

from hybrid_plugin.engine.bundle_identity import AdapterNames
from hybrid_plugin.vllm import patches, saved_sessions
from hybrid_plugin.vllm.activation import SCHEDULER
from hybrid_plugin.vllm.adapters import Adapters, LoadedAdapter
from hybrid_plugin.vllm.requests import VllmRequest
from tests.vllm.fakes import manager, request
from tests.vllm.test_disk import HOST, LENGTH, Engine

ADAPTER = SimpleNamespace(
    lora_name="poet", lora_int_id=3, lora_path="/nowhere/poet", load_inplace=False
)
PATH = "/v1/hybrid/sessions"


class Api:
    """An API server whose engine core answers as it is told."""

    def __init__(self, scheduler: Any = SCHEDULER, keys: tuple[str, ...] = ()) -> None:
        self.orders: list[dict[str, Any]] = []
        self.app = FastAPI()
        saved_sessions.attach(self.app)
        if keys:
            self.app.add_middleware(AuthenticationMiddleware, tokens=list(keys))
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
            model_config=SimpleNamespace(max_model_len=100),
        )
        core = SimpleNamespace(call_utility_async=self._call)
        self.app.state.engine_client = SimpleNamespace(
            vllm_config=config, engine_core=core
        )
        self.app.state.openai_serving_models = SimpleNamespace(
            lora_requests={"poet": ADAPTER}
        )

    async def _call(self, method: str, order: str) -> str:
        assert method == saved_sessions.CALL
        self.orders.append(json.loads(order))
        return json.dumps({"status": 200, "sessions": []})

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://test"
            ) as client:
                return await client.request(method, PATH + path, **more)

        return asyncio.run(go())


def test_orders_go_to_the_engine_core() -> None:
    api = Api()
    body = {"prompt": [1, 2], "cache_salt": "s", "model": "poet"}
    assert api.call("POST", "/tea/save", json=body).is_success
    (order,) = api.orders
    assert (order["tokens"], order["salt"]) == ([1, 2], "s")
    assert order["adapter"] == vars(ADAPTER)
    api.call("POST", "/tea/load", json={"model": "the model itself"})
    assert api.orders[1]["adapter"] is None


def test_a_server_that_the_plugin_does_not_serve_says_so() -> None:
    done = Api(scheduler=None).call("GET", "")
    assert done.status_code == 404 and "does not serve this model" in done.text


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("POST", "/x/save"), ("POST", "/x/load"), ("DELETE", "/x")],
)
def test_endpoints_ask_for_the_api_key(method: str, path: str) -> None:
    api = Api(keys=("secret",))
    for headers in ({}, {"Authorization": "Bearer other"}):
        assert api.call(method, path, headers=headers).status_code == 401
    assert not api.orders
    body = {"json": {"prompt": [1]}} if method == "POST" else {}
    headers = {"Authorization": "Bearer secret"}
    assert api.call(method, path, headers=headers, **body).is_success


def test_endpoints_are_added_behind_those_of_other_plugins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attach_endpoint_plugins(app: Any, tasks: Any) -> None:
        app.state.seen = tasks

    monkeypatch.setattr(
        launchers_app, "attach_endpoint_plugins", attach_endpoint_plugins
    )
    patches.patch_app()
    patches.patch_app()  # once
    app = FastAPI()
    launchers_app.attach_endpoint_plugins(app, ("generate",))
    assert app.state.seen == ("generate",)
    paths = [route.path for route in app.routes]
    assert paths.count(PATH) == 1 and PATH + "/{name:path}/save" in paths


def test_the_engine_core_takes_orders() -> None:
    patches.patch_engine()
    scheduler = SimpleNamespace(kv_cache_manager=manager())
    core: Any = SimpleNamespace(scheduler=scheduler)
    text = getattr(EngineCore, saved_sessions.CALL)(core, '{"action": "list"}')
    assert json.loads(text)["status"] == 409, "it has no disk"


def test_an_order_names_what_a_request_names() -> None:
    for names in (Adapters(), Adapters(AdapterNames())):
        for salt in (None, "s"):
            for adapter in (None, ADAPTER):
                one = request("one", 3, cache_salt=salt, lora_request=adapter)
                order = {
                    "salt": salt,
                    "adapter": None if adapter is None else vars(adapter),
                }
                expected = VllmRequest(one, names).namespace()
                assert saved_sessions.namespace(order, names) == expected
    order = {"adapter": {**vars(ADAPTER), "load_inplace": True}}
    found = saved_sessions.namespace(order, Adapters(AdapterNames()))
    assert found == (LoadedAdapter("poet", ADAPTER.lora_path, 3, 0), None)


# --------------------------------------------------------- with files of a rank


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines on one folder; the one before is closed."""
    made: list[Engine] = []

    def start(*, is_open: bool = True) -> Engine:
        if made:
            made.pop().close()
        made.append(Engine(tmp_path / "bundles"))
        if is_open:
            made[-1].open()
        return made[-1]

    yield start
    made[-1].close()


def take(engine: Engine, **order: Any) -> dict[str, Any]:
    """Have an order taken, and make steps until it is over, as a server does."""
    answer = engine.manager.take_session_order(order)
    while "ticket" in answer:
        assert engine.manager.has_work, "nobody would make a step"
        engine.manager.step_begins()
        engine.step()
        poll = {"action": "poll", "ticket": answer["ticket"]}
        answer = engine.manager.take_session_order(poll)
    return answer


TOKENS = [*range(1000, 1000 + LENGTH + 1)]


def test_a_session_survives_a_restart(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.serve("one", 1000)
    saved = take(engine, action="save", name="tea", tokens=TOKENS, created=7)
    assert (saved["status"], saved["tokens"]) == (200, LENGTH + 1), saved
    engine = start()
    assert take(engine, action="list")["sessions"][0]["on_disk"] == LENGTH + 1
    loaded = take(engine, action="load", name="tea")
    assert (loaded["status"], loaded["tokens"]) == (200, LENGTH + 1)
    assert not engine.manager.has_work
    assert engine.manager.cache.lower_tiers.resumable(TOKENS) == LENGTH + 1
    assert engine.serve("two", 1000) == LENGTH
    removed = take(engine, action="remove", name="tea")
    assert removed["status"] == 200
    engine.finish()
    assert not list(engine.disk.folder.rglob("*.session"))


def test_orders_before_the_files_are_open_are_refused(
    start: Callable[..., Engine],
) -> None:
    engine = start(is_open=False)
    assert engine.manager.take_session_order({"action": "list"})["status"] == 503
    engine.open()
    assert engine.manager.take_session_order({"action": "list"})["status"] == 200


def test_a_server_without_files_says_what_it_needs() -> None:
    of = manager(pages=11, slots=5, host=HOST, host_memory=HOST)
    answer = of.take_session_order({"action": "list"})
    assert answer["status"] == 409 and "options host_memory and disk" in answer["error"]
