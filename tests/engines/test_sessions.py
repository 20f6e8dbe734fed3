# SPDX-License-Identifier: Apache-2.0
"""Sessions: saved by one server, which is killed, and loaded by the next one."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.cli import main
from tests.engines import slow_decay, web
from tests.engines.conftest import StartServer
from tests.engines.disk_fill import FILES, MODEL, first_turns, setup
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.sessions import call, names, order, save_chats
from tests.engines.traffic import next_turns

pytestmark = pytest.mark.engine

SALT = "alice"
TALK = "a talk/about ü"
"""A name that is no path, and no plain one either."""
QUESTION = "What is the code for amber? Please say nothing else about it, and be brief."


@dataclass
class Saved:
    """What a server left that was killed."""

    folder: Path
    second: list[Ask] = field(default_factory=list)
    """Turns behind those that were saved; the last one has a salt."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Of each session, by its name."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """Of a talk over the chat API."""


def chat(server: Server, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
    """An answer of the chat API."""
    body = {"model": str(model_of(server)), "messages": list(messages)}
    body |= {"max_tokens": 8, "temperature": 0}
    response = web.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def model_of(server: Server) -> str:
    """What the server calls the model."""
    found = web.get(f"{server.url}/v1/models", timeout=60).json()
    return str(found["data"][0]["id"])


def kill(server: Server) -> None:
    """End all its processes at once, without a chance to write anything."""
    assert server._process is not None
    os.killpg(server._process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def saved(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of a server that was killed as soon as its sessions were saved."""
    found = Saved(tmp_path_factory.mktemp("sessions"))
    slow_decay.write_nemotron_h(found.folder / MODEL)
    first = first_turns()[:3]
    first[-1] = replace(first[-1], salt=SALT)
    with start_server("saving", **setup(found.folder)) as server:
        refused = call(server.url, "POST", "/none/save", {"prompt": list(range(99))})
        assert refused.status_code == 404 and "cached" in refused.json()["error"]
        answers = server.ask_all(first, 2)
        found.tokens = save_chats(server.url, first, answers)
        found.messages = [{"role": "user", "content": QUESTION}]
        said = chat(server, found.messages)["choices"][0]["message"]["content"]
        found.messages.append({"role": "assistant", "content": said or ""})
        body = {"messages": found.messages}
        found.tokens[TALK] = order(server.url, TALK, "save", body)["tokens"]
        assert names(server.url) == sorted(found.tokens)
        kill(server)
    second = next_turns(first, answers, seed=2)
    found.second = [*second[:-1], replace(second[-1], salt=SALT)]
    return found


@pytest.fixture(scope="module")
def server(start_server: StartServer, saved: Saved) -> Iterator[Server]:
    """Started on what is left."""
    with start_server("loading", **setup(saved.folder)) as running:
        yield running


def test_only_the_user_reads_what_is_saved(saved: Saved) -> None:
    files = [path for path in (saved.folder / FILES).rglob("*") if path.is_file()]
    assert len(files) > 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert not any(name in path.name for path in files for name in ("chat", "talk"))


def test_all_that_was_computed_is_saved(saved: Saved) -> None:
    """But the last token of an answer, which was sampled.

    What this model says is no text: of a talk, what comes before that is found.
    """
    chats = [one for name, one in saved.tokens.items() if name != TALK]
    assert len(chats) == 3 and min(chats) > 300
    assert saved.tokens[TALK] > 0


def test_the_next_turn_computes_only_what_is_new(server: Server, saved: Saved) -> None:
    for number, ask in enumerate(saved.second[:2]):
        name = f"chat {number}"
        found = order(server.url, name, "load")
        assert found["tokens"] == found["saved"] == saved.tokens[name]
        again = server.ask_all([ask], 1)[0]
        assert again.error is None and again.cached_tokens == saved.tokens[name]
        check_equal(server, ask, again)
    levels = server.metrics()
    assert levels["disk_loads"] == 2 and levels["disk_sessions"] == 4
    assert 0 < levels["disk_pinned_bytes"] <= levels["disk_used_bytes"]


def test_salts_stay_apart(server: Server, saved: Saved) -> None:
    ask, name = saved.second[2], "chat 2"
    for salt in (None, "bob"):
        body = {} if salt is None else {"cache_salt": salt}
        refused = call(server.url, "POST", "/chat%202/load", body)
        assert refused.status_code == 409 and "cache_salt" in refused.json()["error"]
    assert server.ask_all([replace(ask, salt="bob")], 1)[0].cached_tokens == 0
    found = order(server.url, name, "load", {"cache_salt": SALT})
    assert found["tokens"] == saved.tokens[name]
    again = server.ask_all([ask], 1)[0]
    assert again.cached_tokens == saved.tokens[name]
    check_equal(server, ask, again)


def test_a_talk_goes_on_over_the_chat_api(server: Server, saved: Saved) -> None:
    """Messages are rendered as a request's are, so what is saved is what is found."""
    found = order(server.url, TALK, "load")
    assert found["tokens"] == saved.tokens[TALK]
    before = server.metrics()["hit_tokens"]
    chat(server, [*saved.messages, {"role": "user", "content": "And then?"}])
    assert server.metrics()["hit_tokens"] - before == saved.tokens[TALK]


def test_the_command_line_asks_the_server(
    server: Server, saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["session", *arguments, "--url", server.url])
        return status, *capsys.readouterr()

    status, out, _ = run("ls", "--json")
    listed = {one["name"]: one["on_disk"] for one in json.loads(out)}
    assert status == 0 and listed == saved.tokens
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(saved.second[0].prompt))
    status, out, _ = run("save", "../x", "--body", str(tokens))
    assert status == 0 and out.startswith("Saved ") and "'../x'" in out
    assert run("load", "../x")[0] == 0
    status, _, error = run("load", "chat 2")
    assert status == 1 and "cache_salt" in error
    assert run("load", "chat 2", "--salt", SALT)[0] == 0
    assert run("rm", "../x")[0] == 0
    status, _, error = run("rm", "../x")
    assert status == 1 and "there is no session '../x'" in error


def test_a_flush_forgets_sessions_until_they_are_loaded(
    server: Server, saved: Saved
) -> None:
    server.reset_prefix_cache()
    ask = saved.second[0]
    assert server.ask_all([ask], 1)[0].cached_tokens == 0
    server.reset_prefix_cache()
    assert order(server.url, "chat 0", "load")["tokens"] == saved.tokens["chat 0"]
    again = server.ask_all([ask], 1)[0]
    assert again.cached_tokens == saved.tokens["chat 0"]
    check_equal(server, ask, again)


def test_what_is_removed_is_gone(server: Server, saved: Saved) -> None:
    for name in saved.tokens:
        assert call(server.url, "DELETE", f"/{name.replace('/', '%2F')}").is_success
    assert names(server.url) == []
    assert not list((saved.folder / FILES).rglob("*.session"))
    assert call(server.url, "POST", "/chat%200/load").status_code == 404
    assert server.is_alive()


def check_equal(server: Server, ask: Ask, answer: Answer) -> None:
    """The answer is the one that is computed without the cache."""
    alone = server.ask_all([replace(ask, salt=f"nobody {len(ask.prompt)}")], 1)[0]
    assert alone.error is None and alone.cached_tokens == 0
    assert answer.tokens == alone.tokens
